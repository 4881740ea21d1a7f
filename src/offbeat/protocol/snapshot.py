"""Owns the coordinator's state as plain numbers and names: what a checkpoint keeps, and how it comes back.

Rules kept here:
- A restored coordinator answers every later event as the old one would have: same decisions, same random choices.
- It is plain JSON: lists, names, numbers; no code in it.
"""

from collections.abc import Iterable
from math import inf, isinf
from typing import Any

from offbeat.core.rules import Mix, Rule
from offbeat.errors import InvalidValue
from offbeat.protocol.answer_book import DecidedTask
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.dispatch import Available
from offbeat.protocol.ends import Ends
from offbeat.protocol.messages import AnswerPush, Decision, Evaluated, Lease, Outcome
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import PlateauSoFar, Scheduler

FORMAT = 1
State = dict[str, Any]

COUNTERS = ("t", "t_decided", "applied", "mixed", "gradients")
JUDGED = {"sequence": "decisions", "duplicates": "duplicates", "not_finite": "not_finite"}
"""What the state calls the judge's counters."""


def snapshot(c: Coordinator, *, answers: bool = True) -> State:
    """All that the coordinator knows; without its answers where a ledger has them, which are the most of it."""
    return {
        "format": FORMAT,
        "at": c.at,
        **{name: getattr(c, name) for name in COUNTERS},
        **{name: getattr(c.judge, attribute) for name, attribute in JUDGED.items()},
        "memory": dict(c.judge.memory),
        "accepted": list(c.judge.accepted),
        "counts": list(c.judge.counts.items()),
        "conduct": c.judge.quarantined.state(),
        "ending": c.end_reason,
        "finished": c.finished,
        "failed": c.outcome.failed,
        "result_t": c.outcome.result_t,
        "ends": list(Ends.of(c.plan)) if c.outcome.extended else None,
        "book": c.book.state(_from_lease),
        "answers": [_from_answer(answer) for answer in c.judge.answers.values()] if answers else None,
        "idle": c.idle.state(),
        "contribution": c.contribution.state(),
        "evaluations": [_from_evaluation(e) for e in c.evaluations],
        "best": c.outcome.best and _from_evaluation(c.outcome.best),
        "rest": _rest(c),
    }


def restored(
    state: State,
    rule: Rule,
    plan: Plan,
    scheduler: Scheduler | None = None,
    *,
    seed: int = 0,
    available: Available = lambda _worker, _at: True,
    decided: Iterable[DecidedTask] = (),
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
    for name, attribute in JUDGED.items():
        setattr(c.judge, attribute, state[name])
    c.judge.memory, c.judge.accepted = state["memory"], state["accepted"]
    c.judge.restore_counts(state.get("counts", ()))  # missing in states of before rules were told of them
    c.judge.quarantined.restore(state["conduct"])
    c.end_reason, c.finished = state["ending"], state["finished"]
    _restore_end(c, state)
    c.book.restore(state["book"], _lease)
    for answer in map(_answer, state["answers"] or ()):
        c.judge.answers.remember(answer)
    for task in decided if state["answers"] is None else ():
        c.judge.answers.take_up(task)
    c.idle.restore(state["idle"])
    c.contribution.restore(state["contribution"])
    for values in state["evaluations"]:
        c.dispatcher.evaluated(_evaluation(values))
    _restore_best(c, state)
    _restore_rest(c, state["rest"])
    c.end_if_enough()  # the plan may ask for less than when the state was taken
    return c


def _restore_end(c: Coordinator, state: State) -> None:
    """How the run ended, and the ends that it was given later; a state of 0.1 has none of it."""
    c.outcome.failed = state.get("failed", c.end_reason.startswith("diverged"))
    c.outcome.result_t, ends = state.get("result_t"), state.get("ends")
    if ends is not None:
        c.plan, c.outcome.extended = Ends(*ends).put_into(c.plan), True


def _restore_best(c: Coordinator, state: State) -> None:
    """A state of before only some evaluations were remembered does not say which is the best, and has all of them."""
    if "best" in state:
        c.outcome.best = None if state["best"] is None else _evaluation(state["best"])
    elif c.plan.keep_best is not None:
        c.outcome.best = c.plan.keep_best.of(map(_evaluation, state["evaluations"]))


def _rest(c: Coordinator) -> State:
    """What only the coordinator itself uses; moments that never come are None."""
    d = c.dispatcher
    moments = {"_woken_at": c.woken_at, "_trigger_due": d.trigger_due, "_retry_due": d.retry_due}
    return {
        "moments": {name: None if isinf(at) else at for name, at in moments.items()},
        "never_triggered": d.trigger_due == -inf,
        "evaluating": c.evaluated_t,
        "device_of": list(d.device_of.items()),
        "fleet": d.fleet,
        "numbers": list(d.book.tasks_of.items()),
        "speeds": d.speeds.state(),
        "group": d.group.state(),
        "gradients_mixed": c.gradients_mixed,
        "tasks": d.book.tasks,
        "held": d.pace.held_back,
        "plateau": d.plateau and [number(d.plateau.best), d.plateau.gamma],
        "paused": d.paused,
        "awaits": c.awaits,
        "waits": d.waits.state(),
        "refused": c.judge.refused,
    }


def _restore_rest(c: Coordinator, state: State) -> None:
    d, moments = c.dispatcher, state["moments"]
    c.woken_at, d.retry_due = moment(moments["_woken_at"]), moment(moments["_retry_due"])
    d.trigger_due = -inf if state["never_triggered"] else moment(moments["_trigger_due"])
    c.evaluated_t, c.gradients_mixed = state["evaluating"], state["gradients_mixed"]
    c.awaits, c.judge.refused = state.get("awaits", False), state.get("refused", c.judge.not_finite)
    d.device_of, d.fleet = dict(state["device_of"]), state["fleet"]
    d.book.tasks, d.book.tasks_of = state["tasks"], dict(state["numbers"])
    d.speeds.restore(state["speeds"])
    d.group.restore(state["group"])
    d.paused = state.get("paused", False)  # missing in states of before a run could be paused
    if "waits" in state:  # missing in states of 0.1
        d.waits.restore(state["waits"])
    if state.get("plateau") is not None:  # else it follows from the evaluations, of which there were all then
        d.plateau = PlateauSoFar(moment(state["plateau"][0]), state["plateau"][1])
    d.pace.held_back = None if state["held"] is None else (state["held"][0], state["held"][1])


def number(value: float) -> float | None:
    """A moment as JSON has it: None where it never comes."""
    return None if value == inf else value


def moment(value: float | None) -> float:
    return inf if value is None else value


def _from_evaluation(evaluation: Evaluated) -> list[Any]:
    return [evaluation.at, evaluation.t, dict(evaluation.metrics)]


def _evaluation(values: list[Any]) -> Evaluated:
    at, t, metrics = values
    return Evaluated(at, t, metrics)


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
    return [answer.worker, answer.outcome.value, _from_lease(d.lease), d.mix and list(d.mix[:4]), *facts]


def _answer(values: list[Any]) -> AnswerPush:
    worker, outcome, lease_values, mix_values, sequence, at, t, staleness, samples, gradients = values
    lease, mix = _lease(lease_values), Mix(*mix_values) if mix_values else None
    decision = Decision(sequence, at, lease, Outcome(outcome), t, staleness, mix, samples, gradients)
    return AnswerPush(worker, lease.task, Outcome(outcome), decision, repeated=True)
