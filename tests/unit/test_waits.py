"""Since when a worker waits for a task."""

import json

from offbeat.core.rules import fedasync
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    FleetJoined,
    RequestEnded,
    SendTask,
    ServerRestarted,
    TaskRequested,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
)
from offbeat.protocol.plan import Plan
from offbeat.protocol.snapshot import restored, snapshot
from offbeat.protocol.waits import SAME_WAIT_S
from tests.unit.test_coordinator import tell

PLAN = Plan(in_flight_max=1, lease_s=1000.0)


def busy() -> Coordinator:
    """Worker 1 has the only task; worker 2 has joined."""
    c = Coordinator(fedasync(0.5), PLAN)
    tell(c, WorkerJoined(0.0, 1, 1), WorkerJoined(0.0, 2, 2), TaskRequested(0.0, 1))
    return c


def freed(c: Coordinator, at: float) -> float | None:
    """Worker 1 is done: since when the one that is given the next task had waited."""
    events = (UpdateArrived(at, 1, 1, 1, 1), VersionPublished(at, 1), UpdateMixed(at, 1))
    (sent,) = [command for event in events for command in c.handle(event) if isinstance(command, SendTask)]
    assert sent.lease.worker == 2
    return sent.asked_at


def test_a_task_says_since_when_its_worker_waited() -> None:
    c = busy()
    tell(c, TaskRequested(3.0, 2))
    assert freed(c, 10.0) == 3.0


def test_polls_that_follow_each_other_are_one_wait() -> None:
    c = busy()
    tell(c, TaskRequested(3.0, 2), RequestEnded(5.0, 2), TaskRequested(5.0 + SAME_WAIT_S, 2))
    assert freed(c, 20.0) == 3.0


def test_a_worker_that_was_away_waits_anew() -> None:
    c = busy()
    tell(c, TaskRequested(3.0, 2), RequestEnded(5.0, 2), TaskRequested(5.1 + SAME_WAIT_S, 2))
    assert freed(c, 20.0) == 5.1 + SAME_WAIT_S


def test_asking_twice_is_one_wait() -> None:
    c = busy()
    tell(c, TaskRequested(3.0, 2), TaskRequested(4.0, 2))
    assert freed(c, 10.0) == 3.0


def test_a_restart_ends_the_requests_and_not_the_wait() -> None:
    c = busy()
    tell(c, TaskRequested(3.0, 2), ServerRestarted(6.0), TaskRequested(7.0, 2))
    assert freed(c, 10.0) == 3.0


def test_one_that_left_and_came_back_waits_anew() -> None:
    c = busy()
    tell(c, TaskRequested(3.0, 2), WorkerLeft(4.0, 2), WorkerJoined(4.5, 2, 2), TaskRequested(5.0, 2))
    assert freed(c, 10.0) == 5.0


def test_a_fleet_waits_since_it_joined() -> None:
    (sent,) = [
        command
        for command in Coordinator(fedasync(0.5), PLAN).handle(FleetJoined(2.0, 5))
        if isinstance(command, SendTask)
    ]
    assert sent.asked_at == 2.0


def test_an_open_lease_that_is_told_again_was_not_asked_for() -> None:
    c = busy()
    (sent,) = tell(c, TaskRequested(4.0, 1))
    assert isinstance(sent, SendTask)
    assert sent.asked_at is None


def test_a_checkpoint_knows_who_waits_since_when() -> None:
    c = busy()
    tell(c, TaskRequested(3.0, 2), RequestEnded(5.0, 2))
    again = restored(json.loads(json.dumps(snapshot(c))), c.rule, c.plan)
    for one in (c, again):
        tell(one, TaskRequested(6.0, 2))
        assert freed(one, 10.0) == 3.0
