"""A simulated run is backed up while it goes on; the backup ends with the same bits, and says that it is a fork."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.server.backup import back_up
from offbeat.server.verify import sentence, verify
from offbeat.settings import Settings
from offbeat.sim.run import Simulation
from offbeat.storage.backup_marker import MARKER, forks_in, read_marker
from offbeat.storage.ledger import Ledger
from tests.simulation.quadratic import Quadratic

TASK = Quadratic([float(i) for i in range(10)], [0.5] * 10, size=3, noise=0.1)
SETTINGS = Settings(epochs=60, seed=3, in_flight_max=4, executor="inline")


def simulated(
    folder: Path, settings: Settings = SETTINGS, backups: tuple[int, ...] = (), *, checkpoint: bool = True
) -> str:
    """Run to the end, with backups beside the folder on the way; the digest of the model."""

    def look(simulation: Simulation) -> None:
        for t in backups:
            out = folder.with_name(f"at-{t}")
            if simulation.coordinator.t >= t and not out.exists():
                if checkpoint:
                    simulation.checkpoint()
                assert back_up(folder, out)["agrees"]

    return str(Simulation.of(TASK, settings, folder=folder).run(look).summary["x_sha256"])


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_backup_on_the_way_ends_with_the_same_bits(tmp_path: Path, checkpoint: bool) -> None:
    x = simulated(tmp_path / "run", backups=(5, 30), checkpoint=checkpoint)
    for t in (5, 30):
        out = tmp_path / f"at-{t}"
        marker = read_marker(out)
        assert marker is not None
        assert (marker.row > 0) == checkpoint
        assert f"A backup of a run up to row {marker.row}, taken at" in sentence(verify(out))
        assert simulated(out) == x
        assert not (out / MARKER).exists()
        with Ledger.open(out / "ledger.sqlite", read_only=True) as ledger:
            (fork,) = forks_in(ledger)
        assert (fork["row"], fork["head"]) == (marker.row, marker.head)
        facts = verify(out)
        assert facts["agrees"]
        assert f"forked from a backup of a run at row {marker.row:,}" in sentence(facts)


def test_an_interrupted_fork_is_forked_once(tmp_path: Path) -> None:
    x = simulated(tmp_path / "run", backups=(20,))
    out = tmp_path / "at-20"
    for _ in range(2):
        simulation = Simulation.of(TASK, SETTINGS, folder=out)
        simulation.executor.finish(simulation.advance())
        simulation.close()
        simulation.executor.close()
    assert simulated(out) == x
    with Ledger.open(out / "ledger.sqlite", read_only=True) as ledger:
        assert len(forks_in(ledger)) == 1


def test_a_finished_run_is_backed_up_whole_and_can_be_extended(tmp_path: Path) -> None:
    simulated(tmp_path / "run")
    back_up(tmp_path / "run", tmp_path / "out")
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names | {MARKER}
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    longer = replace(SETTINGS, epochs=80)
    assert simulated(tmp_path / "out", longer) == simulated(tmp_path / "copy", longer)
    facts = verify(tmp_path / "out")
    assert facts["agrees"]
    assert len(facts["forks"]) == 1
