"""The kernel computes one float32 expression to the last bit, whatever code, threads, queue or buffer is used."""

import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core import kernel
from offbeat.core.kernel import CHUNK, LANES, STRIDE, THREADS_MAX, WORTH, Term, Updater, mixed
from offbeat.core.layout import Array, Model, Vector
from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue

FUSED = 4
"""Terms that compiled code mixes in one loop."""
SIZES = (1, LANES - 1, LANES, LANES + 1, CHUNK - 1, CHUNK, CHUNK + 1, 100_003)
NEEDS_NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
KINDS = [
    pytest.param((compiled, threads), marks=[NEEDS_NUMBA] if compiled else [], id=f"{name}-{threads}")
    for compiled, name in ((True, "compiled"), (False, "numpy"))
    for threads in (1, 2, 3)
]
COEFFICIENTS = st.sampled_from([0.0, 1.0, 0.6, 1 / 3, -0.5]) | st.floats(-2, 2)
MIXES = st.builds(Mix, COEFFICIENTS, COEFFICIENTS, COEFFICIENTS, st.booleans())
ALPHAS = st.floats(0, 1, exclude_min=True)
VALUES = st.floats(-1e6, 1e6, width=32)
TRIPLES = st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=5)
PLAIN = Updater(compiled=False)


@pytest.fixture(autouse=True, scope="module")
def spread() -> Iterator[None]:
    """Small vectors are spread over the threads here, too: that it changes no bit is what is to be shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "SPREAD_MIN", 0)
        yield


@pytest.fixture(scope="module", params=KINDS)
def updater(request: pytest.FixtureRequest) -> Iterator[Updater]:
    compiled, threads = request.param
    with Updater(threads, compiled) as updater:
        yield updater


def normal(size: int, seed: int = 0) -> Vector:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def columns(triples: list[tuple[float, float, float]]) -> list[Vector]:
    return [np.array(column, np.float32) for column in zip(*triples, strict=True)]


def same_bits(a: Vector, b: Vector) -> bool:
    return a.tobytes() == b.tobytes()


def naive(mix: Mix, w: Vector, x_new: Vector, x_tau: Vector) -> Vector:
    out = np.zeros_like(w)
    for i in range(w.size):
        total: np.float32 | None = None
        for factor, vector in zip(mix[:3], (w, x_new, x_tau), strict=True):
            if np.float32(factor) != 0:
                product = np.float32(factor) * vector[i]
                total = product if total is None else total + product
        out[i] = 0 if total is None else total
    return out


def chain(updater: Updater, w: Vector, terms: list[Term]) -> list[Vector]:
    """w and every w after it, one term at a time, each in a buffer of its own."""
    steps = [w]
    for term in terms:
        steps.append(np.empty_like(w))
        updater.mix(steps[-1], steps[-2], [term])
    return steps


@settings(derandomize=True, deadline=None, max_examples=150)
@given(MIXES, TRIPLES)
def test_the_expression_is_rounded_operation_by_operation(
    updater: Updater, mix: Mix, triples: list[tuple[float, float, float]]
) -> None:
    w, x_new, x_tau = columns(triples)
    out = np.empty_like(w)
    updater.mix(out, w, [Term(mix, x_new, x_tau)])
    assert same_bits(out, naive(mix, w, x_new, x_tau))


@pytest.mark.parametrize("size", SIZES)
@settings(derandomize=True, deadline=None, max_examples=6)
@given(st.lists(MIXES, min_size=1, max_size=4), st.integers(0, 1000))
def test_same_bits_in_place_or_not_queued_or_one_by_one(
    updater: Updater, size: int, mixes: list[Mix], seed: int
) -> None:
    terms = [Term(mix, normal(size, seed + 1 + j), normal(size, seed + 50 + j)) for j, mix in enumerate(mixes)]
    w = normal(size, seed)
    expected = chain(PLAIN, w, terms)[-1]
    out, own = np.empty_like(w), w.copy()
    updater.mix(out, w, terms)
    updater.mix(own, own, terms)
    assert same_bits(chain(updater, w, terms)[-1], expected)
    assert same_bits(out, expected)
    assert same_bits(own, expected)
    assert same_bits(w, normal(size, seed))


PLAIN_MIXES = [Mix(1.0 - 0.1 * j, 0.1 * j, 0.0, True) for j in range(1, 10)]
OTHERS = [Mix(0.0, 1.0, 0.0, True), Mix(0.7, 0.0, 0.0, True), Mix(1.0, 0.3, -0.3, True), Mix(0.0, 0.0, 0.0, True)]
QUEUES = [
    *(PLAIN_MIXES[:count] for count in range(FUSED, 10)),
    *([*PLAIN_MIXES[:place], other, *PLAIN_MIXES[place:]] for other in OTHERS for place in (0, 1, 4, 6)),
]


@pytest.mark.parametrize("size", [1, 9, CHUNK + 1])
@pytest.mark.parametrize("mixes", QUEUES)
def test_same_bits_where_several_are_mixed_in_one_loop(updater: Updater, size: int, mixes: list[Mix]) -> None:
    terms = [Term(mix, normal(size, 1 + j), normal(size, 50 + j)) for j, mix in enumerate(mixes)]
    w, out = normal(size), np.empty(size, np.float32)
    expected = chain(PLAIN, w, terms)[-1]
    updater.mix(out, w, terms)
    updater.mix(w, w, terms)
    assert same_bits(out, expected)
    assert same_bits(w, expected)


@pytest.mark.parametrize("size", [1, 7, LANES, CHUNK + 1])
def test_alpha_0_and_alpha_1_are_exact(updater: Updater, size: int) -> None:
    w, x_new, out = normal(size), normal(size, 1), np.empty(size, np.float32)
    x_new[0] = w[-1] = np.float32(1e-45)
    updater.mix(out, w, [Term(Mix(1.0, 0.0, 0.0, True), x_new)])
    assert same_bits(out, w)
    updater.mix(out, w, [Term(Mix(0.0, 1.0, 0.0, True), x_new)])
    assert same_bits(out, x_new)


def test_alpha_0_and_alpha_1_keep_the_sign_of_zero(updater: Updater) -> None:
    minus_0, ones, out = np.full(9, -0.0, np.float32), np.ones(9, np.float32), np.empty(9, np.float32)
    updater.mix(out, minus_0, [Term(Mix(1.0, 0.0, 0.0, True), ones)])
    assert same_bits(out, minus_0)
    updater.mix(out, ones, [Term(Mix(0.0, 1.0, 0.0, True), minus_0)])
    assert same_bits(out, minus_0)


def test_a_coefficient_of_0_skips_what_is_not_a_number(updater: Updater) -> None:
    bad, good = np.full(300, np.nan, np.float32), normal(300)
    bad[7] = np.inf
    out = np.empty_like(good)
    updater.mix(out, bad, [Term(Mix(0.0, 0.5, 0.0, True), good)])
    assert np.array_equal(out, good * np.float32(0.5))
    updater.mix(out, good, [Term(Mix(0.5, 0.0, 0.0, True), bad, bad)])
    assert np.array_equal(out, good * np.float32(0.5))
    updater.mix(out, bad, [Term(Mix(0.0, 0.0, 0.5, True), bad, good)])
    assert np.array_equal(out, good * np.float32(0.5))
    updater.mix(out, bad, [Term(Mix(0.0, 0.0, 0.0, True), bad, bad)])
    assert not out.any()


def test_what_is_not_a_number_shows_where_it_counts(updater: Updater) -> None:
    bad, good, out = np.full(3, np.nan, np.float32), normal(3), np.empty(3, np.float32)
    for w, x_new, x_tau in ((bad, good, good), (good, bad, good), (good, good, bad)):
        updater.mix(out, w, [Term(Mix(0.5, 0.5, 0.5, True), x_new, x_tau)])
        assert np.isnan(out).all()


def test_a_mix_that_overflows_is_seen_when_it_is_measured(updater: Updater) -> None:
    huge, out = np.full(3, 3e38, np.float32), np.empty(3, np.float32)
    updater.mix(out, huge, [Term(Mix(1.0, 1.0, 0.0, True), huge)])
    assert np.isinf(out).all()
    assert not updater.finite(out)
    assert updater.distance(out, huge) == math.inf


@settings(derandomize=True, deadline=None, max_examples=150)
@given(ALPHAS, TRIPLES)
def test_the_mix_stays_in_the_hull_and_keeps_a_fixed_point(
    updater: Updater, alpha: float, triples: list[tuple[float, float, float]]
) -> None:
    w, x_new, _ = columns(triples)
    out, fixed, mix = np.empty_like(w), np.empty_like(w), Mix(1.0 - alpha, alpha, 0.0, True)
    updater.mix(out, w, [Term(mix, x_new)])
    updater.mix(fixed, w, [Term(mix, w)])
    two_ulp = 2 * np.spacing(np.maximum(abs(w), abs(x_new))).astype(np.float64)
    assert (out >= np.minimum(w, x_new) - two_ulp).all()
    assert (out <= np.maximum(w, x_new) + two_ulp).all()
    assert (abs(fixed.astype(np.float64) - w) <= 2 * np.spacing(abs(w))).all()


B = 1 + 2.0**-11
A = 1 + 2.0**-12  # A*A = 1 + 2^-11 + 2^-24, and float32 drops the last term
ROUNDED_TWICE = [
    (Mix(A, 1.0, 0.0, True), (A, -(1 + 2.0**-11), 0.0)),
    (Mix(1.0, A, 0.0, True), (-(1 + 2.0**-11), A, 0.0)),
    (Mix(1.0, 0.0, A, True), (-(1 + 2.0**-11), 0.0, A)),
    (Mix(0.0, 1.0, A, True), (0.0, -(1 + 2.0**-11), A)),
]


@pytest.mark.parametrize(("mix", "values"), ROUNDED_TWICE)
def test_no_multiply_and_add_is_fused(updater: Updater, mix: Mix, values: tuple[float, float, float]) -> None:
    exact = sum(Fraction(c) * Fraction(v) for c, v in zip(mix[:3], values, strict=True))
    assert np.float32(float(exact)) == np.float32(2.0**-24)  # what a fused operation would give
    w, x_new, x_tau = (np.full(1000, value, np.float32) for value in values)
    out = np.empty_like(w)
    updater.mix(out, w, [Term(mix, x_new, x_tau)])
    assert not out.any()


@pytest.mark.parametrize("place", range(FUSED))
@pytest.mark.parametrize(("keep", "w_then", "new", "value"), [(A, A, 1.0, -B), (1.0, -B, A, A)])
def test_none_is_fused_where_several_are_mixed_in_one_loop(
    updater: Updater, place: int, keep: float, w_then: float, new: float, value: float
) -> None:
    """The others leave w as it is, to the bit: 1 * w + 1 * 0."""
    w, out, zeros = np.full(1000, w_then, np.float32), np.empty(1000, np.float32), np.zeros(1000, np.float32)
    terms = [Term(Mix(1.0, 1.0, 0.0, True), zeros)] * FUSED
    terms[place] = Term(Mix(keep, new, 0.0, True), np.full(1000, value, np.float32))
    updater.mix(out, w, terms)
    assert not out.any()


def test_coefficients_are_rounded_once_each_for_itself(updater: Updater) -> None:
    w, out = np.ones(5, np.float32), np.empty(5, np.float32)
    updater.mix(out, w, [Term(Mix(1 - 0.999, 0.999, 0.0, True), np.zeros(5, np.float32))])
    assert (out == np.float32(1 - 0.999)).all()
    assert np.float32(1 - 0.999) != np.float32(1) - np.float32(0.999)


def test_without_terms_w_is_copied(updater: Updater) -> None:
    w, out = normal(10), np.zeros(10, np.float32)
    updater.mix(out, w, [])
    assert same_bits(out, w)


@pytest.mark.parametrize("size", SIZES)
def test_distances_are_exact_to_float64_and_the_same_everywhere(updater: Updater, size: int) -> None:
    x, reference, zeros = normal(size) * np.float32(1e3), normal(size, 1), np.zeros(size, np.float32)
    for other in (reference, zeros):
        apart = x.astype(np.float64) - other
        expected = math.sqrt(math.fsum(v * v for v in apart.tolist()))
        assert updater.distance(x, other) == pytest.approx(expected, rel=1e-12)
        assert updater.distance(x, other) == updater.distance(other, x) == PLAIN.distance(x, other)
    assert updater.distance(x, x) == 0.0


@pytest.mark.parametrize("place", [0, LANES - 1, LANES, CHUNK - 1, CHUNK, 3 * CHUNK, 100_002])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_anywhere(updater: Updater, place: int, bad: float) -> None:
    x = normal(100_003)
    clean = x.copy()
    x[place] = bad
    assert not updater.finite(x)
    for pair in ((x, clean), (x, x), (clean, x)):
        assert not math.isfinite(updater.distance(*pair))


@pytest.mark.parametrize("size", [1, STRIDE, STRIDE + 1, 2 * STRIDE + 3 * CHUNK + 7])
def test_in_strides_everything_is_the_same(updater: Updater, size: int) -> None:
    w, x_new = normal(size), normal(size, 1)
    called: list[int] = []
    seen = updater.distance(x_new, w, between=lambda: called.append(size))
    assert len(called) == -(-size // STRIDE)
    assert seen == updater.distance(x_new, w)
    whole, strides, terms = np.empty_like(w), np.empty_like(w), [Term(Mix(0.4, 0.6, 0.0, True), x_new)]
    updater.mix(whole, w, terms)
    updater.mix(strides, w, terms, between=lambda: called.append(size))
    assert len(called) == 2 * -(-size // STRIDE)
    assert same_bits(whole, strides)


@pytest.mark.parametrize("size", [1, LANES + 1, CHUNK, 100_003])
def test_mixing_in_place_gives_the_bits_of_every_step_on_its_own(updater: Updater, size: int) -> None:
    mixes = [Mix(0.4, 0.6, 0.0, True), Mix(1.0, 0.3, -0.3, False), Mix(0.0, 1.0, 0.0, True)]
    terms = [Term(mix, normal(size, j + 1), normal(size, j + 9)) for j, mix in enumerate(mixes)]
    w, out = normal(size), np.empty(size, np.float32)
    updater.mix(out, w, terms)
    steps = chain(updater, w, terms)
    assert same_bits(out, steps[-1])
    updater.mix(w, w, terms)
    assert same_bits(w, out)
    for before, after in pairwise(steps):
        assert updater.distance(after, before) == PLAIN.distance(after, before)


def test_what_is_measured_is_not_changed(updater: Updater) -> None:
    for bad in (np.nan, np.inf, 0.5):
        x, x_tau = normal(LANES + 3), normal(LANES + 3, 1)
        x[LANES + 1] = bad
        before = x.copy(), x_tau.copy()
        updater.distance(x, x_tau)
        updater.finite(x)
        assert same_bits(x, before[0])
        assert same_bits(x_tau, before[1])


def test_published_models_can_be_mixed_and_measured(updater: Updater) -> None:
    w, x_new, x_tau = (Model.of({"w": normal(10, seed)}).freeze() for seed in range(3))
    out = np.empty(10, np.float32)
    mix = Mix(1.0, 0.5, -0.5, True)
    updater.mix(out, w.vector, [Term(mix, x_new.vector, x_tau.vector)])
    assert same_bits(out, naive(mix, w.vector, x_new.vector, x_tau.vector))
    assert math.isfinite(updater.distance(w.vector, x_tau.vector))
    assert same_bits(mixed(updater, w, mix, x_new, x_tau).vector, out)


GOOD = normal(300)
UNFIT: list[Any] = [
    *(normal(299), normal(600)[::2], normal(300).astype(np.float64), normal(300).astype(np.float16)),
    *(normal(300).reshape(30, 10), normal(300).reshape(300, 1), normal(300).astype(">f4"), normal(0)),
]


@pytest.mark.parametrize("unfit", UNFIT, ids=lambda x: f"{x.dtype}{list(x.shape)}")
@pytest.mark.parametrize("place", ["w", "x_new", "x_tau"])
def test_a_vector_that_does_not_fit_is_refused_and_out_untouched(updater: Updater, unfit: Any, place: str) -> None:
    vectors: dict[str, Any] = {"w": GOOD, "x_new": GOOD, "x_tau": GOOD} | {place: unfit}
    out = np.full(300, 7, np.float32)
    with pytest.raises(InvalidValue, match="here all are contiguous float32"):
        updater.mix(out, vectors["w"], [Term(Mix(0.5, 0.5, 0.5, True), vectors["x_new"], vectors["x_tau"])])
    assert (out == 7).all()


def test_vectors_of_two_dimensions_are_refused(updater: Updater) -> None:
    table, out = normal(300).reshape(30, 10), np.full((30, 10), 7, np.float32)
    with pytest.raises(InvalidValue):
        updater.mix(out, table, [Term(Mix(0.5, 0.5, 0.0, True), table)])
    assert (out == 7).all()
    with pytest.raises(InvalidValue):
        updater.distance(table, table)


def test_an_out_that_overlaps_an_update_is_refused(updater: Updater) -> None:
    memory = normal(400)
    before = memory.copy()
    for x_new, x_tau in ((memory[:300], None), (memory[1:301], GOOD), (GOOD, memory[100:])):
        with pytest.raises(InvalidValue, match="out overlaps"):
            updater.mix(memory[:300], GOOD, [Term(Mix(0.5, 0.5, 0.0, True), x_new, x_tau)])
    assert same_bits(memory, before)


@pytest.mark.parametrize("shift", [1, 299])
def test_an_out_that_overlaps_w_in_part_is_refused(updater: Updater, shift: int) -> None:
    memory = normal(600)
    before = memory.copy()
    for out, w in ((memory[:300], memory[shift : shift + 300]), (memory[shift : shift + 300], memory[:300])):
        with pytest.raises(InvalidValue, match="overlaps"):
            updater.mix(out, w, [Term(Mix(0.5, 0.5, 0.0, True), GOOD)])
    assert same_bits(memory, before)


def test_a_read_only_out_is_refused(updater: Updater) -> None:
    out = normal(300)
    out.flags.writeable = False
    with pytest.raises(InvalidValue):
        updater.mix(out, GOOD, [Term(Mix(0.5, 0.5, 0.0, True), GOOD)])


def test_a_coefficient_for_x_tau_needs_x_tau(updater: Updater) -> None:
    out = np.full(300, 7, np.float32)
    with pytest.raises(InvalidValue, match="no x_tau was given"):
        updater.mix(out, GOOD, [Term(Mix(1.0, 0.5, -0.5, True), GOOD)])
    assert (out == 7).all()
    for nothing in (None, float("nan")):  # as a damaged ledger may say
        with pytest.raises(InvalidValue, match="no x_tau was given"):
            updater.mix(out, GOOD, [Term(Mix(1.0, 0.5, nothing, True), GOOD)])  # type: ignore[arg-type]


def test_an_empty_vector_is_refused(updater: Updater) -> None:
    empty = np.zeros(0, np.float32)
    for work in (
        lambda: updater.distance(empty, empty),
        lambda: updater.finite(empty),
        lambda: updater.mix(empty, empty, []),
    ):
        with pytest.raises(InvalidValue, match="the vector is empty"):
            work()


@pytest.mark.parametrize("threads", [0, -1, THREADS_MAX + 1])
def test_a_bad_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(InvalidValue, match=f"threads is {threads} but must lie in 1..{THREADS_MAX}"):
        Updater(threads)


def test_without_numba_numpy_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not Updater().compiled
    with pytest.raises(InvalidValue, match=r"pip install 'offbeat\[fast\]'"):
        Updater(compiled=True)


def carrying(seed: int, count: int) -> Model:
    arrays: dict[str, Array] = {"w": normal(5, seed), "mean": normal(2, seed), "count": np.asarray(count)}
    return Model.of(arrays, buffers=["mean", "count"]).freeze()


def test_floats_mix_and_whole_numbers_follow_the_newest(updater: Updater) -> None:
    w, x_new, x_tau = carrying(0, 10), carrying(1, 3), carrying(2, 1)
    for mix in (Mix(0.75, 0.25, 0.0, True), Mix(1.0, 0.5, -0.5, True)):
        out = mixed(updater, w, mix, x_new, x_tau)
        assert out["count"] == 3
        assert same_bits(out.vector, naive(mix, w.vector, x_new.vector, x_tau.vector))
        assert out.layout == w.layout
    assert w["count"] == 10
    assert same_bits(w.vector, carrying(0, 10).vector)


def test_one_updater_serves_several_threads_at_once(updater: Updater) -> None:
    size, mix = 2 * CHUNK + 5, Mix(0.4, 0.6, 0.0, True)

    def work(seed: int) -> tuple[Vector, float]:
        w = normal(size, seed)
        updater.mix(w, w, [Term(mix, normal(size, seed + 100))])
        return w, updater.distance(w, normal(size, seed))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(work, range(24)))
    for seed, (w, seen) in enumerate(answers):
        before = normal(size, seed)
        expected = np.float32(0.4) * before + np.float32(0.6) * normal(size, seed + 100)
        assert same_bits(w, expected)
        assert seen == PLAIN.distance(w, before)


@NEEDS_NUMBA
def test_a_warm_updater_compiles_nothing_for_a_served_update() -> None:
    def compiled() -> list[int]:
        loops = import_module("offbeat.core.compiled")
        functions: list[Any] = [loops.mix, loops.squares, loops.largest]
        return [len(function.signatures) for function in functions]

    with Updater() as updater:
        updater.warm()
        before = compiled()
        w, x_new = (np.full(9, number, np.float32) for number in (1.0, 3.0))
        for vector in (w, x_new):
            vector.setflags(write=False)
        out = np.empty_like(w)
        updater.mix(out, w, [Term(Mix(0.5, 0.5, 0.0, publish=True), x_new)])
        assert updater.distance(x_new, w) == 6.0
        assert updater.finite(x_new)
        assert compiled() == before
    assert out.tolist() == [2.0] * 9


@NEEDS_NUMBA
def test_numba_is_loaded_when_there_is_enough_to_do() -> None:
    program = f"""
import sys
import numpy as np
from offbeat.core import kernel
from offbeat.core.kernel import Mix, Term, Updater
x, updater = np.ones({WORTH // 4}, np.float32), Updater()
for _ in range(2):
    updater.distance(x, x)
    updater.mix(np.empty_like(x), x, [Term(Mix(0.5, 0.5, 0.0, True), x)])
print("numba" in sys.modules)
updater.finite(x[:1])
print("numba" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")


def test_a_numba_that_cannot_be_imported_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    updater = Updater()
    monkeypatch.setitem(sys.modules, "offbeat.core.compiled", None)
    updater.warm()
    assert not updater.compiled
    assert updater.distance(GOOD, -GOOD) == PLAIN.distance(GOOD, -GOOD)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(updater: Updater, size: int, bad: float) -> None:
    for number in (np.float32(3.4e38), np.float32(1e-45), np.float32(0), np.float32(-1)):
        x = np.full(size, number, np.float32)
        assert updater.finite(x)
        for place in (0, size // 2, size - 1):
            x[place] = bad
            assert not updater.finite(x)
            assert not math.isfinite(updater.distance(x, x))
            x[place] = number
    called: list[int] = []
    assert updater.finite(x, between=lambda: called.append(1))
    assert called
