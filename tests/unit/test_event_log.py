"""The log of events: the rows of the ledger as lines, and that it never stands in a run's way."""

import errno
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from math import inf, isinf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import (
    AnswerPush,
    BadUpdateArrived,
    Command,
    Decision,
    Evaluated,
    Event,
    Finish,
    FleetJoined,
    HeartbeatArrived,
    Lease,
    LeaseReturned,
    Outcome,
    Quarantine,
    ReleaseTask,
    RequestEnded,
    SendTask,
    TaskRequested,
    TimePassed,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
    WorkerJoined,
    WorkerLeft,
    WorkerReadmitted,
)
from offbeat.server.event_log import DROPPED, EventLog
from offbeat.storage import rows
from offbeat.storage.ledger import CHATTER, Ledger, Observer
from offbeat.storage.row_shapes import NewRow, RowShape
from offbeat.storage.rows import Row, lost_row

PATIENCE_S = 30.0
LEASE = Lease(7, 3, 5, 2, 11, 1 / 3, inf, None, 0.1)
PLAIN = Lease(8, 4, 6, 0, 11, 0.5, 9.5)
APPLIED = Decision(1, 2 / 3, LEASE, Outcome.APPLIED, 12, 0, Mix(0.1 + 0.2, 1 - 1 / 3, 5e-324, False), 50, 10)
REFUSED = Decision(2, 0.75, PLAIN, Outcome.TOO_STALE, 13, 9, None, 50, 10)
HAPPENED: list[tuple[Event, list[Command]]] = [
    (FleetJoined(0.0, 9), [SendTask(LEASE), SendTask(PLAIN)]),
    (WorkerJoined(0.1, 20, 3, 'who "am"\nI', "a secret's digest"), []),
    (TaskRequested(0.2, 20), []),
    (RequestEnded(0.2, 20), []),
    (HeartbeatArrived(0.3, 7), [ReleaseTask(LEASE, revoked=True), ReleaseTask(PLAIN, revoked=False)]),
    (UpdateArrived(2 / 3, 3, 7, 50, 10, distance=nan), [AnswerPush(3, 7, Outcome.APPLIED, APPLIED)]),
    (UpdateArrived(0.7, 4, 8, 50, 10, digest="ab"), [AnswerPush(4, 8, Outcome.TOO_STALE, REFUSED)]),
    (UpdateArrived(0.7, 4, 8, 50, 10), [AnswerPush(4, 8, Outcome.TOO_STALE, REFUSED, repeated=True)]),
    (UpdateArrived(0.7, 4, 9, 50, 10), [AnswerPush(4, 9, Outcome.BUSY, retry_after_s=1.0)]),
    (UpdateArrived(0.7, 4, 99, 50, 10, finite=False, distance=inf), [AnswerPush(4, 99, Outcome.UNKNOWN_TASK)]),
    (UpdateArrived(0.7, 5, 8, 50, 10), [AnswerPush(5, 8, Outcome.NOT_YOURS)]),
    (BadUpdateArrived(0.8, 4, 8, "no model\n"), [Quarantine(4, "five bad updates")]),
    (UpdateMixed(0.9, 1), []),
    (VersionPublished(0.9, 12), []),
    (Evaluated(1.0, 12, {'a "name"': 0.1, "loss": nan}), []),
    (LeaseReturned(1.1, 3, 7), []),
    (WorkerReadmitted(1.2, 4), []),
    (WorkerLeft(1.3, 4), []),
    (TimePassed(1.4), [Finish("12 epochs")]),
]
"""One of almost everything that a ledger can hold."""


@pytest.fixture
def observers() -> list[Observer]:
    """Those who hear of every transaction of `ledger`."""
    return []


@pytest.fixture
def ledger(tmp_path: Path, observers: list[Observer]) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", verbose=True, observers=observers) as ledger:
        yield ledger


def record(ledger: Ledger, happened: Sequence[tuple[Event, list[Command]]] = HAPPENED) -> None:
    for event, commands in happened:
        ledger.record(event, commands)
    ledger.flush()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_logged(row: Row) -> dict[str, Any]:
    """What a line about this row must say, by other means."""
    facts = {name: value for name, value in row._asdict().items() if value is not None}
    if "detail" in facts:
        facts["detail"] = json.loads(facts["detail"])
        facts["detail"].pop("session", None)
    for name, value in facts.items():
        if isinstance(value, float) and (isnan(value) or isinf(value)):
            facts[name] = str(value)
    return facts


def test_lines_are_the_rows_of_the_ledger(ledger: Ledger, observers: list[Observer], tmp_path: Path) -> None:
    log = EventLog.open(str(tmp_path / "events.jsonl"), run="r1")
    observers.append(log.written)
    record(ledger, HAPPENED[:4])
    record(ledger, HAPPENED[4:])
    ledger.add(lost_row(2.0, 7, 1))
    ledger.flush()
    log.close()
    told = lines(tmp_path / "events.jsonl")
    assert [line.pop("run") for line in told] == ["r1"] * len(told)
    assert all(line.pop("logged_at").endswith("+00:00") for line in told)
    assert told == [as_logged(row) for row in ledger.rows() if row.kind not in CHATTER]
    assert {line["kind"] for line in told} >= {"decided", "lost", "finished", "bad_update"}
    assert "digest" not in json.dumps([line for line in told if line["kind"] == "joined"])


def test_every_shape_has_a_known_kind_and_known_columns() -> None:
    named = [value for value in vars(rows).values() if isinstance(value, RowShape | tuple | dict)]
    flat = [found for value in named for found in (value.values() if isinstance(value, dict) else [value])]
    flat = [found for value in flat for found in (value if isinstance(value, tuple) else [value])]
    shapes = [found for found in flat if isinstance(found, RowShape)]
    assert {shape.kind for shape in shapes} == set(rows.KINDS)
    for shape in shapes:
        assert list(NewRow(shape, (None,) * len(shape.columns)).facts()) == list(shape.columns)
        assert set(shape.columns) < set(Row._fields)


def test_a_file_is_appended_to(ledger: Ledger, observers: list[Observer], tmp_path: Path) -> None:
    (tmp_path / "log").write_text('{"kind": "before"}\n')
    log = EventLog.open(str(tmp_path / "log"))
    observers.append(log.written)
    record(ledger, HAPPENED[:1])
    log.close()
    assert [line["kind"] for line in lines(tmp_path / "log")] == ["before", "fleet_joined", "leased", "leased"]
    assert "run" not in lines(tmp_path / "log")[1]


def test_standard_error_is_a_place_too(
    ledger: Ledger, observers: list[Observer], capfd: pytest.CaptureFixture[str]
) -> None:
    log = EventLog.open("-")
    observers.append(log.written)
    record(ledger, HAPPENED[:1])
    log.close()
    assert [json.loads(line)["sequence"] for line in capfd.readouterr().err.splitlines()] == [1, 2, 3]
    os.fstat(2)  # which is not ours to close


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="Is a directory; give a file, or - for stderr"):
        EventLog.open(str(tmp_path))


def entries(count: int) -> list[NewRow]:
    return [rows.EVENTS[VersionPublished](VersionPublished(t / 2, t)) for t in range(count)]


def test_nobody_waits_for_a_reader_that_does_not_read() -> None:
    ours, theirs = os.pipe()
    log = EventLog(theirs, waiting_max=10)
    for _ in range(2000):  # the pipe holds some of them, the queue ten, and the thread what it took
        log.written(entries(10), 10)
    read: list[bytes] = []

    def read_all() -> None:
        while data := os.read(ours, 1 << 16):
            read.append(data)

    thread = threading.Thread(target=read_all)
    thread.start()
    log.close()
    thread.join(PATIENCE_S)
    os.close(ours)
    told = [json.loads(line) for line in b"".join(read).splitlines()]
    dropped = [line["count"] for line in told if line["kind"] == DROPPED]
    published = [line for line in told if line["kind"] == "published"]
    assert dropped, "the queue was full"
    assert sum(dropped) + len(published) == 20_000


class Disk:
    """Lets the log write, a few bytes, or nothing."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self.refused = threading.Event()
        self._write = os.write
        patch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            self.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        size, self.room = self._write(descriptor, data[: self.room]), 0
        return size


@pytest.mark.parametrize(("room", "whole"), [(25, 0), (120, 1)])
def test_what_could_not_be_written_is_counted_and_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int, whole: int
) -> None:
    disk = Disk(monkeypatch)
    log = EventLog.open(str(tmp_path / "log"))
    disk.room = room
    with caplog.at_level(logging.WARNING, "offbeat.server"):
        for _ in range(3):
            log.written(entries(2), 2)
            assert disk.refused.wait(PATIENCE_S)
            disk.refused.clear()
        disk.room = None
        log.written(entries(1), 3)
        log.close()
    told = (tmp_path / "log").read_text().splitlines()
    torn = told.pop(whole)
    assert len("\n".join([*told[:whole], torn])) == room
    assert [json.loads(line)["kind"] for line in told] == ["published"] * (whole + 1) + [DROPPED]
    assert json.loads(told[-1])["count"] == 6 - whole, "the torn one is missing, too"
    assert [record.getMessage() for record in caplog.records] == [
        "events cannot be logged now: No space left on device"
    ]


def test_the_end_comes_once(tmp_path: Path) -> None:
    log = EventLog.open(str(tmp_path / "log"))
    log.close()
    log.close()
    assert (tmp_path / "log").read_text() == ""
