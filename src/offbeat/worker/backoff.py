"""Owns how long a worker waits before it asks again.

Rules kept here:
- Full jitter: any wait up to a ceiling that grows with every failure, so that a fleet which lost its server together
  does not come back together.
- The wait that the server asks for (Retry-After) is a minimum, up to a limit; the jitter comes on top of it.
"""

from math import isfinite, isnan
from typing import Protocol

from offbeat.errors import InvalidValue

ASKED_MAX_S = 3600.0
"""A server that asks for more than this is asked again after this."""


class Rng(Protocol):
    """A `random.Random` or a `numpy.random.Generator`."""

    def random(self) -> float: ...


class Backoff:
    """How long to wait after each failure in a row.

    >>> import random
    >>> backoff = Backoff(first_s=0.5, longest_s=4.0, rng=random.Random(1))
    >>> [round(backoff.next(), 2) for _ in range(6)]
    [0.07, 0.85, 1.53, 1.02, 1.98, 1.8]
    >>> round(backoff.next(at_least_s=30), 2)
    32.61
    """

    def __init__(
        self,
        first_s: float = 0.5,
        longest_s: float = 60.0,
        factor: float = 2.0,
        *,
        rng: Rng,
        asked_max_s: float = ASKED_MAX_S,
    ) -> None:
        _check(first_s, longest_s, factor, asked_max_s)
        self.first_s, self.longest_s, self.factor, self.asked_max_s = first_s, longest_s, factor, asked_max_s
        self._rng = rng
        self._ceiling_s = first_s

    def next(self, at_least_s: float = 0.0) -> float:
        """Seconds to wait now; `at_least_s` is what the server asked for, and less than 0 counts as 0."""
        if isnan(at_least_s):
            raise InvalidValue("at_least_s is nan but must be a number of seconds; leave it out where none was given")
        asked_s = min(max(at_least_s, 0.0), self.asked_max_s)
        wait_s = asked_s + self._ceiling_s * float(self._rng.random())
        self._ceiling_s = min(self.longest_s, self._ceiling_s * self.factor)
        return wait_s

    def reset(self) -> None:
        """It worked: the next failure is the first one again."""
        self._ceiling_s = self.first_s


def _check(first_s: float, longest_s: float, factor: float, asked_max_s: float) -> None:
    if not (isfinite(longest_s) and 0 < first_s <= longest_s):
        raise InvalidValue(
            f"first_s is {first_s} and longest_s {longest_s} but it must be 0 < first_s <= longest_s < inf"
        )
    if not (isfinite(factor) and factor >= 1):
        raise InvalidValue(f"factor is {factor} but must be a number >= 1")
    if not (isfinite(asked_max_s) and asked_max_s >= 0):
        raise InvalidValue(f"asked_max_s is {asked_max_s} but must be a number of seconds >= 0")
