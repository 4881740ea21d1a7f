"""Seeds x fault plans: nothing goes wrong while messages and workers fail, and training finishes once they stop."""

import pytest

from offbeat.errors import InvariantBroken
from offbeat.sim import faults

SEEDS = range(200)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_faulty_run_is_safe_and_finishes(seed: int) -> None:
    try:
        watch = faults.run(seed)
    except InvariantBroken as error:
        pytest.fail(f"replay with: python -m offbeat.sim.faults {seed}\n{error}")
    assert watch.coordinator.t == faults.EPOCHS


def test_the_plans_differ_and_the_faults_really_happen() -> None:
    watches = [faults.run(seed) for seed in range(30)]
    assert sum(watch.duplicates for watch in watches) > 50
    released = [watch for watch in watches if watch.coordinator.released]
    assert len(released) > 10
    assert len({faults.configuration(seed)[1].staleness_policy for seed in SEEDS}) == 3
