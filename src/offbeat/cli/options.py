"""Owns how settings become command-line flags: every field of `Settings` is one, with the same name and help."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

import click

from offbeat.settings import Settings, read_toml

Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(command: Command) -> Command:
    """Give a command a flag for every setting, and `--settings FILE.toml`."""
    hints = get_type_hints(Settings)
    for setting in reversed(fields(Settings)):
        command = click.option(
            f"--{setting.name.replace('_', '-')}",
            setting.name,
            type=_plain(hints[setting.name]),
            default=None,
            envvar=f"OFFBEAT_{setting.name.upper()}",
            help=_help(setting.metadata["help"], setting.default),
        )(command)
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--settings", "settings_file", type=path, help="Read settings from a TOML file; flags win.")(
        command
    )


def settings_of(settings_file: Path | None, flags: dict[str, Any]) -> Settings:
    """Flags and environment over the file over the defaults."""
    values = read_toml(settings_file) if settings_file else {}
    return Settings.of(values | {name: value for name, value in flags.items() if value is not None})


def _plain(hint: Any) -> Any:
    """`int` for `int | None`; text where a number or a text is allowed."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return str if str in parts else next(part for part in parts if part is not type(None))


def _help(text: str, default: Any) -> str:
    return text if default is None else f"{text} [default: {default}]"
