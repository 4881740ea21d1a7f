"""Owns what the pages count: the ledger's rows in, totals out, every row looked at once.

Rules kept here:
- A page that is open costs the rows that are new, not those of the whole run.
- Rows of one kind come together and in order, kind after kind as `feeds` says, which is not how things happened:
  nothing here depends on more of it than that a task's lease is counted before its end.
- Every total means what the coordinator means by it: `t` counts what is published, `gradients` those in the versions
  decided on, a task is in flight from its lease until it is decided on or released.
- Memory: about a kilobyte per worker, and a hundred bytes per update.
"""

import json
from array import array
from collections import Counter, deque
from typing import Any, NamedTuple

from offbeat.web.fleet import Fleet, Rows, Worker

RECENT_TASKS = 20_000
"""Ended tasks that a timeline can be drawn of."""
RATE_UPDATES = 100
"""How many of the newest updates say how fast the run goes."""
WEIGHTS_MAX = 50_000
"""Different weights that are kept apart; more are rounded."""
ROUNDED_DIGITS = 2
RELEASED = "released"


class Ended(NamedTuple):
    """A task that is over: its update was decided on, or it was released and nothing had come."""

    task: int
    worker: int
    leased_at: float
    ended_at: float
    t: int | None
    staleness: int | None
    outcome: str


class Evaluation(NamedTuple):
    """What a version was worth; `detail` holds the metrics as they are stored."""

    t: int
    detail: str


class Tally:
    """The totals of one run."""

    def __init__(self, *, verbose: bool = False) -> None:
        """A `verbose` ledger says who asked for a task, and when an update was mixed."""
        self.verbose = verbose
        self.fleet = Fleet(asks=verbose)
        self.applied = self.duplicates = 0
        self.rejected: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        """Applied updates by their staleness."""
        self.weights: Counter[tuple[int, float]] = Counter()
        """Applied updates by staleness and alpha_t."""
        self.open: dict[int, tuple[Worker, float]] = {}
        """Tasks in flight: whose, and since when."""
        self.leased_at, self.ended_at = array("d"), array("d")
        """When the number of tasks in flight went up and down."""
        self.recent: deque[tuple[Any, ...]] = deque(maxlen=RECENT_TASKS)
        """What `Ended` holds, about in the order in which they ended."""
        self.published_at = array("d", [0.0])
        """When every version could be read; version 0 from the start."""
        self.gradients_of = array("q", [0])
        """Gradients in every version decided on."""
        self.applied_at: deque[float] = deque(maxlen=RATE_UPDATES + 1)
        self.evaluations: list[Evaluation] = []
        self.decided: dict[str, array[int]] = {}
        """The rows in which updates were decided on, by outcome."""
        self.ended: str | None = None
        """Why the run ended."""
        self._pending: dict[int, tuple[int, bool]] = {}
        self._gradients = 0
        self._digits: int | None = None

    # --- what others may ask -----------------------------------------------------------------------------------------

    @property
    def t(self) -> int:
        """Versions published."""
        return len(self.published_at) - 1

    @property
    def gradients(self) -> int:
        """In the versions decided on."""
        return self.gradients_of[-1]

    @property
    def queued(self) -> int:
        """Updates decided on and not yet mixed; where mixings are not recorded, those before an unpublished version."""
        known = self.verbose or any(publish for _, publish in self._pending.values())
        return len(self._pending) if known else 0

    @property
    def staleness_mean(self) -> float:
        """Of applied updates."""
        return sum(u * count for u, count in self.staleness.items()) / self.applied if self.applied else 0.0

    def mixed_at(self, t: int | None) -> float | None:
        """When the version was published that an update went into."""
        return self.published_at[t] if t is not None and t < len(self.published_at) else None

    # --- tasks -------------------------------------------------------------------------------------------------------

    def take_leased(self, rows: Rows) -> None:
        """Tasks were given to workers."""
        of, open_, leased_at = self.fleet.of, self.open, self.leased_at
        for sequence, at, task, number, device in rows:
            worker = of(number, device)
            worker.answered = sequence
            if at > worker.seen_at:
                worker.seen_at = at
            if task not in open_:  # else it is the same lease, told again
                open_[task] = (worker, at)
                leased_at.append(at)
                worker.tasks += 1
                worker.task = task

    def take_decided(self, rows: Rows) -> None:
        """Updates were decided on."""
        sequences, ats, tasks, numbers, granted_ats, ts, stalenesses, outcomes, *_ = zip(*rows, strict=True)
        self.recent.extend(zip(tasks, numbers, granted_ats, ats, ts, stalenesses, outcomes, strict=True))
        of, close = self.fleet.of, self._close
        for sequence, at, task, number, granted_at in zip(sequences, ats, tasks, numbers, granted_ats, strict=True):
            worker = of(number)
            worker.decided.append(sequence)
            worker.took.append(at - granted_at)
            if at > worker.seen_at:
                worker.seen_at = at
            close(at, task)
        for outcome in set(outcomes):
            found = [sequence for sequence, theirs in zip(sequences, outcomes, strict=True) if theirs == outcome]
            self.decided.setdefault(outcome, array("q")).extend(found)
        applied = [row for row in rows if row[8] is not None]
        self._refuse([row for row in rows if row[8] is None])
        self._weigh(applied)
        self._apply(applied)

    def _refuse(self, rows: Rows) -> None:
        self.rejected.update(row[7] for row in rows)
        for row in rows:
            self.fleet.of(row[3]).refuse(row[7])

    def _apply(self, rows: Rows) -> None:
        gradients_of, of, count, t_now = self.gradients_of, self.fleet.of, self.fleet.count, self.t
        for _, _, _, number, _, t, _, _, keep, new, publish, gradients, decision in rows:
            while len(gradients_of) < t:  # a group whose deadline passed had no last update
                gradients_of.append(self._gradients)
            self._gradients += gradients
            if publish:
                gradients_of.append(self._gradients)
            count(of(number), t, keep, new, publish=publish)
            if t > t_now:
                self._pending[decision] = (t, bool(publish))

    def _weigh(self, rows: Rows) -> None:
        self.applied += len(rows)
        self.applied_at.extend(row[1] for row in rows)
        self.staleness.update([row[6] for row in rows])
        self.weights.update([(row[6], self._rounded(row[9])) for row in rows])
        if self._digits is None and len(self.weights) > WEIGHTS_MAX:
            self._digits, exact, self.weights = ROUNDED_DIGITS, self.weights, Counter()
            for (staleness, alpha_t), number in exact.items():
                self.weights[staleness, self._rounded(alpha_t)] += number

    def _rounded(self, alpha_t: float) -> float:
        return alpha_t if self._digits is None else float(f"{alpha_t:.{self._digits}g}")

    def _close(self, at: float, task: int) -> None:
        held = self.open.pop(task, None)
        if held is not None:
            self.ended_at.append(at)
            if held[0].task == task:
                held[0].task = None

    # --- versions ----------------------------------------------------------------------------------------------------

    def take_published(self, rows: Rows) -> None:
        """Versions can be read."""
        published_at = self.published_at
        for at, t in rows:
            while len(published_at) <= t:  # one pass of the updater may publish several as one
                published_at.append(at)

    def take_mixed(self, rows: Rows) -> None:
        """Decisions were applied."""
        for (decision,) in rows:
            self._pending.pop(decision, None)

    def settle(self) -> None:
        """All kinds were told: what is published is mixed."""
        while len(self.gradients_of) <= self.t:
            self.gradients_of.append(self._gradients)
        self.fleet.published(self.t)
        self._pending = {decision: kept for decision, kept in self._pending.items() if kept[0] > self.t}

    # --- the rest ----------------------------------------------------------------------------------------------------

    def take_heartbeats(self, rows: Rows) -> None:
        """Tasks are worked on: the latest moment of each."""
        for task, at in rows:
            if task in self.open:
                self.open[task][0].seen(at)

    def take_released(self, rows: Rows) -> None:
        """Tasks are no longer expected; a late update may still be decided on."""
        for at, task, number, granted_at in rows:
            if task in self.open:
                self._close(at, task)
                self.recent.append((task, number, granted_at, at, None, None, RELEASED))

    def take_repeated(self, rows: Rows) -> None:
        """Updates were pushed again that had been answered before."""
        self.duplicates += len(rows)

    def take_evaluated(self, rows: Rows) -> None:
        """Versions were measured."""
        self.evaluations.extend(Evaluation(t, detail) for t, detail in rows)

    def take_finished(self, rows: Rows) -> None:
        """The run is over."""
        for (detail,) in rows:
            self.ended = json.loads(detail).get("reason", "")
