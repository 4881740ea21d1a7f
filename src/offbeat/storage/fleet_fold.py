"""Owns the part of the fold that knows workers and tasks: what every worker did, who works now, how the run moves.

Rules kept here:
- A task is in flight from its lease until it is decided on or released; where its worker was silent and got its lease
  back, it is in flight again.
- A worker's speed is the median of its newest tasks, from lease to arrival.
- A page shows a few workers of thousands: what costs something is worked out when it is asked for.
- Memory: about a kilobyte per worker, 32 bytes per update, and the newest tasks.
"""

import json
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from offbeat.protocol.contribution import weights_in_version
from offbeat.storage.fold import Rows, Taker, VersionUpdates

RECENT_TASKS = 20_000
"""Ended tasks that a timeline can be drawn of."""
RATE_UPDATES = 100
"""How many of the newest updates say how fast the run goes."""
SPEED_TASKS = 101
"""How many of a worker's newest tasks say how fast it is."""
STATES = ("idle", "working", "silent", "away", "quarantined")
RELEASED = "released"


class EndedTask(NamedTuple):
    """A task that is over: its update was decided on, or it was released before one came."""

    task: int
    worker: int
    leased_at: float
    ended_at: float
    t: int | None
    staleness: int | None
    outcome: str


@dataclass(slots=True)
class WorkerTotals:
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
    """The sum of what its updates weighed in their versions."""
    seen_at: float = 0.0
    here: bool = True
    """It has joined and not left."""
    asked: int = 0
    """The row of its latest request for a task."""
    answered: int = 0
    """The row after which it no longer waits for one."""
    task: int | None = None
    """Of its open lease."""
    silent: int | None = None
    """Of the lease that it lost because it was not heard of, until it is heard of again."""
    why: str | None = None
    """Why it is quarantined."""
    decided: "array[int]" = field(default_factory=lambda: array("q"))
    """The rows in which its updates were decided on."""
    took: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds from lease to arrival, of its newest updates."""

    @property
    def seconds(self) -> float | None:
        return median(self.took[-SPEED_TASKS:]) if self.took else None

    @property
    def state(self) -> str:
        """Where requests are not recorded, a worker that has joined and does not work waits for a task."""
        if self.why is not None:
            return "quarantined"
        if self.task is not None:
            return "working"
        if self.silent is not None:
            return "silent"
        return "idle" if self.here and (self.asked > self.answered or not self.asks) else "away"

    def took_one(self, seconds: float) -> None:
        self.took.append(seconds)
        if len(self.took) > 2 * SPEED_TASKS:
            del self.took[:-SPEED_TASKS]

    def refuse(self, outcome: str) -> None:
        self.refused[outcome] = self.refused.get(outcome, 0) + 1

    def seen(self, at: float) -> None:
        self.seen_at = max(self.seen_at, at)

    def joined(self, sequence: int, device: int, name: str) -> None:
        self.device, self.name, self.here = device, name or self.name, True
        self.answered = max(self.answered, sequence)


class FleetFold:
    def __init__(self, *, verbose: bool = False) -> None:
        """A `verbose` ledger says who asked for a task, and when an update was mixed."""
        self.verbose = verbose
        self.workers: dict[int, WorkerTotals] = {}
        self.open: dict[int, tuple[WorkerTotals, float]] = {}
        """Tasks in flight: whose, and since when."""
        self.leased_at, self.ended_at = array("d"), array("d")
        """When the number of tasks in flight went up and down."""
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=RECENT_TASKS)
        """What `EndedTask` holds, about in the order in which they ended."""
        self.applied_at: deque[float] = deque(maxlen=RATE_UPDATES + 1)
        self.paused = False
        self.decided: dict[str, array[int]] = {}
        """The rows in which updates were decided on, by outcome."""
        self._pending: dict[int, tuple[int, bool]] = {}
        """Decisions on versions that are not published: which version, and does it end with this one?"""
        self._version = VersionUpdates(self._weigh)

    def takers(self) -> Mapping[str, Taker]:
        return {
            "workers": self._workers,
            "leased": self._leased,
            "released": self._released,
            "decided": self._decided,
            "mixed": self._mixed,
            "heartbeat": self._heartbeat,
            "asked": self._asked,
            "paused": self._paused,
        }

    def settle(self, t: int) -> None:
        """What is published is mixed."""
        self._version.settle(t)
        self._pending = {decision: kept for decision, kept in self._pending.items() if kept[0] > t}

    # --- totals ------------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Updates decided on and not yet mixed; where mixings are not recorded, those before an unpublished version."""
        known = self.verbose or any(publish for _, publish in self._pending.values())
        return len(self._pending) if known else 0

    def here(self) -> int:
        return sum(worker.here for worker in self.workers.values())

    def quarantined(self) -> int:
        return sum(worker.here and worker.why is not None for worker in self.workers.values())

    def silent(self) -> int:
        return sum(worker.state == "silent" for worker in self.workers.values())

    def of(self, number: int, device: int | None = None) -> WorkerTotals:
        """The worker of this number, which is made where it is new."""
        worker = self.workers.get(number)
        if worker is None:
            worker = WorkerTotals(number, number if device is None else device, f"worker {number}", self.verbose)
            self.workers[number] = worker
        return worker

    def find(self, text: str) -> WorkerTotals | None:
        """The worker of this number or, where there is none, of this name."""
        if text.isascii() and text.isdecimal() and len(text) < 16 and int(text) in self.workers:
            return self.workers[int(text)]
        return next((worker for worker in self.workers.values() if worker.name == text), None)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _workers(self, rows: Rows) -> None:
        for sequence, at, kind, number, device, text, _ in rows:
            detail = json.loads(text) if text else {}
            if kind == "fleet_joined":
                self._fleet_joined(sequence, at, **detail)
                continue
            worker = self.of(number, device)
            match kind:
                case "joined":
                    worker.joined(sequence, device, detail.get("name", ""))
                case "left":
                    worker.here, worker.answered = False, max(worker.answered, sequence)
                case "quarantined":
                    worker.why = detail.get("why", "")
                    continue  # done to it: it was not seen
                case "readmitted":
                    worker.why = None
                    continue
                case "bad_update":
                    worker.refuse(kind)
                case "declared":
                    continue  # it has joined just before, or pushes just now
            worker.seen(at)

    def _fleet_joined(self, sequence: int, at: float, size: int, devices: int | None = None) -> None:
        for number in range(size):
            worker = self.of(number)
            worker.joined(sequence, number % (devices or size), "")
            worker.seen(at)

    def _asked(self, rows: Rows) -> None:
        for kind, number, sequence, at in rows:
            worker = self.of(number)
            if kind == "requested":
                worker.asked = sequence
                worker.seen(at)
            else:  # no sign of life: a server that starts ends the requests of before
                worker.answered = max(worker.answered, sequence)

    def _paused(self, rows: Rows) -> None:
        self.paused = rows[-1][0] == "run_paused"

    def _heartbeat(self, rows: Rows) -> None:
        for task, number, at in rows:
            if number is not None:
                self.of(number).seen(at)
            elif task in self.open:  # of before the worker was recorded
                self.open[task][0].seen(at)

    def _weigh(self, version: Sequence[tuple[int, float, float]]) -> None:
        for number, weight in weights_in_version(version):
            self.workers[number].mass += weight

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _leased(self, rows: Rows) -> None:
        of, open_, leased_at = self.of, self.open, self.leased_at
        for sequence, at, task, number, device in rows:
            worker = of(number, device)
            worker.answered = max(worker.answered, sequence)
            if at > worker.seen_at:
                worker.seen_at = at
            if task not in open_ and worker.silent != task:  # else it is the same lease, told again
                open_[task] = (worker, at)
                leased_at.append(at)
                worker.tasks += 1
                worker.task = task

    def _released(self, rows: Rows) -> None:
        """A late update may still be decided on, and the worker of a silent lease may be heard of again."""
        for at, task, number, granted_at, _, detail, kind in rows:
            facts = json.loads(detail) if detail else {}
            if kind == "heard_again":
                self._heard_again(at, task, self.of(number), granted_at if facts.get("resumed") else None)
            elif task in self.open:
                self._close(at, task)
                self.recent.append((task, number, granted_at, at, None, None, RELEASED))
                self.of(number).silent = task if facts.get("silent") else None

    def _heard_again(self, at: float, task: int, worker: WorkerTotals, granted_at: float | None) -> None:
        """`granted_at` is that of the lease, where the worker got it back."""
        worker.silent = None
        if granted_at is not None:
            worker.seen(at)
            self.open[task] = (worker, granted_at)
            self.leased_at.append(at)
            worker.task = max(task, worker.task or 0)  # one that it was leased later may have been taken before this

    def _decided(self, rows: Rows) -> None:
        of, close, recent, decided = self.of, self._close, self.recent, self.decided
        for t, staleness, outcome, keep, new, publish, _, decision, _, number, sequence, at, task, granted_at in rows:
            recent.append((task, number, granted_at, at, t, staleness, outcome))
            worker = of(number)
            worker.decided.append(sequence)
            worker.took_one(at - granted_at)
            if at > worker.seen_at:
                worker.seen_at = at
            close(at, task)
            if worker.silent == task:
                worker.silent = None
            if outcome not in decided:
                decided[outcome] = array("q")
            decided[outcome].append(sequence)
            if keep is None:
                worker.refuse(outcome)
                continue
            worker.applied += 1
            self.applied_at.append(at)
            self._version.add(number, t, keep, new, publish=publish)
            self._pending[decision] = (t, bool(publish))

    def _mixed(self, rows: Rows) -> None:
        for (decision,) in rows:
            self._pending.pop(decision, None)

    def _close(self, at: float, task: int) -> None:
        held = self.open.pop(task, None)
        if held is not None:
            self.ended_at.append(at)
            if held[0].task == task:
                held[0].task = None
