"""How updates come in: refused before they are sent, cut and appended, stalled, superseded, and on a full disk."""

import errno
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import OffbeatError
from offbeat.protocol.messages import MixUpdate
from offbeat.server import driver
from offbeat.server.body_receiver import PIECE
from offbeat.server.update_store import Upload
from offbeat.server.uploads import UPLOADS
from offbeat.server.verify import verify
from offbeat.storage.checkpoints import Checkpoints
from offbeat.storage.disk import Disk, Output
from tests.server.serving import PATIENCE_S, TASK, Answered, Running, Worker, packed, serving
from tests.server.speaking import Line, file_of, head, ones, put, refused, settled, sha256, until, untouched

NAMES = count()
ROOM = {"tasks_per_device": 1000, "in_flight_max": 8000, "epochs": 1_000_000, "evaluate_every": 1_000_000}
LARGE = TASK.replace("np.zeros(6, np.float32)", "np.zeros(1_000_000, np.float32)")
DATA = file_of(ones())
EXPECT: dict[str, Any] = {"Expect": "100-continue"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for whatever needs no setting of its own."""
    with serving(tmp_path_factory.mktemp("server"), ROOM) as running:
        yield running
        until(lambda: not len(running.server.app[UPLOADS]))
        assert Worker(running, "last").work().status == 200
    assert verify(running.folder)["agrees"]


@pytest.fixture
def worker(running: Running) -> Worker:
    return Worker(running, f"w{next(NAMES)}")


def offset(worker: Worker, task: int) -> int:
    answer = worker.running.call("GET", f"/v1/tasks/{task}/update", headers=worker.session)
    return int(answer.json["offset"])


def cut_after(worker: Worker, task: int, data: bytes, k: int) -> None:
    """Send k bytes and hang up; back when the server has noticed."""
    running = worker.running
    with Line(running, put(worker, task, data, **EXPECT)) as line:
        assert line.head()[0] == 100
        line.send(data[:k])
        for _ in range(2):  # whoever comes later is heard later: by now the bytes have been read
            running.call("GET", "/v1/health")
    until(lambda: not len(running.server.app[UPLOADS]))


def append(worker: Worker, task: int, data: bytes, k: int, **changes: Any) -> Answered:
    """The rest of it."""
    facts = {"Offbeat-Offset": k, "Offbeat-Size": len(data), "Offbeat-Digest": sha256(data), **changes}
    return worker.push(task, data[k:], **facts)


# --- before the body -------------------------------------------------------------------------------------------------


def test_the_body_is_asked_for_when_it_is_wanted(running: Running, worker: Worker) -> None:
    with Line(running, put(worker, worker.lease()["task"], DATA, **EXPECT)) as line:
        assert line.head() == (100, {})
        assert line.send(DATA).answer().json["outcome"] == "applied"
        assert line.send(head("GET", "/v1/health")).answer().status == 200, "the connection goes on"


@pytest.mark.parametrize("expect", ["100-Continue", "100-CONTINUE"])
def test_letters_may_be_large(running: Running, worker: Worker, expect: str) -> None:
    with Line(running, put(worker, worker.lease()["task"], DATA, Expect=expect)) as line:
        assert line.head()[0] == 100
        assert line.send(DATA).answer().status == 200


def test_a_refusal_comes_before_the_body(running: Running, worker: Worker) -> None:
    other, task = Worker(running, f"w{next(NAMES)}"), worker.lease()["task"]
    cases: list[tuple[Worker, int, dict[str, Any], int, str]] = [
        (worker, 999_999, {}, 404, "unknown_task"),
        (other, task, {}, 403, "not_yours"),
        (worker, task, {"Offbeat-Session": "0-x"}, 401, "replaced"),
        (worker, task, {"Offbeat-Protocol": "2"}, 426, "wrong_version"),
        (worker, task, {"Offbeat-Samples": "0"}, 400, "bad_request"),
        (worker, task, {"Offbeat-Size": 10**9}, 413, "too_long"),
        (worker, task, {"Offbeat-Offset": 5, "Offbeat-Size": len(DATA) + 5}, 409, "wrong_offset"),
    ]
    for who, number, changes, status, error in cases:
        with untouched(running), Line(running, put(who, number, DATA, **EXPECT, **changes)) as line:
            answer = line.answer()
            refused(answer, status, error)
            assert answer.headers["Connection"] == "close", "what is sent next must not be taken for the body"


def test_an_answered_push_gets_its_answer_before_the_body(running: Running, worker: Worker) -> None:
    task = worker.lease()["task"]
    first = worker.push(task, DATA).json
    with untouched(running), Line(running, put(worker, task, DATA, **EXPECT)) as line:
        answer = line.answer()
        assert (answer.status, answer.json | {"head": ""}) == (200, first | {"repeated": True, "head": ""})
        assert answer.headers["Connection"] == "close"


def test_a_full_queue_is_said_before_the_body_and_what_arrived_need_not_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, {**ROOM, "queue_max": 1, "retry_after_s": 2.0}) as running:
        one, two, three = (Worker(running, name) for name in ("one", "two", "three"))
        first, second, third = (w.lease()["task"] for w in (one, two, three))
        mixer, gate = running.server.run.mixer, threading.Event()
        apply = mixer.apply
        monkeypatch.setattr(mixer, "apply", lambda orders: gate.wait(PATIENCE_S) and apply(orders))
        with Line(running, put(two, second, DATA, **EXPECT)) as early:
            assert early.head()[0] == 100  # there was room
            assert one.push(first, DATA).status == 200
            busy = early.send(DATA).answer()
        assert refused(busy, 429, "busy")["retry_after_s"] >= 2
        with Line(running, put(three, third, DATA, **EXPECT)) as line:
            refused(line.answer(), 429, "busy")
        assert running.status()["queued"] == 1
        gate.set()
        settled(running)
        with Line(running, put(two, second, DATA, **EXPECT)) as line:
            assert line.answer().json["outcome"] == "applied", "it is there: nothing is sent"
        settled(running)
        assert three.push(third, DATA).status == 200
        assert settled(running)["applied"] == 3
    assert verify(running.folder)["agrees"]


# --- cut and appended ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 8, 100, len(DATA) - 1])
def test_a_cut_upload_is_appended_to(running: Running, worker: Worker, k: int) -> None:
    task = worker.lease()["task"]
    assert offset(worker, task) == 0
    with untouched(running):
        cut_after(worker, task, DATA, k)
        there = offset(worker, task)
        assert there == k
        for wrong in {k - 1, k + 1} - {0}:
            told = refused(append(worker, task, DATA, wrong), 409, "wrong_offset")
            assert told["offset"] == k
        assert offset(worker, task) == k
    assert append(worker, task, DATA, k).json["outcome"] == "applied"


def test_an_answer_that_nobody_heard_is_given_again(running: Running, worker: Worker) -> None:
    task, before = worker.lease()["task"], settled(running)["applied"]
    cut_after(worker, task, DATA, len(DATA))
    assert worker.push(task, DATA).json["outcome"] == "applied"
    assert settled(running)["applied"] == before + 1


def test_a_large_one_is_appended_to_again_and_again(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, task=LARGE) as running:
        worker = Worker(running)
        lease = worker.lease()
        model = worker.pull(lease).copy()
        model.vector[:] = np.arange(len(model.vector), dtype=np.float32)
        data = packed(model)
        task, at = lease["task"], 0
        for sent in (1_500_000, 3_000_000):
            rest: dict[str, Any] = {"Offbeat-Offset": at, "Offbeat-Size": len(data), "Offbeat-Digest": sha256(data)}
            with Line(running, put(worker, task, data[at:], **EXPECT, **rest)) as line:
                assert line.head()[0] == 100
                line.send(data[at:sent])
                until(lambda: offset(worker, task), lambda there: there >= at + PIECE)  # noqa: B023
            until(lambda: not len(running.server.app[UPLOADS]))
            assert at + PIECE <= offset(worker, task) <= sent
            at = offset(worker, task)
        assert append(worker, task, data, at).json["outcome"] == "applied"
        settled(running)
        assert running.x == (np.float32(0.6) * model.vector).tobytes()
    assert verify(running.folder)["agrees"]


def test_whoever_begins_anew_begins_anew(worker: Worker) -> None:
    task = worker.lease()["task"]
    cut_after(worker, task, b"garbage" * 20, 100)
    assert worker.push(task, DATA).status == 200


def test_a_wrong_digest_after_an_append_starts_over(running: Running, worker: Worker) -> None:
    task = worker.lease()["task"]
    with untouched(running):
        cut_after(worker, task, DATA, 100)
        refused(append(worker, task, DATA, 100, **{"Offbeat-Digest": "0" * 64}), 400, "digest")
        assert offset(worker, task) == 0
        refused(append(worker, task, DATA, 100), 409, "wrong_offset")
    assert worker.push(task, DATA).status == 200


def test_an_append_to_nothing_of_mine_is_refused(running: Running, worker: Worker) -> None:
    other = Worker(running, f"w{next(NAMES)}")
    task = worker.lease()["task"]
    cut_after(worker, task, DATA, 100)
    with untouched(running):
        refused(append(other, task, DATA, 100), 403, "not_yours")
    assert offset(worker, task) == 100
    assert append(worker, task, DATA, 100).status == 200


def test_what_does_not_fit_is_noticed_after_an_append_too(running: Running, worker: Worker) -> None:
    task, bad = worker.lease()["task"], file_of(ones(x=np.ones(7, np.float32)))
    with untouched(running):
        cut_after(worker, task, bad, 4)  # within the header
        refused(append(worker, task, bad, 4), 422, "wrong_layout")
        assert offset(worker, task) == 0
    assert worker.push(task, DATA).status == 200


def test_a_newer_push_closes_the_older_ones_connection(running: Running, worker: Worker) -> None:
    task = worker.lease()["task"]
    with Line(running, put(worker, task, DATA, **EXPECT)) as older:
        assert older.head()[0] == 100
        older.send(DATA[:100])
        with Line(running, put(worker, task, DATA, **EXPECT)) as newer:
            assert newer.head()[0] == 100
            assert older.is_closed()
            assert newer.send(DATA).answer().json["outcome"] == "applied"


def test_who_goes_while_it_waits_for_an_older_one_leaves_nothing(
    running: Running, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, writing, gate = worker.lease()["task"], threading.Event(), threading.Event()
    write = Upload.write

    def slowly(upload: Upload, data: Any) -> None:
        writing.set()
        assert gate.wait(PATIENCE_S)
        write(upload, data)

    monkeypatch.setattr(Upload, "write", slowly)
    uploads = running.server.app[UPLOADS]
    with Line(running, put(worker, task, DATA) + DATA) as older:
        assert writing.wait(PATIENCE_S)
        with Line(running, put(worker, task, DATA) + DATA):
            assert older.is_closed()
        with Line(running, put(worker, task, DATA) + DATA) as newest:
            gate.set()
            assert newest.answer().json["outcome"] == "applied"
    until(lambda: not len(uploads))


# --- limits ----------------------------------------------------------------------------------------------------------


def test_a_stalled_upload_is_cut_and_kept_and_a_slow_one_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"stall_s": 1.0}) as running:
        worker, other = Worker(running), Worker(running, "other")
        task = worker.lease()["task"]
        with Line(running, put(worker, task, DATA, **EXPECT)) as line:
            assert line.head()[0] == 100
            line.send(DATA[:100])
            assert other.work().status == 200, "nobody waits for it"
            refused(line.answer(), 408, "stalled")
            assert line.ended().is_closed()
        assert offset(worker, task) == 100
        assert append(worker, task, DATA, 100).status == 200


def test_too_many_uploads_are_told_to_come_back(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"uploads_max": 2}) as running:
        workers = [Worker(running, f"w{i}") for i in range(3)]
        tasks = [worker.lease()["task"] for worker in workers]
        lines = [Line(running, put(workers[i], tasks[i], DATA, **EXPECT)) for i in range(2)]
        assert [line.head()[0] for line in lines] == [100, 100]
        with Line(running, put(workers[2], tasks[2], DATA, **EXPECT)) as line:
            refused(line.answer(), 503, "not_now")
        assert running.call("GET", "/v1/models/latest").status == 200
        assert workers[0].push(tasks[0], DATA).status == 200, "whose place it is may take it over"
        assert lines[0].is_closed()
        assert workers[2].push(tasks[2], DATA).status == 200
        for line in lines:
            line.cut()
        until(lambda: not len(running.server.app[UPLOADS]))


def test_updates_take_no_more_than_they_may_and_room_is_made(tmp_path: Path) -> None:
    limit = 16 * len(DATA)
    with serving(tmp_path, ROOM, {"updates_bytes_max": limit}) as running:
        uploading = [Worker(running, f"w{i}") for i in range(16)]
        lines = [Line(running, put(worker, worker.lease()["task"], DATA, **EXPECT)) for worker in uploading]
        assert [line.head()[0] for line in lines] == [100] * 16
        extra = Worker(running, "extra")
        task = extra.lease()["task"]
        with untouched(running):
            refused(extra.push(task, DATA), 507, "disk_full")
            assert running.call("GET", "/v1/models/latest").status == 200
            assert 0 < running.status()["disk_bytes"] <= running.status()["disk_bytes_max"] == limit
        for line in lines:  # and none of them comes back
            line.cut()
        until(lambda: not len(running.server.app[UPLOADS]))
        for worker in uploading:
            running.call("DELETE", f"/v1/workers/{worker.number}", headers=worker.session)
        pushed(extra, task)
        for _ in range(40):  # many times what there is room for
            pushed(extra, extra.lease()["task"])
        assert settled(running)["applied"] == 41
        assert running.status()["disk_bytes"] <= limit
    assert verify(running.folder)["x_sha256"] == sha256(running.x)


def test_room_is_made_also_where_all_of_it_went_during_one_slow_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, gate = 16 * len(DATA), threading.Event()
    write = Checkpoints.write

    def slowly(checkpoints: Checkpoints, checkpoint: Any) -> None:
        assert gate.wait(PATIENCE_S)
        write(checkpoints, checkpoint)

    with serving(tmp_path, ROOM, {"updates_bytes_max": limit}) as running:
        worker = Worker(running)
        monkeypatch.setattr(Checkpoints, "write", slowly)
        task = worker.lease()["task"]
        while (answer := worker.push(task, DATA)).status == 200:
            settled(running)
            task = worker.lease()["task"]
        refused(answer, 507, "disk_full")
        gate.set()
        for _ in range(20):
            pushed(worker, task)
            task = worker.lease()["task"]
    assert verify(running.folder)["agrees"]


def pushed(worker: Worker, task: int) -> None:
    """Push until there is room, as a worker does."""
    until(lambda: worker.push(task, DATA).status, lambda status: status == 200)


# --- a disk that is full ---------------------------------------------------------------------------------------------


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_room(*_: Any) -> Any:
    raise sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize(("owner", "verb"), [(Output, "write"), (Output, "sync"), (Disk, "create"), (Disk, "replace")])
def test_a_full_disk_is_said_and_everything_goes_on_once_there_is_room(
    running: Running, worker: Worker, monkeypatch: pytest.MonkeyPatch, owner: Any, verb: str
) -> None:
    task = worker.lease()["task"]
    with untouched(running):
        with monkeypatch.context() as patch:
            patch.setattr(owner, verb, full)
            for _ in range(2):
                refused(worker.push(task, DATA), 507, "disk_full")
            assert running.call("GET", "/v1/models/latest").status == 200
            assert "make room on the disk" in running.status()["trouble"]
        assert not len(running.server.app[UPLOADS])
    taken = running.status()["disk_bytes"]
    assert worker.push(task, DATA).json["outcome"] == "applied"
    assert running.status()["disk_bytes"] == taken + len(DATA), "nothing was left reserved"


def test_another_trouble_with_the_disk_is_no_bad_update(
    running: Running, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    task = worker.lease()["task"]
    with untouched(running), monkeypatch.context() as patch:
        patch.setattr(Output, "write", broken)
        answer = worker.push(task, DATA)
        refused(answer, answer.status, {503: "not_now", 507: "disk_full"}[answer.status])
    assert worker.push(task, DATA).json["outcome"] == "applied"


def test_while_the_ledger_cannot_be_written_nothing_is_told_and_then_all_of_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "STUCK_RETRY_S", 0.02)
    with serving(tmp_path, ROOM) as running:
        worker, other = Worker(running), Worker(running, "other")
        task, later = worker.lease()["task"], other.lease()["task"]
        x, ledger = running.x, running.server.run.ledger

        with monkeypatch.context() as patch:
            patch.setattr(ledger, "_write", no_room)
            refused(worker.push(task, DATA), 507, "disk_full")  # decided, and not written down
            status = until(running.status, lambda status: status["trouble"])
            assert "disk is full" in status["trouble"]
            for who, number in ((worker, task), (other, later)):
                refused(who.push(number, DATA), 507, "disk_full")
            refused(running.call("POST", "/v1/workers", {"name": "new", "protocol": 1}), 507, "disk_full")
            refused(running.call("POST", f"/v1/workers/{worker.number}/ask", headers=worker.session), 507, "disk_full")
            refused(running.call("GET", "/v1/workers"), 507, "disk_full")
            assert running.call("GET", "/v1/health").status == 200
            assert running.call("GET", "/v1/metrics").status == 200
            assert packed(running.server.run.mixer.x) == running.call("GET", "/v1/models/latest").body
            assert running.x == x, "what is not written down has no effect"
        until(running.status, lambda status: status["trouble"] is None)
        assert settled(running)["applied"] == 1
        again = worker.push(task, DATA)
        assert (again.status, again.json["repeated"], again.json["t"]) == (200, True, 1)
        assert running.x == np.full(10, np.float32(0.6)).tobytes(), "once"
        assert other.push(later, DATA).json["outcome"] == "applied"
        assert Worker(running, "new").work().status == 200
        assert settled(running)["applied"] == 3
    facts = verify(running.folder)
    assert facts["agrees"]
    assert facts["applied"] == 3


def test_a_server_that_is_stopped_while_its_disk_is_full_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "STUCK_RETRY_S", 0.02)
    worker, task = stopped_while_full(tmp_path, monkeypatch)
    monkeypatch.undo()
    with serving(tmp_path, ROOM) as running:
        worker.running = running
        assert running.status()["applied"] == 0
        assert worker.push(task, DATA).json["outcome"] == "applied"
        assert settled(running)["applied"] == 1
    assert verify(running.folder)["agrees"]


def stopped_while_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, int]:
    """A worker that was told to come back, and its task."""
    with ExitStack() as stack:
        running = stack.enter_context(serving(folder, ROOM))
        worker = Worker(running)
        task = worker.lease()["task"]
        monkeypatch.setattr(running.server.run.ledger, "_write", no_room)
        refused(worker.push(task, DATA), 507, "disk_full")
        with pytest.raises(OffbeatError, match="disk is full"):
            stack.close()
    return worker, task


def test_a_disk_that_is_full_while_a_version_is_kept_makes_the_mixing_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.server.served_run.RETRY_S", 0.02)
    with serving(tmp_path, {**ROOM, "rule": "delta"}) as running:  # which keeps versions on the disk
        worker = Worker(running)
        lease = worker.lease()
        data = worker.train(lease)
        with monkeypatch.context() as patch:
            patch.setattr(Disk, "write_whole", full)
            assert worker.push(lease["task"], data).json["outcome"] == "applied"
            assert running.status()["t"] == 0
            assert running.call("GET", "/v1/models/latest").headers["Offbeat-Epoch"] == "0"
        until(running.status, lambda status: status["t"] == 1)
        assert worker.work().status == 200
    assert verify(running.folder)["agrees"]


def test_decisions_are_mixed_in_the_order_in_which_they_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, ROOM) as running:
        workers = [Worker(running, f"w{i}") for i in range(6)]
        tasks = [worker.lease()["task"] for worker in workers]
        mixer, seen = running.server.run.mixer, list[int]()
        apply = mixer.apply

        def watched(orders: Any) -> Any:
            seen.extend(order.decision.sequence for order in orders if isinstance(order, MixUpdate))
            return apply(orders)

        monkeypatch.setattr(mixer, "apply", watched)
        threads = [
            threading.Thread(target=worker.push, args=(task, DATA)) for worker, task in zip(workers, tasks, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert settled(running)["applied"] == 6
        assert seen == sorted(seen)
    assert verify(running.folder)["agrees"]
