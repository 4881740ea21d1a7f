"""Owns the comparison of runs: their curves over each other, the settings that differ, what came out."""

from collections.abc import Mapping
from typing import Any

from offbeat.web.json_values import metrics_of, said
from offbeat.web.overview import about, curve
from offbeat.web.run_reader import RunReader

RUNS_MAX = 20
POINTS_MAX = 2000
"""Of all curves together."""
NOT_COMPARED = ("executor",)
"""Settings that change nothing of what comes out."""
RESULTS = ("virtual_s", "wall_s", "ended")
"""What a summary knows besides."""


def part(reading: RunReader, runs: int) -> dict[str, Any]:
    """What a comparison of `runs` runs needs of one of them."""
    settings = {name: said(value) for name, value in reading.settings.items() if name not in NOT_COMPARED}
    return {
        "about": about(reading),
        "settings": settings,
        "results": results(reading),
        "curve": curve(reading.fold, min(500, POINTS_MAX // runs)),
    }


def results(reading: RunReader) -> dict[str, Any]:
    """The results of a run, or how far it has come."""
    fold, summary = reading.fold, reading.summary or {}
    newest = metrics_of(fold.evaluations[-1].detail) if fold.evaluations else {}
    return {
        **newest,
        "t": fold.t,
        "applied": fold.applied,
        "rejected": fold.rejected().total(),
        "gradients": fold.gradients,
        "at_s": reading.at,
        "staleness_mean": fold.staleness_mean,
        "staleness_largest": fold.staleness_largest,
        **{name: said(summary[name]) for name in RESULTS if name in summary},
    }


def comparison(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All of them, side by side; a setting that is the same in all is left out."""
    settings = _side_by_side({run: part["settings"] for run, part in parts.items()})
    return {
        "runs": [{**part["about"], "name": run} for run, part in parts.items()],
        "settings": [row for row in settings if _differs(list(row["values"].values()))],
        "results": _side_by_side({run: part["results"] for run, part in parts.items()}),
        "curves": {run: part["curve"] for run, part in parts.items()},
    }


def _side_by_side(columns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for values in columns.values() for name in values)
    return [{"name": name, "values": {run: values.get(name) for run, values in columns.items()}} for name in names]


def _differs(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)
