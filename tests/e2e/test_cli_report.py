"""`offbeat report` as a user calls it: simulated and served runs, under way and ended, and in a real browser."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from tests.server.serving import PATIENCE_S, Running, Worker, packed, serving
from tests.simulation.comparing import written
from tests.simulation.quadratic import Quadratic
from tests.unit.html_page import Page

from offbeat.cli import Commands
from offbeat.cli.viewing import report
from offbeat.settings import Settings
from offbeat.sim.compare import compare
from offbeat.sim.run import Simulation

CHROMIUM = Path("/usr/bin/chromium")
NAMES = ("<script>document.title='broken'</script>", "\"onload='alert(1)'", "</title><h1>", "honest")
PROGRAM = Commands(name="offbeat", commands={"report": report})


def offbeat(*arguments: str | Path) -> Result:
    return CliRunner().invoke(PROGRAM, [str(argument) for argument in arguments])


def reported(*arguments: str | Path) -> Page:
    """The page that a command writes, by the path that it prints."""
    result = offbeat("report", *arguments, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout.splitlines()[-1])
    path = Path(answer["path"])
    assert answer["bytes"] == path.stat().st_size
    return Page(path.read_text(encoding="utf-8"))


def simulated(folder: Path, **settings: Any) -> Path:
    task = Quadratic([float(number) for number in range(6)], [0.5] * 6, noise=0.1)
    Simulation(task, Settings.of({"epochs": 60, "in_flight_max": 3, **settings}), folder=folder).run()
    return folder


# --- the command -----------------------------------------------------------------------------------------------------


def test_a_run_is_reported_beside_its_other_files(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run")
    result = offbeat("report", run)
    assert result.exit_code == 0, result.output
    assert re.fullmatch(rf"Wrote {run}/report\.html \(\d+(\.\d+)? KB\)", result.stdout.strip())
    assert Page((run / "report.html").read_text()).fact("applied") == 60


def test_json_names_the_file_and_its_size(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run")
    assert reported(run, tmp_path / "out.html").fact("t") == 60
    assert (tmp_path / "out.html").is_file()
    assert not (run / "report.html").exists()


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run")
    for arguments in (
        (tmp_path / "missing",),
        (tmp_path / "missing", tmp_path / "out.html"),
        (run, tmp_path / "nowhere" / "out.html"),
        (run, run),
    ):
        result = offbeat("report", *arguments)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
    assert not (tmp_path / "out.html").exists()
    assert len(offbeat("report", tmp_path / "missing").stderr.splitlines()) == 1


def test_a_comparison_is_reported_from_its_folder(tmp_path: Path) -> None:
    result = compare(written(tmp_path), tmp_path / "all", processes=1, pictures=False)
    page = reported(tmp_path / "all")
    for cells, row in zip(page.rows("methods"), result.rows(), strict=True):
        assert cells[0].text == row.method
        assert cells[2].value == pytest.approx(row.metric)
        assert cells[3].value == row.t
    assert (tmp_path / "all" / "report.html").is_file()
    assert {cells[0].text for cells in page.rows("differing")} == {"fast", "slow"}


# --- served ----------------------------------------------------------------------------------------------------------


@contextmanager
def troubled(folder: Path) -> Iterator[tuple[Running, list[Worker]]]:
    """A server whose workers have hostile names, and one of which pushes NaN until it is quarantined."""
    with serving(folder, {"epochs": 100, "in_flight_max": 4, "bad_updates_max": 2}) as running:
        workers = [Worker(running, name) for name in NAMES]
        for _ in range(3):
            for worker in workers:
                assert worker.work(0.1).status == 200
        for _ in range(2):
            lease = workers[0].lease()
            broken = workers[0].pull(lease).copy()
            broken.vector[:] = np.nan
            workers[0].push(lease["task"], packed(broken))
        workers[1].push(workers[1].lease()["task"], b"garbage")
        yield running, workers


def settled(running: Running, t: int) -> dict[str, Any]:
    """The status, once all is published and evaluated."""
    until = time.monotonic() + PATIENCE_S
    while True:
        status: dict[str, Any] = running.status()
        if status["t"] == t and status["metrics_t"] is not None and not status["queued"]:
            return status
        assert time.monotonic() < until, status
        time.sleep(0.02)


def test_a_served_run_is_reported_while_it_runs_and_after_it_stopped(tmp_path: Path) -> None:
    with troubled(tmp_path) as (running, _):
        status = settled(running, 12)
        running.server.context.troubles.note("evaluation", "version 7 could not be <evaluated>")
        page = reported(running.folder, tmp_path / "live.html")
    for key in ("t", "applied"):
        assert page.fact(key) == status[key]
    assert page.fact("refused") == status["rejected"] == 2
    assert page.fact("staleness-mean") == status["staleness_mean"]
    assert "The run is under way" in page.text
    assert "Trouble: version 7 could not be <evaluated>" in page.text
    after = reported(tmp_path / "run")
    assert "interrupted" in after.ids["fact-state"].text
    assert "Trouble" not in after.text
    for shown in (page, after):
        assert shown.root.all("title")[0].text.startswith("line.py:task")
        ((number, name, why, *_),) = shown.rows("quarantines")
        assert (number.value, name.text, why.text) == (0, NAMES[0], "its update holds NaN or infinity")
        counted = {cells[0].text: cells[2].value for cells in shown.rows("troubles")}
        assert counted == {"Refused: not finite": 2, "Unreadable updates": 1, "Quarantines": 1}
        assert {cells[0].text.partition(" ")[2] for cells in shown.rows("parts")} == set(NAMES)
        assert [cells[3].value for cells in shown.rows("parts")] == [3, 3, 3, 3]


def test_a_server_that_was_killed_leaves_a_folder_that_can_be_reported(tmp_path: Path) -> None:
    with troubled(tmp_path) as (running, _):
        settled(running, 12)
        where = (running.folder / "server.json").read_text()
    (tmp_path / "run" / "server.json").write_text(where)  # as a killed one leaves it: nobody answers there
    assert reported(tmp_path / "run").fact("applied") == 12


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(
    not CHROMIUM.exists() or find_spec("playwright") is None, reason="chromium or playwright is missing"
)
def test_a_browser_shows_it_and_asks_for_nothing_else(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    with troubled(tmp_path) as (running, _):
        settled(running, 12)
    simulated(tmp_path / "all" / "one")
    simulated(tmp_path / "all" / "two", alpha=0.3)
    files = [Path(json.loads(offbeat("report", tmp_path / name, "--json").stdout)["path"]) for name in ("run", "all")]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            for file in files:
                for scheme, width in (("light", 1100), ("dark", 1100), ("light", 380)):
                    _looked_at(browser, file, scheme, width)
        finally:
            browser.close()


def _looked_at(browser: Any, file: Path, scheme: str, width: int) -> None:
    said, asked = [], []
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    assert said == []
    assert asked == [file.as_uri()]
    assert "broken" not in page.title()
    assert page.locator("h1").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it must be scrolled sideways"
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 25, 28)"
    assert dark == (scheme == "dark")
    boxes = [box.bounding_box() for box in page.locator("svg.picture").all()]
    assert boxes
    assert all(box["width"] > 200 and box["height"] > 100 for box in boxes)
    page.close()
