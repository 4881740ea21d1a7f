"""A folder of runs: their names, the list, one beside the other, and the command that shows them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.cli.standing import run_folders
from offbeat.errors import InvalidValue
from offbeat.web.runs import READINGS_MAX, Runs, names_of
from offbeat.web.ui_server import Ui
from tests.web.looking import Visitor, opened, runs_of, simulated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    simulated(folder / "one", epochs=12)
    simulated(folder / "grid a" / "2", epochs=15, alpha=0.3)
    (folder / "not a run").mkdir()
    return folder


@pytest.fixture(scope="module")
def visitor(folder: Path) -> Iterator[Visitor]:
    with opened(runs_of(folder)) as visitor:
        yield visitor


def test_the_runs_are_listed(visitor: Visitor) -> None:
    runs = visitor.get("/runs.json")["runs"]
    assert [(run["name"], run["state"], run["t"], run["rule"]) for run in runs] == [
        ("grid-a~2", "finished", 15, "fedasync, alpha 0.3, polynomial:0.5"),
        ("one", "finished", 12, "fedasync, alpha 0.6, polynomial:0.5"),
    ]
    assert runs[0]["metrics"] == visitor.get("/runs/grid-a~2/overview.json")["metrics"]
    assert visitor.get("/runs.json")["runs"] == runs
    session = visitor.get("/session.json")
    assert (session["role"], session["open"], session["ui"]) == ("viewer", True, True)


@pytest.mark.parametrize("path", ["/", "/compare", "/runs/one/", "/runs/one/workers", "/runs/grid-a~2/updates/3"])
def test_every_page_is_there(visitor: Visitor, path: str) -> None:
    answer = visitor.call("GET", path)
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert visitor.call("GET", "/runs/one").headers["Location"] == "../runs/one/"


@pytest.mark.parametrize("twin", ["overview", "asynchrony", "workers", "updates", "updates/3"])
def test_every_twin_is_there(visitor: Visitor, twin: str) -> None:
    assert visitor.get(f"/runs/one/{twin}.json")
    assert visitor.call("GET", f"/runs/none/{twin}.json").status == 404
    assert visitor.call("GET", f"/{twin}.json").status == 404


def test_runs_are_compared(visitor: Visitor) -> None:
    found = visitor.get("/compare.json?run=one&run=grid-a~2")
    assert [run["name"] for run in found["runs"]] == ["one", "grid-a~2"]
    differ = {row["name"]: row["values"] for row in found["settings"]}
    assert differ == {"alpha": {"one": 0.6, "grid-a~2": 0.3}, "epochs": {"one": 12, "grid-a~2": 15}}
    assert set(found["curves"]) == {"one", "grid-a~2"}
    assert visitor.get("/compare.json") == {"runs": [], "settings": [], "results": [], "curves": {}}
    assert visitor.call("GET", "/compare.json?run=one&run=none").status == 404
    many = "&".join(f"run={number}" for number in range(21))
    assert visitor.call("GET", f"/compare.json?{many}").status == 400


def test_nobody_can_touch_a_run_that_is_not_served(visitor: Visitor) -> None:
    csrf = {"X-CSRF-Token": visitor.get("/session.json")["csrf"]}
    assert visitor.call("POST", "/runs/one/workers/1/quarantine", headers=csrf).status == 403


def test_names_are_fit_for_a_url_and_unique() -> None:
    root = Path("x")
    paths = [root, root / "a" / "b", root / "a~b", root / "ü ö", root / "..odd", root / "a:b"]
    names = names_of(root, paths)
    assert list(names.values()) == paths
    assert all(re.fullmatch(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]*", name) for name in names)


def test_runs_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.web.runs.SEARCH_S", 0.0)
    runs = Runs(tmp_path, run_folders)
    assert runs.listed() == {"runs": []}
    assert runs.get("one") is None
    simulated(tmp_path / "one", epochs=3)
    assert [run["name"] for run in runs.listed()["runs"]] == ["one"]
    assert runs.get("one") is runs.get("one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert runs.get("one") is None
    assert [run["name"] for run in runs.listed()["runs"]] == ["two"]


def test_only_some_runs_are_kept_in_memory(tmp_path: Path) -> None:
    simulated(tmp_path / "0", epochs=1)
    for number in range(1, READINGS_MAX + 2):
        (tmp_path / str(number)).symlink_to(tmp_path / "0")
    runs = Runs(tmp_path, lambda folder: sorted(folder.iterdir()))
    first = runs.get("0")
    for number in range(READINGS_MAX + 2):
        assert runs.get(str(number)) is not None
    assert runs.get("0") is not first


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    simulated(tmp_path / "good", epochs=2)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "settings.json").write_text("{")
    (tmp_path / "bad" / "ledger.sqlite").write_text("not a database")
    assert [run["name"] for run in Runs(tmp_path, run_folders).listed()["runs"]] == ["good"]


def test_it_is_for_this_machine_only(folder: Path) -> None:
    with pytest.raises(InvalidValue, match="tunnel"):
        Ui(folder, run_folders, host="0.0.0.0", port=0)  # noqa: S104 (that is what is refused)
    with pytest.raises(InvalidValue, match="no folder"):
        Ui(folder / "nothing", run_folders, host="127.0.0.1", port=0)


@pytest.mark.slow
def test_the_command(folder: Path) -> None:
    command = [sys.executable, "-c", "from offbeat.cli.viewing import ui; ui()", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert url, line
            assert len(Visitor(url[0]).get("/runs.json")["runs"]) == 2
        finally:
            os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
