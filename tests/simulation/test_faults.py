"""Seeds x fault plans: nothing goes wrong while messages and workers fail, and training finishes once they stop."""

from collections import Counter

import pytest

from offbeat.protocol.messages import Outcome, RunPaused, RunResumed, ServerRestarted
from tests.simulation import faults
from tests.simulation.rule_cases import RULE_CASES

SEEDS = range(200)
QUICK = 60
"""The first seeds, which are in the fast suite; the slow one has all others, and `make faults` runs thousands."""
SEEDS_PER_RULE = range(12)
QUICK_PER_RULE = 2


@pytest.mark.parametrize(
    "seed", [seed if seed < QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS]
)
def test_a_faulty_run_is_safe_and_finishes(seed: int) -> None:
    try:
        watch = faults.run(seed)
    except Exception as error:
        raise AssertionError(f"replay with: python -m tests.simulation.faults {seed}") from error
    assert watch.coordinator.t == faults.EPOCHS, f"replay with: python -m tests.simulation.faults {seed}"


@pytest.mark.parametrize("case", RULE_CASES)
@pytest.mark.parametrize(
    "seed", [seed if seed < QUICK_PER_RULE else pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS_PER_RULE]
)
def test_a_faulty_run_of_every_rule_is_safe_and_finishes(seed: int, case: str) -> None:
    try:
        watch = faults.run(seed, case)
    except Exception as error:
        raise AssertionError(f"replay with: python -m tests.simulation.faults {seed} {case}") from error
    assert watch.coordinator.t == faults.EPOCHS, f"replay with: python -m tests.simulation.faults {seed} {case}"


def test_the_plans_differ_and_the_faults_really_happen() -> None:
    watches = [faults.run(seed) for seed in range(30)]
    assert sum(watch.duplicates for watch in watches) > 50
    released = [watch for watch in watches if watch.coordinator.released]
    assert len(released) > 10
    seen = sum((watch.outcomes for watch in watches), Counter[Outcome]())
    for outcome in (Outcome.BUSY, Outcome.NOT_FINITE, Outcome.TOO_STALE, Outcome.UNKNOWN_TASK):
        assert seen[outcome] > 10, outcome
    assert len({faults.configuration(seed)[1].staleness_policy for seed in SEEDS}) == 3
    silences = sum((watch.silences for watch in watches), Counter[str]())
    for end in ("resumed", "given away", "pushed"):
        assert silences[end] > 10, end
    kinds = Counter(type(event) for watch in watches for event in watch.events)
    assert kinds[RunPaused] == kinds[RunResumed] > 10
    assert kinds[ServerRestarted] > 10


def test_a_failure_tells_how_to_replay_it(capsys: pytest.CaptureFixture[str]) -> None:
    faults.main(["3"])
    assert capsys.readouterr().out.startswith("seed 3: 60 epochs, ")
