"""Staleness functions keep s(0) = 1, 0 <= s <= 1 and never rise; what breaks the rules is refused."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.staleness import (
    CHECKED_TO,
    StalenessFn,
    checked,
    constant,
    exponential,
    from_spec,
    hinge,
    polynomial,
)
from offbeat.errors import InvalidValue, OffbeatError

NUMBERS = st.floats(0, 20) | st.floats(min_value=0, allow_nan=False, allow_infinity=False)
FUNCTIONS = (
    st.just(constant())
    | st.builds(polynomial, NUMBERS)
    | st.builds(hinge, NUMBERS, NUMBERS)
    | st.builds(exponential, NUMBERS)
)
STALENESS = st.integers(0, 200) | st.integers(0, 10**12)
EXAMPLES = [constant(), polynomial(0.5), polynomial(0), hinge(10, 4), hinge(0.25, 2.5), exponential(0.1)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(FUNCTIONS, STALENESS)
def test_every_function_keeps_the_rules(s: StalenessFn, u: int) -> None:
    assert s(0) == 1.0
    assert 0.0 <= s(u + 1) <= s(u) <= 1.0
    assert s(u) == s(u)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.floats(0, 1e-10), st.floats(1, 1e300))
def test_parameters_at_the_ends_of_the_range_keep_the_rules(tiny: float, huge: float) -> None:
    for parameter in (tiny, huge):
        for s in (polynomial(parameter), exponential(parameter), hinge(parameter, parameter)):
            assert 0.0 <= s(CHECKED_TO + 1) <= s(CHECKED_TO) <= s(1) <= s(0) == 1.0


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.floats(0, 5), st.floats(0, 20), st.integers(0, 1000))
def test_values_are_those_of_the_paper(a: float, b: float, u: int) -> None:
    assert constant()(u) == 1.0
    assert polynomial(a)(u) == pytest.approx(math.pow(u + 1, -a), rel=1e-14)
    assert hinge(a, b)(u) == pytest.approx(1.0 if u <= b else 1.0 / (a * (u - b) + 1.0), rel=1e-14)
    assert exponential(a)(u) == pytest.approx(math.exp(-a * u), rel=1e-14)


def test_values_worked_out_by_hand() -> None:
    assert [polynomial(0.5)(u) for u in (0, 3, 8, 15)] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert [hinge(10, 4)(u) for u in (0, 4, 5, 6, 15)] == [1, 1, 1 / 11, 1 / 21, 1 / 111]
    assert hinge(4, 4)(16) == 1 / 49
    assert exponential(math.log(2))(3) == pytest.approx(1 / 8)


@pytest.mark.parametrize("value", [-1, -0.001, math.nan, math.inf, -math.inf])
def test_parameters_out_of_range_are_refused(value: float) -> None:
    for build in (polynomial, exponential, lambda v: hinge(v, 4), lambda v: hinge(10, v)):
        with pytest.raises(InvalidValue, match="must be a finite number >= 0"):
            build(value)


@pytest.mark.parametrize(
    "fn",
    [
        lambda u: 1 / (u + 1),
        lambda _: 1,
        lambda u: u == 0,
        lambda u: np.float32(0.5) ** u,
        lambda u: 1.0 if u < 100 else 0.0,
    ],
)
def test_a_custom_function_that_keeps_the_rules_is_welcome(fn: Callable[[int], float]) -> None:
    s = checked(fn)
    for u in (0, 1, CHECKED_TO, CHECKED_TO + 1, 99, 100, 5000):
        assert s(u) == pytest.approx(float(fn(u)))
        assert isinstance(s(u), float)
    assert s.spec.startswith("custom:")


def test_a_checked_function_stays_what_it_is() -> None:
    s = polynomial(0.5)
    assert checked(s) is s


@pytest.mark.parametrize(
    ("fn", "complaint"),
    [
        (lambda u: 0.5 / (u + 1), r"s\(0\) is 0.5 but must be 1"),
        (lambda u: 2.0 / (u + 1), r"s\(0\) is 2.0 but must be 1"),
        (lambda u: 1.0 if u == 0 else 1.5, r"s\(1\) is 1.5 but must be between 0 and 1"),
        (lambda u: 1.0 - u, r"s\(2\) is -1.0 but must be between 0 and 1"),
        (lambda u: 1.0 if u in (0, 9) else 0.5, r"s\(9\) = 1.0 is above 0.5"),
        (lambda u: 1.0 if u in (0, CHECKED_TO) else 0.5, rf"s\({CHECKED_TO}\) = 1.0 is above 0.5"),
        (lambda u: math.nan if u else 1.0, r"s\(1\) is nan"),
        (lambda _: math.nan, r"s\(0\) is nan"),
    ],
)
def test_a_custom_function_that_breaks_the_rules_is_refused_when_built(
    fn: Callable[[int], float], complaint: str
) -> None:
    with pytest.raises(InvalidValue, match=complaint):
        checked(fn)


@pytest.mark.parametrize("answer", [None, "half", 1j, [1.0]], ids=repr)
def test_a_custom_function_that_answers_no_number_is_refused_when_built(answer: Any) -> None:
    with pytest.raises(OffbeatError):
        checked(lambda _: answer)


@pytest.mark.parametrize("fn", [None, 0.5, "polynomial:0.5"])
def test_what_is_not_callable_is_refused(fn: Any) -> None:
    with pytest.raises(InvalidValue, match="must be a function of the staleness"):
        checked(fn)


@pytest.mark.parametrize(
    ("late", "complaint"),
    [
        (lambda _: 0.75, "s must not rise"),
        (lambda u: 0.25 if u < 100 else 0.3, "s must not rise"),
        (lambda _: 1.5, "between 0 and 1"),
        (lambda _: -0.5, "between 0 and 1"),
        (lambda _: math.nan, "between 0 and 1"),
        (lambda _: math.inf, "between 0 and 1"),
    ],
)
def test_a_custom_function_that_misbehaves_later_is_refused_at_use(
    late: Callable[[int], float], complaint: str
) -> None:
    s = checked(lambda u: 1.0 if u == 0 else 0.5 if u <= CHECKED_TO else late(u))
    assert s(CHECKED_TO) == 0.5
    with pytest.raises(InvalidValue, match=complaint):
        s(100)


def test_a_function_that_changes_its_answer_is_refused_at_use() -> None:
    answers = {"beyond 0": 0.5}
    s = checked(lambda u: answers["beyond 0"] if u else 1.0)
    assert s(3) == 0.5
    answers["beyond 0"] = 0.4
    assert s(0) == 1.0
    for u in (3, CHECKED_TO):
        with pytest.raises(InvalidValue, match="the same argument must give the same answer"):
            s(u)


@pytest.mark.parametrize("staleness", [-1, np.int64(-2)])
def test_negative_staleness_is_refused(staleness: int) -> None:
    with pytest.raises(InvalidValue, match="negative"):
        constant()(staleness)


@pytest.mark.parametrize("staleness", [1.0, 0.5, math.nan, "1", None, np.float64(2)])
def test_staleness_that_is_no_whole_number_is_refused(staleness: Any) -> None:
    with pytest.raises(InvalidValue, match="whole number"):
        polynomial(0.5)(staleness)


@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8])
def test_numpy_integers_are_accepted(integer: Callable[[int], int]) -> None:
    assert polynomial(0.5)(integer(3)) == 0.5
    assert hinge(10, 4)(integer(200)) == 1 / 1961


@settings(derandomize=True, deadline=None, max_examples=200)
@given(FUNCTIONS, STALENESS)
def test_a_spec_names_its_function(s: StalenessFn, u: int) -> None:
    again = from_spec(s.spec)
    assert again == s
    assert again.spec == s.spec
    assert again(u) == s(u)


@pytest.mark.parametrize("s", EXAMPLES, ids=lambda s: s.spec)
def test_specs_read_as_in_the_settings(s: StalenessFn) -> None:
    specs = ["constant", "polynomial:0.5", "polynomial:0", "hinge:10,4", "hinge:0.25,2.5", "exponential:0.1"]
    assert s.spec == specs[EXAMPLES.index(s)]


@pytest.mark.parametrize(
    "spec",
    [
        *("", "linear", "linear:1", "Constant", "custom:f", "polynomial", "polynomial:", "polynomial:a"),
        *("polynomial:1,2", "constant:1", "hinge:1", "hinge:1,2,3", "hinge:,", "exponential:", "polynomial:0.5;"),
    ],
)
def test_specs_that_name_nothing_are_refused(spec: str) -> None:
    with pytest.raises(InvalidValue, match="is unknown; use constant, polynomial:A"):
        from_spec(spec)


@pytest.mark.parametrize("spec", ["polynomial:-1", "polynomial:nan", "hinge:1,-2", "hinge:inf,0", "exponential:-0.1"])
def test_specs_with_parameters_out_of_range_say_which(spec: str) -> None:
    with pytest.raises(InvalidValue, match="must be a finite number >= 0"):
        from_spec(spec)


@pytest.mark.parametrize("s", EXAMPLES, ids=lambda s: s.spec)
def test_built_in_functions_survive_pickling(s: StalenessFn) -> None:
    again = pickle.loads(pickle.dumps(s))  # noqa: S301 (our own bytes)
    assert again == s
    assert [again(u) for u in (0, 1, 70)] == [s(u) for u in (0, 1, 70)]


def test_functions_are_equal_when_their_parameters_are() -> None:
    assert polynomial(0.5) == polynomial(0.5)
    assert hash(hinge(10, 4)) == hash(hinge(10.0, 4.0))
    assert len({polynomial(0.5), polynomial(0.6), hinge(0.5, 0), exponential(0.5), constant()}) == 5


def test_refusals_belong_to_the_error_tree() -> None:
    with pytest.raises(OffbeatError) as refusal:
        polynomial(-1)
    assert isinstance(refusal.value, ValueError)
