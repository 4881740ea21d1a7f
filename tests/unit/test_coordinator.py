"""The coordinator, one situation at a time: these events go in, exactly these commands come out."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import pytest

from offbeat.core.gate import MEDIAN_AFTER, Gate
from offbeat.core.rules import Facts, Memory, Mix, Rule, delta, fedasync, fedavg, fedbuff
from offbeat.core.staleness import polynomial
from offbeat.errors import InvalidValue, InvariantBroken
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    BadUpdateArrived,
    Command,
    Decision,
    Evaluated,
    EvaluateModel,
    Event,
    Finish,
    FleetJoined,
    HeartbeatArrived,
    Lease,
    MixUpdate,
    Outcome,
    PublishVersion,
    Quarantine,
    ReleaseTask,
    RequestEnded,
    SendTask,
    TaskRequested,
    TellFinished,
    TellQuarantined,
    TimePassed,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
    WakeAt,
    WorkerBarred,
    WorkerJoined,
    WorkerLeft,
    WorkerReadmitted,
)
from offbeat.protocol.plan import Plan, StalenessPolicy, Target
from offbeat.protocol.scheduler import Scheduler
from offbeat.protocol.snapshot import restored, snapshot
from tests.simulation import invariants

HALF = Mix(keep=0.5, new=0.5, base=0.0, publish=True)
plan = partial(Plan, lease_s=10.0)
pace = partial(plan, staleness_policy="pace", pace_wait_s=5.0)


def begun(settings: Plan, scheduler: Scheduler | None = None, rule: Rule | None = None) -> Coordinator:
    return Coordinator(rule or fedasync(0.5), settings, scheduler)


def tell(coordinator: Coordinator, *events: Event) -> list[Command]:
    """Tell the coordinator everything; what it answered to the last."""
    commands: list[Command] = []
    for event in events:
        commands = coordinator.handle(event)
    return commands


def asked(at: float, *workers: int) -> list[Event]:
    return [TaskRequested(at, worker) for worker in workers]


def pushed(at: float, worker: int, task: int | None = None, *, gradients: int = 1, samples: int = 1) -> UpdateArrived:
    """By default the task has the number of its worker: both ask and are served in this order."""
    return UpdateArrived(at, worker, worker if task is None else task, samples, gradients)


def leased(
    task: int, worker: int, *, tau: int = 0, at: float = 0.0, number: int = 0, until: float | None = None
) -> Lease:
    return Lease(task, worker, worker, number, tau, at, at + 10.0 if until is None else until)


def applied(sequence: int, at: float, lease: Lease, t: int, staleness: int, mix: Mix = HALF) -> list[Command]:
    """What a push brings about that is applied."""
    decision = Decision(sequence, at, lease, Outcome.APPLIED, t, staleness, mix, samples=1, gradients=1)
    return [MixUpdate(decision), AnswerPush(lease.worker, lease.task, Outcome.APPLIED, decision)]


def refused(sequence: int, at: float, lease: Lease, t: int, staleness: int, outcome: Outcome) -> AnswerPush:
    decision = Decision(sequence, at, lease, outcome, t, staleness, None, samples=1, gradients=1)
    return AnswerPush(lease.worker, lease.task, outcome, decision)


def done(at: float, sequence: int, t: int | None = None) -> list[Event]:
    """The data plane mixed this decision, which made version t."""
    published: list[Event] = [VersionPublished(at, sequence if t is None else t)]
    return [*published, UpdateMixed(at, sequence)]


def outcome(commands: Sequence[Command]) -> Outcome:
    (answer,) = (command for command in commands if isinstance(command, AnswerPush))
    return answer.outcome


def sent(commands: Sequence[Command]) -> list[Lease]:
    return [command.lease for command in commands if isinstance(command, SendTask)]


# --- leases ----------------------------------------------------------------------------------------------------------


def test_whoever_asks_first_is_given_a_task_at_once() -> None:
    c = begun(plan())
    assert tell(c, WorkerJoined(0.0, 7, 3)) == []
    assert tell(c, TaskRequested(0.0, 7)) == [
        SendTask(Lease(task=1, worker=7, device=3, number=0, tau=0, granted_at=0.0, deadline=10.0)),
        WakeAt(10.0),
    ]


def test_the_life_of_a_task() -> None:
    c = begun(plan())
    lease = leased(1, 1)
    assert tell(c, TaskRequested(0.0, 1)) == [SendTask(lease), WakeAt(10.0)]
    assert tell(c, pushed(3.0, 1)) == applied(1, 3.0, lease, t=1, staleness=0)
    assert tell(c, VersionPublished(3.5, 1)) == [EvaluateModel(1)]
    assert tell(c, UpdateMixed(3.5, 1)) == []
    assert tell(c, TaskRequested(4.0, 1)) == [SendTask(leased(2, 1, tau=1, at=4.0, number=1))]  # woken at 10 anyway
    assert tell(c, TimePassed(10.0)) == [WakeAt(14.0)]


def test_whoever_asks_again_is_given_its_open_lease_again() -> None:
    c = begun(plan())
    first = tell(c, *asked(0.0, 1))
    assert tell(c, *asked(2.0, 1)) == [SendTask(leased(1, 1))] == first[:1]
    assert tell(c, WorkerJoined(3.0, 1, 1), *asked(3.0, 1)) == first[:1]
    assert len(c.leases) == 1


def test_staleness_counts_what_is_decided_and_tau_what_is_published() -> None:
    c = begun(plan(), rule=fedasync(0.5, polynomial(0.5)))
    tell(c, *asked(0.0, 1, 2))
    assert tell(c, pushed(1.0, 1)) == applied(1, 1.0, leased(1, 1), t=1, staleness=0)
    alpha_t = 0.5 * 2**-0.5
    assert tell(c, pushed(1.0, 2)) == applied(
        2, 1.0, leased(2, 2), t=2, staleness=1, mix=Mix(1 - alpha_t, alpha_t, 0.0, publish=True)
    )
    # Nothing is published yet: the next lease starts from x_0 and will be two versions behind.
    assert tell(c, *asked(1.0, 3)) == [SendTask(leased(3, 3, at=1.0))]
    # One publication for both, as a data plane that mixes them in one pass reports it.
    assert tell(c, VersionPublished(2.0, 2)) == [EvaluateModel(2)]
    assert tell(c, UpdateMixed(2.0, 1), UpdateMixed(2.0, 2)) == []
    assert tell(c, *asked(2.0, 4)) == [SendTask(leased(4, 4, tau=2, at=2.0))]
    commands = tell(c, pushed(3.0, 3))
    assert isinstance(commands[0], MixUpdate)
    assert (commands[0].decision.t, commands[0].decision.staleness) == (3, 2)


def test_a_lease_runs_out_and_its_device_can_be_triggered_anew() -> None:
    c = begun(plan(tasks_per_device=1, retry_after_s=99.0))
    tell(c, WorkerJoined(0.0, 1, 1), WorkerJoined(0.0, 2, 1), *asked(0.0, 1), *asked(4.0, 2))
    assert tell(c, TimePassed(9.9)) == []  # nothing is due yet
    assert tell(c, TimePassed(10.0)) == [
        ReleaseTask(leased(1, 1), revoked=False),
        SendTask(Lease(2, 2, device=1, number=1, tau=0, granted_at=10.0, deadline=20.0)),
        WakeAt(20.0),
    ]
    assert tell(c, *asked(11.0, 1)) == []  # its device has its one task


def test_a_waking_that_comes_late_releases_everything_that_ran_out() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1), *asked(1.0, 2), *asked(2.0, 3))
    assert tell(c, TimePassed(11.5)) == [
        ReleaseTask(leased(1, 1), revoked=False),
        ReleaseTask(leased(2, 2, at=1.0), revoked=False),
        WakeAt(12.0),
    ]


def test_a_late_push_is_weighed() -> None:
    c = begun(plan(), rule=fedasync(0.5, polynomial(1)))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 2), *done(1.0, 1), TimePassed(10.0))
    quarter = Mix(0.75, 0.25, 0.0, publish=True)
    assert tell(c, pushed(30.0, 1)) == applied(2, 30.0, leased(1, 1), t=2, staleness=1, mix=quarter)
    assert not c.leases
    assert not c.released


@pytest.mark.parametrize("policy", ["reject", "pace"])
def test_a_late_push_is_judged_by_its_staleness(policy: StalenessPolicy) -> None:
    judge = partial(begun, plan(staleness_policy=policy, staleness_max=1))
    for fresh, expected in ((1, Outcome.APPLIED), (2, Outcome.TOO_STALE)):
        c = judge()
        tell(c, *asked(0.0, 9), TimePassed(10.0))
        for n in range(1, fresh + 1):
            tell(c, *asked(20.0, n), pushed(20.0, n, n + 1), *done(20.0, n))
        assert outcome(tell(c, pushed(30.0, 9, 1))) is expected
        assert c.t_decided == fresh + (expected is Outcome.APPLIED)


def test_reject_refuses_what_is_one_too_stale_and_remembers_it() -> None:
    c = begun(plan(staleness_policy="reject", staleness_max=1))
    tell(c, *asked(0.0, 1, 2, 3), pushed(1.0, 1), *done(1.0, 1))
    assert outcome(tell(c, pushed(1.0, 2))) is Outcome.APPLIED
    answer = refused(3, 2.0, leased(3, 3), t=3, staleness=2, outcome=Outcome.TOO_STALE)
    assert tell(c, pushed(2.0, 3)) == [answer]
    assert tell(c, pushed(2.0, 3)) == [_again(answer)]
    assert (c.applied, c.t_decided, c.gradients) == (2, 2, 2)


def test_a_heartbeat_extends_a_lease_and_only_an_open_one() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1))
    assert tell(c, HeartbeatArrived(6.0, 1), HeartbeatArrived(6.0, 99)) == []
    assert tell(c, *asked(6.0, 1)) == [SendTask(leased(1, 1, until=16.0))]
    assert tell(c, TimePassed(10.0)) == [WakeAt(16.0)]
    assert tell(c, TimePassed(16.0)) == [ReleaseTask(leased(1, 1, until=16.0), revoked=False)]
    assert tell(c, HeartbeatArrived(17.0, 1)) == []
    assert not c.leases


def test_a_worker_that_leaves_hands_its_task_back() -> None:
    c = begun(plan(in_flight_max=1))
    tell(c, *asked(0.0, 1, 2))
    assert tell(c, WorkerLeft(1.0, 1)) == [ReleaseTask(leased(1, 1), revoked=False), SendTask(leased(2, 2, at=1.0))]
    assert outcome(tell(c, pushed(2.0, 1))) is Outcome.APPLIED  # it comes back with what it had done
    assert tell(c, WorkerLeft(3.0, 3)) == []  # nobody knows it


def test_a_worker_that_left_or_hung_up_is_given_nothing() -> None:
    c = begun(plan(in_flight_max=1))
    tell(c, *asked(0.0, 1, 2, 3), WorkerLeft(1.0, 2), RequestEnded(1.0, 3))
    assert tell(c, pushed(2.0, 1), *done(2.0, 1)) == []


# --- pushes ----------------------------------------------------------------------------------------------------------


def _again(answer: Command) -> AnswerPush:
    assert isinstance(answer, AnswerPush)
    return AnswerPush(answer.worker, answer.task, answer.outcome, answer.decision, repeated=True)


def test_a_full_queue_pushes_back_and_takes_the_update_later() -> None:
    c = begun(plan(queue_max=1, retry_after_s=2.5))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1))
    assert tell(c, pushed(1.0, 2)) == [AnswerPush(2, 2, Outcome.BUSY, retry_after_s=2.5)]
    assert c.leases == {2: leased(2, 2)}  # nothing was decided
    tell(c, *done(2.0, 1))
    assert tell(c, pushed(3.5, 2)) == applied(2, 3.5, leased(2, 2), t=2, staleness=1)


def test_a_late_push_that_meets_a_full_queue_may_come_again() -> None:
    c = begun(plan(queue_max=1))
    tell(c, *asked(0.0, 1), *asked(5.0, 2), TimePassed(10.0), pushed(11.0, 2))
    assert outcome(tell(c, pushed(11.0, 1))) is Outcome.BUSY
    assert outcome(tell(c, *done(12.0, 1), pushed(12.0, 1))) is Outcome.APPLIED


def test_a_push_that_comes_again_gets_the_first_answer_again_and_changes_nothing() -> None:
    c = begun(plan())
    first = tell(c, *asked(0.0, 1), pushed(1.0, 1))
    assert tell(c, pushed(2.0, 1, gradients=50, samples=9)) == [_again(first[1])]
    assert tell(c, *done(3.0, 1), pushed(4.0, 1)) == [_again(first[1])]
    assert (c.judge.decisions, c.applied, c.t_decided, c.gradients, c.judge.duplicates) == (1, 1, 1, 1, 2)
    assert c.contribution.mass == {1: 0.5}


def test_a_repeated_push_does_not_touch_the_workers_next_lease() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1), pushed(1.0, 1), *done(1.0, 1), *asked(1.0, 1), pushed(2.0, 1, task=1))
    assert tell(c, *asked(3.0, 1)) == [SendTask(leased(2, 1, tau=1, at=1.0, number=1))]


def test_a_late_push_does_not_touch_the_workers_next_lease() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1), TimePassed(10.0), *asked(11.0, 1), pushed(12.0, 1, task=1), *done(12.0, 1))
    assert tell(c, *asked(13.0, 1)) == [SendTask(leased(2, 1, at=11.0, number=1))]


def test_a_task_is_its_own_workers() -> None:
    c = begun(plan())
    anothers = tell(c, *asked(0.0, 1, 2), pushed(1.0, 2, task=1))
    assert anothers == [AnswerPush(2, 1, Outcome.NOT_YOURS)]
    assert c.leases.keys() == {1, 2}
    first = tell(c, pushed(1.0, 1))
    assert tell(c, pushed(2.0, 2, task=1)) == anothers  # nor is it told what the other was told
    assert tell(c, pushed(2.0, 1)) == [_again(first[1])]
    tell(c, TimePassed(10.0))
    assert tell(c, pushed(11.0, 3, task=2)) == [AnswerPush(3, 2, Outcome.NOT_YOURS)]
    assert outcome(tell(c, pushed(11.0, 2))) is Outcome.APPLIED


def test_an_unknown_task_is_refused() -> None:
    c = begun(plan())
    assert tell(c, pushed(0.0, 1, task=1)) == [AnswerPush(1, 1, Outcome.UNKNOWN_TASK)]
    assert tell(c, pushed(0.0, 1, task=-5)) == [AnswerPush(1, -5, Outcome.UNKNOWN_TASK)]
    assert c.judge.decisions == 0


def test_an_update_that_is_not_finite_is_refused_and_stays_refused() -> None:
    c = begun(plan(in_flight_max=1))
    tell(c, *asked(0.0, 1, 2))
    answer = refused(1, 1.0, leased(1, 1), t=1, staleness=0, outcome=Outcome.NOT_FINITE)
    assert tell(c, UpdateArrived(1.0, 1, 1, 1, 1, finite=False)) == [answer, SendTask(leased(2, 2, at=1.0))]
    assert tell(c, pushed(2.0, 1)) == [_again(answer)]
    assert c.applied == 0


def test_answers_and_released_leases_are_kept_up_to_a_limit() -> None:
    c = begun(plan(answers_kept=1, released_kept=1))
    tell(c, *asked(0.0, 1, 2, 3, 4), pushed(1.0, 1), pushed(1.0, 2), TimePassed(10.0))
    assert outcome(tell(c, pushed(11.0, 1))) is Outcome.UNKNOWN_TASK
    assert outcome(tell(c, pushed(11.0, 2))) is Outcome.APPLIED  # again
    assert outcome(tell(c, pushed(11.0, 3))) is Outcome.UNKNOWN_TASK
    assert outcome(tell(c, pushed(11.0, 4))) is Outcome.APPLIED
    assert c.applied == 3


# --- admission -------------------------------------------------------------------------------------------------------


def test_no_more_tasks_than_in_flight_max() -> None:
    c = begun(plan(in_flight_max=2))
    commands = tell(c, FleetJoined(0.0, 5))
    assert len(sent(commands)) == 2
    worker = sent(commands)[0].worker
    assert not sent(tell(c, pushed(1.0, worker, 1)))
    assert len(sent(tell(c, VersionPublished(1.0, 1)))) == 1
    assert not sent(tell(c, UpdateMixed(1.0, 1)))
    assert len(c.leases) == 2


def test_the_next_task_starts_from_the_result_of_the_last_one() -> None:
    c = begun(plan(in_flight_max=1))
    tell(c, *asked(0.0, 1, 2))
    assert tell(c, pushed(1.0, 1)) == applied(1, 1.0, leased(1, 1), t=1, staleness=0)
    assert tell(c, VersionPublished(1.0, 1)) == [EvaluateModel(1), SendTask(leased(2, 2, tau=1, at=1.0))]


def test_one_task_per_device_though_two_workers_serve_it() -> None:
    c = begun(plan())
    tell(c, WorkerJoined(0.0, 1, 5), WorkerJoined(0.0, 2, 5), WorkerJoined(0.0, 3, 6))
    tell(c, *asked(0.0, 1))
    assert tell(c, *asked(0.0, 2)) == [WakeAt(1.0)]
    assert sent(tell(c, *asked(0.0, 3)))[0].device == 6
    tell(c, pushed(0.5, 1))
    assert sent(tell(c, VersionPublished(0.5, 1))) == [
        Lease(3, 2, device=5, number=1, tau=1, granted_at=0.5, deadline=10.5)
    ]


@pytest.mark.parametrize("limit", [2, None])
def test_more_tasks_per_device_where_set(limit: int | None) -> None:
    c = begun(plan(tasks_per_device=limit))
    for worker in (1, 2, 3):
        tell(c, WorkerJoined(0.0, worker, 5))
        tell(c, *asked(0.0, worker))
    assert len(c.leases) == (limit or 3)


def test_triggering_at_fixed_moments_only() -> None:
    c = begun(plan(in_flight_max=2), Scheduler(trigger_every_s=4.0))
    assert tell(c, *asked(0.0, 1)) == [SendTask(leased(1, 1)), WakeAt(10.0)]
    assert tell(c, *asked(1.0, 2)) == [WakeAt(4.0)]
    assert tell(c, *asked(3.9, 3)) == []
    commands = tell(c, TimePassed(4.0))
    (lease,) = sent(commands)  # in_flight_max
    assert lease.worker in (2, 3)
    assert commands[1:] == [WakeAt(8.0)]
    assert tell(c, WorkerLeft(5.0, 1)) == [ReleaseTask(leased(1, 1), revoked=False)]
    assert len(sent(tell(c, TimePassed(8.0)))) == 1


def test_a_moment_at_which_nobody_waits_is_not_used_up() -> None:
    c = begun(plan(), Scheduler(trigger_every_s=4.0))
    tell(c, Evaluated(0.0, 0, {}))
    assert len(sent(tell(c, FleetJoined(0.0, 2)))) == 2


def test_a_late_push_that_is_refused_does_not_let_its_device_into_a_group_twice() -> None:
    c = begun(plan(lease_s=1.0), Scheduler(group=3), fedavg(3))
    tell(c, *asked(0.0, 1), TimePassed(1.0), *asked(1.0, 1), pushed(1.5, 1, 2), UpdateMixed(1.5, 1))
    late = UpdateArrived(1.6, 1, 1, samples=1, gradients=1, finite=False)
    assert outcome(tell(c, late)) is Outcome.NOT_FINITE
    assert sent(tell(c, *asked(1.7, 1))) == []
    assert [lease.worker for lease in sent(tell(c, *asked(1.7, 2)))] == [2]


def test_a_worker_that_is_not_available_is_looked_at_again() -> None:
    c = Coordinator(fedasync(0.5), plan(retry_after_s=3.0), available=lambda worker, at: at >= 5.0 or worker == 2)
    assert tell(c, *asked(0.0, 1)) == [WakeAt(3.0)]
    assert tell(c, *asked(0.5, 2)) == [SendTask(leased(1, 2, at=0.5))]
    assert tell(c, TimePassed(3.0)) == [WakeAt(6.0)]
    assert tell(c, TimePassed(6.0)) == [SendTask(leased(2, 1, at=6.0)), WakeAt(10.5)]


def test_least_contribution_first() -> None:
    c = begun(plan(in_flight_max=1), Scheduler("fair"))
    served = []
    tell(c, FleetJoined(0.0, 3))
    for sequence in range(1, 10):
        (lease,) = c.leases.values()
        served.append(lease.worker)
        tell(c, pushed(float(sequence), lease.worker, lease.task), *asked(float(sequence), lease.worker))
        tell(c, *done(float(sequence), sequence))
    assert [sorted(served[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_contribution_is_counted_for_the_device_whoever_served_it() -> None:
    c = begun(plan())
    tell(c, WorkerJoined(0.0, 1, 7), WorkerJoined(0.0, 2, 7), WorkerJoined(0.0, 3, 8))
    for sequence, worker in enumerate((1, 2, 3), start=1):
        tell(c, *asked(1.0, worker), pushed(1.0, worker), *done(1.0, sequence))
    assert c.contribution.mass == {7: 1.0, 8: 0.5}
    assert c.contribution.surviving() == {7: 0.375, 8: 0.5}


# --- pace ------------------------------------------------------------------------------------------------------------


def test_pace_grants_up_to_its_bound() -> None:
    """(t - tau_oldest) + other leases in flight + arrived but unmixed + 1 <= staleness_max = 2."""
    c = begun(pace(staleness_max=2))
    assert len(sent(tell(c, *asked(0.0, 1)))) == 1
    assert len(sent(tell(c, *asked(0.0, 2)))) == 1  # 0 + 0 + 0 + 1
    assert len(sent(tell(c, *asked(0.0, 3)))) == 1  # 0 + 1 + 0 + 1
    assert tell(c, *asked(0.0, 4)) == [WakeAt(5.0)]  # 0 + 2 + 0 + 1
    assert not sent(tell(c, pushed(1.0, 3)))
    assert not sent(tell(c, VersionPublished(1.0, 1)))  # 1 + 1 + 1 + 1
    assert not sent(tell(c, UpdateMixed(1.0, 1)))  # 1 + 1 + 0 + 1
    tell(c, pushed(2.0, 1), VersionPublished(2.0, 2))
    assert not sent(tell(c, UpdateMixed(2.0, 2)))  # 2 + 0 + 0 + 1: lease 2 holds the others back
    commands = tell(c, pushed(3.0, 2))
    assert outcome(commands) is Outcome.APPLIED
    assert c.applied == 3
    assert sent(tell(c, VersionPublished(3.0, 3))) == [leased(4, 4, tau=3, at=3.0)]


def test_pace_counts_what_has_arrived_and_is_not_mixed() -> None:
    c = begun(pace(staleness_max=2))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1))
    assert len(sent(tell(c, *asked(1.0, 3)))) == 1  # 0 + 0 + 1 + 1
    assert tell(c, *asked(1.0, 4)) == [WakeAt(6.0)]  # 0 + 1 + 1 + 1


def test_pace_revokes_a_lease_that_holds_others_back_and_refuses_its_late_push() -> None:
    c = begun(pace(staleness_max=1))
    tell(c, *asked(0.0, 1), *asked(0.0, 2))
    assert tell(c, *asked(1.0, 3)) == [WakeAt(6.0)]
    assert tell(c, TimePassed(5.9)) == []
    assert tell(c, TimePassed(6.0)) == [
        ReleaseTask(leased(1, 1), revoked=True),
        SendTask(leased(3, 3, at=6.0)),
        WakeAt(10.0),
    ]
    # Its staleness is 0 and nobody else is in flight any more, but it was told to stop.
    tell(c, WorkerLeft(7.0, 2), WorkerLeft(7.0, 3))
    answer = refused(1, 7.0, leased(1, 1), t=1, staleness=0, outcome=Outcome.TOO_STALE)
    assert tell(c, pushed(7.0, 1)) == [answer]
    assert tell(c, pushed(8.0, 1)) == [_again(answer)]


def test_pace_waits_anew_for_the_next_oldest_lease() -> None:
    c = begun(pace(staleness_max=1, in_flight_max=9))
    tell(c, *asked(0.0, 1, 2, 3, 4))
    assert tell(c, TimePassed(5.0))[0] == ReleaseTask(leased(1, 1), revoked=True)
    assert len(c.leases) == 2
    assert [type(command) for command in tell(c, TimePassed(9.9))] == []
    assert tell(c, TimePassed(10.0))[0] == ReleaseTask(leased(2, 2), revoked=False)  # by then its time is up


def test_pace_holds_nobody_back_without_a_lease_in_flight() -> None:
    c = begun(pace(staleness_max=0))
    tell(c, *asked(0.0, 1), pushed(1.0, 1))
    assert tell(c, *asked(1.0, 2)) == []  # x_0 would be one behind already
    assert not sent(tell(c, *asked(1.0, 3)))
    tell(c, VersionPublished(2.0, 1))
    assert [lease.tau for lease in c.leases.values()] == []
    assert len(sent(tell(c, UpdateMixed(2.0, 1)))) == 1


def test_pace_does_not_ask_to_be_woken_for_nobody() -> None:
    """A waking in the past, asked for again and again, would stop the clock."""
    c = begun(pace(staleness_max=0, lease_s=100.0))
    tell(c, *asked(0.0, 1), *asked(0.0, 2), RequestEnded(1.0, 2))
    assert tell(c, TimePassed(5.0)) == [WakeAt(100.0)]


def test_pace_revokes_at_the_first_fixed_moment_after_its_patience() -> None:
    c = begun(pace(staleness_max=0, lease_s=100.0), Scheduler(trigger_every_s=3.0))
    commands = tell(c, FleetJoined(0.0, 2))
    moments = [0.0]
    while not any(isinstance(command, ReleaseTask) for command in commands):
        wakings = [command.at for command in commands if isinstance(command, WakeAt)]
        assert len(wakings) == 1
        assert wakings[0] > moments[-1]
        moments += wakings
        commands = tell(c, TimePassed(moments[-1]))
    assert moments == [0.0, 3.0, 6.0]  # held back since 0, for 5 seconds at least
    assert [type(command) for command in commands] == [ReleaseTask, SendTask, WakeAt]


def test_pace_loses_patience_though_polls_end_and_begin_again() -> None:
    """A server's polls are shorter than pace_wait_s: the moment between two of them must not start patience anew."""
    c = begun(pace(staleness_max=0, lease_s=100.0))
    tell(c, *asked(0.0, 1, 2))
    for at in (2.0, 4.0):
        tell(c, RequestEnded(at, 2), *asked(at, 2))
    revoked = leased(1, 1, until=100.0)
    assert tell(c, TimePassed(5.0))[0] == ReleaseTask(revoked, revoked=True)


def test_pace_keeps_its_promise_to_open_leases_when_a_late_push_comes() -> None:
    """The push of worker 1, whose lease ran out, must not be let in front of worker 2, which is in time."""
    c = begun(pace(staleness_max=1))
    tell(c, *asked(0.0, 1), *asked(5.0, 2), TimePassed(10.0), *asked(10.0, 3))
    assert outcome(tell(c, pushed(11.0, 1))) is Outcome.TOO_STALE
    assert outcome(tell(c, pushed(11.0, 3))) is Outcome.APPLIED
    assert outcome(tell(c, pushed(12.0, 2))) is Outcome.APPLIED


# --- the gate --------------------------------------------------------------------------------------------------------


def far(at: float, worker: int, distance: float, task: int | None = None, *, base_gone: bool = False) -> UpdateArrived:
    """A push of this ||x_new - x_tau||."""
    return UpdateArrived(at, worker, worker if task is None else task, 1, 1, distance=distance, base_gone=base_gone)


def test_an_update_above_the_gate_is_refused_and_stays_refused() -> None:
    c = begun(plan(gate=Gate(2.0)))
    tell(c, *asked(0.0, 1, 2))
    answer = refused(1, 1.0, leased(1, 1), t=1, staleness=0, outcome=Outcome.TOO_LARGE)
    assert tell(c, far(1.0, 1, 2.1)) == [answer]
    assert tell(c, far(2.0, 1, 1.0)) == [_again(answer)]
    assert tell(c, far(2.0, 2, 2.0)) == applied(2, 2.0, leased(2, 2), t=1, staleness=0)
    assert c.leases == {}


def test_the_gate_clips_what_the_rule_answers() -> None:
    c = begun(plan(gate=Gate(2.0, "clip")))
    tell(c, *asked(0.0, 1, 2))
    quarter = Mix(keep=0.5, new=0.125, base=0.375, publish=True)
    assert tell(c, far(1.0, 1, 8.0)) == applied(1, 1.0, leased(1, 1), t=1, staleness=0, mix=quarter)
    assert c.contribution.mass == {1: 0.125}
    assert tell(c, far(1.0, 2, 2.0)) == applied(2, 1.0, leased(2, 2), t=2, staleness=1)
    assert outcome(tell(c, *asked(1.0, 3), far(1.0, 3, inf))) is Outcome.TOO_LARGE


def test_the_rule_sees_an_update_as_the_gate_lets_it_through() -> None:
    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        assert facts.distance is not None
        return Mix(1.0, 1.0 / facts.distance, 0.0, publish=True), memory

    c = begun(plan(gate=Gate(2.0, "clip")), rule=Rule("mine", formula, needs_distance=True))
    tell(c, *asked(0.0, 1, 2))
    clipped = Mix(keep=1.0, new=0.125, base=0.375, publish=True)  # 1/2 of an update that is 1/4 as long
    assert tell(c, far(1.0, 1, 8.0)) == applied(1, 1.0, leased(1, 1), t=1, staleness=0, mix=clipped)
    assert tell(c, far(1.0, 2, 1.0))[0] == applied(2, 1.0, leased(2, 2), 2, 1, Mix(1.0, 1.0, 0.0, publish=True))[0]


def test_the_median_is_of_what_was_applied_alone() -> None:
    c = begun(plan(gate=Gate(median_max=3.0), queue_max=1))
    for n in range(1, MEDIAN_AFTER + 1):
        tell(c, *asked(0.0, 1), far(0.0, 1, 1.0, n), *done(0.0, n))
    assert list(c.judge.accepted) == [1.0] * MEDIAN_AFTER
    tell(c, *asked(0.0, 1, 2, 3))
    assert outcome(tell(c, far(1.0, 1, 3.5, MEDIAN_AFTER + 1))) is Outcome.TOO_LARGE
    assert outcome(tell(c, far(1.0, 2, 2.5, MEDIAN_AFTER + 2))) is Outcome.APPLIED
    assert outcome(tell(c, far(1.0, 3, 2.0, MEDIAN_AFTER + 3))) is Outcome.BUSY
    assert list(c.judge.accepted) == [*[1.0] * MEDIAN_AFTER, 2.5]


def test_a_refusal_needs_no_room_in_the_queue() -> None:
    c = begun(plan(gate=Gate(2.0), queue_max=1))
    tell(c, *asked(0.0, 1, 2, 3), far(1.0, 1, 1.0))
    assert outcome(tell(c, far(1.0, 2, 3.0))) is Outcome.TOO_LARGE
    assert outcome(tell(c, far(1.0, 3, 1.0, base_gone=True))) is Outcome.TOO_STALE


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (far(1.0, 1, 1.0, base_gone=True), Outcome.TOO_STALE),
        (far(1.0, 1, 99.0, base_gone=True), Outcome.TOO_STALE),
        (UpdateArrived(1.0, 1, 1, 1, 1, base_gone=True), Outcome.TOO_STALE),
        (UpdateArrived(1.0, 1, 1, 1, 1, finite=False, base_gone=True), Outcome.NOT_FINITE),
        (far(8.0, 1, 99.0, base_gone=True), Outcome.FINISHED),
        (far(1.0, 2, 1.0, 1, base_gone=True), Outcome.NOT_YOURS),
    ],
)
def test_an_update_whose_base_is_gone_is_too_stale(event: UpdateArrived, expected: Outcome) -> None:
    c = begun(plan(gate=Gate(2.0, "clip"), until_s=8.0))
    assert outcome(tell(c, *asked(0.0, 1), event)) is expected


def test_an_update_that_is_too_stale_as_well_as_too_large_is_too_stale() -> None:
    c = begun(plan(gate=Gate(2.0), bad_updates_max=1, staleness_policy="reject", staleness_max=0))
    tell(c, *asked(0.0, 1, 2), far(1.0, 1, 1.0))
    assert outcome(tell(c, far(1.0, 2, 99.0))) is Outcome.TOO_STALE
    assert c.quarantined == {}


def test_an_update_that_was_not_measured_stops_the_run() -> None:
    c = begun(plan(gate=Gate(2.0)))
    with pytest.raises(InvariantBroken, match="which was not measured"):
        tell(c, *asked(0.0, 1), pushed(1.0, 1))
    assert (c.judge.decisions, len(c.leases)) == (0, 1)


@pytest.mark.parametrize(
    ("rule", "gate", "distance", "base"),
    [
        (fedasync(0.5), None, False, False),
        (delta(0.5), None, False, True),
        (fedasync(0.5), Gate(1.0), True, False),
        (fedasync(0.5), Gate(1.0, "clip"), True, True),
        (delta(0.5), Gate(median_max=2.0), True, True),
        (Rule("mine", fedasync(0.5).formula, needs_distance=True), None, True, False),
    ],
)
def test_what_the_data_plane_must_know_is_said(rule: Rule, gate: Gate | None, distance: bool, base: bool) -> None:
    c = begun(plan(gate=gate), rule=rule)
    assert (c.needs_distance, c.needs_base) == (distance, base)


# --- quarantine ------------------------------------------------------------------------------------------------------

strict = partial(plan, bad_updates_max=2, gate=Gate(2.0))


def garbage(at: float, worker: int, task: int | None = None, why: str = "no such tensor") -> BadUpdateArrived:
    return BadUpdateArrived(at, worker, worker if task is None else task, why)


def nan_pushed(at: float, worker: int, task: int) -> UpdateArrived:
    return UpdateArrived(at, worker, task, 1, 1, finite=False)


def again(c: Coordinator, settings: Plan) -> Coordinator:
    """The same coordinator, by way of its state."""
    return restored(snapshot(c), c.rule, settings)


def test_garbage_leaves_the_lease_open_until_it_is_too_much() -> None:
    c = begun(strict())
    tell(c, *asked(0.0, 1), RequestEnded(0.0, 1))
    assert tell(c, garbage(1.0, 1)) == []
    assert c.leases == {1: leased(1, 1)}
    assert c.quarantined == {}
    assert tell(c, garbage(2.0, 1, why="garbage")) == [
        Quarantine(1, "garbage"),
        ReleaseTask(leased(1, 1), revoked=True),
    ]
    assert c.quarantined == {1: "garbage"}
    assert tell(c, garbage(3.0, 1, why="more")) == []
    assert tell(c, *asked(3.0, 1)) == [TellQuarantined(1, "garbage")]
    invariants.check(c)


def test_whoever_sent_garbage_once_may_push_again() -> None:
    c = begun(strict())
    tell(c, *asked(0.0, 1), garbage(1.0, 1))
    assert tell(c, far(2.0, 1, 1.0)) == applied(1, 2.0, leased(1, 1), t=1, staleness=0)


def test_an_applied_update_makes_up_for_a_bad_one() -> None:
    c = begun(strict())
    tell(c, *asked(0.0, 1), garbage(1.0, 1), far(2.0, 1, 1.0), *done(2.0, 1), *asked(2.0, 1))
    assert tell(c, garbage(3.0, 1, 2)) == []
    assert len(tell(c, garbage(3.0, 1, 2))) == 2


BAD: dict[str, Callable[[int], Event]] = {
    "garbage": lambda task: garbage(1.0, 1, task),
    "not finite": lambda task: nan_pushed(1.0, 1, task),
    "too large": lambda task: far(1.0, 1, 2.5, task),
}


@pytest.mark.parametrize("second", BAD)
@pytest.mark.parametrize("first", BAD)
def test_whatever_is_bad_counts(first: str, second: str) -> None:
    c = begun(strict())
    for bad, quarantined in ((first, set()), (second, {1})):
        tell(c, *asked(c.at, 1))
        (task,) = c.leases
        tell(c, BAD[bad](task))
        assert c.quarantined.keys() == quarantined
    invariants.check(c)


def test_what_is_stale_or_not_decided_on_is_not_bad() -> None:
    c = begun(strict(bad_updates_max=1, queue_max=1, until_s=50.0))
    tell(c, *asked(0.0, 1, 2, 3), far(1.0, 1, 1.0))
    assert outcome(tell(c, far(1.0, 2, 1.0))) is Outcome.BUSY
    assert outcome(tell(c, far(1.0, 2, 1.0, base_gone=True))) is Outcome.TOO_STALE
    assert outcome(tell(c, nan_pushed(1.0, 2, 2))) is Outcome.TOO_STALE  # again
    assert outcome(tell(c, nan_pushed(1.0, 2, 3))) is Outcome.NOT_YOURS
    assert outcome(tell(c, nan_pushed(1.0, 2, 99))) is Outcome.UNKNOWN_TASK
    assert outcome(tell(c, nan_pushed(50.0, 3, 3))) is Outcome.FINISHED
    assert c.quarantined == {}


def test_a_stale_update_between_two_bad_ones_makes_up_for_nothing() -> None:
    c = begun(strict())
    tell(c, *asked(0.0, 1), nan_pushed(0.0, 1, 1), *asked(0.0, 1), far(0.0, 1, 1.0, 2, base_gone=True))
    assert c.quarantined == {}
    tell(c, *asked(0.0, 1), nan_pushed(0.0, 1, 3))
    assert c.quarantined == {1: "its update holds NaN or infinity"}


def test_nobody_can_make_garbage_count_for_another() -> None:
    c = begun(strict(bad_updates_max=1))
    tell(c, *asked(0.0, 1, 2), far(0.0, 2, 1.0))
    assert tell(c, garbage(1.0, 2, task=1)) == []
    assert tell(c, garbage(1.0, 3, task=1)) == []
    assert tell(c, garbage(1.0, 2, task=2)) == []  # answered by now
    assert tell(c, garbage(1.0, 1, task=99)) == []
    assert c.quarantined == {}


def test_garbage_under_a_lease_that_ran_out_counts() -> None:
    c = begun(strict(bad_updates_max=1))
    tell(c, *asked(0.0, 1), TimePassed(10.0), *asked(11.0, 1))
    revoked = leased(2, 1, at=11.0, number=1)
    assert tell(c, garbage(12.0, 1, task=1, why="late")) == [Quarantine(1, "late"), ReleaseTask(revoked, revoked=True)]


def test_a_bad_push_answers_first_and_then_takes_the_next_lease_away() -> None:
    c = begun(strict(bad_updates_max=1))
    tell(c, *asked(0.0, 1), TimePassed(10.0), *asked(11.0, 1))
    answer = refused(1, 12.0, leased(1, 1), t=1, staleness=0, outcome=Outcome.TOO_LARGE)
    assert tell(c, far(12.0, 1, 8.0)) == [
        answer,
        Quarantine(1, "its ||x_new - x_tau|| is 8; 2 is accepted"),
        ReleaseTask(leased(2, 1, at=11.0, number=1), revoked=True),
    ]


def test_a_quarantined_worker_is_given_nothing_though_it_waits_leaves_and_joins() -> None:
    c = begun(strict(in_flight_max=1))
    tell(c, *asked(0.0, 1), TimePassed(10.0), *asked(11.0, 2, 1), garbage(12.0, 1))
    assert 1 in c.idle
    assert tell(c, garbage(12.0, 1)) == [Quarantine(1, "no such tensor")]
    assert 1 not in c.idle
    tell(c, WorkerLeft(13.0, 1), WorkerJoined(13.0, 1, 5))
    assert tell(c, *asked(13.0, 1)) == [TellQuarantined(1, "no such tensor")]
    assert [lease.worker for lease in sent(tell(c, WorkerLeft(14.0, 2), FleetJoined(14.0, 2)))] == [0]
    invariants.check(c)


def test_what_a_quarantined_worker_pushes_is_refused_unseen() -> None:
    c = begun(strict(bad_updates_max=1, not_finite_max=2))
    tell(c, *asked(0.0, 1), TimePassed(10.0), *asked(11.0, 1), nan_pushed(12.0, 1, 2))
    assert c.quarantined
    answer = refused(2, 13.0, leased(1, 1), t=1, staleness=0, outcome=Outcome.QUARANTINED)
    assert tell(c, nan_pushed(13.0, 1, 1)) == [answer]
    assert tell(c, far(14.0, 1, 1.0)) == [_again(answer)]
    assert not c.released
    tell(c, *asked(15.0, 2), nan_pushed(15.0, 2, 3))
    # the one that nobody saw is not between
    assert c.end_reason == "diverged: the last 2 updates were NaN, infinite or above value_max"


def test_a_revoked_lease_of_a_worker_that_was_readmitted_is_too_stale() -> None:
    c = begun(strict(bad_updates_max=1))
    tell(c, *asked(0.0, 1), garbage(1.0, 1), WorkerReadmitted(2.0, 1))
    assert outcome(tell(c, far(3.0, 1, 1.0))) is Outcome.TOO_STALE


def test_a_readmitted_worker_begins_anew() -> None:
    c = begun(strict())
    tell(c, *asked(0.0, 1), garbage(1.0, 1), garbage(1.0, 1))
    assert tell(c, WorkerReadmitted(2.0, 1)) == []
    assert c.quarantined == {}
    assert sent(tell(c, *asked(3.0, 1))) == [leased(2, 1, at=3.0, number=1)]
    assert tell(c, garbage(4.0, 1, 2)) == []
    assert (
        tell(c, WorkerReadmitted(4.0, 1), garbage(4.0, 1, 2)) == []
    )  # it was not quarantined: its count was forgotten
    assert tell(c, garbage(5.0, 1, 2))[0] == Quarantine(1, "no such tensor")
    assert tell(c, WorkerReadmitted(6.0, 99)) == []


def test_somebody_may_bar_a_worker_whatever_its_updates_were_like() -> None:
    c = begun(strict())
    tell(c, *asked(0.0, 1, 2))
    lease = next(iter(c.leases.values()))
    assert tell(c, WorkerBarred(1.0, lease.worker, "odd"))[:2] == [
        Quarantine(lease.worker, "odd"),
        ReleaseTask(lease, revoked=True),
    ]
    assert tell(c, WorkerBarred(2.0, lease.worker, "again")) == []
    assert c.quarantined == {lease.worker: "odd"}
    assert TellQuarantined(lease.worker, "odd") in tell(c, *asked(3.0, lease.worker))
    tell(c, WorkerReadmitted(4.0, lease.worker))
    assert c.quarantined == {}


def test_a_quarantined_worker_hears_of_the_end() -> None:
    c = begun(strict(bad_updates_max=1, until_s=8.0))
    tell(c, *asked(0.0, 1, 2), garbage(1.0, 1))
    assert tell(c, *asked(8.0, 1))[0] == TellFinished(1)
    assert outcome(tell(c, far(8.0, 1, 1.0))) is Outcome.FINISHED
    assert tell(c, garbage(9.0, 2)) == []  # nothing is judged any more
    assert c.quarantined == {1: "no such tensor"}


def test_nobody_is_quarantined_unless_it_is_asked_for() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1))
    for _ in range(1000):
        assert tell(c, garbage(1.0, 1)) == []
    assert outcome(tell(c, nan_pushed(2.0, 1, 1))) is Outcome.NOT_FINITE
    assert c.quarantined == {}


def test_another_takes_the_place_of_a_quarantined_worker_in_its_group() -> None:
    c = begun(plan(bad_updates_max=1), Scheduler(group=2), fedavg(2))
    tell(c, *asked(0.0, 1, 2, 3))
    assert tell(c, garbage(1.0, 1)) == [
        Quarantine(1, "no such tensor"),
        ReleaseTask(leased(1, 1), revoked=True),
        SendTask(leased(3, 3, at=1.0)),
    ]


def test_pace_no_longer_waits_for_a_quarantined_worker() -> None:
    c = begun(pace(staleness_max=0, bad_updates_max=1))
    tell(c, *asked(0.0, 1, 2))
    assert sent(tell(c, garbage(1.0, 1))) == [leased(2, 2, at=1.0)]


def test_a_restart_forgets_neither_the_quarantined_nor_the_counts_nor_the_gate() -> None:
    settings = strict(gate=Gate(median_max=9.0))
    c = begun(settings)
    tell(c, *asked(0.0, 1, 2, 3), garbage(1.0, 1), garbage(1.0, 1), garbage(1.0, 2), far(1.0, 3, 0.5))
    new = again(c, settings)
    assert new.quarantined == {1: "no such tensor"}
    assert list(new.judge.accepted) == [0.5]
    assert tell(new, garbage(2.0, 2, why="x"))[0] == Quarantine(2, "x")
    assert tell(new, *asked(2.0, 1)) == [TellQuarantined(1, "no such tensor")]
    assert snapshot(again(new, settings)) == snapshot(new)


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_group_waits_for_the_slowest() -> None:
    c = begun(plan(), Scheduler(group=2), fedavg(2))
    tell(c, *asked(0.0, 1, 2))
    assert tell(c, *asked(0.0, 3)) == []
    first = Mix(0.0, 1.0, 0.0, publish=False)
    assert tell(c, pushed(1.0, 1)) == applied(1, 1.0, leased(1, 1), t=1, staleness=0, mix=first)
    assert tell(c, UpdateMixed(1.0, 1)) == []  # nobody starts from a half-made version
    assert tell(c, pushed(9.0, 2)) == applied(2, 9.0, leased(2, 2), t=1, staleness=0, mix=HALF)
    assert tell(c, *asked(9.0, 4)) == []  # not published yet
    assert len(sent(tell(c, VersionPublished(9.0, 1)))) == 2


def test_a_group_weighs_by_samples() -> None:
    c = begun(plan(), Scheduler(group=2), fedavg(2))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1, samples=30))
    commands = tell(c, pushed(2.0, 2, samples=10))
    assert isinstance(commands[0], MixUpdate)
    assert commands[0].decision.mix == Mix(0.75, 0.25, 0.0, publish=True)


def test_over_selection_revokes_the_latecomers() -> None:
    c = begun(plan(), Scheduler(group=2, over_selection=1.5), fedavg(2))
    commands = tell(c, FleetJoined(0.0, 6))
    assert len(sent(commands)) == 3
    one, two, three = sent(commands)
    tell(c, pushed(1.0, one.worker, 1))
    mixing, release, answer = tell(c, pushed(2.0, two.worker, 2))
    assert isinstance(mixing, MixUpdate)
    assert release == ReleaseTask(three, revoked=True)
    assert outcome([answer]) is Outcome.APPLIED
    late = refused(3, 2.5, three, t=2, staleness=1, outcome=Outcome.TOO_STALE)
    assert tell(c, pushed(2.5, three.worker, 3)) == [late]
    assert [lease.tau for lease in sent(tell(c, VersionPublished(3.0, 1)))] == [1, 1, 1]


def test_whoever_runs_out_of_time_is_replaced_in_its_group() -> None:
    c = begun(plan(), Scheduler(group=2), fedavg(2))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1), UpdateMixed(1.0, 1), *asked(1.0, 3))
    assert tell(c, TimePassed(10.0)) == [
        ReleaseTask(leased(2, 2), revoked=False),
        SendTask(leased(3, 3, at=10.0)),
        WakeAt(20.0),
    ]
    # The one that is late is still in time for its group: the version is not made yet.
    commands = tell(c, pushed(11.0, 2))
    assert [type(command) for command in commands] == [MixUpdate, ReleaseTask, AnswerPush]
    assert outcome(tell(c, pushed(12.0, 3))) is Outcome.TOO_STALE


def test_a_groups_deadline_publishes_what_is_there() -> None:
    c = begun(plan(lease_s=100.0), Scheduler(group=3, group_deadline_s=6.0), fedavg(3))
    assert tell(c, *asked(0.0, 1)) == [SendTask(leased(1, 1, until=100.0)), WakeAt(6.0)]
    tell(c, *asked(1.0, 2), pushed(2.0, 1), UpdateMixed(2.0, 1))
    assert tell(c, TimePassed(6.0)) == [
        ReleaseTask(leased(2, 2, at=1.0, until=101.0), revoked=True),
        PublishVersion(1),
    ]
    assert (c.t, c.t_decided) == (0, 1)
    assert tell(c, *asked(6.0, 1)) == []
    again = leased(3, 1, tau=1, at=6.5, number=1, until=106.5)
    assert tell(c, VersionPublished(6.5, 1)) == [EvaluateModel(1), SendTask(again), WakeAt(12.5)]
    commands = tell(c, pushed(7.0, 1, 3))
    assert isinstance(commands[0], MixUpdate)
    assert commands[0].decision.mix == Mix(0.0, 1.0, 0.0, publish=False)  # the mean begins anew
    assert outcome(tell(c, pushed(8.0, 2))) is Outcome.TOO_STALE


def test_a_groups_deadline_is_put_off_when_nothing_has_arrived() -> None:
    c = begun(plan(lease_s=100.0, retry_after_s=2.0), Scheduler(group=2, group_deadline_s=6.0), fedavg(2))
    tell(c, *asked(0.0, 1))
    assert tell(c, TimePassed(6.0)) == [WakeAt(8.0)]
    tell(c, pushed(7.0, 1), UpdateMixed(7.0, 1))
    assert tell(c, TimePassed(8.0)) == [PublishVersion(1)]


def test_a_groups_deadline_counts_from_its_first_task() -> None:
    """Not from the first look at who waits, when nobody can be given a task."""
    scheduler = Scheduler(group=2, group_deadline_s=6.0)
    c = Coordinator(fedavg(2), plan(lease_s=100.0), scheduler, available=lambda _, at: at >= 20.0)
    at = 0.0
    commands = tell(c, FleetJoined(at, 2))
    while not sent(commands):
        at = min(command.at for command in commands if isinstance(command, WakeAt))
        commands = tell(c, TimePassed(at))
    first, second = sent(commands)
    tell(c, pushed(at + 1, first.worker, first.task), UpdateMixed(at + 1, 1), TimePassed(at + 5.5))
    assert outcome(tell(c, pushed(at + 5.5, second.worker, second.task))) is Outcome.APPLIED


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_run_ends_after_its_epochs_once_they_are_mixed() -> None:
    c = begun(plan(epochs=2))
    tell(c, *asked(0.0, 1, 2, 3), pushed(1.0, 1), pushed(1.0, 2))
    assert c.end_reason == "2 epochs"
    assert tell(c, *asked(2.0, 4)) == [TellFinished(4)]
    assert tell(c, *asked(2.0, 3)) == [TellFinished(3)]  # though its lease is open
    answer = refused(3, 3.0, leased(3, 3), t=3, staleness=2, outcome=Outcome.FINISHED)
    assert tell(c, pushed(3.0, 3)) == [answer]
    assert tell(c, VersionPublished(4.0, 2)) == [EvaluateModel(2)]
    assert tell(c, UpdateMixed(4.0, 1)) == []
    assert tell(c, UpdateMixed(4.0, 2)) == [Finish("2 epochs")]
    assert tell(c, pushed(5.0, 3)) == [_again(answer)]
    assert tell(c, TimePassed(90.0), *asked(90.0, 1)) == [TellFinished(1)]


def test_whoever_waits_when_the_run_ends_is_given_nothing() -> None:
    c = begun(plan(epochs=1, in_flight_max=1))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1))
    assert tell(c, VersionPublished(1.0, 1)) == [EvaluateModel(1)]
    assert tell(c, UpdateMixed(1.0, 1)) == [Finish("1 epochs")]
    assert tell(c, pushed(2.0, 1)) != []
    assert not c.leases


def test_the_run_ends_after_its_gradients() -> None:
    c = begun(plan(gradients=7))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1, gradients=6), *done(1.0, 1))
    assert not c.end_reason
    tell(c, pushed(2.0, 2, gradients=4), VersionPublished(2.0, 2))
    assert tell(c, UpdateMixed(2.0, 2)) == [Finish("7 gradients")]
    assert c.gradients == 10


def test_the_run_ends_at_its_time() -> None:
    c = begun(plan(until_s=8.0))
    assert tell(c, *asked(0.0, 1)) == [SendTask(leased(1, 1)), WakeAt(8.0)]
    assert tell(c, TimePassed(7.9)) == []
    assert tell(c, TimePassed(8.0)) == [Finish("8 s")]
    assert outcome(tell(c, pushed(8.0, 1))) is Outcome.FINISHED


def test_an_update_at_the_end_is_too_late_whether_or_not_the_waking_came_first() -> None:
    """Else it would depend on which waking happened to be on its way."""
    c = begun(plan(until_s=8.0))
    tell(c, *asked(0.0, 1))
    commands = tell(c, pushed(8.0, 1))
    assert outcome(commands) is Outcome.FINISHED
    assert commands[-1] == Finish("8 s")


def test_the_run_ends_at_its_target() -> None:
    c = begun(plan(target=Target.parse("accuracy>=0.9")))
    assert c.needs_evaluation
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1), *done(1.0, 1), pushed(2.0, 2))
    assert tell(c, Evaluated(2.0, 1, {"accuracy": 0.89, "loss": 0.1})) == []
    tell(c, *done(3.0, 2))
    reason = "target accuracy>=0.9 reached at epoch 2"
    assert tell(c, Evaluated(4.0, 2, {"accuracy": 0.9})) == [Finish(reason)]


def test_a_target_that_is_reached_while_updates_wait_lets_them_be_mixed() -> None:
    c = begun(plan(target=Target.parse("loss<=0.5")))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1), *done(1.0, 1), pushed(2.0, 2))
    assert tell(c, Evaluated(2.0, 1, {"loss": 0.5})) == []
    assert tell(c, VersionPublished(3.0, 2)) == [EvaluateModel(2)]
    assert tell(c, UpdateMixed(3.0, 2)) == [Finish("target loss<=0.5 reached at epoch 1")]


def test_a_run_without_an_end_goes_on() -> None:
    c = begun(plan(in_flight_max=1))
    assert not c.needs_evaluation
    for n in range(1, 50):
        assert sent(tell(c, *asked(float(n), 1))) == [leased(n, 1, tau=n - 1, at=float(n), number=n - 1)]
        tell(c, pushed(float(n), 1, n), *done(float(n), n))
    assert not c.end_reason


def test_a_run_may_end_before_anything_arrived() -> None:
    assert tell(begun(plan(until_s=1.0)), TimePassed(1.0)) == [Finish("1 s")]


def test_a_group_that_is_not_complete_at_the_end_is_not_published_later() -> None:
    c = begun(plan(until_s=1.5), Scheduler(group=2, group_deadline_s=5.0), fedavg(2))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1))
    assert tell(c, UpdateMixed(2.0, 1)) == [Finish("1.5 s")]
    assert c.gradients == 0, "what is in no version was not applied to the global model"
    assert tell(c, TimePassed(5.0)) == []


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_every_third_version_and_the_last_are_evaluated() -> None:
    c = begun(plan(evaluate_every=3, epochs=7))
    evaluated = []
    for n in range(1, 8):
        tell(c, *asked(float(n), 1), pushed(float(n), 1, n))
        for event in done(float(n), n):
            evaluated += [command.t for command in tell(c, event) if isinstance(command, EvaluateModel)]
    assert evaluated == [3, 6, 7]
    assert c.finished


def test_the_last_version_is_evaluated_once() -> None:
    c = begun(plan(evaluate_every=2, epochs=2))
    tell(c, *asked(0.0, 1, 2), pushed(1.0, 1), pushed(1.0, 2))
    assert tell(c, VersionPublished(1.0, 2)) == [EvaluateModel(2)]
    assert tell(c, UpdateMixed(1.0, 1), UpdateMixed(1.0, 2)) == [Finish("2 epochs")]


def test_versions_that_are_published_together_do_not_skip_an_evaluation() -> None:
    """A target might never be seen."""
    c = begun(plan(evaluate_every=2))
    tell(c, *asked(0.0, 1, 2, 3), pushed(1.0, 1), pushed(1.0, 2), pushed(1.0, 3))
    assert tell(c, VersionPublished(2.0, 3)) == [EvaluateModel(3)]


def test_fedbuff_counts_updates_and_versions() -> None:
    c = begun(plan(epochs=1), rule=fedbuff(2))
    tell(c, *asked(0.0, 1, 2, 3), pushed(1.0, 1), UpdateMixed(1.0, 1))
    assert (c.applied, c.t_decided) == (1, 0)
    tell(c, pushed(2.0, 2))
    assert (c.applied, c.t_decided) == (2, 1)
    assert outcome(tell(c, pushed(2.0, 3))) is Outcome.FINISHED


# --- how much to train -----------------------------------------------------------------------------------------------


def test_gamma_may_follow_t_and_past_evaluations() -> None:
    def gamma(t: int, past: Sequence[Evaluated]) -> float:
        return 0.1 / (t + 1) if not past else past[-1].metrics["loss"]

    c = begun(plan(), Scheduler(gamma=gamma))
    assert c.needs_evaluation
    assert sent(tell(c, *asked(0.0, 1)))[0].gamma == 0.1
    assert sent(tell(c, pushed(1.0, 1), *asked(1.0, 4)))[0].gamma == 0.1  # t counts what is published
    assert sent(tell(c, *done(1.0, 1), *asked(1.0, 2)))[0].gamma == 0.05
    assert sent(tell(c, Evaluated(2.0, 1, {"loss": 0.25}), *asked(2.0, 3)))[0].gamma == 0.25
    assert sent(tell(c, *asked(3.0, 2)))[0].gamma == 0.05  # a lease that is open stays as it is


def test_slower_devices_do_fewer_local_iterations() -> None:
    c = begun(plan(lease_s=1000.0), Scheduler(local_iterations_min=2, local_iterations_max=8))
    assert [lease.local_iterations for worker in (1, 2, 3) for lease in sent(tell(c, *asked(0.0, worker)))] == [8] * 3
    tell(c, pushed(8.0, 1, gradients=8), *done(8.0, 1))  # 1 s per iteration
    tell(c, pushed(16.0, 2, gradients=8), *done(16.0, 2))  # 2 s
    tell(c, pushed(160.0, 3, gradients=8), *done(160.0, 3))  # 20 s
    given = [sent(tell(c, *asked(200.0, worker)))[0].local_iterations for worker in (1, 2, 3, 4)]
    assert given == [8, 4, 2, 8]


# --- when something is wrong -----------------------------------------------------------------------------------------


def test_a_clock_that_goes_back_stops_the_run() -> None:
    c = begun(plan())
    tell(c, TimePassed(5.0))
    with pytest.raises(
        InvariantBroken, match=r"the clock went back from 5.0 to 4.5: TaskRequested\(at=4.5, worker=1\)"
    ):
        tell(c, *asked(4.5, 1))


@pytest.mark.parametrize("event", [VersionPublished(1.0, 1), VersionPublished(1.0, 0), UpdateMixed(1.0, 1)])
def test_a_data_plane_that_runs_ahead_stops_the_run(event: Event) -> None:
    c = begun(plan())
    with pytest.raises(InvariantBroken, match="broken after"):
        tell(c, *asked(0.0, 1), event)


def test_a_version_that_is_published_twice_stops_the_run() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1), pushed(1.0, 1), *done(1.0, 1))
    with pytest.raises(InvariantBroken, match="version 1 was decided on and is new"):
        tell(c, VersionPublished(2.0, 1))


def test_an_update_without_samples_raises_and_changes_nothing() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1))
    with pytest.raises(InvalidValue, match="at least one sample"):
        tell(c, pushed(1.0, 1, samples=0))
    assert tell(c, pushed(2.0, 1)) == applied(1, 2.0, leased(1, 1), t=1, staleness=0)


def test_the_story_of_a_task_is_told_from_its_lease_to_its_answer() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1, 2), HeartbeatArrived(1.0, 1), pushed(2.0, 1), *done(2.0, 1), pushed(3.0, 2), pushed(4.0, 1))
    story = invariants.story_of(c, 1)
    assert [line.split("(")[0] for line in story] == [
        "TaskRequested",
        "HeartbeatArrived",
        "UpdateArrived",
        "UpdateArrived",
    ]
    assert "SendTask(lease=Lease(task=1, worker=1" in story[0]
    assert "MixUpdate" in story[2]
    assert "repeated=True" in story[3]
    assert invariants.story_of(c, 99) == []
    assert c.latest(2) == [*c.latest(3)[1:]]
    assert c.latest(1)[0] == story[3]


def test_the_deadlines_of_tasks_that_are_over_are_forgotten() -> None:
    """A long run with short tasks and long leases keeps no list of all of them."""
    c = begun(plan(in_flight_max=1, lease_s=inf))
    for n in range(1, 2000):
        tell(c, *asked(0.0, 1), pushed(0.0, 1, n), *done(0.0, n))
    assert len(c.leases) == 0
    assert len(c.book.deadlines) < 600
