"""Owns how settings become command-line flags: every field of `Settings` is one, with the same name and help."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

import click

from offbeat.settings import Settings, read_toml

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
SERVER_TABLE = "server"
"""In a file of settings: those of the server itself."""
PLACES = (
    click.option("--on", type=click.Choice(["here", "ray"]), default="here", show_default=True, help="Where runs go."),
    click.option(
        "--ray-address",
        envvar="OFFBEAT_RAY_ADDRESS",
        help="HOST:PORT of a Ray cluster, or auto.  [default: RAY_ADDRESS, else a Ray of its own]",
    ),
    click.option(
        "--processes", type=click.IntRange(1, 256), help="How many to use.  [default: one per core, of all nodes]"
    ),
)
Command = TypeVar("Command", bound=Callable[..., Any])


def place_options(command: Command) -> Command:
    """Give a command the flags that say where runs go."""
    for option in reversed(PLACES):
        command = option(command)
    return command


def settings_options(command: Command) -> Command:
    """Give a command a flag for every setting, and `--settings FILE.toml`."""
    path = click.Path(dir_okay=False, path_type=Path)
    option = click.option("--settings", "settings_file", type=path, help="Read settings from a TOML file; flags win.")
    return option(flags_of(Settings)(command))


def flags_of(kind: type[Any], envvar: str = "OFFBEAT") -> Callable[[Command], Command]:
    """A flag, and a variable of the environment, for every field of a dataclass."""
    return lambda command: _flagged(command, kind, envvar)


def _flagged(command: Command, kind: type[Any], envvar: str) -> Command:
    hints = get_type_hints(kind)
    for setting in reversed(fields(kind)):
        command = click.option(
            f"--{setting.name.replace('_', '-')}",
            setting.name,
            type=_plain(hints[setting.name]),
            is_flag=hints[setting.name] is bool,
            default=None,
            envvar=f"{envvar}_{setting.name.upper()}",
            help=_help(setting.metadata["help"], setting.default),
        )(command)
    return command


def settings_of(settings_file: Path | None, flags: dict[str, Any]) -> Settings:
    """Flags and environment over the file over the defaults."""
    values = read_toml(settings_file) if settings_file else {}
    values.pop(SERVER_TABLE, None)
    return Settings.of(values | given(flags))


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were set."""
    return {name: value for name, value in flags.items() if value is not None}


def _plain(hint: Any) -> Any:
    """`int` for `int | None`; text where a number or a text is allowed."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return str if str in parts else next(part for part in parts if part is not type(None))


def _help(text: str, default: Any) -> str:
    return text if default is None else f"{text} [default: {default}]"
