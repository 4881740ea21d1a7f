"""Ringmaster's stops: a lease whose update would be refused is revoked, and its worker begins anew."""

import json
from functools import partial

import pytest

from offbeat.core.rules import Mix, rennala, ringmaster
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.led import LedCoordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    EndSilence,
    Event,
    HeartbeatArrived,
    Lease,
    Outcome,
    ReleaseTask,
    SendTask,
    TaskRequested,
    TimePassed,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
)
from offbeat.protocol.plan import Plan
from offbeat.protocol.snapshot import restored, snapshot

R = 2
plan = partial(Plan, staleness_policy="reject", staleness_max=R - 1, cancels=True, starts_in_time=True, lease_s=100.0)


def begun(settings: Plan, workers: int) -> Coordinator:
    """Every worker has the task of its number, from x_0."""
    c = Coordinator(ringmaster(0.5, R), settings)
    tell(c, *(TaskRequested(0.0, worker) for worker in range(1, workers + 1)))
    assert list(c.leases) == list(range(1, workers + 1))
    return c


def tell(c: Coordinator, *events: Event) -> list[Command]:
    commands: list[Command] = []
    for event in events:
        commands = c.handle(event)
    return commands


def pushed(at: float, worker: int, task: int) -> UpdateArrived:
    return UpdateArrived(at, worker, task, samples=1, gradients=5)


def published(at: float, t: int) -> list[Event]:
    return [VersionPublished(at, t), UpdateMixed(at, t)]


def revoked(commands: list[Command]) -> list[int]:
    return [command.lease.task for command in commands if isinstance(command, ReleaseTask) and command.revoked]


def sent(commands: list[Command]) -> list[Lease]:
    return [command.lease for command in commands if isinstance(command, SendTask)]


def outcome(commands: list[Command]) -> Outcome:
    (answer,) = (command for command in commands if isinstance(command, AnswerPush))
    return answer.outcome


def test_at_staleness_r_all_leases_from_the_old_version_are_revoked() -> None:
    c = begun(plan(), 4)
    assert revoked(tell(c, pushed(1.0, 1, 1))) == []
    tell(c, *published(1.0, 1), TaskRequested(1.0, 1))
    assert revoked(tell(c, pushed(2.0, 2, 2))) == [3, 4]
    assert [(lease.task, lease.tau) for lease in c.leases.values()] == [(5, 1)]


def test_a_worker_whose_task_was_revoked_begins_anew_from_the_newest_version() -> None:
    c = begun(plan(), 3)
    tell(c, pushed(1.0, 1, 1), *published(1.0, 1))
    assert revoked(tell(c, pushed(2.0, 2, 2))) == [3]
    assert sent(tell(c, *published(2.0, 2), TaskRequested(2.0, 3)))[0].tau == 2


def test_what_is_pushed_under_a_revoked_lease_is_refused_and_counts_nothing() -> None:
    c = begun(plan(), 3)
    tell(c, pushed(1.0, 1, 1), *published(1.0, 1), pushed(2.0, 2, 2), *published(2.0, 2))
    before = c.gradients, c.applied, c.t_decided, dict(c.contribution.mass), dict(c.judge.counts)
    answer = tell(c, pushed(3.0, 3, 3))
    assert outcome(answer) is Outcome.TOO_STALE
    assert (c.gradients, c.applied, c.t_decided, dict(c.contribution.mass), dict(c.judge.counts)) == before
    assert before == (10, 2, 2, {1: 0.5, 2: 0.5}, {1: 1, 2: 1})
    assert outcome(tell(c, pushed(4.0, 3, 3))) is Outcome.TOO_STALE, "and the same when it comes again"


def test_an_update_that_is_just_in_time_is_taken() -> None:
    c = begun(plan(), 2)
    tell(c, pushed(1.0, 1, 1), *published(1.0, 1))
    mixing, _ = tell(c, pushed(2.0, 2, 2))
    assert mixing.decision.staleness == R - 1  # type: ignore[union-attr]
    assert mixing.decision.mix == Mix(1.0, 0.5, -0.5, publish=True)  # type: ignore[union-attr]


def test_staleness_counts_what_is_decided_and_not_yet_published() -> None:
    c = begun(plan(), 3)
    tell(c, pushed(1.0, 1, 1))
    assert revoked(tell(c, pushed(1.0, 2, 2))) == [3]
    assert (c.t, c.t_decided) == (0, 2)


def test_no_task_starts_from_a_version_that_is_too_stale_already() -> None:
    c = begun(plan(), 3)
    tell(c, pushed(1.0, 1, 1), pushed(1.0, 2, 2))
    assert sent(tell(c, TaskRequested(1.0, 3))) == [], "a task from x_0 would be refused whenever it came"
    assert [lease.tau for lease in sent(tell(c, VersionPublished(2.0, 1)))] == [1], "x_1 is just good enough"
    without = Coordinator(ringmaster(0.5, R), plan(starts_in_time=False))
    tell(without, *(TaskRequested(0.0, worker) for worker in (1, 2, 3)), pushed(1.0, 1, 1), pushed(1.0, 2, 2))
    assert sent(tell(without, TaskRequested(1.0, 3)))[0].tau == 0


# --- silence ---------------------------------------------------------------------------------------------------------


def silent(settings: Plan) -> Coordinator:
    """Task 1 is silent since 5.0; tasks 2 and 3 go on."""
    c = begun(settings, 3)
    tell(c, HeartbeatArrived(4.0, 2), HeartbeatArrived(4.0, 3), TimePassed(5.0))
    assert (list(c.silent), list(c.leases)) == ([1], [2, 3])
    return c


def test_a_silent_lease_that_is_back_stands_where_it_was_and_is_revoked_in_time() -> None:
    """It is reopened last and is the oldest: leases after it must not hide that it is too stale."""
    c = silent(plan(silent_s=5.0))
    tell(c, pushed(6.0, 2, 2), *published(6.0, 1), TaskRequested(6.0, 2))
    (end, *_) = tell(c, HeartbeatArrived(7.0, 1))
    assert isinstance(end, EndSilence)
    assert end.resumed
    assert [(lease.task, lease.tau) for lease in c.leases.values()] == [(1, 0), (3, 0), (4, 1)]
    assert revoked(tell(c, pushed(8.0, 3, 3))) == [1]


@pytest.mark.parametrize("sign", [HeartbeatArrived(8.0, 1), TaskRequested(8.0, 1)])
def test_a_silent_lease_that_can_no_longer_be_accepted_is_not_given_back(sign: Event) -> None:
    c = silent(plan(silent_s=5.0))
    tell(c, pushed(6.0, 2, 2), *published(6.0, 1), pushed(7.0, 3, 3), *published(7.0, 2))
    commands = tell(c, sign)
    assert EndSilence(Lease(1, 1, 1, 0, 0, 0.0, 5.0), resumed=False) in commands
    assert c.book.find(1)[1], "its worker is told to stop"
    assert [lease.tau for lease in sent(commands)] == ([2] if isinstance(sign, TaskRequested) else [])
    assert outcome(tell(c, pushed(9.0, 1, 1))) is Outcome.TOO_STALE


# --- the rest --------------------------------------------------------------------------------------------------------


def test_a_restored_and_a_led_coordinator_revoke_the_same() -> None:
    c, settings = begun(plan(), 5), plan()
    led = LedCoordinator(c.rule, settings)
    for lease in c.leases.values():
        led.follow(0.0, SendTask(lease))
    tell(c, pushed(1.0, 1, 1), *published(1.0, 1))
    tell(led, pushed(1.0, 1, 1), *published(1.0, 1))
    again = restored(json.loads(json.dumps(snapshot(c))), c.rule, settings)
    assert tell(c, pushed(2.0, 2, 2)) == tell(again, pushed(2.0, 2, 2)) == tell(led, pushed(2.0, 2, 2))
    assert led.follow(2.0, ReleaseTask(Lease(3, 3, 3, 0, 0, 0.0, 100.0), revoked=True)) == [], "it has done so"
    assert c.leases == again.leases == led.leases == {}


@pytest.mark.parametrize("policy", ["weigh", "pace"])
@pytest.mark.parametrize("what", ["cancels", "starts_in_time"])
def test_only_what_is_refused_can_be_cancelled(policy: str, what: str) -> None:
    with pytest.raises(InvalidValue, match="go with staleness_policy reject"):
        Plan(staleness_policy=policy, staleness_max=1, **{what: True})  # type: ignore[arg-type]


def test_rennala_takes_fresh_updates_alone_and_revokes_nothing() -> None:
    c = Coordinator(rennala(2), plan(staleness_max=0, cancels=False))
    tell(c, *(TaskRequested(0.0, worker) for worker in (1, 2, 3)))
    assert outcome(tell(c, pushed(1.0, 1, 1), UpdateMixed(1.0, 1), pushed(2.0, 2, 2))) is Outcome.APPLIED
    assert (c.t_decided, list(c.leases)) == (1, [3])
    assert outcome(tell(c, pushed(3.0, 3, 3))) is Outcome.TOO_STALE
    assert (c.judge.memory, c.applied, c.gradients) == ({"count": 0}, 2, 10)
