"""From the rows that last alone, a coordinator makes every decision of a run again."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from offbeat.method import method_of, until_stuck
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.led import LedCoordinator
from offbeat.settings import Settings
from offbeat.sim.event_sources import window_of
from offbeat.storage.leading import UNKNOWN_TO_THE_UNCHAINED, LedThrough, lead
from offbeat.storage.ledger import NO_ROW, Ledger
from tests.server.serving import BEFORE_THE_CHAIN
from tests.simulation import faults
from tests.simulation.rule_cases import RULE_CASES
from tests.simulation.test_extending import METHODS as MORE_METHODS
from tests.simulation.test_run import METHODS, TASK, simulate
from tests.unit.test_fold import again

SEEDS = range(24)
RULES: dict[str, dict[str, Any]] = {
    "adapted": {"rule": "fedasync", "staleness_fn": "hinge:1,2"},
    "gated": {"norm_median_max": 1.5},
}
SIMULATED: dict[str, dict[str, Any]] = {**METHODS, **MORE_METHODS, **RULES, **RULE_CASES}
MIXED_LATER = {
    f"{name}, mixed later": {**RULE_CASES[name], "mix_s": 0.2} for name in ("asyncfeded", "ringmaster", "ace")
}
CLOSED = ("deadline", "fedadam with a deadline")
"""Those whose groups are closed by a deadline."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Coordinator, int]]:
    """Runs of every rule, policy and scheduler with faults of every kind, in ledgers that were pruned."""
    folder, found = tmp_path_factory.mktemp("seeds"), {}
    for seed in SEEDS:
        path = folder / f"{seed}.sqlite"
        watch = recorded(path, seed)
        found[seed] = path, watch.coordinator, watch.coordinator.judge.decisions
    return found


def recorded(path: Path, seed: int, case: str = "") -> faults.Watch:
    """A faulty run in a ledger that was pruned."""
    watch = faults.run(seed, case)
    with Ledger.create(path, verbose=True) as ledger:
        for event, commands in again(watch, seed):
            ledger.record(event, commands)
        ledger.flush()
        while ledger.forget_chatter(NO_ROW):
            pass
    return watch


def led_by(path: Path, like: Any) -> LedThrough:
    with Ledger.open(path, read_only=True) as ledger:
        return lead(ledger, LedCoordinator(like.rule, like.plan, like.scheduler, seed=1))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_faulty_run_is_decided_again(seeds: dict[int, Any], seed: int) -> None:
    path, coordinator, decisions = seeds[seed]
    led = led_by(path, coordinator)
    assert led.differences == led.lacks == []
    assert led.decisions == decisions > 0


@pytest.mark.parametrize("case", RULE_CASES)
def test_a_faulty_run_of_every_rule_is_decided_again(case: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    coordinator = recorded(path, 5, case).coordinator
    led = led_by(path, coordinator)
    assert led.differences == led.lacks == []
    assert led.decisions == coordinator.judge.decisions > 0


def test_the_seeds_hold_every_kind_of_answer(seeds: dict[int, Any]) -> None:
    kinds: Counter[str] = Counter()
    for path, _, _ in seeds.values():
        with Ledger.open(path, read_only=True) as ledger:
            kinds.update(row.kind if row.kind != "decided" else str(row.outcome) for row in ledger.rows())
    wanted = {"busy", "unknown", "repeated", "applied", "too_stale", "not_finite", "finished"}
    assert wanted | {"heard_again", "released", "restarted", "mixed"} <= set(kinds)
    assert not {"requested", "heartbeat", "time_passed", "request_ended"} & set(kinds)


@pytest.mark.parametrize("method", SIMULATED | MIXED_LATER)
def test_a_simulated_run_is_decided_again(method: str, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"epochs": 40, **(SIMULATED | MIXED_LATER)[method]}
    run = simulate(dir=tmp_path / "run", **chosen)
    settings = Settings.of({"device_model": "lognormal:1", "seed": 4, **chosen})
    used = until_stuck(method_of(settings, TASK, window=window_of(settings)))
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        led = lead(ledger, used.led())
        assert led.decisions == ledger.count("decided") >= run.summary["t"]
        assert bool(ledger.count("group_closed")) is (method in CLOSED)
        asked = [(row.asked_at, row.at) for row in ledger.rows("leased") if row.at == row.granted_at]
    assert led.differences == led.lacks == []
    assert all(asked_at is not None and asked_at <= at for asked_at, at in asked)


# --- what is otherwise is found --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("new = new * 1.0000001 WHERE kind = 'decided' AND decision = 7", "(decided): new was"),
        ("staleness = staleness + 1 WHERE kind = 'decided' AND decision = 7", "(decided): staleness was"),
        ("samples = 3 WHERE kind = 'arrived' AND task = 7", "(decided): samples was"),
        ("tau = tau + 1 WHERE kind = 'leased' AND task = 9", "(leased): tau was"),
    ],
)
def test_a_row_that_does_not_follow_is_named(change: str, named: str, tmp_path: Path) -> None:
    simulate(dir=tmp_path / "run", epochs=30)
    path, settings = tmp_path / "run" / "ledger.sqlite", Settings.of({"epochs": 30, "seed": 4})
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE events SET {change}")  # noqa: S608 (text from above)
    with Ledger.open(path, read_only=True) as ledger:
        (difference,) = lead(ledger, method_of(settings, TASK).led()).differences
    assert named in difference


def test_another_rule_decides_otherwise(tmp_path: Path) -> None:
    simulate(dir=tmp_path / "run", epochs=30, alpha=0.5)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        led = lead(ledger, method_of(Settings.of({"epochs": 30, "alpha": 0.4}), TASK).led())
    assert "new was 0.5" in led.differences[0] or "keep was 0.5" in led.differences[0]


def test_an_answer_that_is_missing_is_named(tmp_path: Path) -> None:
    simulate(dir=tmp_path / "run", epochs=30)
    path = tmp_path / "run" / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM events WHERE kind = 'decided' AND decision = 7")
    with Ledger.open(path, read_only=True) as ledger:
        (difference,) = lead(ledger, method_of(Settings.of({"epochs": 30}), TASK).led()).differences
    assert "decided is missing" in difference


# --- ledgers of before -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ledger_of_before_is_led_by_its_arrivals_and_says_what_it_lacks(
    seeds: dict[int, Any], seed: int, tmp_path: Path
) -> None:
    source, coordinator, decisions = seeds[seed]
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(source.read_bytes())
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(BEFORE_THE_CHAIN)
        connection.execute("DELETE FROM events WHERE kind = 'mixed'")  # which was pruned then
    led = led_by(path, coordinator)
    assert led.lacks == list(UNKNOWN_TO_THE_UNCHAINED)
    assert (led.decisions, led.differences) == (decisions, [])
