"""Owns the judgement of a pushed update: its outcome, its coefficients, and what it means for its worker.

Rules kept here:
- A task is answered once. A push that comes again gets the first answer again and changes nothing.
- A worker whose updates are bad too often in a row is quarantined. Bad is what no honest training produces: garbage,
  NaN or infinity, a value above value_max, a distance that the gate refuses, a false claim. A late update is not bad.
  One applied update makes up for every bad one before it.
- A quarantine belongs to the worker's number: leaving and joining again does not lift it; only a readmission does.
- The rule sees an update as the gate lets it through.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from offbeat.core.gate import Accepted, clipped
from offbeat.core.rules import Answer, Facts, Rule
from offbeat.errors import InvariantBroken
from offbeat.protocol.answer_book import AnswerBook
from offbeat.protocol.messages import AnswerPush, Decision, Lease, Outcome, UpdateArrived
from offbeat.protocol.plan import Plan

NO_DOTS: Mapping[str, float] = {}


class Judge:
    """The rule, the gate and the quarantine, with what they remember, and the answers given so far."""

    def __init__(self, rule: Rule, plan: Plan) -> None:
        self.rule, self.plan = rule, plan
        self.memory = rule.memory
        self.accepted: Accepted = ()
        """What the gate remembers."""
        self.counts: dict[int, int] = {}
        """Updates that were applied, by device."""
        self.caches: set[int] = set()
        """Where devices share the vectors that a rule keeps for them: those that there are."""
        self.applied = 0
        self.quarantined = QuarantinedWorkers(plan.bad_updates_max)
        self.answers = AnswerBook(plan.answers_kept)
        """The answers of the latest tasks, by task."""
        self.decisions = 0
        """Decisions made so far; the newest one has this number."""
        self.duplicates = 0
        self.not_finite = 0
        """Updates in a row that were refused for NaN, infinity or a value above value_max."""
        self.refused = 0
        """Updates in a row that were refused for any reason but the end of the run."""

    def known_answer(self, event: UpdateArrived) -> AnswerPush | None:
        """The answer to a task that was answered before."""
        if event.task not in self.answers:
            return None
        first = self.answers[event.task]
        if first.worker != event.worker:
            return AnswerPush(event.worker, event.task, Outcome.NOT_YOURS)
        self.duplicates += 1
        return first

    def outcome(self, event: UpdateArrived, *, ending: bool, stale: bool, queue_is_full: bool) -> Outcome:
        """What becomes of an update that was pushed under a lease of its worker."""
        if ending:
            return Outcome.FINISHED
        if event.worker in self.quarantined.reasons:
            return Outcome.QUARANTINED
        if not event.finite:
            return Outcome.NOT_FINITE
        if self.too_large_value(event):
            return Outcome.TOO_LARGE
        if stale:
            return Outcome.TOO_STALE
        if not self._gated(event)[0]:
            return Outcome.TOO_LARGE
        return Outcome.BUSY if queue_is_full else Outcome.APPLIED

    def decide(self, event: UpdateArrived, lease: Lease, outcome: Outcome, t: int) -> Decision:
        """The next decision: this update has this outcome, and would be in version t."""
        mix = self._weighed(event, lease, t) if outcome is Outcome.APPLIED else None
        self.decisions += 1
        if outcome is not Outcome.QUARANTINED:  # the values of a quarantined worker's update were not looked at
            diverged = outcome is Outcome.NOT_FINITE or bool(self.too_large_value(event))
            self.not_finite = self.not_finite + 1 if diverged else 0
        if outcome is not Outcome.FINISHED:
            self.refused = 0 if mix is not None else self.refused + 1
        staleness, counts = t - 1 - lease.tau, (event.samples, event.gradients)
        return Decision(self.decisions, event.at, lease, outcome, t, staleness, mix, *counts)

    def misconduct(self, event: UpdateArrived, outcome: Outcome) -> str:
        """What is wrong with an update of this outcome; empty where nothing speaks against its worker."""
        if outcome is Outcome.APPLIED:
            self.quarantined.forgive(event.worker)
        elif outcome is Outcome.NOT_FINITE:
            return "its update holds NaN or infinity"
        elif outcome is Outcome.TOO_LARGE and (too_large := self.too_large_value(event)):
            return too_large
        elif outcome is Outcome.TOO_LARGE and self.plan.gate:
            limit = self.plan.gate.limit(self.accepted)
            return f"its ||x_new - x_tau|| is {event.distance:g}; {limit:g} is accepted"
        return ""

    def too_large_value(self, event: UpdateArrived) -> str:
        """What is wrong with the largest value of this update; empty where it is in bounds."""
        if event.largest is None or event.largest <= self.plan.value_max:
            return ""
        return f"its update holds a value of {event.largest:g}; value_max is {self.plan.value_max:g}"

    def _weighed(self, event: UpdateArrived, lease: Lease, t: int) -> Answer:
        factor, accepted = self._gated(event)
        distance = None if event.distance is None else event.distance * factor
        dots = NO_DOTS if event.dots is None else _scaled(event.dots, factor)
        count, applied, seen, caches = self._counted(lease.device)
        facts = Facts(t, lease.tau, lease.device, event.samples, distance, count, applied, seen, caches, 1.0, dots)
        mix, self.memory = self.rule.decide(facts, self.memory)
        self.accepted = accepted
        return clipped(mix, factor)

    def _counted(self, device: int) -> tuple[int, int, int, int]:
        """One more update of this device: its own, all, the devices, and the caches that there are now."""
        count = self.counts[device] = self.counts.get(device, 0) + 1
        self.applied += 1
        seen = len(self.counts)
        if not self.rule.caches:
            return count, self.applied, seen, seen
        self.caches.add(self.rule.cache_of(device))
        return count, self.applied, seen, len(self.caches)

    def restore_counts(self, counts: Iterable[tuple[int, int]]) -> None:
        self.counts = dict(counts)
        self.applied = sum(self.counts.values())
        self.caches = {self.rule.cache_of(device) for device in self.counts} if self.rule.caches else set()

    def _gated(self, event: UpdateArrived) -> tuple[float, Accepted]:
        """The factor that the gate applies to this update, and what the gate remembers once the update is applied."""
        if self.plan.gate is None:
            return 1.0, self.accepted
        if event.distance is None:
            raise InvariantBroken(f"the gate needs ||x_new - x_tau||, which was not measured: {event}")
        return self.plan.gate.judge(event.distance, self.accepted)


def _scaled(dots: Mapping[str, float], factor: float) -> dict[str, float]:
    """The inner products with a difference that is clipped; D is in a name as often as it is multiplied."""
    return {name: value * factor ** name.count("D") for name, value in dots.items()}


class QuarantinedWorkers:
    """Who is quarantined and why, and the bad updates in a row of all others."""

    def __init__(self, bad_updates_max: int | None) -> None:
        self.reasons: dict[int, str] = {}
        self._bad_updates_max = bad_updates_max
        self._bad: dict[int, int] = {}

    def count_bad(self, worker: int, why: str) -> bool:
        """One more bad update; true where the worker is quarantined for it now."""
        if self._bad_updates_max is None or worker in self.reasons:
            return False
        self._bad[worker] = self._bad.get(worker, 0) + 1
        return self._bad[worker] >= self._bad_updates_max and self.bar(worker, why)

    def bar(self, worker: int, why: str) -> bool:
        """Quarantine the worker at once; false where it is quarantined already."""
        if worker in self.reasons:
            return False
        self.reasons[worker] = why
        return True

    def forgive(self, worker: int) -> None:
        """An update of the worker was applied: its count begins anew."""
        self._bad.pop(worker, None)

    def readmit(self, worker: int) -> None:
        self.reasons.pop(worker, None)
        self._bad.pop(worker, None)

    def state(self) -> dict[str, Any]:
        return {"bad": list(self._bad.items()), "quarantined": list(self.reasons.items())}

    def restore(self, state: dict[str, Any]) -> None:
        self._bad, self.reasons = dict(state["bad"]), dict(state["quarantined"])
