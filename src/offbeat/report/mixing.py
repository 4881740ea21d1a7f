"""Owns what the decisions on updates add up to: how stale, with what weight, from whose data.

Rules kept here:
- A weight is what the update has in its version: alpha_t under FedAsync, its share of the mean under FedAvg.
- An update that was lost afterwards was decided on, but is in no version: it has no weight and no part.
- What is kept grows with devices and with different weights to three digits, never with updates.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.protocol.contribution import Contribution
from offbeat.protocol.messages import Outcome
from offbeat.storage.rows import Row

BARS_MAX = 60
LONG_TAIL = 3
"""Where the largest staleness is so many times that of all but a few updates, the picture ends before it."""
ALL_BUT_A_FEW = 0.995
SHOWN_MIN = 5
"""Even where nothing was stale, there is an axis."""


class Update(NamedTuple):
    """An applied update that waits for its version."""

    device: int
    staleness: int
    keep: float
    new: float
    is_lost: bool


class Part(NamedTuple):
    """What a device has brought."""

    device: int
    updates: int
    mass: float
    share: float
    """Of what all devices have in the newest version."""


@dataclass
class Mixing:
    """Decisions, summed up as they are read."""

    lost: Collection[int] = ()
    """Decisions whose updates were lost."""
    applied: int = 0
    gradients: int = 0
    """In the versions decided on."""
    outcomes: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    """How many applied updates had it."""
    staleness_refused: Counter[int] = field(default_factory=Counter)
    weights: Counter[tuple[int, float]] = field(default_factory=Counter)
    """How many updates of a staleness got a weight, to three digits."""
    updates: Counter[int] = field(default_factory=Counter)
    """Applied, by device."""
    gradients_at: "array[float]" = field(default_factory=lambda: array("d", [0.0]))
    """In version t."""
    _contribution: Contribution = field(default_factory=Contribution)
    _version: list[Update] = field(default_factory=list)
    _t: int = 0
    _gradients: int = 0

    def take(self, row: Row) -> None:
        """One more decision, in order."""
        outcome, staleness = str(row.outcome), row.staleness or 0
        self.outcomes[outcome] += 1
        if row.keep is None or row.new is None:
            if outcome != Outcome.FINISHED:
                self.staleness_refused[staleness] += 1
            return
        if self._version and row.t != self._t:
            self._publish()  # a group that went on with what had arrived
        self._t, device = row.t or 0, row.device or 0
        self.applied += 1
        self.staleness[staleness] += 1
        self.updates[device] += 1
        self._gradients += row.gradients or 0
        self._version.append(Update(device, staleness, row.keep, row.new, row.decision in self.lost))
        if row.publish:
            self._publish()

    def end(self, t: int) -> None:
        """All decisions were taken; t versions are published."""
        if self._version and t >= self._t:
            self._publish()

    def _publish(self) -> None:
        left = 1.0
        mixed = [update for update in self._version if not update.is_lost]
        for update in reversed(mixed):
            self.weights[update.staleness, float(f"{update.new * left:.3g}")] += 1
            left *= update.keep
        for update in mixed:
            self._contribution.count(update.device, update.keep, update.new)
        self._contribution.publish()
        self._version.clear()
        self.gradients = self._gradients
        missing = self._t + 1 - len(self.gradients_at)
        self.gradients_at.extend([self.gradients_at[-1]] * (missing - 1) + [float(self.gradients)] * (missing > 0))

    # --- what came out -----------------------------------------------------------------------------------------------

    @property
    def refused(self) -> int:
        """Updates that were decided on and not applied; those after the end are among them."""
        return sum(self.outcomes.values()) - self.applied

    @property
    def staleness_mean(self) -> float:
        """Over all applied updates."""
        total = sum(staleness * count for staleness, count in self.staleness.items())
        return total / self.applied if self.applied else 0.0

    def parts(self) -> list[Part]:
        """All devices that brought something, the largest part first."""
        surviving = self._contribution.surviving()
        total = sum(surviving.values())
        parts = [
            Part(device, count, self._contribution.mass.get(device, 0.0), surviving.get(device, 0.0) / (total or 1.0))
            for device, count in self.updates.items()
        ]
        return sorted(parts, key=lambda part: (-part.share, part.device))


def quantile(counts: Mapping[int, int], part: float) -> int:
    """The smallest value that this part of all does not exceed.

    >>> quantile({0: 5, 1: 4, 7: 1}, 0.5), quantile({0: 5, 1: 4, 7: 1}, 0.95), quantile({}, 0.5)
    (0, 7, 0)
    """
    wanted, seen = part * sum(counts.values()), 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen >= wanted:
            return value
    return 0


def shown_to(counts: Mapping[int, int]) -> int:
    """The largest staleness that a picture shows: a few stragglers do not squeeze all others.

    >>> shown_to({0: 900, 10: 100, 4000: 1}), shown_to({0: 5, 9: 5}), shown_to({0: 5})
    (10, 9, 5)
    """
    largest, most = max(counts, default=0), max(SHOWN_MIN, quantile(counts, ALL_BUT_A_FEW))
    return most if largest > LONG_TAIL * most else max(SHOWN_MIN, largest)


def bars(counts: Mapping[int, int], largest: int, most: int = BARS_MAX) -> tuple[list[float], list[int]]:
    """Edges and heights of a histogram; where there are too many values, several share a bar.

    >>> bars({0: 5, 1: 4, 3: 1}, 3)
    ([-0.5, 0.5, 1.5, 2.5, 3.5], [5, 4, 0, 1])
    """
    width = -(-(largest + 1) // most)
    heights = [0] * -(-(largest + 1) // width)
    for value, count in counts.items():
        if value <= largest:
            heights[value // width] += count
    return [width * index - 0.5 for index in range(len(heights) + 1)], heights
