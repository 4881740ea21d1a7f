"""Owns what went wrong in a run, as its ledger tells it.

Rules kept here:
- Counts are of all there were; lists hold the first LISTED_MAX.
- What strangers said (names, reasons) is kept as they said it: whoever shows it makes it safe.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

from offbeat.protocol.messages import Evaluated
from offbeat.storage.rows import Row

LISTED_MAX = 30
REASONS_MAX = 50
"""Different reasons that are told apart."""
ANSWERED = ("busy", "unknown", "not_yours", "repeated")
OTHER = "other reasons"

Rows = Callable[[str], Iterator[Row]]
"""The rows of a kind."""


class Quarantined(NamedTuple):
    """A worker that was given nothing any more."""

    worker: int
    at: float
    why: str
    readmitted_at: float | None = None


class Lost(NamedTuple):
    """An acknowledged update that was damaged and dropped."""

    task: int
    decision: int
    at: float


class Gap(NamedTuple):
    """Evaluations of a metric that were no number."""

    evaluations: int
    first_t: int


@dataclass
class Troubles:
    """What went wrong, by kind."""

    answered: Counter[str] = field(default_factory=Counter)
    """Pushes that were answered without a decision, or again."""
    bad: Counter[str] = field(default_factory=Counter)
    """Updates that could not even be looked at, by why."""
    quarantines: int = 0
    quarantined: list[Quarantined] = field(default_factory=list)
    losses: int = 0
    lost: list[Lost] = field(default_factory=list)
    released: Counter[str] = field(default_factory=Counter)
    """Leases that ended without an update, by how."""
    gaps: dict[str, Gap] = field(default_factory=dict)
    """By metric."""

    @classmethod
    def read(cls, rows: Rows) -> "Troubles":
        """From the rows of a ledger; evaluations are told by `evaluated`."""
        found = cls(answered=Counter({kind: sum(1 for _ in rows(kind)) for kind in ANSWERED}))
        for row in rows("bad_update"):
            why = str(_detail(row).get("why", ""))
            found.bad[why if why in found.bad or len(found.bad) < REASONS_MAX else OTHER] += 1
        found._read_quarantines(rows("quarantined"), rows("readmitted"))
        for row in rows("lost"):
            found.losses += 1
            found.lost.append(Lost(row.task or 0, row.decision or 0, row.at))
        del found.lost[LISTED_MAX:]
        for row in rows("released"):
            found.released[_how(row)] += 1
        return found

    def evaluated(self, event: Evaluated) -> None:
        """Take note of metrics that are no numbers."""
        for name, value in event.metrics.items():
            if not isfinite(value):
                gap = self.gaps.get(name, Gap(0, event.t))
                self.gaps[name] = Gap(gap.evaluations + 1, gap.first_t)

    def _read_quarantines(self, begun: Iterable[Row], ended: Iterable[Row]) -> None:
        for row in begun:
            self.quarantines += 1
            if len(self.quarantined) < LISTED_MAX:
                self.quarantined.append(Quarantined(row.worker or 0, row.at, str(_detail(row).get("why", ""))))
        for row in ended:
            self.quarantined = [
                one._replace(readmitted_at=row.at) if _lifts(row, one) else one for one in self.quarantined
            ]


def _lifts(row: Row, one: Quarantined) -> bool:
    return one.worker == row.worker and one.readmitted_at is None and one.at <= row.at


def _how(row: Row) -> str:
    """How a lease ended without an update."""
    if _detail(row).get("revoked"):
        return "revoked"
    return "expired" if row.deadline is not None and row.at >= row.deadline else "given up"


def _detail(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(row.detail) if row.detail else {}
    return found
