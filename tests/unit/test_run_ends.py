"""What ends a run, what another end does to it, and which runs have failed; all of it survives a checkpoint."""

import json
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from offbeat.core.gate import Gate
from offbeat.core.rules import fedasync
from offbeat.errors import InvalidValue
from offbeat.protocol.best import BestBy
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.ends import Ends, refuse_reached
from offbeat.protocol.messages import (
    Evaluated,
    Finish,
    FleetJoined,
    RunExtended,
    SendTask,
    TaskRequested,
    TellFinished,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
)
from offbeat.protocol.plan import Plan, Target
from offbeat.protocol.snapshot import restored, snapshot
from tests.simulation import invariants

PLAN = Plan(in_flight_max=1, epochs=2)
NEW = ("failed", "result_t", "ends")
"""What a state of 0.1 does not have, beside two numbers in `rest`."""


def begun(plan: Plan = PLAN) -> Coordinator:
    c = Coordinator(fedasync(0.5), plan)
    c.handle(FleetJoined(0.0, 2))
    return c


def push(c: Coordinator, at: float, **facts: Any) -> list[object]:
    """The one worker with a task pushes it, and its update is mixed where it is applied."""
    (lease,) = c.leases.values()
    told: list[object] = [*c.handle(UpdateArrived(at, lease.worker, lease.task, 1, 1, **facts))]
    if c.queued:
        told += c.handle(VersionPublished(at, c.t_decided))
        told += c.handle(UpdateMixed(at, c.judge.decisions))
    return [*told, *c.handle(TaskRequested(at, lease.worker))]


def again(c: Coordinator, plan: Plan = PLAN) -> Coordinator:
    return restored(json.loads(json.dumps(snapshot(c))), c.rule, plan)


def test_another_end_lets_a_finished_run_go_on() -> None:
    c = begun()
    push(c, 1.0)
    told = push(c, 2.0)
    assert Finish("2 epochs") in told
    assert isinstance(told[-1], TellFinished)
    (granted,) = (
        command for command in c.handle(RunExtended(2.0, 3, None, None, None)) if isinstance(command, SendTask)
    )
    assert (granted.lease.tau, c.finished, c.end_reason, c.plan.epochs) == (2, False, "", 3)
    invariants.check(c)
    assert Finish("3 epochs") in push(c, 3.0)


def test_the_ends_that_a_run_was_given_survive_a_checkpoint() -> None:
    c = begun(replace(PLAN, keep_best=BestBy.parse("a")))
    push(c, 1.0)
    c.handle(Evaluated(1.0, 1, {"a": 0.5}))
    c.handle(RunExtended(1.0, None, 40, 12.5, "a>=0.9"))
    c.handle(Evaluated(1.0, 1, {"a": 0.95}))
    twin = again(c, replace(PLAN, keep_best=BestBy.parse("a")))
    assert Ends.of(twin.plan) == Ends(None, 40, 12.5, "a>=0.9")
    assert (twin.outcome.result_t, twin.end_reason) == (1, "target a>=0.9 reached at epoch 1")
    assert twin.outcome.best == Evaluated(1.0, 1, {"a": 0.95})
    assert snapshot(twin) == snapshot(c)


def test_a_state_of_0_1_is_still_understood() -> None:
    state = snapshot(begun())
    for name in NEW:
        del state[name]
    del state["rest"]["awaits"], state["rest"]["refused"]
    c = restored(state, fedasync(0.5), PLAN)
    assert (c.outcome.failed, c.outcome.result_t, c.outcome.extended, c.plan) == (False, None, False, PLAN)
    state["ending"] = "diverged: the last 110 updates were NaN or infinite"
    assert restored(state, fedasync(0.5), PLAN).outcome.failed


@pytest.mark.parametrize(
    ("plan", "facts", "ended"),
    [
        (
            replace(PLAN, not_finite_max=3),
            {"finite": False},
            "diverged: the last 3 updates were NaN, infinite or above value_max",
        ),
        (
            replace(PLAN, gate=Gate(1.0), refused_max=3),
            {"distance": 9.0},
            "stuck: the last 3 updates were refused, and the model has not changed since epoch 0",
        ),
        (replace(PLAN, gate=Gate(1.0), until_s=3.0), {"distance": 9.0}, "3 s; all 2 updates were refused"),
    ],
)
def test_a_run_without_an_applied_update_has_failed(plan: Plan, facts: dict[str, Any], ended: str) -> None:
    c = begun(plan)
    for at in (1.0, 2.0, 3.0):
        push(c, at, **facts)
    assert (c.end_reason, c.outcome.failed) == (ended, True)
    assert again(c, plan).outcome.failed
    with pytest.raises(InvalidValue, match=r"has failed .* cannot be extended"):
        refuse_reached(c, Ends(epochs=50), c.at)


def test_one_applied_update_is_no_failure() -> None:
    plan = replace(PLAN, gate=Gate(1.0), until_s=4.0, refused_max=3)
    c = begun(plan)
    for at, distance in ((1.0, 9.0), (2.0, 0.5), (3.0, 9.0), (4.0, 9.0)):
        push(c, at, distance=distance)
    assert (c.end_reason, c.outcome.failed) == ("4 s", False)


def test_ends_are_said_in_words() -> None:
    assert str(Ends(epochs=50)) == "50 epochs"
    assert str(Ends(gradients=7, until_s=2.5, target="a>=0.9")) == "7 gradients or 2.5 s or target a>=0.9"
    plan = Plan(epochs=3, target=Target("a", ">=", 0.5))
    assert Ends.of(plan).put_into(plan) == plan
    assert Ends().put_into(plan).until_s == inf
