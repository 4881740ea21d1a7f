"""`offbeat ui` and `offbeat track` as a user calls them: real processes, and one line where something is wrong."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.web.looking import simulated

from offbeat.cli import main

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    simulated(folder / "one", epochs=12)
    return folder


def test_runs_are_shown_until_somebody_ends_it(folder: Path) -> None:
    command = [sys.executable, "-m", "offbeat", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
            assert found is not None
            with urllib.request.urlopen(f"{found[0]}/runs.json", timeout=PATIENCE_S) as answer:  # noqa: S310 (our own)
                runs = json.load(answer)["runs"]
            assert [(run["name"], run["state"], run["t"]) for run in runs] == [("one", "finished", 12)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ui", "nowhere"], "there is no folder nowhere"),
        (["ui", ".", "--host", "0.0.0.0"], "for this machine only"),  # noqa: S104
        (["ui", ".", "--port", "99999"], "99999 is not in the range"),
        (["track", "nowhere", "tensorboard:x"], "is not the folder of a run"),
        (["track", ".", "paper:x"], "is no tracker; use tensorboard:DIR or mlflow:URI"),
        (["simulate", "digits", "--track", "tensorboard:x"], "give --dir, too"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(arguments: list[str], words: str) -> None:
    said = CliRunner().invoke(main, arguments)
    assert (said.exit_code, words in said.output) == (2, True), said.output


def test_a_finished_run_is_told_to_a_tracker(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    said = CliRunner().invoke(main, ["track", str(folder / "one"), f"tensorboard:{tmp_path}"])
    assert (said.exit_code, said.output) == (0, "The trackers have the whole run.\n")
    assert list(tmp_path.rglob("events.out.tfevents.*"))
