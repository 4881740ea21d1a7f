"""Owns how settings are shown: those that differ from the defaults first, and those that differ between runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from offbeat.settings import Settings
from offbeat.storage.json_file import plain

ABOUT = ("task", "served")
"""Recorded among the settings, but not set by users."""
PER_RUN = ("seed", "executor")
"""Settings in which runs of one method may differ."""


def defaults() -> dict[str, Any]:
    return dict(plain(Settings().as_dict()))


def shown(value: object) -> str:
    """The value of a setting, as it is shown."""
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def settings_tables(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run: those that differ from their default, and the rest."""
    usual, helps = defaults(), {setting.name: setting.metadata["help"] for setting in fields(Settings)}
    own = {name: value for name, value in recorded.items() if name not in ABOUT}
    changed = [name for name in own if own[name] != usual.get(name)]
    rows = [
        {"name": name, "here": shown(own[name]), "default": shown(usual.get(name)), "help": helps.get(name, "")}
        for name in changed
    ]
    return {"changed": rows, "unchanged": settings_list(own, [name for name in own if name not in changed])}


def settings_list(recorded: Mapping[str, Any], names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, shown(recorded[name])) for name in names]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all runs, the task among them."""
    names = dict.fromkeys(name for one in settings for name in one if name not in PER_RUN)
    return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]
