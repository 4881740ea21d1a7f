"""Programs of steps give the bits of one step after the other, whatever code, threads, size or order is used."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core import kernel
from offbeat.core.kernel import CHUNK, STRIDE, Updater
from offbeat.core.layout import Layout, Model, Vector, aligned
from offbeat.core.rules import Facts, Rule, ace, ca2fl, compose, dcasgd, fadas, fedbuff, momentum, nesterov
from offbeat.core.rules.average import poly
from offbeat.core.rules.interface import Elementwise, Larger, Move, OnParameters, Product, Root, Steps, VectorStep
from offbeat.core.step_program import BLOCK, OrderOutline, StepProgram, outlined, planned
from offbeat.core.vectors import Order, Standing, Vectors
from offbeat.errors import InvalidValue

NEEDS_NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
KINDS = [
    pytest.param((compiled, threads), marks=[NEEDS_NUMBA] if compiled else [], id=f"{name}-{threads}")
    for compiled, name in ((True, "compiled"), (False, "numpy"))
    for threads in (1, 2)
]
SIZES = (1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK + 1, 3 * CHUNK + 5)
PRESENT = ("w", "x", "new", "base", "m")
"""`g` and `h` are slots that were never written."""
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.9, 1 / 3, 1e-46, 1e30]) | st.floats(-2, 2)
SPECIAL = np.array([0.0, -0.0, 1e-40, -1e-45, 3e38, np.inf, -np.inf, np.nan], np.float32)
READ = st.sampled_from([*PRESENT, "g", "h"])
WRITTEN = st.sampled_from(["w", "m", "g", "h", "_a", "_b"])
Named = Mapping[str, Vector]


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


# --- one step after the other ----------------------------------------------------------------------------------------


def elementwise_value(step: Elementwise, now: Named, size: int) -> Vector:
    """What one step writes, by its definition and with a rounding for every operation."""
    number = np.float32
    match step:
        case Move():
            terms = [now[name] * number(factor) for name, factor in step.terms if number(factor)]
            total = terms[0] if terms else np.zeros(size, np.float32)
            for term in terms[1:]:
                total = total + term
            return total
        case Product():
            product = (now[step.left] * now[step.right]) * number(step.share)
            return now[step.into] * number(step.keep) + product if number(step.keep) else product
        case Larger():
            return np.where(now[step.into] > now[step.of], now[step.into], now[step.of])
        case Root():
            divisor = np.sqrt(now[step.under]) + number(step.eps)
            return np.where(divisor == 0, number(0), now[step.over] * number(step.step) / divisor)


def naive(orders: Sequence[Sequence[VectorStep]], vectors: Named, trained: int) -> dict[str, Vector]:
    """All vectors after some orders; a slot that is not there is 0, and so are parts of scratch that nothing wrote."""
    size = len(vectors["w"])
    now = {name: np.zeros(size, np.float32) for name in ("g", "h")} | dict(vectors)
    with np.errstate(all="ignore"):
        for steps in orders:
            for step in steps:
                for one in step.steps if isinstance(step, OnParameters) else (step,):
                    value = elementwise_value(one, now, size)
                    if isinstance(step, OnParameters):
                        value = np.concatenate([value[:trained], now[one.into][trained:]])
                    now[one.into] = value
            now = {name: vector for name, vector in now.items() if not name.startswith("_")}
    return now


def same_bits(a: Vector, b: Vector) -> bool:
    """NaN is NaN: which of two is kept is not promised."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.all(nan | (a.view(np.uint32) == b.view(np.uint32))))


# --- random programs -------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> list[list[VectorStep]]:
    """A few orders of a few steps; scratch is read after it was written, in the same order and part."""
    orders: list[list[VectorStep]] = []
    for _ in range(draw(st.integers(1, 3))):
        scratch: list[str] = []
        orders.append([draw(vector_steps(scratch)) for _ in range(draw(st.integers(1, 7)))])
    return orders


@st.composite
def vector_steps(draw: st.DrawFn, scratch: list[str]) -> VectorStep:
    if draw(st.integers(0, 3)):
        return draw(steps(scratch, scratch))
    inside = [*scratch]
    return OnParameters(tuple(draw(steps(inside, scratch)) for _ in range(draw(st.integers(1, 3)))))


@st.composite
def steps(draw: st.DrawFn, known: list[str], outside: list[str]) -> Elementwise:
    read = READ | st.sampled_from(known) if known else READ
    into = draw(WRITTEN)
    reads_itself = not into.startswith("_") or into in known
    kind = draw(st.sampled_from(["move", "product", "larger", "root"] if reads_itself else ["move", "root"]))
    made = draw(step_of(kind, into, read))
    if known is not outside and into.startswith("_") and into not in outside:
        return made._replace(into="w")  # elsewhere it would not be there
    if into.startswith("_") and into not in known:
        known.append(into)
    return made


def step_of(kind: str, into: str, read: st.SearchStrategy[str]) -> st.SearchStrategy[Elementwise]:
    if kind == "move":
        return st.lists(st.tuples(read, NUMBERS), max_size=5).map(lambda terms: Move(into, tuple(terms)))
    if kind == "product":
        return st.builds(Product, st.just(into), NUMBERS, NUMBERS, read, read)
    if kind == "larger":
        return st.builds(Larger, st.just(into), read)
    return st.builds(Root, st.just(into), NUMBERS, read, read, st.sampled_from([0.0, 1e-8, 0.1]))


def filled(size: int, seed: int) -> Vector:
    random = np.random.default_rng(seed)
    vector = random.normal(size=size).astype(np.float32)
    places = random.integers(0, size, size=size // 4)
    vector[places] = random.choice(SPECIAL, size=len(places))
    return vector


class Ran(NamedTuple):
    written: dict[str, Vector]
    cleared: tuple[str, ...]


def ran(updater: Updater, orders: Sequence[Sequence[VectorStep]], vectors: Named, trained: int) -> Ran:
    outlines, numbers = [], list[float]()
    for steps in orders:
        outline, found = outlined(steps)
        outlines.append(OrderOutline(outline))
        numbers += found
    size = len(vectors["w"])
    plan = planned(tuple(outlines), frozenset(vectors), has_buffers=trained < size)
    written = {name: aligned(size) for name in plan.writes}
    inputs = [vectors[name] for name in plan.reads]
    updater.run(StepProgram(plan, inputs, [*written.values()], numbers, size, trained))
    return Ran(written, plan.cleared)


@given(orders=programs(), size=st.sampled_from(SIZES), share=st.sampled_from([0.4, 1.0]), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_program_gives_the_bits_of_its_steps_one_by_one(
    updater: Updater, orders: list[list[VectorStep]], size: int, share: float, seed: int
) -> None:
    trained = max(1, int(size * share))
    vectors = {name: filled(size, seed + place) for place, name in enumerate(PRESENT)}
    kept = {name: vector.copy() for name, vector in vectors.items()}
    expected = naive(orders, vectors, trained)
    written, cleared = ran(updater, orders, vectors, trained)
    for name, vector in written.items():
        assert same_bits(vector, expected[name]), name
    for name in cleared:
        assert not expected[name].view(np.uint32).any(), name
    untouched = set(expected) - {*written, *cleared}
    assert all(name not in vectors or same_bits(expected[name], vectors[name]) for name in untouched)
    assert all(same_bits(vectors[name], kept[name]) for name in vectors)


@pytest.mark.parametrize("size", [STRIDE + 3, 3 * CHUNK])
def test_in_strides_or_past_the_caches_everything_is_the_same(
    updater: Updater, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if updater.compiled:
        monkeypatch.setattr("offbeat.core.step_code.STREAMED_MIN", 0)
    vectors = {name: filled(size, place) for place, name in enumerate(PRESENT)}
    difference = Move("_a", (("new", 1.0), ("base", -1.0)))
    steps: list[VectorStep] = [difference, Product("m", 0.9, 0.1, "_a", "_a"), Move("w", (("m", 0.3),))]
    written, _ = ran(updater, [steps], vectors, size - 7)
    expected = naive([steps], vectors, size - 7)
    assert all(same_bits(vector, expected[name]) for name, vector in written.items())


def test_what_is_0_is_neither_read_nor_written() -> None:
    publishing = [Move("g", (("new", 1.0), ("g", 1.0))), Move("w", (("x", 1.0), ("g", 1.0))), Move("g", ())]
    plan = planned((OrderOutline(outlined(publishing)[0]),), frozenset(PRESENT), has_buffers=False)
    assert (plan.reads, plan.writes, plan.cleared) == (("new", "x"), ("w",), ("g",))


def test_a_step_that_nothing_reads_is_left_out() -> None:
    steps = [Move("m", (("base", 1.0),)), Move("m", (("new", 1.0),))]
    plan = planned((OrderOutline(outlined(steps)[0]),), frozenset(PRESENT), has_buffers=False)
    assert (plan.reads, len(plan.on_parameters.operations)) == (("new",), 1)


@pytest.mark.parametrize("name", ["_a", "new 0"])
def test_a_vector_that_is_not_there_is_refused(name: str) -> None:
    outline = OrderOutline(outlined([Move("w", ((name, 1.0),))])[0])
    with pytest.raises(InvalidValue, match="there is no vector"):
        planned((outline,), frozenset(("w",)), has_buffers=False)


def test_vectors_that_do_not_fit_are_refused(updater: Updater) -> None:
    vectors = {name: filled(5, 0) for name in PRESENT} | {"new": filled(4, 0)}
    with pytest.raises(InvalidValue, match="contiguous float32"):
        ran(updater, [[Move("w", (("new", 1.0),))]], vectors, 5)


# --- rules -----------------------------------------------------------------------------------------------------------

RULES = [fadas(2), compose(fedbuff(2), momentum(0.9)), ca2fl(2), ace(0.1), nesterov(2), dcasgd(0.5, 0.1)]


def orders_of(rule: Rule, updates: list[Model], x_tau: Model) -> Iterator[Order]:
    memory, t = rule.memory, 2
    for number, x_new in enumerate(updates):
        facts = Facts(t=t, tau=0, device=number % 2, caches=min(2, number + 1))
        answer, memory = rule.decide(facts, memory)
        yield Order(answer, x_new, x_tau, t if answer.publish else None)
        t += answer.publish


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.spec)
@pytest.mark.parametrize("together", [1, 5])
def test_a_rule_gives_the_same_vectors_together_or_one_by_one(updater: Updater, rule: Rule, together: int) -> None:
    layout = Layout.of({"a": np.zeros(CHUNK + 9, np.float32), "b": np.zeros(7, np.float32)}, buffers=["b"])
    random = np.random.default_rng(0)
    models = [Model(layout, random.normal(size=layout.size).astype(np.float32)).freeze() for _ in range(7)]
    found = []
    for made, count in ((updater, together), (Updater(compiled=False), 1)):
        vectors = Vectors(Standing.first(models[0], poly(8)), made, poly(8))
        orders = [*orders_of(rule, models[1:], models[0])]
        for first in range(0, len(orders), count):
            vectors.apply(orders[first : first + count])
        found.append(vectors.models())
    ours, plain = found
    assert {*ours} == {*plain}
    assert all(same_bits(ours[name].vector, plain[name].vector) for name in ours)
    assert isinstance(orders[0].answer, Steps)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.spec)
@pytest.mark.parametrize("stop", range(1, 6))
def test_vectors_that_were_restored_go_on_with_the_same_bits(rule: Rule, stop: int) -> None:
    layout = Layout.of({"a": np.zeros(9, np.float32), "b": np.zeros(7, np.float32)}, buffers=["b"])
    models = [Model(layout, filled(layout.size, seed)).freeze() for seed in range(7)]
    orders = [*orders_of(rule, models[1:], models[0])]
    whole, first, second = (Vectors(Standing.first(models[0]), Updater(compiled=False)) for _ in range(3))
    for number, order in enumerate(orders):
        whole.apply([order])
        if number == stop:
            second.restore(first.models())
        (first if number < stop else second).apply([order])
    ours, plain = second.models(), whole.models()
    assert {*ours} == {*plain}
    assert all(same_bits(ours[name].vector, plain[name].vector) for name in ours)


@NEEDS_NUMBA
def test_machine_code_is_made_when_there_is_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CODE_WORTH", 9)
    steps = [Move("w", (("new", 1.0), ("m", 2.5)))]
    plan = planned((OrderOutline(outlined(steps)[0]),), frozenset(PRESENT), has_buffers=False)
    program = StepProgram(plan, [filled(5, 0), filled(5, 1)], [aligned(5)], [1.0, 2.5], 5, 5)
    with Updater() as updater:
        first, second = (updater._work_of(program, plan.on_parameters, 0, 5) for _ in range(2))
    assert isinstance(first, partial)
    assert second.__module__ == "offbeat.core.step_code"
