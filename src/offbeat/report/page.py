"""Owns the HTML of reports: one file that needs nothing else, and no way for a name to become markup.

Rules kept here:
- Everything that a template shows is cleaned and escaped, unless it was made as markup: a picture.
- Layout and wording are in `templates/`. Numbers and sentences that need thought are made in Python.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.metadata import version
from math import nan
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from offbeat.report import wording
from offbeat.report.chosen import shown
from offbeat.sim.compare import spread_of

TEXT_MAX = 400
"""Letters of any one text that are shown."""


def render(template: str, *, title: str, at: datetime, contents: Mapping[str, str], **facts: Any) -> str:
    """A whole file; `contents` are the sections by id, with their names."""
    page = _environment().get_template(template)
    return page.render(title=title, at=at, contents=contents, version=version("offbeat"), **facts)


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
    environment.filters.update({"exact": repr, "mean": _mean, "setting": shown, "with_spread": _with_spread})
    return environment


def _safe(value: object) -> object:
    return value if isinstance(value, Markup) else wording.clean(value, TEXT_MAX)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _with_spread(values: Sequence[float | None]) -> str:
    known = [float(value) for value in values if value is not None]
    return wording.with_spread(known, spread_of(known) if known else nan)
