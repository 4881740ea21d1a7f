"""What is decided when, and what becomes of a version when it is published: numbers worked out by hand."""

from math import sqrt
from typing import Any

import numpy as np
import pytest

from offbeat.core.kernel import Term, Updater
from offbeat.core.layout import Vector
from offbeat.core.rules import Mix, Rule, adam, asyncfeded, compose, fedavg, fedbuff, momentum, rennala, ringmaster
from offbeat.core.staleness import constant
from offbeat.protocol.messages import PublishVersion, UpdateArrived
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from tests.simulation.test_engine import Played, fleet

FRESH: dict[str, Any] = {"staleness_policy": "reject", "staleness_max": 0, "starts_in_time": True}


class Seen(Played):
    """A run, with its arrivals and the groups that their deadline closed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arrivals: list[UpdateArrived] = []
        self.closed: list[PublishVersion] = []
        super().__init__(*arguments, **named)

    def _record(self, event: Any, commands: Any) -> None:
        super()._record(event, commands)
        self.arrivals += [event] if isinstance(event, UpdateArrived) else []
        self.closed += [command for command in commands if isinstance(command, PublishVersion)]


# --- a rule that reads what mixing changes ---------------------------------------------------------------------------


def pushed(x_tau: Vector, device: int) -> Vector:
    """What `Halfway` trains."""
    return (x_tau + np.float32(device)) / np.float32(2)


def mixed_one_by_one(run: Seen, rate: float, eps: float, x_0: float) -> list[Vector]:
    """All versions, from the decisions alone: eta must be that of the version right before."""
    versions = [np.full(1, x_0, np.float32)]
    with Updater(compiled=False) as updater:
        for decision in run.decisions:
            x, x_tau = versions[-1], versions[decision.lease.tau]
            x_new = pushed(x_tau, decision.lease.device)
            learnt, moved = updater.inner((x_new, x_tau), (x_new, x_tau)), updater.inner((x, x_tau), (x, x_tau))
            eta = rate / (sqrt(moved) / sqrt(learnt) + eps)
            assert decision.mix == Mix(1.0, eta, -eta, publish=True)
            out = np.empty_like(x)
            updater.mix(out, x, [Term(Mix(1.0, eta, -eta, publish=True), x_new, x_tau)])
            versions.append(out)
    return versions


@pytest.mark.parametrize("mix_s", [0.0, 0.3, 0.5, 1.0, 7.0])
@pytest.mark.parametrize("seconds", [(1.0, 1.1, 1.2), (1.0, 1.0, 1.0), (0.5, 1.0, 3.0)])
def test_an_update_that_arrives_while_others_are_unmixed_is_decided_after_them(
    seconds: tuple[float, ...], mix_s: float
) -> None:
    run = Seen(asyncfeded(1.0, 1.0), fleet(*seconds), Plan(3, epochs=20), mix_s=mix_s, seed=8)
    versions = mixed_one_by_one(run, 1.0, 1.0, 8.0)
    assert run.plane.x["x"].tobytes() == versions[-1].tobytes()
    assert len(run.decisions) == run.coordinator.t == 20
    assert all(later.at >= earlier.at + mix_s for earlier, later in zip(run.decisions, run.decisions[1:], strict=False))
    assert {decision.lease.device for decision in run.decisions} == {0, 1, 2}, "nobody is overtaken for ever"


def test_those_that_wait_for_a_mixing_go_in_the_order_in_which_they_came() -> None:
    """They arrive at 1, 1.1 and 1.2 s; mixing takes half a second. Device 0 is back at 2, behind device 2."""
    run = Seen(asyncfeded(), fleet(1.0, 1.1, 1.2), Plan(3, epochs=5), mix_s=0.5, seed=8)
    story = [(decision.at, decision.lease.device, decision.staleness) for decision in run.decisions]
    assert story == [(1.0, 0, 0), (1.5, 1, 1), (2.0, 2, 2), (2.5, 0, 3), (3.0, 1, 3)]
    assert [arrival.at for arrival in run.arrivals[:5]] == [1.0, 1.5, 2.0, 2.5, 3.0]


def test_the_inner_products_are_recorded_with_the_arrival() -> None:
    run = Seen(asyncfeded(), fleet(1.0, 1.1), Plan(2, epochs=2), mix_s=0.5, seed=8)
    # x_0 = 8; device 0 pushes 4: D = -4, eta = 1, x_1 = 4; device 1 pushes 4.5 from x_0: D = -3.5, L = -4
    assert [dict(arrival.dots or {}) for arrival in run.arrivals[:2]] == [
        {"D.D": 16.0, "L.L": 0.0},
        {"D.D": 12.25, "L.L": 16.0},
    ]
    assert run.decisions[1].mix is not None
    assert run.decisions[1].mix.new == 1 / (4 / 3.5 + 1)


# --- what a publication does -----------------------------------------------------------------------------------------


def closed_by_deadlines(rule: Rule, versions: int) -> Seen:
    """Groups of three, of which two arrive before the deadline: devices take 1, 2 and 10 s, and the deadline is 3 s."""
    scheduler = Scheduler(group=3, group_deadline_s=3.0)
    return Seen(rule, fleet(1.0, 2.0, 10.0), Plan(3, epochs=versions), scheduler, seed=8)


def test_a_deadline_publishes_through_the_momentum() -> None:
    """x_0 = 8. The group's mean is (4 + 4.5)/2 = 4.25: g = m = -3.75, x_1 = 4.25.

    Then (2.125 + 2.625)/2 = 2.375: g = -1.875, m = 0.9*-3.75 - 1.875 = -5.25, x_2 = -1. Then (-0.5 + 0)/2 = -0.25:
    g = 0.75, m = 0.9*-5.25 + 0.75 = -3.975, x_3 = -4.975.
    """
    for versions, x in ((1, 4.25), (2, -1.0), (3, -4.975)):
        run = closed_by_deadlines(compose(fedavg(3), momentum(0.9)), versions)
        assert run.plane.x["x"][0] == pytest.approx(x, abs=1e-5)
    assert [at for at, _ in run.published] == [3.0, 6.0, 9.0]
    assert [command.t for command in run.closed] == [1, 2, 3]
    assert all(command.closing for command in run.closed)
    assert run.plane.vectors.standing.slots["m"][0] == pytest.approx(-3.975, abs=1e-5)
    assert not run.plane.vectors.standing.slots.get("g", np.zeros(1)).any(), "the next step begins at 0"
    assert not any(run.coordinator.judge.memory.values())
    assert run.coordinator.contribution.mass == {0: 1.5, 1: 1.5}


def test_a_deadline_publishes_through_adam() -> None:
    """m = 0.1*g and v = 0.01*g*g at first, so the step is eta*0.1*g/(0.1*|g| + eps): eta but for eps."""
    run = closed_by_deadlines(compose(fedavg(3), adam(0.05)), 1)
    assert run.plane.x["x"][0] == pytest.approx(8 - 0.05 * 0.375 / (0.375 + 1e-3), abs=1e-6)


def test_a_group_that_is_complete_in_time_ends_alike() -> None:
    """The same numbers, from a group of two without a deadline."""
    rule, scheduler = compose(fedavg(2), momentum(0.9)), Scheduler(group=2)
    run = Seen(rule, fleet(1.0, 2.0), Plan(2, epochs=3), scheduler, seed=8)
    assert run.closed == []
    assert run.plane.x["x"][0] == pytest.approx(-4.975, abs=1e-5)


def test_a_deadline_without_finishes_closes_as_ever() -> None:
    run = closed_by_deadlines(fedavg(3), 2)
    assert run.closed == [PublishVersion(1), PublishVersion(2)]
    assert run.plane.x["x"][0] == 2.375


def test_a_buffer_publishes_through_the_momentum() -> None:
    """x_0 = 8. Device 0 pushes 4 at 1 and 4 at 2, device 1 pushes 4.5 at 2; two make a version.

    Which of the two comes first at 2 does not matter: tasks are sent in one order and arrive in it. With device 0:
    g = (-4 - 4)/2 = m, x_1 = 4. With device 1: g = (-4 - 3.5)/2 = m, x_1 = 4.25.
    """
    rule = compose(fedbuff(2, staleness_fn=constant()), momentum(0.5))
    first = Seen(rule, fleet(1.0, 2.0), Plan(2, epochs=1), seed=8)
    assert first.plane.x["x"][0] == {0: 4.0, 1: 4.25}[first.decisions[1].lease.device]
    second = Seen(rule, fleet(1.0, 2.0), Plan(2, epochs=2), seed=8)
    x_tau = {0: 8.0, 1: float(first.plane.x["x"][0])}
    g = sum((x_tau[one.lease.tau] + one.lease.device) / 2 - x_tau[one.lease.tau] for one in second.decisions[2:]) / 2
    assert second.plane.x["x"][0] == pytest.approx(x_tau[1] + 0.5 * (x_tau[1] - 8.0) + g, abs=1e-5)


WAITING: dict[str, tuple[Rule, Plan, Scheduler, tuple[float, ...]]] = {
    "groups": (
        compose(fedavg(2), momentum(0.9)),
        Plan(2, epochs=10),
        Scheduler(group=2),
        (1.0, 2.0),
    ),
    "rennala": (rennala(1), Plan(1, **FRESH, epochs=10), Scheduler(), (1.0,)),
    "ringmaster": (ringmaster(0.5, 1), Plan(1, **FRESH, cancels=True, epochs=10), Scheduler(), (1.0,)),
}
"""Where the next task waits for the version that is being mixed."""


@pytest.mark.parametrize("case", WAITING)
def test_where_tasks_wait_for_the_mixing_it_changes_no_bit(case: str) -> None:
    rule, plan, scheduler, seconds = WAITING[case]
    at_once, later = (Seen(rule, fleet(*seconds), plan, scheduler, mix_s=mix_s, seed=8) for mix_s in (0.0, 0.25))
    assert at_once.plane.x["x"].tobytes() == later.plane.x["x"].tobytes()
    assert at_once.coordinator.at < later.coordinator.at
    assert later.answered == at_once.answered
