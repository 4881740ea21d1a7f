"""Rules with vectors of their own: a run ends with its bits wherever it is stopped, extended or trained."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.kernel import Updater
from offbeat.settings import Settings
from offbeat.sim.processes import Processes
from offbeat.sim.run import Run, Simulation, StopRequested
from offbeat.storage.run_folder import RunFolder
from tests.simulation.rule_cases import RULE_CASES
from tests.simulation.test_run import TASK

COMMON: dict[str, Any] = {
    "executor": "inline",
    "device_model": "lognormal:1",
    "evaluate_every": 7,
    "seed": 4,
    "epochs": 30,
}
WORLDS: dict[str, dict[str, Any]] = {
    "calm": {},
    "slow server": {"mix_s": 0.2, "queue_max": 3},
    "lossy": {"dropout": 0.2, "lease_s": 4.0},
}
MOMENTS = (1, 17, 18, 19, 20, 47, 90)
"""Events after which a run is stopped: in the middle of a buffer, too, and between a decision and its mixing."""


def simulation(folder: Path | None, **settings: Any) -> Simulation:
    return Simulation(TASK, Settings.of(COMMON | settings), folder=folder)


def stop_after(run: Simulation, handled: int) -> None:
    """Stop exactly when so many events were handled."""
    while run.engine.handled < handled and not run.finished:
        run.executor.finish(run.engine.advance(handled_max=handled))
    run.checkpoint()
    run.close()


def stop_at(run: Simulation, t: int) -> None:
    """Stop at a version as a user does who presses ^C."""

    def look(run: Simulation) -> None:
        if run.coordinator.t >= t:
            raise StopRequested

    with pytest.raises(StopRequested):
        run.run(look)


def rows_of(folder: Path) -> list[Any]:
    with RunFolder.open(folder).ledger() as ledger:
        return [row[1:] for row in ledger.rows() if row.kind not in ("truncated", "extended", "finished")]


def same(one: Run, other: Run) -> None:
    assert one.summary["x_sha256"] == other.summary["x_sha256"]
    assert one.ledger == other.ledger
    assert one.metrics == other.metrics
    assert one.contribution == other.contribution
    assert (one.average is None) is (other.average is None)
    if one.average is not None and other.average is not None:
        assert np.array_equal(one.average.vector, other.average.vector)


@pytest.mark.parametrize("world", ["calm", *(pytest.param(name, marks=pytest.mark.slow) for name in [*WORLDS][1:])])
@pytest.mark.parametrize("case", RULE_CASES)
def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_bits(case: str, world: str, tmp_path: Path) -> None:
    settings = RULE_CASES[case] | WORLDS[world]
    for handled in MOMENTS:
        stop_after(simulation(tmp_path / "run", **settings), handled)
    stop_at(simulation(tmp_path / "run", **settings), 25)
    resumed, whole = (simulation(tmp_path / name, **settings).run() for name in ("run", "whole"))
    same(resumed, whole)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


@pytest.mark.parametrize("case", ["ca2fl", "asyncfeded", "fedadam with a deadline", "averaged with slots"])
def test_so_does_one_that_is_killed_a_while_after_its_checkpoint(case: str, tmp_path: Path) -> None:
    settings = RULE_CASES[case] | {"mix_s": 0.1}
    for before, after in pairwise((9, 30, 31, 60)):
        killed = simulation(tmp_path / "run", **settings)
        while killed.engine.handled < after and not killed.finished:
            if killed.engine.handled == before:
                killed.checkpoint()
            killed.executor.finish(killed.engine.advance(handled_max=killed.engine.handled + 1))
        killed.close()
    same(simulation(tmp_path / "run", **settings).run(), simulation(tmp_path / "whole", **settings).run())


@pytest.mark.parametrize("case", RULE_CASES)
def test_an_extended_run_has_the_bits_of_one_long_run(case: str, tmp_path: Path) -> None:
    settings = RULE_CASES[case]
    short = simulation(tmp_path / "run", **settings | {"epochs": 11}).run()
    extended, whole = (simulation(tmp_path / name, **settings).run() for name in ("run", "whole"))
    assert (short.summary["t"], extended.summary["t"]) == (11, 30)
    same(extended, whole)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_other_processes_and_kernels_give_the_same_bits() -> None:
    pytest.importorskip("numba", reason="numba is not installed")
    executor = Processes(TASK, 2)
    try:
        for settings in RULE_CASES.values():
            chosen = Settings.of(COMMON | settings)
            with (
                Updater(compiled=True) as compiled,
                Updater(compiled=False) as plain,
                Updater(3, compiled=True) as three,
            ):
                runs = [Simulation(TASK, chosen, updater=updater).run() for updater in (compiled, plain, three)]
                runs.append(Simulation(TASK, chosen, executor, updater=plain).run())
            assert len({run.summary["x_sha256"] for run in runs}) == 1, settings
            for run in runs[1:]:
                same(run, runs[0])
    finally:
        executor.close()
