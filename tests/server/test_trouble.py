"""Trouble is true: it is in the status as soon as it can be seen, in the log once, and gone when it has passed."""

import errno
import json
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.server import evaluator, served_run, trouble_watch
from offbeat.server.push_answers import ENOUGH
from offbeat.storage.checkpoints import Checkpoints
from offbeat.storage.disk import Output
from tests.server.serving import TASK, Running, Worker, serving
from tests.server.speaking import Line, file_of, head, ones, refused, until

LINUX = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux can change a limit of another process")
LARGE = 300_000
LOOKS = 50
STATUS = head("GET", "/v1/status")


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def trouble(running: Running) -> str | None:
    found: str | None = running.status()["trouble"]
    return found


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


@contextmanager
def child_server(folder: Path, task: str = TASK) -> Iterator[tuple[Running, int]]:
    """A server in a process of its own, whose limits a test can change, and its process id; folder/log is its log."""
    (folder / "line.py").write_text(task)
    arguments = ("serve", str(folder / "line.py"), "--dir", str(folder / "run"), "--port", "0", "--epochs", "1000")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "offbeat", *arguments], stdout=log, stderr=log)
    try:
        where = folder / "run" / "server.json"
        until(lambda: process.poll() is not None or where.exists())
        assert process.poll() is None, (folder / "log").read_text()
        server: Any = None
        yield Running(server, folder / "run", json.loads(where.read_text())["url"]), process.pid
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_it_is_looked_for_often_enough() -> None:
    assert trouble_watch.LOOK_S <= 0.5


# --- a full disk -----------------------------------------------------------------------------------------------------


@LINUX
def test_a_disk_that_is_full_for_uploads_alone_is_trouble_until_there_is_room(tmp_path: Path) -> None:
    task = TASK.replace("np.zeros(6,", f"np.zeros({LARGE},").replace("standard_normal(6)", f"standard_normal({LARGE})")
    data = file_of(ones(x=np.ones(LARGE, np.float32)))
    with child_server(tmp_path, task) as (running, pid):
        worker = Worker(running)
        number = worker.lease()["task"]
        assert trouble(running) is None
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (LARGE, resource.RLIM_INFINITY))
        for _ in range(3):
            refused(worker.push(number, data), 507, "disk_full")
            told = trouble(running)
            assert told is not None
            assert "updates are refused" in told
            assert "make room on the disk" in told
        assert running.call("GET", "/v1/health").status == 200
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        until(lambda: trouble(running) is None)  # although nobody has pushed
        assert worker.push(number, data).status == 200
        assert not list((tmp_path / "run" / "updates").glob("room*"))
    log = (tmp_path / "log").read_text()
    assert log.count("WARNING: updates are refused") == 1, log
    assert log.count("INFO: over: updates are refused") == 1, log


def test_an_update_that_is_kept_ends_the_trouble_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trouble_watch, "LOOK_S", 1e6)
    with serving(tmp_path) as running:
        worker = Worker(running)
        number, data = worker.lease()["task"], file_of(ones())
        with monkeypatch.context() as patch:
            patch.setattr(Output, "write", full)
            refused(worker.push(number, data), 507, "disk_full")
            assert "make room on the disk" in str(trouble(running))
        assert worker.push(number, data).status == 200
        assert trouble(running) is None


def test_room_for_updates_that_is_used_up_is_trouble(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offbeat.server")
    with serving(tmp_path) as running:
        worker, updates = Worker(running), running.server.run.updates
        number, data, room = worker.lease()["task"], file_of(ones()), updates.bytes_max
        updates.bytes_max = 1
        refused(worker.push(number, data), 507, "disk_full")
        assert "raise updates_bytes_max" in str(trouble(running))
        updates.bytes_max = room
        until(lambda: trouble(running) is None)
    assert len(messages(caplog, "over: updates are refused")) == 1


def test_a_version_that_cannot_be_written_is_trouble_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offbeat.server")
    monkeypatch.setattr(served_run, "RETRY_S", 0.02)
    with serving(tmp_path) as running:
        with monkeypatch.context() as patch:
            patch.setattr(running.server.run.versions, "add", full)
            assert Worker(running).work().status == 200
            assert "version 1 cannot be written" in until(lambda: trouble(running))
        until(lambda: trouble(running) is None)
        until(lambda: running.status()["t"] == 1)
    assert len(messages(caplog, "version 1 cannot be written")) == 2, "its beginning, and its end"


def test_a_checkpoint_that_cannot_be_written_is_trouble_until_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offbeat.server")
    with serving(tmp_path, limits={"checkpoint_every": 1}) as running:
        worker = Worker(running)
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "write", full)
            assert worker.work().status == 200
            assert "a checkpoint could not be written" in until(lambda: trouble(running))
        assert worker.work().status == 200
        until(lambda: trouble(running) is None)
    assert len(messages(caplog, "a checkpoint could not be written")) == 2


def test_a_ledger_that_cannot_be_written_is_in_the_log_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offbeat.server")
    monkeypatch.setattr("offbeat.server.driver.STUCK_RETRY_S", 0.02)
    with serving(tmp_path) as running:
        worker = Worker(running)
        number = worker.lease()["task"]
        with monkeypatch.context() as patch:
            patch.setattr(running.server.run.ledger, "_write", _no_room)
            refused(worker.push(number, file_of(ones())), 507, "disk_full")
            assert "nothing can be decided" in until(lambda: trouble(running))
            assert "updates are refused" not in str(trouble(running)), "one cause is told once"
        until(lambda: trouble(running) is None)
    assert len(messages(caplog, "nothing can be decided")) == 2


def _no_room(*_: Any) -> Any:
    import sqlite3

    raise sqlite3.OperationalError("database or disk is full")


# --- descriptors -----------------------------------------------------------------------------------------------------


@LINUX
def test_too_few_descriptors_are_trouble_until_there_are_more(tmp_path: Path) -> None:
    with child_server(tmp_path) as (running, pid), Line(running, STATUS) as line:
        assert line.answer().json["trouble"] is None
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (_lowest(pid), before[1]))
        told = until(lambda: line.send(STATUS).answer().json["trouble"])
        assert "files and connections open" in told
        assert "LimitNOFILE" in told
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        until(lambda: line.send(STATUS).answer().json["trouble"] is None)
        worker = Worker(running)
        assert worker.push(worker.lease()["task"], file_of(ones())).status == 200
    log = (tmp_path / "log").read_text()
    assert log.count("WARNING: the server has nearly all of the") == 1, log
    assert log.count("INFO: over: the server has nearly all of the") == 1, log


def _lowest(pid: int) -> int:
    """The lowest number of a descriptor that was free at any of some moments."""
    looks = [{int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir()} for _ in range(LOOKS)]
    return min(next(number for number in count() if number not in look) for look in looks)


# --- the evaluator ---------------------------------------------------------------------------------------------------


def test_an_evaluator_that_dies_is_trouble_with_its_first_death_until_a_version_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offbeat.server")
    monkeypatch.setattr(evaluator, "TRIES", 1000)  # so that it never gives up
    deadly = tmp_path / "deadly"
    die = (
        f'import os; from pathlib import Path; Path({str(deadly)!r}).exists() and os._exit(9)\n        return {{"size"'
    )
    with serving(tmp_path, {"evaluate_every": 1}, task=TASK.replace('return {"size"', die)) as running:
        until(lambda: running.status()["metrics_t"] == 0)
        deadly.touch()
        assert Worker(running).work().status == 200
        told = until(lambda: trouble(running))
        assert "version 1 is not evaluated yet" in told
        assert "try 1 of" in told or "try 2 of" in told
        deadly.unlink()
        until(lambda: running.status()["metrics_t"] == 1)
        until(lambda: trouble(running) is None)
    assert len(messages(caplog, "is not evaluated yet")) == 2, "its beginning, and its end"


def test_an_evaluation_that_fails_is_in_the_log_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offbeat.server")
    flag = tmp_path / "failing"
    failing = f'from pathlib import Path; Path({str(flag)!r}).exists() and 1 / 0\n        return {{"size"'
    with serving(tmp_path, {"evaluate_every": 1}, task=TASK.replace('return {"size"', failing)) as running:
        worker = Worker(running)
        until(lambda: running.status()["metrics_t"] == 0)
        flag.touch()
        for t in (1, 2):
            assert worker.work().status == 200
            until(lambda: f"version {t} could not be evaluated" in str(trouble(running)))  # noqa: B023
        flag.unlink()
        assert worker.work().status == 200
        until(lambda: trouble(running) is None)
    assert [record.levelname for record in caplog.records if "could not be evaluated" in record.getMessage()] == [
        "WARNING",
        "INFO",
    ]


# --- most updates refused --------------------------------------------------------------------------------------------


def test_most_updates_refused_is_trouble_until_most_are_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offbeat.server")
    with serving(tmp_path, {"bad_updates_max": 10_000}) as running:
        worker = Worker(running)
        for _ in range(ENOUGH):
            assert trouble(running) is None
            refused(worker.push(worker.lease()["task"], b"garbage, not a model"), 422, "not_a_model")
        told = trouble(running)
        assert told is not None
        assert told.startswith(f"{ENOUGH} of the latest {ENOUGH} updates were refused, {ENOUGH} of them as not_a_model")
        assert running.call("GET", "/metrics").body.count(b"offbeat_trouble 1.0") == 1
        for _ in range(2 * ENOUGH):
            assert worker.work().status == 200
        assert trouble(running) is None
    assert len(messages(caplog, "updates were refused")) == 2
