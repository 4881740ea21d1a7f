"""Owns the checks of the numbers that rules are built with."""

import math
from collections.abc import Callable

from offbeat.errors import InvalidValue

Schedule = Callable[[int], float]
"""A number that depends on the epoch t."""


def schedule_of(alpha: float | Schedule) -> Schedule:
    """alpha as a function of t: a number is checked here, a schedule at every use."""
    if callable(alpha):
        return lambda t: in_0_1(alpha(t))
    number = in_0_1(alpha)
    return lambda _: number


def spec_of(alpha: float | Schedule) -> str:
    return getattr(alpha, "__name__", type(alpha).__name__) if callable(alpha) else repr(float(alpha))


def scaled_from(alpha: float, epoch: int, factor: float = 0.5) -> Schedule:
    """The schedule of the authors' code: alpha up to `epoch`, alpha*factor from there on.

    >>> [scaled_from(0.9, 800)(t) for t in (1, 799, 800, 2000)]
    [0.9, 0.9, 0.45, 0.45]
    """
    in_0_1(alpha)
    in_0_1(alpha * factor)

    def schedule(t: int) -> float:
        return alpha if t < epoch else alpha * factor

    schedule.__name__ = f"{alpha!r}*{factor!r} from {epoch}"
    return schedule


def in_0_1(alpha: float) -> float:
    if not 0.0 < alpha <= 1.0:
        raise InvalidValue(f"alpha is {alpha!r} but must lie in (0, 1]; 0.6 is a good start")
    return float(alpha)


def whole(rule: str, k: int, name: str = "k", meaning: str = "how many updates make one version") -> int:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidValue(f"{rule}: {name} is {k!r} but must be a whole number >= 1: {meaning}")
    return k


def above_0(rule: str, name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise InvalidValue(f"{rule}: {name} is {value!r} but must be a finite number > 0")
    return float(value)


def at_least_0(rule: str, name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidValue(f"{rule}: {name} is {value!r} but must be a finite number >= 0")
    return float(value)


def below_1(rule: str, name: str, value: float) -> float:
    """A share that is kept of what was there before: in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise InvalidValue(f"{rule}: {name} is {value!r} but must lie in [0, 1)")
    return float(value)
