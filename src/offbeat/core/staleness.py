"""Owns s(staleness): how much an update counts, given how old the model it started from is.

Rules kept here:
- s(0) = 1, 0 <= s <= 1, non-increasing, same argument same answer. Checked at 0..64 when a function is built and
  again at every use, so that a slip in a user's own function stops the run instead of bending it.
- Staleness is the number of versions published between a worker's lease and its mixing; fresh is 0.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from offbeat.errors import InvalidValue

CHECKED_TO = 64


@dataclass(frozen=True, slots=True)
class StalenessFn:
    """A staleness function that has been checked; `spec` is its name in settings, such as 'polynomial:0.5'."""

    spec: str
    formula: Callable[[int], float] = field(repr=False, compare=False)
    table: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = tuple(_bounded(self.spec, self.formula, u) for u in range(CHECKED_TO + 1))
        for u in range(1, CHECKED_TO + 1):
            _refuse_rise(self.spec, u, table[u - 1], table[u])
        object.__setattr__(self, "table", table)

    def __call__(self, staleness: int) -> float:
        u = _counted(staleness)
        value = _bounded(self.spec, self.formula, u)
        if u > CHECKED_TO:
            _refuse_rise(self.spec, u, min(self.table[CHECKED_TO], _bounded(self.spec, self.formula, u - 1)), value)
        elif value != self.table[u]:
            raise InvalidValue(
                f"staleness function {self.spec}: s({u}) was {self.table[u]!r} and is now {value!r}; "
                "the same argument must give the same answer"
            )
        return value


def constant() -> StalenessFn:
    """s = 1: every update counts the same (FedAsync+Const).

    >>> constant()(16)
    1.0
    """
    return StalenessFn("constant", _constant)


def polynomial(a: float) -> StalenessFn:
    """s = (staleness + 1)^-a (FedAsync+Poly).

    >>> [round(polynomial(0.5)(u), 6) for u in (0, 1, 3, 15)]
    [1.0, 0.707107, 0.5, 0.25]
    """
    a = _at_least_0("polynomial", "a", a)
    return StalenessFn(f"polynomial:{_short(a)}", partial(_polynomial, a))


def hinge(a: float, b: float) -> StalenessFn:
    """s = 1 up to a staleness of b, then 1 / (a*(staleness - b) + 1) (FedAsync+Hinge).

    >>> hinge(10, 4)(4), hinge(10, 4)(5) == 1 / 11, hinge(10, 4)(15) == 1 / 111
    (1.0, True, True)
    """
    a, b = _at_least_0("hinge", "a", a), _at_least_0("hinge", "b", b)
    return StalenessFn(f"hinge:{_short(a)},{_short(b)}", partial(_hinge, a, b))


def exponential(a: float) -> StalenessFn:
    """s = exp(-a*staleness): not in the paper, but in its authors' code.

    >>> round(exponential(0.5)(2), 6)
    0.367879
    """
    a = _at_least_0("exponential", "a", a)
    return StalenessFn(f"exponential:{_short(a)}", partial(_exponential, a))


def checked(fn: Callable[[int], float]) -> StalenessFn:
    """Any callable as a staleness function; one that breaks the rules is refused here.

    >>> checked(lambda u: 1 / (u + 1))(3)
    0.25
    """
    if isinstance(fn, StalenessFn):
        return fn
    if not callable(fn):
        raise InvalidValue(f"staleness_fn must be a function of the staleness, not {fn!r}; try offbeat.polynomial(0.5)")
    return StalenessFn(f"custom:{getattr(fn, '__name__', type(fn).__name__)}", fn)


def from_spec(spec: str) -> StalenessFn:
    """The staleness function that a settings string names.

    >>> from_spec("hinge:10,4") == hinge(10, 4)
    True
    """
    match spec_parts(spec):
        case "constant", []:
            return constant()
        case "polynomial", [a]:
            return polynomial(a)
        case "hinge", [a, b]:
            return hinge(a, b)
        case "exponential", [a]:
            return exponential(a)
    raise InvalidValue(
        f"staleness_fn {spec!r} is unknown; use constant, polynomial:A, hinge:A,B or exponential:A, "
        "for instance polynomial:0.5"
    )


def spec_parts(spec: str) -> tuple[str, list[float] | None]:
    """The name in a settings string and the numbers behind it; None where they are not numbers.

    >>> spec_parts("hinge:10,4"), spec_parts("constant"), spec_parts("hinge:x")
    (('hinge', [10.0, 4.0]), ('constant', []), ('hinge', None))
    """
    name, _, rest = spec.partition(":")
    try:
        return name, [float(part) for part in rest.split(",")] if rest else []
    except ValueError:
        return name, None


def _constant(_: int) -> float:
    return 1.0


def _polynomial(a: float, u: int) -> float:
    return float((u + 1.0) ** -a)


def _hinge(a: float, b: float, u: int) -> float:
    return 1.0 if u <= b else 1.0 / (a * (u - b) + 1.0)


def _exponential(a: float, u: int) -> float:
    return math.exp(-a * u)


def _counted(staleness: int) -> int:
    try:
        u = operator.index(staleness)
    except TypeError:
        raise InvalidValue(f"staleness counts versions, so it is a whole number, not {staleness!r}") from None
    if u < 0:
        raise InvalidValue(f"staleness {u} is negative: an update cannot start from a version not yet published")
    return u


def _bounded(spec: str, formula: Callable[[int], float], u: int) -> float:
    answer = formula(u)
    try:
        value = float(answer)
    except (TypeError, ValueError):
        raise InvalidValue(f"staleness function {spec}: s({u}) is {answer!r} but must be a number") from None
    if u == 0 and value != 1.0:
        raise InvalidValue(
            f"staleness function {spec}: s(0) is {value!r} but must be 1, so that a fresh update counts in full"
        )
    if not 0.0 <= value <= 1.0:
        raise InvalidValue(f"staleness function {spec}: s({u}) is {value!r} but must be between 0 and 1")
    return value


def _short(value: float) -> str:
    return repr(value).removesuffix(".0")


def _refuse_rise(spec: str, u: int, before: float, value: float) -> None:
    if value > before:
        raise InvalidValue(
            f"staleness function {spec}: s({u}) = {value!r} is above {before!r}, which a smaller staleness got; "
            "s must not rise with staleness"
        )


def _at_least_0(name: str, parameter: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidValue(f"{name}: {parameter} is {value!r} but must be a finite number >= 0")
    return float(value)
