"""The scheduler `shuffled`: every device once a round; devices at work are waited for, and none that is gone."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from math import inf

import pytest

from offbeat.core.rules import delta, fedavg
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.idle import PICKS_MAX
from offbeat.protocol.messages import (
    Command,
    Event,
    FleetJoined,
    HeartbeatArrived,
    LeaseReturned,
    RequestEnded,
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
from offbeat.protocol.shuffled import Shuffled
from offbeat.protocol.snapshot import restored, snapshot
from offbeat.protocol.waits import SAME_WAIT_S

SHUFFLED = Scheduler("shuffled")


def rounds_of(tasks: list[int], size: int) -> list[tuple[int, ...]]:
    """The tasks, a round's worth at a time."""
    return [tuple(tasks[begin : begin + size]) for begin in range(0, len(tasks), size)]


def everybody(_: int) -> bool:
    return True


def idle(seed: int, workers: int = 3) -> Shuffled:
    """Devices that are never at work for longer than a moment."""
    waiting = Shuffled(seed, lambda worker: worker, lambda _: False)
    for worker in range(workers):
        waiting.add(worker)
    return waiting


def take(waiting: Shuffled, at: float = 0.0) -> int:
    """The next task goes to this worker, which does it at once and asks again."""
    worker = waiting.pick(everybody, at)
    assert worker is not None
    assert worker not in waiting
    waiting.granted(worker)
    waiting.add(worker)
    return worker


class Fleet:
    """A coordinator and workers that answer when they are told to."""

    def __init__(self, plan: Plan, workers: int = 3, scheduler: Scheduler = SHUFFLED, seed: int = 0) -> None:
        self.away: set[int] = set()
        rule = fedavg(scheduler.group) if scheduler.group else delta(0.5)
        self.c = Coordinator(rule, plan, scheduler, seed=seed, available=lambda worker, _: worker not in self.away)
        self.tasks: list[int] = []
        """The devices, in the order of their tasks."""
        self.open: dict[int, int] = {}
        self.wake_at = inf
        self.tell(FleetJoined(0.0, workers))

    def tell(self, event: Event) -> list[Command]:
        commands = self.c.handle(event)
        for command in commands:
            if isinstance(command, SendTask):
                self.tasks.append(command.lease.device)
                self.open[command.lease.worker] = command.lease.task
            elif isinstance(command, WakeAt):
                self.wake_at = command.at
        return commands

    def push(self, at: float, worker: int) -> None:
        """An update of this worker is mixed; the worker does not ask again."""
        self.tell(UpdateArrived(at, worker, self.open.pop(worker), 1, 1))
        if self.c.t_decided > self.c.t:
            self.tell(VersionPublished(at, self.c.t_decided))
        self.tell(UpdateMixed(at, self.c.applied))

    def do(self, at: float, worker: int) -> None:
        """It pushes, and asks for its next task."""
        self.push(at, worker)
        self.tell(TaskRequested(at, worker))


# --- the order -------------------------------------------------------------------------------------------------------


def test_six_tasks_of_three_devices_are_two_permutations() -> None:
    waiting = idle(seed=0)
    assert [take(waiting) for _ in range(6)] == [2, 0, 1, 2, 1, 0]


def test_every_permutation_comes_about_as_often() -> None:
    waiting = idle(seed=2)
    rounds = Counter(rounds_of([take(waiting) for _ in range(3 * 6000)], 3))
    assert rounds.keys() == set(permutations(range(3)))
    assert sum((count - 1000) ** 2 / 1000 for count in rounds.values()) < 20.5  # chi-square, 5 degrees, p = 0.001


def test_the_order_is_keyed_by_the_seed() -> None:
    first, same, other = ([take(one) for _ in range(60)] for one in (idle(1, 10), idle(1, 10), idle(2, 10)))
    assert first == same != other


@pytest.mark.parametrize("in_flight_max", [1, 2, 3, 4])
def test_after_m_times_n_tasks_every_device_had_m(in_flight_max: int) -> None:
    fleet = Fleet(Plan(in_flight_max), workers=4)
    for at in range(1, 101):
        fleet.do(float(at), next(iter(fleet.open)))
    assert all(set(one_round) == set(range(4)) for one_round in rounds_of(fleet.tasks[:100], 4))


def test_a_fast_device_waits_at_the_end_of_the_round_and_not_before() -> None:
    fleet = Fleet(Plan(2), workers=3)
    slow, fast = fleet.tasks
    fleet.do(1.0, fast)  # the third device has its turn now
    third = fleet.tasks[-1]
    fleet.do(2.0, third)  # a new round, in which the slow one is still to come
    assert len(fleet.tasks) == 4
    fleet.do(3.0, fleet.tasks[-1])
    assert len(fleet.tasks) == 5
    fleet.do(4.0, fleet.tasks[-1])  # of the second round, only the slow one is left
    assert (len(fleet.tasks), fleet.wake_at) == (5, 3600.0)
    fleet.do(100.0, slow)
    assert (fleet.tasks[5], len(fleet.tasks)) == (slow, 7)


def test_a_million_workers_wait_and_a_round_costs_no_more_than_its_tasks() -> None:
    waiting = idle(seed=3, workers=1_000_000)
    assert len({take(waiting) for _ in range(2000)}) == 2000


# --- nobody is waited for that is gone -------------------------------------------------------------------------------


def stuck(**limits: float) -> tuple[Fleet, int, int]:
    """Two devices; one is at work, and the other has had its turn in every round but waits for that one's."""
    fleet = Fleet(Plan(2, **limits), workers=2)  # type: ignore[arg-type]
    dead, other = fleet.tasks
    fleet.do(1.0, other)
    fleet.do(2.0, other)
    assert (fleet.tasks, len(fleet.c.idle)) == ([dead, other, other], 1)
    return fleet, dead, other


@pytest.mark.parametrize("seed", range(3))
def test_a_dead_device_holds_the_round_until_its_lease_is_over(seed: int) -> None:
    fleet = Fleet(Plan(2, lease_s=10.0), workers=2, seed=seed)
    dead, other = fleet.tasks
    for at in (1.0, 2.0):
        fleet.do(at, other)
    assert fleet.wake_at == 10.0
    fleet.tell(TimePassed(10.0))
    for at in range(11, 31):
        fleet.do(float(at), other)
    assert fleet.tasks == [dead, *([other] * 23)]


def test_a_silent_device_is_not_waited_for_and_has_its_turn_when_it_is_back() -> None:
    fleet, dead, other = stuck(lease_s=100.0, silent_s=5.0)
    fleet.tell(TimePassed(5.0))
    assert fleet.tasks[3:] == [other]
    fleet.tell(HeartbeatArrived(6.0, 1))  # its lease is open again, so that it is waited for
    fleet.do(7.0, other)
    assert fleet.tasks[4:] == []
    fleet.do(8.0, dead)
    assert fleet.tasks[4:] == [dead, other]


@pytest.mark.parametrize(
    "goodbye",
    [
        lambda worker: WorkerLeft(3.0, worker),
        lambda worker: WorkerBarred(3.0, worker, "an operator said so"),
        lambda worker: LeaseReturned(3.0, worker, 1),
    ],
)
def test_a_device_that_is_gone_is_not_waited_for(goodbye: Callable[[int], Event]) -> None:
    fleet, dead, other = stuck()
    fleet.tell(goodbye(dead))
    assert fleet.tasks[3:] == [other]


def test_a_device_that_pushed_is_expected_for_a_moment() -> None:
    fleet, dead, other = stuck()
    fleet.push(3.0, dead)
    assert (len(fleet.tasks), fleet.wake_at) == (3, 3.0 + SAME_WAIT_S)
    fleet.tell(TaskRequested(4.0, dead))
    assert fleet.tasks[3:] == [dead, other]


def test_a_device_that_pushed_and_does_not_come_back_is_passed_over() -> None:
    fleet, dead, other = stuck()
    fleet.push(3.0, dead)
    fleet.tell(TimePassed(3.0 + SAME_WAIT_S))
    assert fleet.tasks[3:] == [other]


def test_a_poll_that_ran_out_and_begins_again_costs_no_turn() -> None:
    fleet = Fleet(Plan(1), workers=3)
    first = fleet.tasks[0]
    second, third = {0, 1, 2} - {first}
    fleet.tell(RequestEnded(1.0, third))
    fleet.do(2.0, first)
    fleet.do(2.5, second)
    assert fleet.tasks == [first, second]
    fleet.tell(TaskRequested(3.0, third))
    assert fleet.tasks == [first, second, third]


def test_after_a_restart_the_round_waits_for_those_who_waited() -> None:
    fleet = Fleet(Plan(1), workers=3)
    first = fleet.tasks[0]
    fleet.tell(ServerRestarted(1.0))
    fleet.do(2.0, first)
    assert (fleet.tasks, fleet.wake_at) == ([first], 1.0 + SAME_WAIT_S)
    other = (first + 1) % 3
    fleet.tell(TaskRequested(3.0, other))
    fleet.do(5.0, other)
    fleet.tell(TimePassed(6.0))
    assert fleet.tasks[:2] == [first, other]
    assert len(fleet.tasks) == 3  # the third did not come: a new round


def test_a_device_that_is_not_available_is_looked_at_again_and_then_passed_over() -> None:
    fleet = Fleet(Plan(1), workers=3)
    first = fleet.tasks[0]
    asleep, awake = {0, 1, 2} - {first}
    fleet.away = {asleep}
    fleet.do(1.0, first)
    assert fleet.tasks == [first, awake]
    fleet.away = set()
    fleet.do(2.0, awake)  # at the end of the round it is there
    assert fleet.tasks == [first, awake, asleep]
    fleet.away = {asleep}
    for at in range(3, 13):
        fleet.do(float(at), fleet.tasks[-1])
    assert set(fleet.tasks[3:]) == {first, awake}
    fleet.away = set()
    for at in range(13, 19):
        fleet.do(float(at), fleet.tasks[-1])
    assert 2 <= fleet.tasks[-6:].count(asleep) <= 3, "it makes up for nothing"


def test_nobody_available_costs_a_bounded_search_and_nobody_is_forgotten() -> None:
    waiting, asked = idle(seed=4, workers=1000), Counter[int]()

    def away(worker: int) -> bool:
        asked[worker] += 1
        return False

    assert waiting.pick(away, 0.0) is None
    assert asked.total() == PICKS_MAX
    while waiting.pick(lambda worker: worker == 7, 0.0) is None:
        pass
    assert len(waiting) == 999


def test_whoever_joins_later_takes_part_from_then_on() -> None:
    fleet = Fleet(Plan(1), workers=2)
    for at in range(1, 11):
        fleet.do(float(at), fleet.tasks[-1])
    for event in (WorkerJoined(11.0, 2, 2), TaskRequested(11.0, 2)):
        fleet.tell(event)
    for at in range(12, 24):
        fleet.do(float(at), fleet.tasks[-1])
    assert 3 <= fleet.tasks[-12:].count(2) <= 5


# --- devices with several workers, and groups ------------------------------------------------------------------------


def test_the_turn_is_the_devices_whichever_worker_has_it() -> None:
    fleet = Fleet(Plan(1), workers=0)
    for worker, device in enumerate((0, 0, 1, 1)):
        fleet.tell(WorkerJoined(0.0, worker, device))
        fleet.tell(TaskRequested(0.0, worker))
    for at in range(1, 12):
        fleet.do(float(at), next(iter(fleet.open)))
    assert fleet.tasks[0] == 0  # who came first
    assert all(set(one_round) == {0, 1} for one_round in rounds_of(fleet.tasks, 2))


def test_groups_go_through_all_devices_before_any_comes_again() -> None:
    fleet = Fleet(Plan(5), workers=5, scheduler=Scheduler("shuffled", group=2))
    for at in range(1, 41):
        fleet.do(float(at), next(iter(fleet.open)))
    assert all(set(one_round) == set(range(5)) for one_round in rounds_of(fleet.tasks[:40], 5))


# --- a checkpoint ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", range(0, 40, 3))
def test_a_restored_coordinator_goes_on_with_the_same_order(moment: int) -> None:
    plan = Plan(3)
    fleet = Fleet(plan, workers=7, seed=5)
    for at in range(1, 60):
        if at == moment + 1:
            state = json.loads(json.dumps(snapshot(fleet.c), allow_nan=False))
            again = restored(state, fleet.c.rule, plan, SHUFFLED, seed=5, available=fleet.c.dispatcher.available)
            assert snapshot(again) == snapshot(fleet.c)
            whole, fleet.c = fleet.c, again
            assert whole is not again
        fleet.away = {at % 7, at % 5}
        fleet.do(float(at), list(fleet.open)[at % len(fleet.open)])
    uninterrupted = Fleet(plan, workers=7, seed=5)
    for at in range(1, 60):
        uninterrupted.away = {at % 7, at % 5}
        uninterrupted.do(float(at), list(uninterrupted.open)[at % len(uninterrupted.open)])
    assert fleet.tasks == uninterrupted.tasks
