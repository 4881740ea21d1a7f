"""An administrator pauses a run and resumes it: no new leases meanwhile, and everything that is open is judged."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.server.server import ServeOptions
from offbeat.storage.ledger import Ledger
from offbeat.web.app import furnish
from tests.server import serving as served
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import settled, until
from tests.web.looking import Visitor


@pytest.fixture(autouse=True)
def _with_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ServeOptions", partial(ServeOptions, extend=furnish))


def said(*arguments: str) -> str:
    found = CliRunner().invoke(main, list(arguments))
    assert found.exit_code == 0, found.output
    return found.output


def kinds(running: Running) -> list[str]:
    with Ledger.open(running.folder / "ledger.sqlite", read_only=True) as ledger:
        return [row.kind for row in ledger.rows() if row.kind.startswith("run_")]


def test_while_it_is_paused_nothing_is_given_out_and_what_is_open_is_judged(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        busy, idle = Worker(running, "busy"), Worker(running, "idle")
        lease = busy.lease()
        assert said("pause", running.url).startswith("Paused")
        assert running.status()["paused"]
        assert "running, paused" in said("status", running.url)
        assert b"offbeat_paused 1.0" in running.call("GET", "/metrics").body
        assert idle.ask(0.1) == {"state": "idle"}
        assert busy.push(lease["task"], busy.train(lease)).json["outcome"] == "applied"
        assert busy.ask(0.1) == {"state": "idle"}
        assert settled(running)["t"] == 1
        assert said("resume", running.url).startswith("Resumed")
        assert not running.status()["paused"]
        assert idle.work().json["outcome"] == "applied"


def test_a_worker_that_waits_hears_of_its_task_when_the_run_is_resumed(tmp_path: Path) -> None:
    with serving(tmp_path) as running, ThreadPoolExecutor(1) as pool:
        assert running.call("POST", "/v1/pause").status == 204
        waiting = pool.submit(Worker(running).ask, 20.0)
        until(running.status, lambda status: status["waiting"] == 1)
        assert running.call("POST", "/v1/resume").status == 204
        assert waiting.result()["state"] == "working"


def test_a_pause_survives_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        assert running.call("POST", "/v1/pause").status == 204
    for _ in range(2):  # once by the ledger, once by a checkpoint
        with serving(tmp_path) as running:
            assert running.status()["paused"]
            assert Worker(running).ask(0.1) == {"state": "idle"}
    assert "interrupted, paused" in said("status", str(tmp_path / "run"))
    with serving(tmp_path) as running:
        assert running.call("POST", "/v1/resume").status == 204
        assert Worker(running).work().json["outcome"] == "applied"
        assert kinds(running) == ["run_paused", "run_resumed"]


def test_the_clock_goes_on_while_a_run_is_paused(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": None, "until_s": 1.0}) as running:
        assert running.call("POST", "/v1/pause").status == 204
        assert until(running.status, lambda status: status["finished"])["reason"] == "1 s"


def test_the_page_says_that_it_is_paused_and_an_admin_resumes_there(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        visitor = Visitor(running.url)
        csrf = {"X-CSRF-Token": visitor.get("/session.json")["csrf"]}

        def overview() -> Any:
            return visitor.get("/overview.json")

        assert visitor.call("POST", "/pause", headers=csrf).status == 204
        assert overview()["paused"]
        assert overview()["health"] == {
            "level": "warning",
            "sentence": "paused by an administrator: no task is given out until the run is resumed",
        }
        assert running.status()["paused"]
        assert visitor.call("POST", "/resume").status == 403
        assert visitor.call("POST", "/resume", headers=csrf).status == 204
        assert not overview()["paused"]
