"""Many seeds are counted as single ones are, and the first that fails is told with how to replay it."""

from collections import Counter

import pytest

from offbeat.errors import InvariantBroken
from tests.simulation import faults, many_faults
from tests.simulation.rule_cases import RULE_CASES

SEEDS = range(5, 15)


def test_the_totals_are_those_of_the_single_seeds() -> None:
    totals, failed = many_faults.counted(map(many_faults.one_seed, SEEDS), lambda _: None)
    watches = [faults.run(seed, many_faults.case_of(seed)) for seed in SEEDS]
    assert failed is None
    assert totals.seeds == len(SEEDS)
    assert totals.sums["events"] == sum(len(watch.events) for watch in watches)
    assert totals.sums["restarts"] == sum(watch.restarts for watch in watches) > 0
    seen = sum((watch.outcomes for watch in watches), Counter())
    assert totals.outcomes == {outcome.value: count for outcome, count in seen.items()}
    assert totals.words(2.0).startswith("10 seeds in 2 s (5.0 per second): ")


def test_a_seed_that_fails_stops_the_count_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = faults.run

    def broken(seed: int, case: str) -> faults.Watch:
        if seed == 8:
            raise InvariantBroken("task 3 was applied twice")
        return run(seed, case)

    monkeypatch.setattr(faults, "run", broken)
    totals, failed = many_faults.counted(map(many_faults.one_seed, SEEDS), lambda _: None)
    assert totals.seeds == 3
    assert failed is not None
    assert failed.seed == 8
    assert "task 3 was applied twice" in (failed.failure or "")
    assert many_faults.replay_of(8) == "python -m tests.simulation.faults 8"
    assert many_faults.replay_of(9) == f"python -m tests.simulation.faults 9 {[*RULE_CASES][4]}"


def test_seeds_run_on_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert many_faults.main(["12", "--first", "100", "--processes", "2"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Seeds 100 to 111. 12 seeds in ")
    assert "applied once" in told
