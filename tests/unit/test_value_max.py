"""value_max: the largest absolute value of an update, found in the pass that looks for NaN, and judged."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.core.gate import Gate
from offbeat.core.kernel import CHUNK, LANES, STRIDE, Updater
from offbeat.core.rules import fedasync
from offbeat.errors import InvalidValue
from offbeat.method import VALUE_MAX, method_of
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Outcome,
    Quarantine,
    TaskRequested,
    UpdateArrived,
    WorkerJoined,
)
from offbeat.protocol.plan import Plan
from offbeat.settings import Settings
from offbeat.storage.ledger import Ledger
from tests.simulation.quadratic import Quadratic

UPDATERS = [pytest.param(compiled, id="compiled" if compiled else "numpy") for compiled in (False, True)]


# --- the pass over memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", UPDATERS)
@pytest.mark.parametrize("size", [1, LANES + 1, CHUNK, 100_003])
@pytest.mark.parametrize("value", [3e8, -3e8, 1.5, -1e-45, 0.0])
def test_the_largest_absolute_value_is_found_wherever_it_is(compiled: bool, size: int, value: float) -> None:
    if compiled:
        pytest.importorskip("numba")
    with Updater(compiled=compiled) as updater:
        for place in {0, size // 2, size - 1}:
            x = np.zeros(size, np.float32)
            x[place] = value
            found = float(abs(np.float32(value)))
            assert updater.largest(x) == found
            measured = updater.measured(x, np.ones(size, np.float32))
            assert measured.largest == found
            assert measured.distance == updater.distance(x, np.ones(size, np.float32))


@pytest.mark.parametrize("compiled", UPDATERS)
def test_nan_is_above_infinity_is_above_every_number(compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    with Updater(compiled=compiled) as updater:
        x = np.full(3 * CHUNK, 3.4e38, np.float32)
        assert updater.largest(x) == float(np.float32(3.4e38))
        x[CHUNK] = -np.inf
        assert updater.largest(x) == math.inf
        x[0] = np.nan
        assert math.isnan(updater.largest(x))
        assert math.isnan(updater.measured(x, np.zeros_like(x)).largest)


def test_in_strides_and_on_several_threads_it_is_the_same() -> None:
    x = np.zeros(2 * STRIDE + 7, np.float32)
    x[STRIDE + 3] = -7.0
    with Updater(3, compiled=False) as updater:
        assert updater.largest(x) == updater.largest(x, between=lambda: None) == 7.0
        assert updater.measured(x, x, between=lambda: None) == (0.0, 7.0)


# --- the coordinator -------------------------------------------------------------------------------------------------


def begun(**plan: Any) -> Coordinator:
    c = Coordinator(fedasync(0.5), Plan(in_flight_max=1, value_max=1e8, **plan))
    c.handle(WorkerJoined(0.0, 1, 1))
    c.handle(TaskRequested(0.0, 1))
    return c


def answer(c: Coordinator, **seen: Any) -> AnswerPush:
    commands = c.handle(UpdateArrived(1.0, 1, 1, 1, 1, **seen))
    return next(command for command in commands if isinstance(command, AnswerPush))


def test_a_value_above_value_max_is_refused_by_name_and_stays_refused() -> None:
    c = begun()
    first = answer(c, largest=1e38)
    assert first.outcome is Outcome.TOO_LARGE
    assert first.why == "its update holds a value of 1e+38; value_max is 1e+08"
    assert answer(c) == first.again()
    assert c.applied == 0


def test_a_value_of_value_max_itself_is_mixed() -> None:
    assert answer(begun(), largest=1e8).outcome is Outcome.APPLIED


def test_it_is_a_bad_update_and_quarantines() -> None:
    c = begun(bad_updates_max=1)
    commands = c.handle(UpdateArrived(1.0, 1, 1, 1, 1, largest=2e8))
    assert Quarantine(1, "its update holds a value of 2e+08; value_max is 1e+08") in commands


def test_what_holds_nan_as_well_is_not_finite() -> None:
    assert answer(begun(), finite=False, largest=1e38).outcome is Outcome.NOT_FINITE


def test_a_gate_refuses_with_its_own_words() -> None:
    c = begun(gate=Gate(3.0))
    found = answer(c, distance=4.0)
    assert (found.outcome, found.why) == (Outcome.TOO_LARGE, "")


def test_updates_that_are_all_too_large_end_the_run_as_those_with_nan_do() -> None:
    c = begun(not_finite_max=1)
    answer(c, largest=1e9)
    assert c.end_reason == "diverged: the last 1 updates were NaN, infinite or above value_max"


def test_only_what_is_above_the_limit_is_told() -> None:
    plan = Plan(value_max=10.0)
    assert [plan.excess(value) for value in (0.0, 10.0, 10.5, math.inf, math.nan)] == [None, None, 10.5, None, None]
    assert Plan().excess(3e38) is None


@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_a_limit_that_refuses_everything_is_refused(wrong: float) -> None:
    with pytest.raises(InvalidValue, match=r"value_max is .* but must be a number > 0; inf is no limit"):
        Plan(value_max=wrong)


def test_the_setting_is_1e8_where_it_is_not_set() -> None:
    def plan(**settings: Any) -> Plan:
        return method_of(Settings.of(settings), None).plan

    assert plan().value_max == VALUE_MAX == 1e8
    assert plan(value_max=5).value_max == 5.0
    assert plan(value_max=math.inf).value_max == math.inf


# --- a simulated run -------------------------------------------------------------------------------------------------

RUNAWAY = Quadratic(centres=(1.0, 1e30), shrink=(0.0, 0.0))
"""Device 1 jumps to 1e30 at once."""


def outcomes(folder: Path, device: int) -> list[str | None]:
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        return [row.outcome for row in ledger.rows("decided") if row.device == device]


def test_a_simulated_runaway_is_refused_and_does_not_spoil_the_model(tmp_path: Path) -> None:
    run = offbeat.simulate(RUNAWAY, epochs=20, executor="inline", dir=tmp_path)
    assert set(outcomes(tmp_path, 1)) == {"too_large"}
    assert float(np.abs(run.x.vector).max()) <= 1.0
    with Ledger.open(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        seen = zip(ledger.rows("arrived"), ledger.rows("decided"), strict=True)
        details = {decided.outcome: arrived.detail for arrived, decided in seen}
    assert details["applied"] is None or "largest" not in details["applied"], "an ordinary row does not grow"
    assert "largest" in (details["too_large"] or "")


@pytest.mark.parametrize("gate", [{}, {"norm_max": 1e31}], ids=["plain", "with a gate"])
def test_without_a_limit_it_is_mixed(gate: dict[str, Any], tmp_path: Path) -> None:
    run = offbeat.simulate(RUNAWAY, epochs=20, executor="inline", value_max=math.inf, dir=tmp_path, **gate)
    assert float(np.abs(run.x.vector).max()) > 1e20
    assert set(outcomes(tmp_path, 1)) == {"applied"}
