"""The gate on ||x_new - x_tau||: limits, factors, what it remembers, and what a clipped update is."""

import math
import statistics
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.gate import MEDIAN_AFTER, MEDIAN_OF, Accepted, Gate, clipped
from offbeat.core.kernel import Updater
from offbeat.core.rules import Mix, Rule, delta, fedasync
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import AnswerPush, Command, Event, Outcome, Quarantine, TellQuarantined
from offbeat.protocol.plan import Plan
from offbeat.sim.devices import device_model
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import SimulatedFleet
from offbeat.sim.executors import Inline
from offbeat.sim.plane import Plane
from offbeat.task import start
from tests.simulation.invariants import check
from tests.simulation.quadratic import Quadratic

Doubles = npt.NDArray[np.float64]
DISTANCE = st.floats(0.0, 1e12)
LIMIT = st.floats(1e-6, 1e6)
COORDINATE = st.floats(-1e3, 1e3)
VECTOR = st.tuples(*[COORDINATE] * 3).map(np.array)
COEFFICIENT = st.floats(-1.0, 1.0)


def passed(gate: Gate, distances: list[float], memory: Accepted = ()) -> list[float]:
    """The factors of these distances, one after the other."""
    factors = []
    for distance in distances:
        factor, memory = gate.judge(distance, memory)
        factors.append(factor)
    return factors


def applied(mix: Mix, w: Doubles, x_new: Doubles, x_tau: Doubles) -> Doubles:
    return mix.keep * w + mix.new * x_new + mix.base * x_tau


# --- an absolute limit -----------------------------------------------------------------------------------------------


def test_refuse_lets_through_up_to_the_limit_and_nothing_above() -> None:
    gate = Gate(norm_max=2.0)
    assert passed(gate, [0.0, 1.9, 2.0, math.nextafter(2.0, 3.0), 1e300, 1.0]) == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert not gate.needs_base


def test_clip_shortens_what_is_too_long() -> None:
    gate = Gate(norm_max=2.0, policy="clip")
    assert passed(gate, [0.0, 2.0, 4.0, 8.0]) == [1.0, 1.0, 0.5, 0.25]
    assert gate.needs_base


@pytest.mark.parametrize("policy", ["refuse", "clip"])
@pytest.mark.parametrize("distance", [math.nan, math.inf])
def test_a_distance_that_is_not_finite_is_refused(policy: Any, distance: float) -> None:
    assert Gate(2.0, policy).judge(distance, [1.0]) == (0.0, [1.0])
    assert Gate(None, policy, 2.0).judge(distance, [1.0]) == (0.0, [1.0]), "before there is a limit as well"


def test_what_cannot_be_scaled_is_refused() -> None:
    assert Gate(1e-200, "clip").judge(1e200, []) == (0.0, [])


@settings(derandomize=True, deadline=None, max_examples=200)
@given(DISTANCE, LIMIT)
def test_a_factor_lies_above_0_and_at_most_at_1(distance: float, norm_max: float) -> None:
    factor, _ = Gate(norm_max, "clip").judge(distance, [])
    assert 0.0 < factor <= 1.0
    assert (factor == 1.0) == (distance <= norm_max)
    assert distance * factor <= norm_max * (1 + 1e-12)
    assert Gate(norm_max).judge(distance, [])[0] == (1.0 if distance <= norm_max else 0.0)


# --- a limit relative to the median ----------------------------------------------------------------------------------


def test_the_median_says_nothing_before_fifty_updates() -> None:
    gate = Gate(median_max=3.0)
    ones = [1.0] * (MEDIAN_AFTER - 1)
    assert gate.limit(ones) == math.inf
    assert gate.limit([*ones, 1.0]) == 3.0
    assert passed(gate, [*ones, 1e9]) == [1.0] * MEDIAN_AFTER
    assert passed(gate, [*ones, 1.0, 3.0, 3.1]) == [1.0] * (MEDIAN_AFTER + 1) + [0.0]


def test_what_is_refused_leaves_no_trace() -> None:
    gate, memory = Gate(median_max=3.0), [1.0] * MEDIAN_AFTER
    assert gate.judge(4.0, memory) == (0.0, memory)
    assert passed(gate, [4.0] * 1000 + [3.0], memory) == [0.0] * 1000 + [1.0]


def test_what_is_clipped_is_remembered_at_its_limit() -> None:
    gate, memory = Gate(median_max=4.0, policy="clip"), [1.0] * MEDIAN_AFTER
    assert gate.judge(400.0, memory) == (0.01, [*memory, 4.0])


def test_the_memory_is_bounded_and_the_latest() -> None:
    gate, memory = Gate(median_max=1e9), list[float]()
    for n in range(1, MEDIAN_OF + 100):
        _, after = gate.judge(float(n), memory)
        assert after is not memory, "a memory is never changed in place"
        memory = list(after)
    assert memory == [float(n) for n in range(100, MEDIAN_OF + 100)]
    assert MEDIAN_AFTER <= MEDIAN_OF


def test_nothing_is_remembered_where_nothing_is_made_of_it() -> None:
    assert Gate(norm_max=3.0).judge(1.0, ()) == (1.0, ())


def test_models_that_do_not_move_set_no_limit() -> None:
    still = [0.0] * MEDIAN_AFTER
    assert Gate(median_max=3.0).limit(still) == math.inf
    assert Gate(norm_max=5.0, median_max=3.0).limit(still) == 5.0
    assert passed(Gate(None, "clip", 3.0), [1.0], still) == [1.0]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.floats(1e-3, 1e12), min_size=MEDIAN_AFTER, max_size=MEDIAN_AFTER + 3), st.floats(1.0, 100.0), LIMIT)
def test_the_smaller_limit_counts(distances: list[float], median_max: float, norm_max: float) -> None:
    relative = median_max * statistics.median(distances)
    assert Gate(median_max=median_max).limit(distances) == pytest.approx(relative)
    assert Gate(norm_max, median_max=median_max).limit(distances) == pytest.approx(min(relative, norm_max))


def test_the_median_of_huge_distances_is_one_of_them() -> None:
    assert Gate(median_max=1.0).limit([1.5e308] * MEDIAN_AFTER) == 1.5e308


# --- what a clipped update is ----------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=300)
@given(VECTOR, VECTOR, LIMIT)
def test_a_clipped_update_lies_at_the_limit_on_the_way_to_where_it_was(
    x_new: Doubles, x_tau: Doubles, norm_max: float
) -> None:
    distance = float(np.linalg.norm(x_new - x_tau))
    factor, _ = Gate(norm_max, "clip").judge(distance, [])
    alone = clipped(Mix(keep=0.0, new=1.0, base=0.0, publish=True), factor)
    moved = applied(alone, np.zeros(3), x_new, x_tau) - x_tau
    assert float(np.linalg.norm(moved)) == pytest.approx(min(distance, norm_max), rel=1e-6, abs=1e-9)
    assert float(moved @ (x_new - x_tau)) == pytest.approx(float(np.linalg.norm(moved)) * distance, rel=1e-6, abs=1e-9)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(VECTOR, VECTOR, VECTOR, COEFFICIENT, COEFFICIENT, COEFFICIENT, st.floats(1e-9, 1.0), st.booleans())
def test_clipped_mixes_the_shorter_update_in_place_of_the_pushed_one(
    w: Doubles,
    x_new: Doubles,
    x_tau: Doubles,
    keep: float,
    new: float,
    base: float,
    factor: float,
    publish: bool,
) -> None:
    mix = Mix(keep, new, base, publish)
    shorter = x_tau + factor * (x_new - x_tau)
    wanted, found = applied(mix, w, shorter, x_tau), applied(clipped(mix, factor), w, x_new, x_tau)
    assert found == pytest.approx(wanted, abs=1e-9)
    assert clipped(mix, factor).publish is publish
    assert sum(clipped(mix, factor)[:3]) == pytest.approx(sum(mix[:3]), abs=1e-12)


def test_what_is_not_clipped_keeps_its_bits() -> None:
    mix = Mix(0.7, 0.3, -0.1, True)
    assert clipped(mix, 1.0) is mix


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *(({"norm_max": bad}, f"norm_max is {bad!r} but must be a finite number > 0") for bad in (0.0, -1.0, math.inf)),
        ({"norm_max": math.nan}, "norm_max is nan but must"),
        *(({"median_max": bad}, f"norm_median_max is {bad!r} but must be .* >= 1") for bad in (0.99, -3.0, math.inf)),
        ({"median_max": math.nan}, "norm_median_max is nan but must"),
        ({"norm_max": 1.0, "policy": "scale"}, "norm_policy is 'scale'; use one of refuse, clip"),
        ({"policy": "clip"}, "a gate needs norm_max or norm_median_max"),
    ],
)
def test_a_gate_refuses_what_makes_no_sense_and_says_what_is_allowed(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        Gate(**arguments)


# --- in a simulated run ----------------------------------------------------------------------------------------------


class Simulated:
    """Device 0 stays at 1; device 1 pushes 100, and both take a second for it."""

    def __init__(self, rule: Rule, plan: Plan) -> None:
        self.commands: list[Command] = []
        self.coordinator = Coordinator(rule, plan)
        task = Quadratic(centres=(1.0, 100.0), shrink=(0.0, 0.0))
        executor, fleet = Inline(task), SimulatedFleet(2, device_model("constant", seed=0), seed=0)
        with Updater(compiled=False) as updater:
            plane = Plane(start(task, 0), self.coordinator, executor, updater, seed=0)
            engine = Engine(self.coordinator, fleet, plane, self.record)
            while not engine.finished:
                executor.finish(engine.advance())
        self.x = float(plane.x["x"][0])

    def record(self, _: Event, commands: list[Command]) -> None:
        check(self.coordinator)
        self.commands += commands

    def outcomes(self, worker: int) -> list[Outcome]:
        answers = [command for command in self.commands if isinstance(command, AnswerPush)]
        return [answer.outcome for answer in answers if answer.worker == worker]


def test_a_simulated_run_goes_on_without_whoever_is_refused_too_often() -> None:
    run = Simulated(fedasync(0.5), Plan(gate=Gate(3.0), bad_updates_max=2, epochs=6))
    assert run.outcomes(1) == [Outcome.TOO_LARGE] * 2
    assert run.outcomes(0) == [Outcome.APPLIED] * 6
    why = "its ||x_new - x_tau|| is 99; 3 is accepted"
    assert [command for command in run.commands if isinstance(command, Quarantine)] == [Quarantine(1, why)]
    assert [command for command in run.commands if isinstance(command, TellQuarantined)] == [TellQuarantined(1, why)]
    assert run.x == 1.0


@pytest.mark.parametrize(("rule", "x"), [(fedasync(0.5), 1.75), (delta(0.5), 2.5)], ids=["fedasync", "delta"])
def test_a_simulated_run_clips(rule: Rule, x: float) -> None:
    """Device 1, which the seed lets go first, is clipped to 1 + 3 and mixed by half; device 0 then pushes 1."""
    run = Simulated(rule, Plan(gate=Gate(3.0, "clip"), epochs=2))
    assert run.outcomes(0) == run.outcomes(1) == [Outcome.APPLIED]
    assert run.x == pytest.approx(x)
