"""The same bits under every rule: compiled or numpy, one thread or two, one update at a time or several in a pass."""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec

import numpy as np
import pytest

from offbeat.core import kernel
from offbeat.core.kernel import CHUNK, Updater
from offbeat.core.rules import Answer, Average, Facts, Memory, Mix, OnParameters, Rule, Steps, move, poly
from offbeat.core.vectors import Vectors
from tests.contract.rule_cases import AGGREGATES, CASES
from tests.contract.rule_runs import NUMPY, Run, applied, drawn, learning, run, start

SIZE = CHUNK + 77
"""More than one chunk, so that there is work for two threads."""
UPDATES = 14
NEEDS_NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
KINDS = [
    pytest.param((compiled, threads), marks=[NEEDS_NUMBA] if compiled else [], id=f"{name}-{threads}")
    for compiled, name, threads in ((False, "numpy", 2), (True, "compiled", 1), (True, "compiled", 2))
]
PASSES = [(UPDATES,), (1, 4, 2, 7), (5, 9), (2,) * 7]


@pytest.fixture(autouse=True, scope="module")
def spread() -> Iterator[None]:
    """Small vectors are spread over the threads here, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SPREAD_MIN", 0)
        yield


@pytest.fixture(scope="module", params=KINDS)
def updater(request: pytest.FixtureRequest) -> Iterator[Updater]:
    compiled, threads = request.param
    with Updater(threads, compiled) as updater:
        yield updater


LOCAL = learning(0, SIZE)


def ran(rule: Rule, staleness_max: int = 4, average: Average | None = None, updater: Updater = NUMPY) -> Run:
    arrivals = drawn(0, UPDATES, devices=3, staleness_max=staleness_max)
    return run(rule, start(0, SIZE), arrivals, LOCAL, average=average, updater=updater)


@cache
def plainly(name: str) -> Run:
    """In numpy, with one thread, one update at a time."""
    return ran(CASES[name].rule, CASES[name].staleness_max, poly())


def bits(vectors: Vectors) -> dict[str, tuple[bytes, int]]:
    """All vectors: w, x, slots, caches and the mean, with the whole number beside them."""
    return {name: (model.vector.tobytes(), int(model["seen"])) for name, model in vectors.models().items()}


@pytest.mark.parametrize("name", CASES)
def test_compiled_code_and_threads_change_no_bit(name: str, updater: Updater) -> None:
    case, plain = CASES[name], plainly(name)
    other = ran(case.rule, case.staleness_max, poly(), updater)
    assert other.answers == plain.answers
    assert bits(other.vectors) == bits(plain.vectors)


@pytest.mark.parametrize("name", CASES)
def test_several_in_a_pass_have_the_bits_of_one_by_one(name: str, updater: Updater) -> None:
    plain = plainly(name)
    for passes in PASSES:
        assert bits(applied(plain, passes, updater, poly())) == bits(plain.vectors)


@pytest.mark.parametrize("name", AGGREGATES)
def test_several_in_a_pass_without_an_average(name: str, updater: Updater) -> None:
    plain = ran(CASES[name].rule, CASES[name].staleness_max)
    for passes in PASSES:
        assert bits(applied(plain, passes, updater)) == bits(plain.vectors)


def test_a_pass_may_hold_updates_of_every_kind() -> None:
    """Steps read x, which a version before them in the same pass has changed."""
    gather, step = Mix(1.0, 0.5, -0.5, publish=False), move("w", w=1.0, new=0.25, x=-0.25)
    kinds: list[Answer] = [gather._replace(publish=True), gather, Steps(1, 0.25, 0, False, (step,))]

    def formula(_: Facts, memory: Memory) -> tuple[Answer, Memory]:
        return kinds[int(memory["count"]) % 3], {"count": memory["count"] + 1}

    rule = Rule("every kind", formula, {"count": 0}, needs_base=True)
    plain = ran(rule)
    for passes in PASSES:
        assert bits(applied(plain, passes, NUMPY)) == bits(plain.vectors)


def test_steps_for_parameters_alone_leave_float_buffers_where_they_were(updater: Updater) -> None:
    steps = (move("w", new=1.0), OnParameters((move("w", w=2.0), move("m", m=1.0, new=1.0))))
    rule = Rule("twice", lambda _, memory: (Steps(0, 1, 0, True, steps), memory), slots=("m",))
    result = ran(rule, updater=updater)
    pushed = [order.x_new.vector for order in result.orders if order.x_new is not None]
    trained = SIZE - 2
    assert result.vectors.w.vector[:trained].tobytes() == (2 * pushed[-1][:trained]).tobytes()
    assert result.vectors.w.vector[trained:].tobytes() == pushed[-1][trained:].tobytes()
    assert not result.vectors.standing.slots["m"][trained:].any()
    assert np.abs(result.vectors.standing.slots["m"][:trained]).max() > 1
