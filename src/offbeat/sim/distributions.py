"""Owns named distributions: what a setting such as `uniform:0.5,1.5` or `10*lognormal:1` makes of a uniform draw.

Rule kept here: a distribution is its inverse and its range, so a value can be checked before any is drawn.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from offbeat.errors import InvalidValue

ALLOWED = "a number, uniform:LO,HI, lognormal:S, pareto:A or exponential[:M], and FACTOR* before any of them"
EXPONENT_MAX = 50.0
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A value for every u in (0, 1), between `low` and `high`."""

    inverse: Callable[[float], float]
    low: float
    high: float

    def times(self, factor: float) -> "Distribution":
        """Every value that many times as large."""
        return Distribution(lambda u: factor * self.inverse(u), factor * self.low, factor * self.high)


def distribution(spec: float | str) -> Distribution:
    """The distribution that a number or a text names; a ValueError where it names none.

    >>> distribution("10*uniform:1,3").inverse(0.5), distribution(7.0).inverse(0.2)
    (20.0, 7.0)
    """
    if not isinstance(spec, str):
        return _constant(spec)
    factor, star, rest = spec.rpartition("*")
    if star:
        return distribution(rest).times(_positive(float(factor)))
    name, _, numbers = rest.partition(":")
    if name not in _NAMED:
        return _constant(float(rest))
    try:
        return _NAMED[name](*(float(number) for number in numbers.split(",") if numbers))
    except TypeError:
        raise ValueError(f"{name} takes other numbers") from None


def within(name: str, spec: float | str, low: float, high: float, meaning: str) -> Distribution:
    """The distribution of a setting, all values of which must lie between `low` and `high`."""
    try:
        found = distribution(spec)
    except ValueError:
        raise InvalidValue(f"{name} is {spec!r} but must be {ALLOWED}") from None
    if not low <= found.low <= found.high <= high:
        raise InvalidValue(f"{name} is {spec!r} but must {meaning} on every device")
    return found


def _constant(value: float = 1.0) -> Distribution:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    return Distribution(lambda _: value, value, value)


def _lognormal(sigma: float) -> Distribution:
    _positive(sigma, or_zero=True)
    return Distribution(lambda u: _exp(sigma * _NORMAL.inv_cdf(u)), 0.0, math.inf)


def _exponential(mean: float = 1.0) -> Distribution:
    _positive(mean)
    return Distribution(lambda u: -mean * math.log(u), 0.0, math.inf)


def _uniform(low: float, high: float) -> Distribution:
    _positive(low, or_zero=True)
    _positive(high - low, or_zero=True)
    return Distribution(lambda u: low + (high - low) * u, low, high)


def _pareto(shape: float) -> Distribution:
    _positive(shape)
    return Distribution(lambda u: _exp(-math.log(u) / shape), 1.0, math.inf)


def _exp(number: float) -> float:
    """Within what a clock can count: from a nanosecond to longer than the universe is old."""
    return math.exp(max(-EXPONENT_MAX, min(EXPONENT_MAX, number)))


def _positive(number: float, *, or_zero: bool = False) -> float:
    if not (math.isfinite(number) and (number > 0 or (or_zero and number == 0))):
        raise ValueError(f"{number} is not > 0")
    return number


_NAMED: dict[str, Callable[..., Distribution]] = {
    "constant": _constant,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "uniform": _uniform,
    "pareto": _pareto,
}
NAMES = frozenset(_NAMED)
