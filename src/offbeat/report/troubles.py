"""Owns what went wrong in a run, as its ledger tells it, and what that means.

Rules kept here:
- Counts are of all there were; lists hold the first LISTED_MAX.
- What strangers said (names, reasons) is kept as they said it: the page makes it safe.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from offbeat.protocol.messages import Outcome
from offbeat.report.wording import whole
from offbeat.storage.fold import Rows, RunFold, Taker

LISTED_MAX = 30
REASONS_MAX = 50
"""Different reasons that are told apart."""
OTHER = "other reasons"
REFUSED: dict[str, str] = {
    Outcome.TOO_STALE: "Too stale, or its lease was revoked, or its x_tau was gone.",
    Outcome.NOT_FINITE: "It held NaN or infinity.",
    Outcome.TOO_LARGE: "Its step ||x_new - x_tau|| was larger than the gate accepts.",
    Outcome.QUARANTINED: "Its worker was in quarantine.",
    Outcome.FINISHED: "It arrived after the end; nothing is wrong with it.",
    Outcome.UNKNOWN_TASK: "Its task is not known.",
    Outcome.NOT_YOURS: "Its task was leased to another worker.",
    Outcome.BUSY: "The queue was full.",
}
"""Why an update was not applied."""
ANSWERED = {
    "busy": "Pushes that met a full queue and were told to come back.",
    "unknown": "Pushes for tasks that are not known.",
    "not_yours": "Pushes for tasks of another worker.",
    "repeated": "Pushes that came again and got their first answer again; nothing is wrong with them.",
}
RELEASED = {
    "silent": "Leases whose worker was not heard of for too long: others got its place.",
    "expired": "Leases without a sign of life until their deadline.",
    "revoked": "Leases taken back: their group went on, they held others up, or their worker was quarantined.",
    "given up": "Leases that ended because their worker left, was lost or handed them back.",
}


class Mishap(NamedTuple):
    """A kind of trouble, how often it happened, and what it means."""

    name: str
    many: int
    meaning: str

    @property
    def is_harmless(self) -> bool:
        """Is it told, but no reason to worry?"""
        return self.name in ("Refused: finished", "Pushes: repeated")


class QuarantinedWorker(NamedTuple):
    worker: int
    at: float
    why: str
    readmitted_at: float | None = None


class LostUpdate(NamedTuple):
    task: int
    decision: int
    at: float


class Gap(NamedTuple):
    """Evaluations of a metric that were no number."""

    evaluations: int
    first_t: int


@dataclass
class Troubles:
    """What went wrong, by kind; a part of the fold."""

    bad: Counter[str] = field(default_factory=Counter)
    """Updates that could not be read, by why."""
    quarantines: int = 0
    quarantined: list[QuarantinedWorker] = field(default_factory=list)
    losses: int = 0
    lost: list[LostUpdate] = field(default_factory=list)
    released: Counter[str] = field(default_factory=Counter)
    """Leases that ended without an update, by how."""
    gaps: dict[str, Gap] = field(default_factory=dict)
    """By metric."""
    names: dict[int, str] = field(default_factory=dict)
    """What workers call themselves."""
    workers_of: dict[int, int] = field(default_factory=dict)
    """The worker that joined last for a device."""

    def takers(self) -> Mapping[str, Taker]:
        return {"workers": self._workers, "released": self._released, "lost": self._lost}

    def name_for(self, device: int) -> str:
        """Of the worker that joined last for a device; empty where there is none."""
        return self.names.get(self.workers_of.get(device, -1), "")

    def evaluated(self, t: int, metrics: Mapping[str, float]) -> None:
        """Take note of metrics that are no numbers."""
        for name, value in metrics.items():
            if not isfinite(value):
                gap = self.gaps.get(name, Gap(0, t))
                self.gaps[name] = Gap(gap.evaluations + 1, gap.first_t)

    def _workers(self, rows: Rows) -> None:
        for _, at, kind, worker, device, detail, _ in rows:
            match kind:
                case "joined":
                    self.names[worker] = str(_said(detail, "name"))
                    self.workers_of[device] = worker
                case "bad_update":
                    why = _said(detail, "why")
                    self.bad[why if why in self.bad or len(self.bad) < REASONS_MAX else OTHER] += 1
                case "quarantined":
                    self.quarantines += 1
                    if len(self.quarantined) < LISTED_MAX:
                        self.quarantined.append(QuarantinedWorker(worker, at, _said(detail, "why")))
                case "readmitted":
                    self._readmitted(worker, at)

    def _readmitted(self, worker: int, at: float) -> None:
        for index, one in enumerate(self.quarantined):
            if one.worker == worker and one.readmitted_at is None:
                self.quarantined[index] = one._replace(readmitted_at=at)

    def _released(self, rows: Rows) -> None:
        left = (row for row in rows if row[-1] == "released")
        self.released.update(_how(at, deadline, detail) for at, _, _, _, deadline, detail, _ in left)

    def _lost(self, rows: Rows) -> None:
        self.losses += len(rows)
        self.lost.extend(LostUpdate(task, decision, at) for at, task, decision in rows)
        del self.lost[LISTED_MAX:]


def mishaps(fold: RunFold, found: Troubles) -> list[Mishap]:
    gap = "Evaluations that were not a finite number; the first is of epoch {}."
    kinds = [
        *_counted("Refused", REFUSED, fold.rejected()),
        Mishap("Unreadable updates", found.bad.total(), "Garbage, a wrong shape, or damaged on the way."),
        Mishap("Quarantines", found.quarantines, "Workers with too many bad updates in a row."),
        Mishap("Lost updates", found.losses, "Acknowledged, then found damaged, and dropped."),
        *_counted("Pushes", ANSWERED, fold.kinds),
        *_counted("Leases", RELEASED, found.released),
        *(Mishap(f"Not a number: {name}", many, gap.format(whole(t))) for name, (many, t) in found.gaps.items()),
    ]
    return [mishap for mishap in kinds if mishap.many]


def _counted(of: str, meanings: Mapping[str, str], counts: Counter[str]) -> Iterator[Mishap]:
    for kind, meaning in meanings.items():
        yield Mishap(f"{of}: {kind.replace('_', ' ')}", counts[kind], meaning)


def _how(at: float, deadline: float | None, detail: str | None) -> str:
    facts = json.loads(detail or "{}")
    if facts.get("revoked") or facts.get("silent"):
        return "revoked" if facts.get("revoked") else "silent"
    return "expired" if deadline is not None and at >= deadline else "given up"


def _said(detail: str | None, name: str) -> str:
    return str(json.loads(detail or "{}").get(name, ""))
