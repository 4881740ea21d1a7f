"""Owns what a tracker is told of a run, and which trackers there are.

Rules kept here:
- A tracker hears of points on the curve and of windows of updates, in one order that depends on the ledger alone. So
  a run that is followed again can skip what a tracker has.
- `offbeat/...` are our own numbers; the task's metrics keep their names.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from offbeat.errors import InvalidValue


class RunDescription(NamedTuple):
    """What a tracker must know to tell a run from others."""

    name: str
    key: str
    """Tells it from every other run, also from an earlier one in the same folder."""
    begun_at: float
    """In seconds since 1970; the run's own clock counts from here, also where it is virtual."""
    settings: Mapping[str, Any]


class TrackedPoint(NamedTuple):
    """One version on the curve: when it was published, what it was made of, and what its evaluation showed."""

    t: int
    at_s: float
    gradients: int
    metrics: Mapping[str, float]


class UpdateWindow(NamedTuple):
    """Updates that were decided on one after the other."""

    t: int
    """The epoch that the last of them went into, or would have."""
    at_s: float
    staleness: tuple[int, ...]
    """Of those that were applied, as is alpha_t."""
    alpha_t: tuple[float, ...]
    refused: int


class Sink(Protocol):
    """A tracker. What goes wrong raises; `begin` again then tells how much has arrived."""

    def begin(self, run: RunDescription) -> int:
        """A run, new or known; answers how many points and windows of it are there already."""
        ...

    def metrics(self, point: TrackedPoint) -> None:
        """The next point."""
        ...

    def updates(self, window: UpdateWindow) -> None:
        """The next window."""
        ...

    def flush(self) -> None:
        """All that was said so far is to be seen."""
        ...

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is finished."""
        ...

    def close(self) -> None:
        """Nothing more will be said, for now or for good; a second time does nothing."""
        ...


def values_of(report: TrackedPoint | UpdateWindow) -> dict[str, float]:
    """A point or a window as numbers by name.

    >>> values_of(UpdateWindow(7, 3.5, (0, 2), (0.5, 0.25), 1))["offbeat/alpha_t_mean"]
    0.375
    """
    if isinstance(report, TrackedPoint):
        return {**report.metrics, "offbeat/gradients": float(report.gradients), "offbeat/at_s": report.at_s}
    values = {"offbeat/refused": float(report.refused)}
    if report.staleness:
        values["offbeat/staleness_mean"] = sum(report.staleness) / len(report.staleness)
        values["offbeat/staleness_largest"] = float(max(report.staleness))
        values["offbeat/alpha_t_mean"] = sum(report.alpha_t) / len(report.alpha_t)
    return values


def sink_of(spec: str) -> Sink:
    """The tracker that `tensorboard:DIR` or `mlflow:URI` names; where its package is missing, says what to install."""
    kind, _, where = spec.partition(":")
    makers = {"tensorboard": "TensorBoard", "mlflow": "MLflow"}
    if kind not in makers or not where:
        raise InvalidValue(f"{spec!r} is no tracker; use tensorboard:DIR or mlflow:URI (such as sqlite:///mlflow.db)")
    made: Sink = getattr(import_module(f"offbeat.trackers.{kind}"), makers[kind])(where)
    return made
