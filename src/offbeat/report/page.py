"""Owns the HTML of reports: one file that needs nothing else, and no way for a name to become markup.

Rules kept here:
- Everything that a template shows is cleaned and escaped, unless it was made as markup: a picture.
- Layout and wording are in `templates/`. Numbers and sentences that need thought are made in Python.
- Settings that differ from the defaults, or between runs, are shown first.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from functools import cache
from importlib.metadata import version
from math import isfinite
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from offbeat.report import wording
from offbeat.settings import Settings
from offbeat.sim.compare import spread_of
from offbeat.storage.json_file import plain

TEXT_MAX = 400
"""Letters of any one text that are shown."""
ABOUT = ("task", "served")
"""Recorded among the settings, but not set by users."""
PER_RUN = ("seed", "executor")
"""Settings in which runs of one method may differ."""


def render(template: str, *, title: str, at: datetime, **facts: Any) -> str:
    return _environment().get_template(template).render(title=title, at=at, version=version("offbeat"), **facts)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("offbeat.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_safe,
    )
    names = ("clean", "duration", "many", "moment", "number", "share", "size", "whole")
    environment.filters.update({name: getattr(wording, name) for name in names})
    environment.filters.update({"exact": repr, "mean": _mean, "setting": _shown, "with_spread": with_spread})
    return environment


def _safe(value: object) -> object:
    return value if isinstance(value, Markup) else wording.clean(value, TEXT_MAX)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def with_spread(values: Sequence[float | None]) -> str:
    """The mean of what is known, and its spread where there is one.

    >>> with_spread([1.0, 2.0]), with_spread([None])
    ('1.5 ± 0.7071', '-')
    """
    known = [float(value) for value in values if value is not None]
    spread = spread_of(known) if known else 0.0
    return wording.number(_mean(known)) + (f" ± {wording.number(spread)}" if isfinite(spread) and spread else "")


# --- settings --------------------------------------------------------------------------------------------------------


def default_settings() -> dict[str, Any]:
    return dict(plain(Settings().as_dict()))


def settings_tables(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a run: those that differ from their default, and the rest."""
    usual, helps = default_settings(), {setting.name: setting.metadata["help"] for setting in fields(Settings)}
    own = {name: value for name, value in recorded.items() if name not in ABOUT}
    changed = [name for name in own if own[name] != usual.get(name)]
    rows = [
        {"name": name, "here": _shown(own[name]), "default": _shown(usual.get(name)), "help": helps.get(name, "")}
        for name in changed
    ]
    return {"changed": rows, "unchanged": settings_list(own, [name for name in own if name not in changed])}


def settings_list(recorded: Mapping[str, Any], names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, _shown(recorded[name])) for name in names]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all runs, the task among them."""
    names = dict.fromkeys(name for one in settings for name in one if name not in PER_RUN)
    return [name for name in names if any(one.get(name) != settings[0].get(name) for one in settings)]


def _shown(value: object) -> str:
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
