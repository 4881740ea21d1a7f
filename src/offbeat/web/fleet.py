"""Owns what is known of every worker, counted from the ledger: what it did, what came of it, when it was last seen.

Rules kept here:
- Mass counts as in `protocol.contribution`: an update has the weight that it has in the version it is published in.
- A worker's speed is the median of its newest tasks, from lease to arrival.
- A page asks for a few workers of thousands: what costs something is worked out when it is asked for.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Rows = Sequence[tuple[Any, ...]]
FLEET = (
    *("fleet_joined", "joined", "left", "returned", "bad_update", "quarantined", "readmitted"),
    *("busy", "unknown", "not_yours", "repeated"),
)
"""Kinds of rows that tell of workers."""
DONE_TO_IT = ("quarantined", "readmitted")
"""Those of which a worker need not know anything."""
ASKS = ("requested", "request_ended")

SPEED_TASKS = 101
"""How many of a worker's newest tasks say how fast it is."""
STATES = ("idle", "working", "away", "quarantined")


@dataclass(slots=True)
class Worker:
    """One worker, as the ledger knows it."""

    number: int
    device: int
    name: str
    asks: bool
    """Does the ledger say when it asks for a task?"""
    tasks: int = 0
    """Leases that it was given."""
    applied: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    mass: float = 0.0
    seen_at: float = 0.0
    here: bool = True
    """It has joined and not left."""
    asked: int = 0
    """The row of its latest request for a task."""
    answered: int = 0
    """The row after which it waits no more."""
    task: int | None = None
    """Of its open lease."""
    why: str | None = None
    """It is quarantined, for this."""
    decided: "array[int]" = field(default_factory=lambda: array("q"))
    """The rows in which its updates were decided on."""
    took: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds from lease to arrival, of every update."""

    @property
    def seconds(self) -> float | None:
        """How long its tasks take."""
        return median(self.took[-SPEED_TASKS:]) if self.took else None

    def refuse(self, outcome: str) -> None:
        """One more update of it was refused."""
        self.refused[outcome] = self.refused.get(outcome, 0) + 1

    def seen(self, at: float) -> None:
        """It gave a sign of life."""
        if at > self.seen_at:
            self.seen_at = at

    @property
    def state(self) -> str:
        """What it does; where asking is not recorded, whoever has joined and does not work waits for a task."""
        if self.why is not None:
            return "quarantined"
        if self.task is not None:
            return "working"
        return "idle" if self.here and (self.asked > self.answered or not self.asks) else "away"


class Fleet:
    """All workers that ever joined."""

    def __init__(self, *, asks: bool) -> None:
        """Does the ledger say when workers ask for tasks?"""
        self._asks = asks
        self.workers: dict[int, Worker] = {}
        self._unpublished: list[tuple[Worker, float, float]] = []
        self._t = 0

    def of(self, number: int, device: int | None = None) -> Worker:
        """The worker of this number."""
        worker = self.workers.get(number)
        if worker is None:
            worker = Worker(number, number if device is None else device, f"worker {number}", self._asks)
            self.workers[number] = worker
        return worker

    def take(self, rows: Rows) -> None:
        """What happened to workers, in order."""
        for sequence, at, kind, number, device, text in rows:
            detail = json.loads(text) if text else {}
            if kind == "fleet_joined":
                self._fleet_joined(sequence, at, **detail)
                continue
            worker = self.of(number, device)
            match kind:
                case "joined":
                    _joined(worker, sequence, device, detail.get("name", ""))
                case "left":
                    worker.here, worker.answered = False, max(worker.answered, sequence)
                case "quarantined":
                    worker.why = detail.get("why", "")
                case "readmitted":
                    worker.why = None
                case "bad_update":
                    worker.refuse(kind)
            if kind not in DONE_TO_IT:
                worker.seen(at)

    def _fleet_joined(self, sequence: int, at: float, size: int, devices: int | None = None) -> None:
        for number in range(size):
            worker = self.of(number)
            _joined(worker, sequence, number % (devices or size), "")
            worker.seen(at)

    def take_asks(self, rows: Rows) -> None:
        """Workers asked for tasks, or wait no more: the latest row and moment of each."""
        for kind, number, sequence, at in rows:
            worker = self.of(number)
            if kind == "requested":
                worker.asked = sequence
                worker.seen(at)
            else:  # nobody was seen: a server that starts ends what waited before
                worker.answered = max(worker.answered, sequence)

    def find(self, text: str) -> Worker | None:
        """The worker of this number or, where there is none, of this name."""
        if text.isascii() and text.isdecimal() and len(text) < 16 and int(text) in self.workers:
            return self.workers[int(text)]
        return next((worker for worker in self.workers.values() if worker.name == text), None)

    # --- whose data count --------------------------------------------------------------------------------------------

    def count(self, worker: Worker, t: int, keep: float, new: float, *, publish: int) -> None:
        """An update of this worker went into version t with these coefficients, and may have been its last."""
        if t != self._t:
            self._publish()
        self._t = t
        worker.applied += 1
        if publish and not self._unpublished:
            worker.mass += new
            return
        self._unpublished.append((worker, keep, new))
        if publish:
            self._publish()

    def published(self, t: int) -> None:
        """Version t is there, whether or not one of its updates said that it was the last."""
        if self._t <= t:
            self._publish()

    def _publish(self) -> None:
        left = 1.0
        for worker, keep, new in reversed(self._unpublished):
            worker.mass += new * left
            left *= keep
        self._unpublished.clear()

    # --- counts ------------------------------------------------------------------------------------------------------

    def here(self) -> int:
        """How many have joined and not left."""
        return sum(worker.here for worker in self.workers.values())

    def quarantined(self) -> int:
        """How many of those that are here are quarantined."""
        return sum(worker.here and worker.why is not None for worker in self.workers.values())


def _joined(worker: Worker, row: int, device: int, name: str) -> None:
    worker.device, worker.name, worker.here = device, name or worker.name, True
    worker.answered = max(worker.answered, row)
