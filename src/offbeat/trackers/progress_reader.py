"""Owns how a run's fold becomes points on a curve and windows of updates, for simulated and served runs alike.

Rules kept here:
- What comes out depends on the rows alone, not on when they are read or how many at a time.
- A window is at least a part of all that came before it: a long run has a few thousand windows, not one per update.
"""

from collections.abc import Mapping
from operator import itemgetter

from offbeat.storage.fold import EvaluatedVersion, Rows, RunFold, Taker
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import metrics_in
from offbeat.trackers.sink import TrackedPoint, UpdateWindow

PARTS = 200
"""A window is closed when it holds this part of all updates so far."""


class ProgressReader:
    """Reads one ledger on from where it stopped the last time."""

    def __init__(self) -> None:
        self.after = 0
        """The last row that was read."""
        self._windows = WindowFold()
        self._fold = RunFold(self._windows)
        self._told = 0
        """Evaluations that were told."""

    def news(self, ledger: Ledger) -> list[TrackedPoint | UpdateWindow]:
        """What the rows say that were committed since the last time, in their order."""
        newest = ledger.newest()
        self._fold.read(ledger.select, self.after, newest)
        evaluated = self._fold.evaluations[self._told :]
        self.after, self._told = newest, len(self._fold.evaluations)
        found: list[tuple[int, TrackedPoint | UpdateWindow]] = [(one.sequence, self._point(one)) for one in evaluated]
        found += self._windows.closed
        self._windows.closed = []
        return [report for _, report in sorted(found, key=itemgetter(0))]

    def rest(self) -> list[UpdateWindow]:
        """The last window, for a run that is over."""
        return [self._windows.window()] if self._windows.count else []

    def _point(self, evaluation: EvaluatedVersion) -> TrackedPoint:
        """At the moment of its publication; x_0 was there from the beginning."""
        t = min(evaluation.t, self._fold.t)
        at, gradients = self._fold.published_at[t], self._fold.gradients_in(t)
        return TrackedPoint(evaluation.t, at, gradients, metrics_in(evaluation.detail))


class WindowFold:
    """The part of the fold that gathers updates into windows."""

    def __init__(self) -> None:
        self.closed: list[tuple[int, UpdateWindow]] = []
        """Not told yet, with the row of the last update in each."""
        self._total = 0
        self._begin()

    def takers(self) -> Mapping[str, Taker]:
        return {"decided": self._decided}

    def window(self) -> UpdateWindow:
        """The open window."""
        return UpdateWindow(self._t, self._at_s, tuple(self._staleness), tuple(self._alpha_t), self._refused)

    def _begin(self) -> None:
        self._staleness: list[int] = []
        self._alpha_t: list[float] = []
        self._refused = self._t = self.count = 0
        self._at_s = 0.0

    def _decided(self, rows: Rows) -> None:
        for t, staleness, _, keep, new, _, _, _, _, _, sequence, at, *_ in rows:
            self._total += 1
            self.count, self._t, self._at_s = self.count + 1, t, at
            if keep is None:
                self._refused += 1
            else:
                self._staleness.append(staleness)
                self._alpha_t.append(new)
            if self.count * PARTS >= self._total:
                self.closed.append((sequence, self.window()))
                self._begin()
