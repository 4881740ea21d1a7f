"""A worker that is not heard of loses its place to others, and may get its lease back; a run that is paused."""

import json
from dataclasses import replace
from functools import partial
from math import inf

import pytest

from offbeat.core.rules import fedasync, fedavg
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    EndSilence,
    Event,
    HeartbeatArrived,
    Lease,
    LeaseReturned,
    Outcome,
    ReleaseTask,
    RunPaused,
    RunResumed,
    SendTask,
    ServerRestarted,
    TaskRequested,
    TimePassed,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
    WakeAt,
    WorkerBarred,
    WorkerJoined,
    WorkerLeft,
)
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.protocol.snapshot import restored, snapshot

plan = partial(Plan, in_flight_max=1, lease_s=60.0, silent_s=6.0)


def begun(settings: Plan, scheduler: Scheduler | None = None) -> Coordinator:
    rule = fedavg(scheduler.group) if scheduler and scheduler.group else fedasync(0.5)
    return Coordinator(rule, settings, scheduler)


def tell(c: Coordinator, *events: Event) -> list[Command]:
    """Tell the coordinator everything; what it answered to the last, without wakings."""
    commands: list[Command] = []
    for event in events:
        commands = c.handle(event)
    return [command for command in commands if not isinstance(command, WakeAt)]


def asked(at: float, *workers: int) -> list[Event]:
    return [TaskRequested(at, worker) for worker in workers]


def leased(task: int, worker: int, at: float = 0.0, *, tau: int = 0, until: float | None = None) -> Lease:
    return Lease(task, worker, worker, 0, tau, at, at + 6.0 if until is None else until)


def pushed(at: float, worker: int, task: int) -> UpdateArrived:
    return UpdateArrived(at, worker, task, samples=1, gradients=1)


def mixed(at: float, sequence: int) -> list[Event]:
    return [VersionPublished(at, sequence), UpdateMixed(at, sequence)]


def sent(commands: list[Command]) -> list[int]:
    return [command.lease.worker for command in commands if isinstance(command, SendTask)]


def outcomes(commands: list[Command]) -> list[Outcome]:
    return [command.outcome for command in commands if isinstance(command, AnswerPush)]


def silent(settings: Plan) -> Coordinator:
    """Worker 1 had task 1, and was not heard of for 6 seconds."""
    c = begun(settings)
    tell(c, *asked(0.0, 1))
    assert tell(c, TimePassed(6.0)) == [ReleaseTask(leased(1, 1), revoked=False, silent=True)]
    return c


# --- the place -------------------------------------------------------------------------------------------------------


def test_the_place_of_a_silent_worker_goes_to_another_at_once() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1, 2))
    assert c.handle(HeartbeatArrived(5.0, 1)) == []
    assert tell(c, TimePassed(6.0)) == []
    assert tell(c, TimePassed(11.0)) == [
        ReleaseTask(leased(1, 1, until=11.0), revoked=False, silent=True),
        SendTask(leased(2, 2, at=11.0)),
    ]
    assert list(c.silent) == [1]


def test_its_late_push_is_judged_once() -> None:
    c = silent(plan())
    tell(c, *asked(7.0, 2))
    assert outcomes(tell(c, pushed(9.0, 1, 1))) == [Outcome.APPLIED]
    assert not c.silent
    again = tell(c, pushed(10.0, 1, 1))
    assert [(answer.outcome, answer.repeated) for answer in again if isinstance(answer, AnswerPush)] == [
        (Outcome.APPLIED, True)
    ]
    assert c.applied == 1


def test_a_device_that_is_silent_may_have_another_worker() -> None:
    c = begun(plan(in_flight_max=4))
    tell(c, WorkerJoined(0.0, 1, 7), WorkerJoined(0.0, 2, 7), *asked(0.0, 1, 2))
    assert sent(tell(c, TimePassed(6.0))) == [2]
    (given_away,) = tell(c, HeartbeatArrived(7.0, 1))  # the device has its task: one at a time
    assert given_away == EndSilence(Lease(1, 1, 7, 0, 0, 0.0, 6.0), resumed=False)


def test_32_dead_workers_cost_the_fleet_90_seconds_with_the_settings_of_a_served_run() -> None:
    c = begun(Plan(silent_s=90.0))
    tell(c, *asked(0.0, *range(32)))
    assert len(c.leases) == 32
    tell(c, *asked(1.0, *range(100, 132)))
    granted: list[int] = []
    wake, events = inf, 0
    commands = c.handle(TimePassed(1.0))
    while not granted and events < 10:
        wake = min([wake, *(command.at for command in commands if isinstance(command, WakeAt))])
        commands, wake = c.handle(TimePassed(wake if wake < inf else 90.0)), inf
        granted += sent(commands)
        events += 1
    assert sorted(granted) == list(range(100, 132))
    assert c.at == 90.0


def test_without_silence_a_lease_holds_its_place_until_its_time_is_over() -> None:
    c = begun(replace(plan(), silent_s=inf))
    tell(c, *asked(0.0, 1, 2))
    assert tell(c, TimePassed(59.0)) == []
    assert tell(c, TimePassed(60.0))[0] == ReleaseTask(leased(1, 1, until=60.0), revoked=False)
    assert tell(c, HeartbeatArrived(61.0, 1)) == []


@pytest.mark.parametrize("silent_s", [0.0, -1.0])
def test_a_silence_takes_time(silent_s: float) -> None:
    with pytest.raises(InvalidValue, match=r"silent_s is .* but must be > 0 seconds"):
        Plan(silent_s=silent_s)


# --- coming back -----------------------------------------------------------------------------------------------------


def test_a_heartbeat_in_time_gives_the_lease_back() -> None:
    c = silent(plan())
    assert tell(c, HeartbeatArrived(59.0, 1)) == [EndSilence(leased(1, 1, until=65.0), resumed=True)]
    assert (list(c.leases), list(c.silent), list(c.released)) == ([1], [], [])
    assert tell(c, *asked(59.0, 2)) == []  # it holds its place again
    assert tell(c, HeartbeatArrived(64.0, 1)) == []
    assert outcomes(tell(c, pushed(69.0, 1, 1))) == [Outcome.APPLIED]


def test_a_lease_that_is_back_can_be_lost_to_silence_again() -> None:
    c = silent(plan())
    tell(c, HeartbeatArrived(10.0, 1))
    assert tell(c, TimePassed(16.0)) == [ReleaseTask(leased(1, 1, until=16.0), revoked=False, silent=True)]
    assert tell(c, HeartbeatArrived(69.0, 1)) == [EndSilence(leased(1, 1, until=75.0), resumed=True)]


def test_after_lease_s_the_lease_is_over() -> None:
    c = silent(plan())
    assert tell(c, HeartbeatArrived(60.0, 1)) == [EndSilence(leased(1, 1), resumed=False)]
    assert (list(c.leases), list(c.silent), list(c.released)) == ([], [], [1])
    assert outcomes(tell(c, pushed(61.0, 1, 1))) == [Outcome.APPLIED]  # late, and judged


def test_a_place_that_was_given_away_is_not_given_back() -> None:
    c = silent(plan())
    tell(c, *asked(7.0, 2))
    assert tell(c, HeartbeatArrived(8.0, 1)) == [EndSilence(leased(1, 1), resumed=False)]
    tell(c, WorkerLeft(9.0, 2))
    assert tell(c, HeartbeatArrived(10.0, 1)) == []  # its first sign of life has decided
    assert outcomes(tell(c, pushed(11.0, 1, 1))) == [Outcome.APPLIED]


def test_a_silent_worker_that_asks_is_given_its_task_again() -> None:
    c = silent(plan())
    again = leased(1, 1, until=15.0)
    assert tell(c, *asked(9.0, 1)) == [EndSilence(again, resumed=True), SendTask(again)]


def test_a_silent_worker_that_asks_while_its_place_is_taken_waits_for_a_new_task() -> None:
    c = silent(plan())
    tell(c, *asked(7.0, 2))
    assert tell(c, *asked(9.0, 1)) == [EndSilence(leased(1, 1), resumed=False)]
    assert 1 in c.idle
    assert sent(tell(c, WorkerLeft(10.0, 2))) == [1]
    assert [lease.task for lease in c.leases.values()] == [3]


@pytest.mark.parametrize(
    "event",
    [WorkerLeft(8.0, 1), LeaseReturned(8.0, 1, 1), WorkerBarred(8.0, 1, "lies")],
    ids=lambda event: type(event).__name__,
)
def test_a_silent_worker_that_goes_or_is_barred_gets_nothing_back(event: Event) -> None:
    c = silent(plan())
    assert EndSilence(leased(1, 1), resumed=False) in tell(c, event)
    assert tell(c, HeartbeatArrived(9.0, 1)) == []
    assert (list(c.leases), list(c.silent), list(c.released)) == ([], [], [1])


def test_a_task_that_is_not_its_own_is_not_handed_back() -> None:
    c = silent(plan())
    assert tell(c, LeaseReturned(8.0, 2, 1)) == []
    assert list(c.silent) == [1]


def test_under_pace_a_lease_comes_back_only_where_every_lease_stays_in_bounds() -> None:
    bounded = plan(in_flight_max=4, staleness_policy="pace", staleness_max=2)
    for versions, resumed in ((2, True), (3, False)):
        c = silent(bounded)
        for n in range(1, versions + 1):
            tell(c, *asked(7.0, 2), pushed(7.0, 2, n + 1), *mixed(7.0, n))
        (end,) = tell(c, HeartbeatArrived(8.0, 1))
        assert isinstance(end, EndSilence)
        assert end.resumed == resumed


def test_under_pace_a_lease_that_is_back_is_the_oldest_again() -> None:
    c = silent(plan(in_flight_max=4, staleness_policy="pace", staleness_max=2, pace_wait_s=3.0))
    tell(c, *asked(7.0, 2), pushed(7.0, 2, 2), *mixed(7.0, 1), *asked(7.0, 2))
    tell(c, HeartbeatArrived(8.0, 1))
    assert list(c.leases) == [1, 3]
    assert tell(c, *asked(8.0, 3)) == []  # it would make task 1 too stale
    assert tell(c, TimePassed(11.0))[0] == ReleaseTask(c.released[1][0], revoked=True)


def test_in_a_group_a_lease_comes_back_while_its_version_is_the_newest() -> None:
    c = begun(plan(in_flight_max=9), Scheduler(group=2))
    tell(c, *asked(0.0, 1, 2), HeartbeatArrived(5.0, 2), TimePassed(6.0))
    assert tell(c, HeartbeatArrived(7.0, 1)) == [EndSilence(leased(1, 1, until=13.0), resumed=True)]
    tell(c, HeartbeatArrived(12.0, 2), TimePassed(13.0), *asked(13.0, 3), pushed(14.0, 2, 2), pushed(14.0, 3, 3))
    tell(c, VersionPublished(14.0, 1))
    assert tell(c, HeartbeatArrived(15.0, 1)) == [EndSilence(leased(1, 1, until=13.0), resumed=False)]


def test_a_restarted_server_gives_open_leases_their_time_anew_and_keeps_the_silent_ones() -> None:
    c = silent(plan(in_flight_max=2))
    tell(c, *asked(7.0, 2), ServerRestarted(10.0))
    assert tell(c, TimePassed(15.0)) == []
    assert tell(c, TimePassed(16.0)) == [ReleaseTask(leased(2, 2, at=7.0, until=16.0), revoked=False, silent=True)]
    assert list(c.silent) == [1, 2]


# --- pause -----------------------------------------------------------------------------------------------------------


def test_while_a_run_is_paused_no_task_is_given_out_and_what_is_open_is_judged() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1, 2), RunPaused(1.0))
    assert tell(c, *asked(1.0, 1)) == [SendTask(leased(1, 1))]  # its own, which is open
    assert outcomes(tell(c, pushed(2.0, 1, 1))) == [Outcome.APPLIED]
    assert tell(c, *mixed(2.0, 1), *asked(2.0, 1), TimePassed(100.0)) == []
    assert sent(tell(c, RunResumed(101.0))) in ([1], [2])


def test_a_paused_run_gives_a_silent_worker_its_own_lease_back() -> None:
    c = silent(plan())
    assert tell(c, RunPaused(7.0), HeartbeatArrived(8.0, 1)) == [EndSilence(leased(1, 1, until=14.0), resumed=True)]


def test_a_paused_run_still_ends_in_time() -> None:
    c = begun(plan(until_s=20.0))
    tell(c, *asked(0.0, 1), RunPaused(1.0), TimePassed(20.0))
    assert c.finished


def test_a_paused_run_still_notices_who_is_silent() -> None:
    c = begun(plan(in_flight_max=3, staleness_policy="pace", staleness_max=1, pace_wait_s=2.0))
    tell(c, *asked(0.0, 1, 2, 3))  # one is held back by the others
    assert c.handle(RunPaused(1.0)) == []
    assert c.handle(TimePassed(2.0)) == [WakeAt(6.0)]  # nobody is revoked for holding others back
    assert c.handle(TimePassed(4.0)) == []
    assert len(tell(c, TimePassed(6.0))) == 2
    assert not c.leases


# --- by way of a checkpoint ------------------------------------------------------------------------------------------


def twin(c: Coordinator) -> Coordinator:
    state = json.loads(json.dumps(snapshot(c), allow_nan=False))
    return restored(state, c.rule, c.plan, c.scheduler)


def test_silence_and_pause_survive_a_checkpoint() -> None:
    c = silent(plan())
    tell(c, RunPaused(7.0))
    again = twin(c)
    assert (again.silent, again.dispatcher.paused) == (c.silent, True)
    assert again.handle(HeartbeatArrived(8.0, 1)) == c.handle(HeartbeatArrived(8.0, 1))
    assert snapshot(again) == snapshot(c)


def test_a_state_of_before_there_was_silence_or_pause_is_restored() -> None:
    c = begun(plan())
    tell(c, *asked(0.0, 1))
    state = snapshot(c)
    del state["book"]["silent"], state["rest"]["paused"]
    again = restored(state, c.rule, c.plan, c.scheduler)
    assert (again.leases, again.silent, again.dispatcher.paused) == (c.leases, {}, False)


def test_after_a_heartbeat_a_restored_coordinator_asks_to_be_woken_when_the_live_one_does() -> None:
    c = begun(plan(in_flight_max=2, retry_after_s=1.0))
    tell(c, *asked(0.0, 1), HeartbeatArrived(2.0, 1))
    c.woken_at = inf  # the waking that it asked for first has come, for whatever reason
    again = twin(c)
    assert c.handle(TimePassed(3.0)) == again.handle(TimePassed(3.0)) == [WakeAt(8.0)]


def test_a_lease_whose_time_is_shortened_is_missed_by_nobody() -> None:
    """A run that an earlier version left has leases with the time of before."""
    c = begun(plan())
    tell(c, *asked(0.0, 1))
    c.book.extend(1, 100.0)
    c.woken_at = inf
    assert c.handle(ServerRestarted(1.0)) == [WakeAt(7.0)]
    assert len(tell(c, TimePassed(7.0))) == 1
