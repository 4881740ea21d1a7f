"""Owns how settings become command-line flags: every field of `Settings` is one, with the same name, help and group."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click

from offbeat.errors import MissingExtra, OffbeatError
from offbeat.settings import DEPRECATED, GROUPS, Settings, read_toml
from offbeat.task_arguments import parsed

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
TRACK = click.option(
    "--track",
    multiple=True,
    metavar="TRACKER",
    help="Show the run in tensorboard:DIR or mlflow:URI, too; may be repeated.",
)
SERVER_TABLE = "server"
"""In a file of settings: those of the server itself."""
PLACES = (
    click.option(
        "--on",
        type=click.Choice(["here", "ray"]),
        default="here",
        show_default=True,
        help="Where the runs go: to processes of this machine, or to a Ray cluster.",
    ),
    click.option(
        "--ray-address",
        envvar="OFFBEAT_RAY_ADDRESS",
        help="HOST:PORT of a Ray cluster, or auto.  [default: RAY_ADDRESS, else a Ray of its own]",
    ),
    click.option(
        "--processes",
        type=click.IntRange(1, 256),
        help="Number of processes.  [default: one per core of this machine, or of the cluster]",
    ),
)
ACCEPT_CHANGED_TASK = click.option(
    "--accept-changed-task", is_flag=True, help="Resume although the task's code has changed, and record it."
)
TASK_ARGS = click.option(
    "--task-arg",
    "--task-args",
    "task_args",
    multiple=True,
    metavar="NAME=VALUE",
    envvar="OFFBEAT_TASK_ARGS",
    callback=lambda _ctx, _option, texts: parsed(texts) or None,
    help=Settings.__dataclass_fields__["task_args"].metadata["help"],
)
Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]


def folder_option(help_text: str, default: str | None = None) -> Option:
    path = default and Path(default)
    return click.option("--dir", "folder", type=FOLDER, default=path, show_default=True, help=help_text)


class GroupedCommand(click.Command):
    """A command whose help shows its options under headings; those of no group come first, under "Options"."""

    def __init__(self, *arguments: Any, groups: Mapping[str, str] | None = None, **more: Any) -> None:
        """`groups` gives the group of an option, one of `GROUPS` or a heading; those of settings are known."""
        super().__init__(*arguments, **more)
        self.groups = {setting.name: setting.metadata["group"] for setting in fields(Settings)} | {**(groups or {})}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *GROUPS.values())}
        for parameter in self.get_params(ctx):
            group = self.groups.get(parameter.name or "", "Options")
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(GROUPS.get(group, group), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def settings_options(command: Command) -> Command:
    """Give a command a flag for every setting, and `--settings FILE.toml`."""
    option = click.option("--settings", "settings_file", type=FILE, help="Read settings from a TOML file; flags win.")
    return option(flags_of(Settings)(command))


def flags_of(kind: type[Any]) -> Callable[[Command], Command]:
    """A flag, and a variable of the environment, for every field of a dataclass."""
    hints = get_type_hints(kind)
    options = [TASK_ARGS if one.name == "task_args" else _flag(one, hints[one.name]) for one in fields(kind)]
    return all_of(*options)


def all_of(*options: Option) -> Callable[[Command], Command]:
    """Give a command these options, in this order."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def _flag(setting: "Field[Any]", hint: Any) -> Option:
    """A flag for a value of this type: `int` for `int | None`, text where a number or a text is allowed."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    default = "" if setting.default in (None, "") else f" [default: {setting.default}]"
    return click.option(
        f"--{setting.name.replace('_', '-')}",
        setting.name,
        type=str if str in kinds else kinds[0],
        is_flag=hint is bool,
        default=None,
        envvar=f"OFFBEAT_{setting.name.upper()}",
        help=setting.metadata["help"] + default,
    )


def settings_of(settings_file: Path | None, flags: dict[str, Any]) -> Settings:
    """Flags and environment over the file over the defaults."""
    values = read_toml(settings_file) if settings_file else {}
    values.pop(SERVER_TABLE, None)
    if isinstance(values.get("task_args"), dict) and flags.get("task_args"):
        flags = {**flags, "task_args": values["task_args"] | flags["task_args"]}
    values |= given(flags)
    say_deprecated(values)
    return Settings.of(values)


def say_deprecated(settings: Mapping[str, Any]) -> None:
    for name in DEPRECATED:
        if name in settings:
            flag, argument = name.replace("_", "-"), f"{name}={settings[name]}"
            click.echo(f"--{flag} is deprecated: use --task-arg {argument} (in a file: task_args.{argument})", err=True)


def given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Imports in this block that fail are one line that says which extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), extra) from error


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OffbeatError(f"cannot write to {folder}: {error.strerror}; choose another folder with --dir") from error
