"""What was simulated is what is deployed: one scenario, played to the simulator and to a live server."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.protocol.messages import Decision
from offbeat.settings import Settings
from offbeat.sim.run import Simulation
from offbeat.storage.ledger import Ledger
from tests.server.serving import TASK, Running, Worker, packed, serving

SCENARIOS: dict[str, dict[str, Any]] = {
    "fedasync": {"rule": "fedasync", "alpha": 0.7},
    "reject": {"staleness_policy": "reject", "staleness_max": 3, "staleness_fn": "hinge:10,2"},
    "pace": {"staleness_policy": "pace", "staleness_max": 6},
    "fedbuff": {"rule": "fedbuff:3"},
    "delta": {"rule": "delta", "alpha": 0.4},
    "gradients": {"gradients": 75},
}


def story(folder: Path) -> tuple[list[tuple[str, int]], list[Decision]]:
    """Who was leased a task and whose update arrived, in order; and what was decided."""
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        rows = [(row.kind, row.worker) for row in ledger.rows() if row.kind in ("leased", "arrived")]
        return [(kind, int(worker or 0)) for kind, worker in rows], list(ledger.decisions())


def told(decisions: list[Decision]) -> list[tuple[Any, ...]]:
    """Everything but the moment and the number of the task, which count what a script leaves out."""
    return [
        (d.t, d.lease.tau, d.staleness, d.outcome, d.mix, d.lease.device, d.lease.number, d.gradients)
        for d in decisions
    ]


def play(running: Running, script: list[tuple[str, int]]) -> None:
    workers = {device: Worker(running, f"w{device}", device=device) for device in range(8)}
    leases: dict[int, Any] = {}
    for kind, device in script:
        worker = workers[device]
        if kind == "leased":
            leases[device] = worker.lease()
            continue
        lease = leases.pop(device)
        data = packed(worker.pull({"model": "/v1/models/latest"}))  # whatever it holds, the decision is the same
        worker.push(lease["task"], data, Offbeat_Samples=10 + device, Offbeat_Gradients=3)
        while running.server.run.coordinator.queued:
            running.status()


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_scenario_gives_the_same_decisions_simulated_and_served(name: str, tmp_path: Path) -> None:
    chosen = {"devices": 8, "in_flight_max": 5, "epochs": 25, "seed": 3, **SCENARIOS[name]}
    (tmp_path / "line.py").write_text(TASK)
    Simulation.of(
        str(tmp_path / "line.py"), Settings.of({**chosen, "device_model": "lognormal:1"}), folder=tmp_path / "simulated"
    ).run()
    script, simulated = story(tmp_path / "simulated")
    assert max(d.staleness for d in simulated) > 2
    with serving(tmp_path, chosen) as running:
        play(running, script)
    _, served = story(running.folder)
    assert told(served) == told(simulated)[: len(served)]
    assert len(served) >= len(simulated) - 1 > 20, "the simulator answers those who come after the end"
