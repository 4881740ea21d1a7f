"""A run that diverged, stands still or had all its updates refused ends with status 3 and says so; others with 0."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from tests.server.serving import PATIENCE_S, Running, Worker, packed

from offbeat.cli import main
from offbeat.core.layout import Model
from offbeat.server.server import Server

TASK = """
import numpy as np
from offbeat import Trained


class Steps:
    devices = 4

    def __init__(self, step):
        self.step = step

    def initial(self, seed):
        return {{"x": np.zeros(3, np.float32)}}

    def train(self, model, work):
        model["x"][:] += np.float32(self.step)
        return Trained(samples=1, gradients=1)

    def evaluate(self, model):
        return {{"x": float(model["x"].mean())}}


task = Steps({step})
"""


def task_file(folder: Path, step: str = "1.0") -> Path:
    file = folder / "steps.py"
    file.write_text(TASK.format(step=step))
    return file


def simulated(folder: Path, step: str, *flags: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(
        main, ["simulate", str(task_file(folder, step)), "--json", "--executor", "inline", *flags]
    )
    return result.exit_code, json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_a_run_that_ends_as_it_should(tmp_path: Path) -> None:
    status, summary, _ = simulated(tmp_path, "1.0", "--epochs", "20")
    assert (status, summary["failed"], summary["ended"]) == (0, False, "20 epochs")


@pytest.mark.parametrize("flags", [("--epochs", "20"), ("--until-s", "1000")])
def test_a_run_that_diverges(tmp_path: Path, flags: tuple[str, ...]) -> None:
    status, summary, said = simulated(tmp_path, "float('nan')", *flags)
    assert (status, summary["failed"]) == (3, True)
    assert summary["ended"].startswith("diverged: the last ")
    assert f"The run has failed: {summary['ended']}" in said


@pytest.mark.parametrize(
    ("flags", "ended"),
    [
        (("--until-s", "5"), r"5 s; all \d+ updates were refused"),
        (("--epochs", "20"), r"stuck: the last \d+ updates were refused, and the model has not changed since epoch 0"),
        (
            ("--epochs", "20", "--bad-updates-max", "2"),
            r"nothing was left to happen; all 8 updates were refused",
        ),
    ],
)
def test_a_run_whose_updates_are_all_refused(tmp_path: Path, flags: tuple[str, ...], ended: str) -> None:
    status, summary, said = simulated(tmp_path, "1.0", "--norm-max", "0.5", *flags, "--dir", str(tmp_path / "run"))
    assert (status, summary["failed"], summary["t"]) == (3, True, 0)
    assert re.fullmatch(ended, summary["ended"])
    assert "The run has failed" in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["failed"]
    same = ["--norm-max", "0.5", "--executor", "inline", *flags, "--dir", str(tmp_path / "run")]
    again = CliRunner().invoke(main, ["simulate", str(tmp_path / "steps.py"), *same, "--gradients", "7"])
    assert again.exit_code == 2  # and it is no run to be extended


def test_a_comparison_marks_the_run_and_is_no_failure_itself(tmp_path: Path) -> None:
    task_file(tmp_path)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        f'task = "{tmp_path / "steps.py"}"\nmetric = "x"\n[settings]\nepochs = 10\nexecutor = "inline"\n'
        "[methods.good]\n[methods.bad]\nnorm_max = 0.5\n"
    )
    result = CliRunner().invoke(main, ["compare", str(spec), "--dir", str(tmp_path / "runs"), "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert {row["method"]: row["failed"] for row in rows} == {"good": 0, "bad": 1}
    assert re.search(r"failed$", result.stdout, re.MULTILINE)


def test_a_server_whose_run_diverged_ends_with_status_3(tmp_path: Path) -> None:
    """In a process of its own; the test is the worker whose every update is NaN."""
    flags = ["--port", "0", "--in-flight-max", "1", "--bad-updates-max", "1000", "--epochs", "5"]
    command = [sys.executable, "-m", "offbeat", "serve", str(task_file(tmp_path)), "--dir", str(tmp_path / "run")]
    server = subprocess.Popen([*command, *flags, "--exit-when-finished"], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r" at (http://\S+)", line)))
        worker = Worker(Running(cast(Server, None), tmp_path / "run", url))
        garbage = packed(Model.of({"x": np.full(3, np.nan, np.float32)}))
        while (answer := worker.ask())["state"] == "working":
            assert worker.push(answer["lease"]["task"], garbage).json["error"] == "not_finite"
        assert answer["state"] == "finished"
        _, said = server.communicate(timeout=PATIENCE_S)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 3, said
    assert re.search(
        r"The run has failed: diverged: the last 110 updates were NaN, infinite or above value_max\.", said
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["failed"], summary["t"]) == (True, 0)
