"""Workers that join at the same time wait for the disk together, and are given numbers and devices of their own."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.protocol.messages import WorkerJoined
from offbeat.server.sessions import WorkerSessions
from tests.server.serving import PATIENCE_S, Running, Worker, serving
from tests.server.speaking import until

TOGETHER = 7


@contextmanager
def slow_commit(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While this is open, the driver waits for the disk with what one worker's joining has told it."""
    ledger, begun, over = running.server.run.ledger, threading.Event(), threading.Event()
    real = ledger.flush

    def flush() -> None:
        if any(row.kind == "joined" for row in ledger._waiting):  # else it is the clock's
            begun.set()
            assert over.wait(PATIENCE_S)
        real()

    monkeypatch.setattr(ledger, "flush", flush)
    first = threading.Thread(target=Worker, args=(running, "first"))
    first.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield
    finally:
        over.set()
        first.join()


def waiting(running: Running) -> int:
    return running.server.run.driver._queue.qsize()


def test_workers_that_join_meanwhile_wait_for_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as running, ThreadPoolExecutor(TOGETHER) as pool:
        with slow_commit(running, monkeypatch):
            coming = [pool.submit(Worker, running, f"w{number}") for number in range(TOGETHER)]
            until(lambda: waiting(running), lambda many: many >= TOGETHER)
        workers = [one.result() for one in coming]
        assert {worker.number for worker in workers} == set(range(1, 1 + TOGETHER))
        assert {worker.joined["device"] for worker in workers} == set(range(1, 1 + TOGETHER)), "each has its own"
        assert workers[-1].work().status == 200


def test_two_processes_of_one_name_join_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as running, ThreadPoolExecutor(2) as pool:
        with slow_commit(running, monkeypatch):
            coming = [pool.submit(Worker, running, "same") for _ in range(2)]
            until(lambda: waiting(running), lambda many: many >= 1)
        both = [one.result() for one in coming]
        assert [worker.number for worker in both] == [1, 1]
        sessions = running.server.context.sessions
        valid = [sessions.find(worker.joined["session"]) is not None for worker in both]
        assert sorted(valid) == [False, True], "the later one has shut out the other"


def test_what_is_promised_to_one_that_joins_is_free_again_where_it_does_not() -> None:
    sessions = WorkerSessions()
    with sessions.coming("a", sessions.device("a", 2)):
        assert sessions.device("b", 2) == 1
        assert sessions.has_room("b", 2)
        assert not sessions.has_room("b", 1)
    assert sessions.device("b", 2) == 0
    assert sessions.has_room("b", 1)


def test_one_that_has_joined_is_counted_once() -> None:
    sessions = WorkerSessions()
    with sessions.coming("a", 0):
        sessions.take(WorkerJoined(0.0, sessions.number("a"), 0, "a", "digest"))
        assert sessions.has_room("b", 2)
    assert [sessions.has_room("b", most) for most in (1, 2)] == [False, True]
    assert sessions.has_room("a", 1), "who was there may come back"
    assert sessions.device("b", 2) == 1
