"""Owns the curves of runs: metrics by epoch, gradients and time; thinned out and averaged for pictures.

Rules kept here:
- Numbers, not objects: a curve of a hundred thousand evaluations takes a few megabytes.
- What is not a number stays a gap, and is counted; thinning keeps peaks and dips.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.sim.curve import CurvePoint

Numbers = npt.NDArray[np.float64]
DRAWN_MAX = 1e100
"""What is larger is drawn like what is no number: no axis can hold it."""


class Series(NamedTuple):
    """One metric, wherever it was measured."""

    t: "array[float]"
    at: "array[float]"
    gradients: "array[float]"
    values: "array[float]"

    @classmethod
    def empty(cls) -> "Series":
        return cls(*(array("d") for _ in cls._fields))


@dataclass(slots=True)
class RunCurve:
    """What a run's evaluations showed, in the order in which they came; not all need to have measured the same."""

    metrics: dict[str, Series] = field(default_factory=dict)

    @classmethod
    def of(cls, points: Sequence[CurvePoint]) -> "RunCurve":
        curve = cls()
        for point in points:
            curve.add(point.t, point.at, point.gradients, point.metrics)
        return curve

    def add(self, t: float, at: float, gradients: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            series = self.metrics.setdefault(name, Series.empty())
            for column, number in zip(series, (t, at, gradients, value), strict=True):
                column.append(number)

    @property
    def ended_at(self) -> float:
        """The moment of the newest version that was evaluated."""
        return max((max(series.at) for series in self.metrics.values()), default=0.0)

    def last(self, metric: str) -> float | None:
        return self.metrics[metric].values[-1] if metric in self.metrics else None

    def along(self, axis: str, metric: str) -> tuple[Numbers, Numbers]:
        """An axis (`t`, `at` or `gradients`) and a metric on it, from left to right; gaps are NaN."""
        series = self.metrics.get(metric, Series.empty())
        x, y = np.asarray(getattr(series, axis), dtype=np.float64), np.asarray(series.values, dtype=np.float64)
        y = np.where(np.isfinite(y) & (np.abs(y) < DRAWN_MAX), y, nan)
        order = np.argsort(x, kind="stable")
        return x[order], y[order]


def thinned(x: Numbers, y: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """At most `most` points: of each stretch the lowest and the highest, and both ends."""
    if len(x) <= most:
        return x, y
    kept = sorted({0, len(x) - 1, *_extremes(y, max(1, (most - 2) // 2))})
    return x[kept], y[kept]


def _extremes(y: Numbers, stretches: int) -> Iterator[int]:
    for part in np.array_split(np.arange(len(y)), stretches):
        finite = part[np.isfinite(y[part])]
        if len(finite):
            yield from (int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])]))
        else:
            yield int(part[0])


def held(at: Numbers, x: Numbers, y: Numbers) -> Numbers:
    """The value of the newest version at these moments; a run that has ended keeps what it reached.

    >>> held(np.array([0.0, 1.5, 9.0]), np.array([1.0, 2.0]), np.array([5.0, 6.0]))
    array([nan,  5.,  6.])
    """
    index = np.searchsorted(x, at, side="right") - 1
    return np.where(index >= 0, y[np.clip(index, 0, None)], nan)


def averaged(lines: Sequence[tuple[Numbers, Numbers]], most: int) -> tuple[Numbers, Numbers, Numbers]:
    """Several runs as one line: where, their mean, and their spread; it ends at the mean of their last values."""
    lines = [line for line in lines if len(line[0])]
    if len(lines) < 2:
        x, y = thinned(*lines[0], most) if lines else (np.empty(0), np.empty(0))
        return x, y, np.zeros(len(x))
    at = np.unique(np.concatenate([x for x, _ in lines]))
    if len(at) > most:
        at = at[np.unique(np.linspace(0, len(at) - 1, most).astype(np.int64))]
    values = np.array([held(at, x, y) for x, y in lines])
    return at, values.mean(axis=0), values.std(axis=0, ddof=1)
