"""The digits example on Flower's own simulation engine: its ClientApp is as in Flower's quickstart, and it learns."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.storage.run_folder import RunFolder
from tests.flower.simulated import EXAMPLE, NODES
from tests.flower.superlink import PATIENCE_S, end

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


TRIES = 4
TOO_SLOW = "The current node timed out during startup"
"""Ray waits for itself for 30 seconds, whatever the machine has to do."""


def simulated(folder: Path) -> str:
    """Run it until Ray has come up, and answer what it printed; the run goes on in its folder."""
    said = TOO_SLOW
    for _ in range(TRIES):
        if TOO_SLOW in said:
            said = simulated_once(folder)
    return said


def simulated_once(folder: Path) -> str:
    """Run it, and answer what it printed; whatever it started is gone afterwards."""
    path = os.pathsep.join([str(ROOT), str(EXAMPLE)])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.flower.simulated", str(folder)],
        env={**os.environ, **quiet, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        end(process, signal.SIGKILL)
    return said.decode()


def test_the_example_learns(tmp_path: Path) -> None:
    said = simulated(tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists(), said[-5000:]
    folder = RunFolder.open(tmp_path / "run")
    summary = folder.summary
    assert summary is not None
    assert summary["t"] == summary["applied"] == 40
    assert summary["accuracy"] > 0.85
    assert f"accuracy {summary['accuracy']:.3f} at epoch 40" in said
    assert "there was no proximal term" not in said
    with folder.ledger() as ledger:
        applied = [decision for decision in ledger.decisions() if decision.mix]  # others come after the end
    assert {decision.lease.worker for decision in applied} == set(range(NODES))
    assert max(decision.staleness for decision in applied) >= 1
    assert len(applied) == 40
    assert all(
        decision.mix and decision.mix.new == pytest.approx(0.6 * (decision.staleness + 1) ** -0.5)
        for decision in applied
    )
