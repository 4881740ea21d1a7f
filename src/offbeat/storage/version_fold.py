"""Owns the part of the fold that grows with a run: when every version came, what its evaluation showed, the weights.

Those who draw a run read it: page, report, trackers and the curve of a simulation. A server does not keep it.

Memory: 16 bytes per version, a few hundred per evaluation, and a hundred per different weight.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import NamedTuple

from offbeat.protocol.messages import TOTAL_MAX
from offbeat.storage.fold import KEEP, Rows, Taker, counted_staleness

WEIGHTS_MAX = 50_000
"""Different weights that are kept apart; more are rounded."""
ROUNDED_DIGITS = 2


class EvaluatedVersion(NamedTuple):
    """A version that was evaluated; `detail` holds its metrics as the ledger stores them."""

    sequence: int
    at: float
    t: int
    detail: str


class VersionFold:
    def __init__(self) -> None:
        self.published_at = array("d", [0.0])
        """When every version could be read; version 0 from the start."""
        self.gradients_of = array("q", [0])
        """Gradients in every version decided on."""
        self.evaluations: list[EvaluatedVersion] = []
        self.weights: Counter[tuple[int, float]] = Counter()
        """Applied updates by staleness and alpha_t."""
        self._gradients = 0
        self._rounds = False

    def takers(self) -> Mapping[str, Taker]:
        return {"published": self._published, "decided": self._decided, "evaluated": self._evaluated}

    def settle(self, t: int) -> None:
        """Version t is published: those decided on without a last update have their gradients, too."""
        missing = t + 1 - len(self.gradients_of)
        if missing > 0:  # a group whose deadline passed had no last update
            self.gradients_of.extend([self._gradients] * missing)

    def mixed_at(self, t: int | None) -> float | None:
        """When the version was published that an update went into."""
        return self.published_at[t] if t is not None and t < len(self.published_at) else None

    def gradients_in(self, t: int) -> int:
        """The gradients in a version; in the newest one decided on where this one is not."""
        return self.gradients_of[min(t, len(self.gradients_of) - 1)]

    def _published(self, rows: Rows) -> None:
        for at, t in rows:
            missing = t + 1 - len(self.published_at)  # one pass of the updater may publish several as one
            self.published_at.extend([at] * missing)

    def _decided(self, rows: Rows) -> None:
        applied = [row for row in rows if row[KEEP] is not None]
        self._weigh([(counted_staleness(row[1]), row[4]) for row in applied])
        gradients_of, total = self.gradients_of, self._gradients
        for t, publish, gradients in map(itemgetter(0, 5, 6), applied):
            while len(gradients_of) < t:  # a group whose deadline passed had no last update
                gradients_of.append(total)
            total = min(total + gradients, TOTAL_MAX)
            if publish:
                gradients_of.append(total)
        self._gradients = total

    def _weigh(self, weights: Iterable[tuple[int, float]]) -> None:
        self.weights.update(map(_rounded, weights) if self._rounds else weights)
        if not self._rounds and len(self.weights) > WEIGHTS_MAX:
            self._rounds, exact, self.weights = True, self.weights, Counter()
            for weight, count in exact.items():
                self.weights[_rounded(weight)] += count

    def _evaluated(self, rows: Rows) -> None:
        self.evaluations.extend(map(EvaluatedVersion._make, rows))


def _rounded(weight: tuple[int, float]) -> tuple[int, float]:
    staleness, alpha_t = weight
    return staleness, float(f"{alpha_t:.{ROUNDED_DIGITS}g}")
