"""Owns how rows of a ledger become points on a curve and windows of updates, for simulated and served runs alike.

Rules kept here:
- What comes out depends on the rows alone, not on when they are read or how many at a time.
- A window is at least a part of all that came before it: a long run has a few thousand windows, not one per update.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import takewhile

from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import Row, as_evaluation
from offbeat.trackers.sink import Point, Window

PARTS = 200
"""A window is closed when it holds this part of all updates so far."""
KINDS = ("decided", "published", "evaluated")


class Reading:
    """Where the reading of one ledger stands."""

    def __init__(self) -> None:
        self.after = 0
        """The last row that was looked at."""
        self.at_s = 0.0
        self._total = self._gradients = 0
        self._window = _Open()
        self._coming: deque[tuple[int, int]] = deque()
        """Epochs that are decided on and not published, with the gradients up to them."""
        self._t, self._published_at, self._in_version = array("q", [0]), array("d", [0.0]), array("q", [0])
        """What is published: sixteen bytes and eight for each version, so that old ones can be evaluated late."""

    def news(self, ledger: Ledger) -> Iterator[Point | Window]:
        """What the rows say that were committed since the last time."""
        newest = ledger.newest()
        kinds = [takewhile(lambda row: row.sequence <= newest, ledger.rows(kind, after=self.after)) for kind in KINDS]
        for row in merge(*kinds, key=lambda row: row.sequence):
            self.after, self.at_s = row.sequence, row.at
            yield from self._read(row)
        self.after = newest

    def rest(self) -> Iterable[Window]:
        """The last window, for a run that is over."""
        return [self._window.closed()] if self._window.count else []

    def _read(self, row: Row) -> Iterator[Point | Window]:
        match row.kind:
            case "decided":
                yield from self._decided(row)
            case "published":
                self._published(row.t or 0, row.at)
            case "evaluated":
                yield self._point(row)

    def _decided(self, row: Row) -> Iterator[Window]:
        self._window.add(row)
        self._total += 1
        if row.keep is not None:
            self._gradients += row.gradients or 0
            self._coming.append((row.t or 0, self._gradients))
        if self._window.count * PARTS >= self._total:
            yield self._window.closed()
            self._window = _Open()

    def _published(self, t: int, at: float) -> None:
        gradients = self._in_version[-1]
        while self._coming and self._coming[0][0] <= t:
            gradients = self._coming.popleft()[1]
        self._t.append(t)
        self._published_at.append(at)
        self._in_version.append(gradients)

    def _point(self, row: Row) -> Point:
        """At the moment of its publication; x_0 was there from the beginning."""
        evaluation = as_evaluation(row)
        index = bisect_right(self._t, evaluation.t) - 1
        return Point(evaluation.t, self._published_at[index], self._in_version[index], evaluation.metrics)


class _Open:
    """A window that is not closed."""

    def __init__(self) -> None:
        self.staleness: list[int] = []
        self.alpha_t: list[float] = []
        self.refused = self.count = self.t = 0
        self.at_s = 0.0

    def add(self, row: Row) -> None:
        self.count, self.t, self.at_s = self.count + 1, row.t or 0, row.at
        if row.keep is None:
            self.refused += 1
        else:
            self.staleness.append(row.staleness or 0)
            self.alpha_t.append(row.new or 0.0)

    def closed(self) -> Window:
        return Window(self.t, self.at_s, tuple(self.staleness), tuple(self.alpha_t), self.refused)
