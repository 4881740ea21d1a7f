"""Owns how settings are shown: those that differ from the defaults first, and those that differ between runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from offbeat.report.page import NOTHING, Html, joined, paragraph, table, tag, text
from offbeat.settings import Settings
from offbeat.storage.json_file import plain

ABOUT = ("task", "served")
"""Written down among the settings, but nobody sets them."""
PER_RUN = ("seed", "executor")
"""What makes no other method."""


def defaults() -> dict[str, Any]:
    """Every setting as it is where nobody sets it."""
    return dict(plain(Settings().as_dict()))


def shown(value: object) -> str:
    """A setting's value, in words."""
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def settings_tables(recorded: Mapping[str, Any]) -> Html:
    """All settings of a run."""
    usual, helps = defaults(), {setting.name: setting.metadata["help"] for setting in fields(Settings)}
    own = {name: value for name, value in recorded.items() if name not in ABOUT}
    changed = [name for name in own if own[name] != usual.get(name)]
    rows = [
        (_code(name), _code(shown(own[name])), _code(shown(usual.get(name))), text(helps.get(name, "")))
        for name in changed
    ]
    first = table("settings-changed", ("setting", "here", "default", "what it is"), rows, words=4) if rows else NOTHING
    nothing = paragraph(text("Every setting has its default.")) if not rows else NOTHING
    rest = [name for name in own if name not in changed]
    return joined((first, nothing, tag("h3", text("As by default")), settings_list(own, rest)))


def settings_list(recorded: Mapping[str, Any], names: Iterable[str]) -> Html:
    """Names and values, as many columns as there is room for."""
    items = [tag("li", _code(name), text(" = "), _code(shown(recorded[name]))) for name in names]
    return tag("ul", *items, class_="columns") if items else paragraph(text("None."))


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all runs, the task among them."""
    names = dict.fromkeys(name for one in settings for name in one if name not in PER_RUN)
    return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]


def _code(value: str) -> Html:
    return tag("code", text(value, 200))
