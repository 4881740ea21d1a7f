"""Owns what a comparison shows: a row per method, summed up over the seeds; as a table in text and as pictures."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, Self

from offbeat.errors import InvalidValue, MissingExtra
from offbeat.sim.curve import CURVE, CurvePoint, read_curve
from offbeat.sim.spec import Spec
from offbeat.storage.run_folder import SUMMARY


class Row(NamedTuple):
    """One method, summed up over the seeds: mean and sample standard deviation."""

    method: str
    seeds: int
    metric: float
    metric_spread: float
    reached_s: float | None
    """Mean virtual time at which the reference's final metric was reached, over the seeds that reached it."""
    reached_spread: float
    reached_by: int
    """How many seeds reached it."""
    t: float
    gradients: float
    virtual_s: float
    bytes: float
    staleness: float
    lanes_mean: float | None
    """Trainings per batch, where they were batched."""


@dataclass
class Comparison:
    """The results of a comparison."""

    spec: Spec
    curves: dict[str, list[list[CurvePoint]]]
    summaries: dict[str, list[dict[str, Any]]]

    @classmethod
    def read(cls, spec: Spec, folder: Path) -> Self:
        """From the runs' folders."""
        curves: dict[str, list[list[CurvePoint]]] = {name: [] for name in spec.methods}
        summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in spec.methods}
        for entry in spec.entries(folder):
            curve = read_curve(entry.folder / CURVE)
            refuse_unknown_metric(spec, entry.method, curve[-1].metrics)
            curves[entry.method].append(curve)
            summaries[entry.method].append(json.loads((entry.folder / SUMMARY).read_text()))
        return cls(spec, curves, summaries)

    def rows(self) -> list[Row]:
        """A row per method."""
        return [self._row(name) for name in self.spec.methods]

    @property
    def table(self) -> str:
        """The rows as text."""
        rows, reach = self.rows(), self.spec.reach
        columns = {"method": [row.method for row in rows], "seeds": [str(row.seeds) for row in rows]}
        columns[self.spec.metric] = [_with_spread(row.metric, row.metric_spread, 4) for row in rows]
        if reach is not None:
            columns[f"{reach}'s final {self.spec.metric} after"] = [_reached_text(row) for row in rows]
        columns |= {
            "epochs": [f"{row.t:,.0f}" for row in rows],
            "gradients": [f"{row.gradients:,.0f}" for row in rows],
            "virtual s": [f"{row.virtual_s:,.1f}" for row in rows],
            "MB": [f"{row.bytes / 1e6:,.1f}" for row in rows],
            "staleness": [f"{row.staleness:.1f}" for row in rows],
        }
        if any(row.lanes_mean is not None for row in rows):
            columns["lanes"] = ["" if row.lanes_mean is None else f"{row.lanes_mean:.1f}" for row in rows]
        return _aligned(columns)

    def plot(self, folder: Path | str) -> list[Path]:
        """Draw the metric against virtual time, epochs, gradients and bytes; returns the files."""
        try:
            plots = import_module("offbeat.plots")  # by name: pictures are an extra, and a layer above
        except ModuleNotFoundError as error:
            raise MissingExtra(str(error.name), "plots") from error
        files: list[Path] = plots.comparison(Path(folder), self)
        return files

    def _row(self, name: str) -> Row:
        summaries = self.summaries[name]
        finals = [curve[-1].metrics[self.spec.metric] for curve in self.curves[name]]
        reached = [at for at in self._reached(name) if at is not None]
        lanes = [summary["lanes_mean"] for summary in summaries if "lanes_mean" in summary]
        return Row(
            name,
            len(summaries),
            mean(finals),
            spread_of(finals),
            mean(reached) if reached else None,
            spread_of(reached),
            len(reached),
            t=mean(summary["t"] for summary in summaries),
            gradients=mean(summary["gradients"] for summary in summaries),
            virtual_s=mean(summary["virtual_s"] for summary in summaries),
            bytes=mean(summary["bytes_down"] + summary["bytes_up"] for summary in summaries),
            staleness=mean(summary["staleness_mean"] for summary in summaries),
            lanes_mean=mean(lanes) if lanes else None,
        )

    def _reached(self, name: str) -> Iterator[float | None]:
        """Per seed, when this method first had the final metric of the reference with the same seed."""
        against = self.spec.reference(name)
        if against is None:
            return
        for reference, curve in zip(self.curves[against], self.curves[name], strict=True):
            sign = -1 if self.spec.lower_is_better else 1
            goal = sign * reference[-1].metrics[self.spec.metric]
            yield next((p.at for p in curve if sign * p.metrics.get(self.spec.metric, math.nan) >= goal), None)


def refuse_unknown_metric(spec: Spec, method: str, measured: Mapping[str, float]) -> None:
    """A metric that was not measured cannot be compared."""
    if spec.metric not in measured:
        raise InvalidValue(f"metric is {spec.metric!r} but {method} has {', '.join(measured) or 'none'}")


def spread_of(values: Sequence[float]) -> float:
    """The sample standard deviation; NaN where there is none: of one value, or where a run diverged.

    >>> spread_of([1.0, 3.0]), spread_of([1.0]), spread_of([1.0, float("inf")])
    (1.4142135623730951, nan, nan)
    """
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def _with_spread(value: float, spread: float, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if math.isnan(spread) else f" ± {spread:.{digits}f}")


def _reached_text(row: Row) -> str:
    if row.reached_s is None:
        return "not reached"
    some = "" if row.reached_by == row.seeds else f" ({row.reached_by} of {row.seeds})"
    return f"{_with_spread(row.reached_s, row.reached_spread, 1)} s{some}"


def _aligned(columns: dict[str, list[str]]) -> str:
    """Columns side by side: the first to the left, numbers to the right."""
    widths = [max(len(cell) for cell in (heading, *cells)) for heading, cells in columns.items()]
    lines = [tuple(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )
