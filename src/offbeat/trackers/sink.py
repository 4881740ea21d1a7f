"""Owns what a tracker is told of a run, and which trackers there are.

Rules kept here:
- A tracker hears of points on the curve and of windows of updates, in one order that depends on the ledger alone. So
  a run that is followed again can skip what a tracker has.
- What is told depends on the rows alone, not on when they are read or how many at a time.
- A window is at least a part of all that came before it: a long run has a few thousand windows, not one per update.
- `offbeat/...` are our own numbers; the task's metrics keep their names.
"""

from collections.abc import Mapping
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from offbeat.errors import InvalidValue
from offbeat.storage.fold import Rows, RunFold, Taker
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import metrics_in
from offbeat.storage.version_fold import EvaluatedVersion, VersionFold

PARTS = 200
"""A window is closed when it holds this part of all updates so far."""


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

    @property
    def values(self) -> dict[str, float]:
        return {**self.metrics, "offbeat/gradients": float(self.gradients), "offbeat/at_s": self.at_s}


class UpdateWindow(NamedTuple):
    t: int
    """The epoch that the last of them went into, or would have."""
    at_s: float
    staleness: tuple[int, ...]
    """Of those that were applied, as is alpha_t."""
    alpha_t: tuple[float, ...]
    refused: int

    @property
    def values(self) -> dict[str, float]:
        """Its numbers by name.

        >>> UpdateWindow(7, 3.5, (0, 2), (0.5, 0.25), 1).values["offbeat/alpha_t_mean"]
        0.375
        """
        values = {"offbeat/refused": float(self.refused)}
        if self.staleness:
            values["offbeat/staleness_mean"] = sum(self.staleness) / len(self.staleness)
            values["offbeat/staleness_largest"] = float(max(self.staleness))
            values["offbeat/alpha_t_mean"] = sum(self.alpha_t) / len(self.alpha_t)
        return values


Report = TrackedPoint | UpdateWindow


class Sink(Protocol):
    """A tracker. What goes wrong raises; `begin` again then tells how much has arrived."""

    def begin(self, run: RunDescription) -> int:
        """A run, new or known; answers how many points and windows of it are there already."""

    def tell(self, report: Report) -> None:
        """The next point or window."""

    def flush(self) -> None:
        """All that was said so far is to be seen."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """The run is finished."""

    def close(self) -> None:
        """Nothing more will be said, for now or for good; a second time does nothing."""


def sink_of(spec: str) -> Sink:
    """The tracker that `tensorboard:DIR` or `mlflow:URI` names; where its package is missing, says what to install."""
    kind, _, where = spec.partition(":")
    makers = {"tensorboard": "TensorBoard", "mlflow": "MLflow"}
    if kind not in makers or not where:
        raise InvalidValue(f"{spec!r} is no tracker; use tensorboard:DIR or mlflow:URI (such as sqlite:///mlflow.db)")
    made: Sink = getattr(import_module(f"offbeat.trackers.{kind}"), makers[kind])(where)
    return made


# --- from the fold of a run to what is told --------------------------------------------------------------------------


class ProgressReader:
    """Reads one ledger on from where it stopped the last time; the part of the fold that gathers updates in windows."""

    def __init__(self) -> None:
        self.after = 0
        """The last row that was read."""
        self._versions = VersionFold()
        self._fold = RunFold(self, self._versions)
        self._told = 0
        """Evaluations that were told."""
        self._closed: list[tuple[int, Report]] = []
        """Windows that were not told yet, with the row of the last update in each."""
        self._total = 0
        self._begin_window()

    def news(self, ledger: Ledger) -> list[Report]:
        """What the rows say that were committed since the last time, in their order."""
        newest = ledger.newest()
        self._fold.read(ledger.select, self.after, newest)
        evaluated = self._versions.evaluations[self._told :]
        self.after, self._told = newest, len(self._versions.evaluations)
        found = [*((one.sequence, self._point(one)) for one in evaluated), *self._closed]
        self._closed = []
        return [report for _, report in sorted(found, key=itemgetter(0))]

    def rest(self) -> list[UpdateWindow]:
        """The last window, for a run that is over."""
        return [self._window()] if self._count else []

    def takers(self) -> Mapping[str, Taker]:
        return {"decided": self._decided}

    def _point(self, evaluation: EvaluatedVersion) -> TrackedPoint:
        """At the moment of its publication; x_0 was there from the beginning."""
        t = min(evaluation.t, self._fold.t)
        at, gradients = self._versions.published_at[t], self._versions.gradients_in(t)
        return TrackedPoint(evaluation.t, at, gradients, metrics_in(evaluation.detail))

    def _window(self) -> UpdateWindow:
        return UpdateWindow(self._t, self._at_s, tuple(self._staleness), tuple(self._alpha_t), self._refused)

    def _begin_window(self) -> None:
        self._staleness: list[int] = []
        self._alpha_t: list[float] = []
        self._refused = self._t = self._count = 0
        self._at_s = 0.0

    def _decided(self, rows: Rows) -> None:
        for t, staleness, _, keep, new, _, _, _, _, _, sequence, at, *_ in rows:
            self._total += 1
            self._count, self._t, self._at_s = self._count + 1, t, at
            if keep is None:
                self._refused += 1
            else:
                self._staleness.append(staleness)
                self._alpha_t.append(new)
            if self._count * PARTS >= self._total:
                self._closed.append((sequence, self._window()))
                self._begin_window()
