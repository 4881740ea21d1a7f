"""What the driver promises: nothing is told before it is on the disk, every command is carried out, few visits."""

import hashlib
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from offbeat.protocol.messages import WorkerJoined
from offbeat.server import run_results
from offbeat.server import server as server_module
from offbeat.server.driver import Driver
from offbeat.storage import chain
from tests.server.serving import PATIENCE_S, TASK, Worker, serving
from tests.server.speaking import Line, file_of, ones, until
from tests.server.test_checkpoints import Outside, served

DATA = file_of(ones())


def test_a_question_is_answered_after_the_commit_of_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = served(tmp_path / "run", Outside())
    committing, gate, write = threading.Event(), threading.Event(), run.ledger._write

    def slowly(*rows: Any) -> int:
        committing.set()
        assert gate.wait(PATIENCE_S)
        return write(*rows)

    monkeypatch.setattr(run.ledger, "_write", slowly)
    told = run.driver.tell(lambda at: WorkerJoined(at, 0, 0, "w0"))
    asked = run.driver.ask(lambda c: c.dispatcher.device(0))
    run.start()
    assert committing.wait(PATIENCE_S)
    assert not asked.done(), "a crash now would lose what it shows"
    gate.set()
    assert asked.result(PATIENCE_S) == 0
    assert told.done()
    run.stop()


def test_a_question_that_fails_is_no_failure_of_the_driver(tmp_path: Path) -> None:
    run = served(tmp_path / "run", Outside())
    run.start()
    with pytest.raises(ZeroDivisionError):
        run.driver.ask(lambda _: 1 // 0).result(PATIENCE_S)
    assert run.driver.ask(lambda c: c.t).result(PATIENCE_S) == 0
    run.stop()


def test_a_command_that_the_driver_does_not_know_is_an_error(tmp_path: Path) -> None:
    run = served(tmp_path / "run", Outside())
    unknown: Any = object()
    with pytest.raises(AssertionError):
        run.driver._do(unknown)
    run.start()
    run.stop()


def test_a_push_visits_the_driver_once_and_twice_where_it_is_unusual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event after the body; a question before it where the lease is not open. A worker that declared no samples
    visits once more, once."""
    with serving(tmp_path) as running:
        worker = Worker(running, samples=5)
        task = worker.lease()["task"]
        until(lambda: running.status()["metrics_t"] == 0)
        visits, put = list[str](), Driver._put

        def counted(driver: Driver, item: Any, *, must: bool = False) -> None:
            visits.append(type(item).__name__)
            put(driver, item, must=must)

        with monkeypatch.context() as patch:
            patch.setattr(Driver, "_put", counted)
            assert worker.push(task, DATA).status == 200
            assert visits == ["Told"]
            visits.clear()
            assert worker.push(task, DATA).json["repeated"]
        assert visits[0] == "Asked"


def test_the_model_is_hashed_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, sha256 = list[str](), hashlib.sha256

    def noted(*arguments: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"] != chain.__name__:
            threads.append(threading.current_thread().name)
        return sha256(*arguments)

    with serving(tmp_path, {"epochs": 1}) as running:
        monkeypatch.setattr(hashlib, "sha256", noted)
        Worker(running).work()
        until(lambda: (running.folder / "summary.json").exists())
    assert threads
    assert running.server.run.driver._thread.name not in threads


def test_what_aiohttp_logs_elsewhere_in_the_process_is_not_silenced() -> None:
    program = "import logging, offbeat.server.server; print(logging.getLogger('aiohttp.server').level)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) == logging.NOTSET


def test_garbage_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path) as running, caplog.at_level(logging.DEBUG):
        with Line(running, b"GARBAGE\r\n\r\n") as line:
            assert line.answer().status == 400
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- trouble ---------------------------------------------------------------------------------------------------------


def test_an_evaluation_that_succeeds_ends_the_trouble_of_one_that_failed(tmp_path: Path) -> None:
    failing = 'if model["x"][0] == np.float32(0.6):\n            raise ValueError("no")\n        '
    task = TASK.replace('return {"size"', failing + 'return {"size"')
    with serving(tmp_path, {"evaluate_every": 1}, task=task) as running:
        worker = Worker(running)
        until(lambda: running.status()["metrics_t"] == 0)
        assert worker.work().status == 200
        assert "version 1 could not be evaluated" in until(lambda: running.status()["trouble"])
        assert worker.work().status == 200
        until(lambda: running.status()["metrics_t"] == 2)
        assert running.status()["trouble"] is None


def test_results_that_can_be_written_at_last_end_their_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RETRY_S", 0.02)
    with serving(tmp_path, {"epochs": 1}) as running:
        with monkeypatch.context() as patch:
            patch.setattr(run_results, "write_json", _full)
            Worker(running).work()
            assert "the results cannot be written" in until(lambda: running.status()["trouble"])
        until(lambda: (running.folder / "summary.json").exists())
        until(lambda: running.status()["trouble"] is None)


def _full(*_: Any) -> Any:
    raise OSError(28, "No space left on device")
