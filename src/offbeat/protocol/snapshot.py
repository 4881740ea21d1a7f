"""Owns the coordinator's state as plain numbers and names: what a checkpoint keeps, and how it comes back.

Rules kept here:
- A restored coordinator answers every later event as the old one would have: same decisions, same random choices.
- It is plain JSON: lists, names, numbers; no code in it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from offbeat.core.rules import Mix, Rule
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import AnswerPush, Decision, Evaluated, Lease, Outcome
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler

FORMAT = 1
State = dict[str, Any]

COUNTERS = ("t", "t_decided", "sequence", "applied", "mixed", "gradients", "duplicates", "not_finite")


def snapshot(c: Coordinator, *, answers: bool = True) -> State:
    """All that the coordinator knows; without its answers where a ledger has them, which are the most of it."""
    return {
        "format": FORMAT,
        "at": c.at,
        **{name: getattr(c, name) for name in COUNTERS},
        "memory": dict(c.memory),
        "accepted": list(c.accepted),
        "conduct": c.conduct.state(),
        "ending": c.ending,
        "finished": c.finished,
        "book": c.book.state(_from_lease),
        "answers": [_from_answer(answer) for answer in c.answers.values()] if answers else None,
        "idle": c.idle.state(),
        "contribution": c.contribution.state(),
        "evaluations": [(e.at, e.t, dict(e.metrics)) for e in c.evaluations],
        "rest": c.rest(),
    }


def restored(
    state: State,
    rule: Rule,
    plan: Plan,
    scheduler: Scheduler | None = None,
    *,
    seed: int = 0,
    available: Callable[[int, float], bool] = lambda _worker, _at: True,
    decided: Iterable[Decision] = (),
) -> Coordinator:
    """The coordinator that this state was taken of, given the same rule, plan, scheduler and seed.

    `decided` are the last `answers_kept` decisions until then, for a state without answers.
    """
    if state.get("format") != FORMAT:
        raise InvalidValue(f"the state has format {state.get('format')!r}; this version of Offbeat reads {FORMAT}")
    c = Coordinator(rule, plan, scheduler, seed=seed, available=available)
    c.at = state["at"]
    for name in COUNTERS:
        setattr(c, name, state[name])
    c.memory, c.accepted = state["memory"], state["accepted"]
    c.conduct.restore(state["conduct"])
    c.ending, c.finished = state["ending"], state["finished"]
    c.book.restore(state["book"], _lease)
    known = map(_again, decided) if state["answers"] is None else map(_answer, state["answers"])
    c.answers = OrderedDict((answer.task, answer) for answer in known)
    while len(c.answers) > plan.answers_kept:
        c.answers.popitem(last=False)
    c.idle.restore(state["idle"])
    c.contribution.restore(state["contribution"])
    c.evaluations = [Evaluated(at, t, metrics) for at, t, metrics in state["evaluations"]]
    c.restore_rest(state["rest"])
    return c


def number(value: float) -> float | None:
    """A moment that may be infinitely far, for JSON."""
    return None if value == inf else value


def moment(value: float | None) -> float:
    """Back again."""
    return inf if value is None else value


def _from_lease(lease: Lease) -> list[Any]:
    who = [lease.task, lease.worker, lease.device, lease.number, lease.tau]
    return [*who, lease.granted_at, number(lease.deadline), lease.local_iterations, lease.gamma]


def _lease(values: list[Any]) -> Lease:
    task, worker, device, count, tau, granted_at, deadline, iterations, gamma = values
    return Lease(task, worker, device, count, tau, granted_at, moment(deadline), iterations, gamma)


def _from_answer(answer: AnswerPush) -> list[Any]:
    d = answer.decision
    if d is None:
        raise AssertionError("only decided tasks are remembered")
    facts = [d.sequence, d.at, d.t, d.staleness, d.samples, d.gradients]
    return [answer.worker, answer.outcome.value, _from_lease(d.lease), d.mix and list(d.mix), *facts]


def _again(decision: Decision) -> AnswerPush:
    lease = decision.lease
    return AnswerPush(lease.worker, lease.task, decision.outcome, decision, repeated=True)


def _answer(values: list[Any]) -> AnswerPush:
    worker, outcome, lease_values, mix_values, sequence, at, t, staleness, samples, gradients = values
    lease, mix = _lease(lease_values), Mix(*mix_values) if mix_values else None
    decision = Decision(sequence, at, lease, Outcome(outcome), t, staleness, mix, samples, gradients)
    return AnswerPush(worker, lease.task, Outcome(outcome), decision, repeated=True)
