"""Owns how contestants are compared: in turns, so that a busy machine slows all of them.

Rules kept here:
- Every contestant runs once in every turn, and a different one goes first each turn.
- A figure is the median over the turns; a ratio is the median of the ratios within a turn.
"""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

Contestant = Callable[[], float]
"""Runs once and returns its speed: more is better."""
Tell = Callable[[str], None]
"""Is told what is measured now."""


def silent(_what: str) -> None:
    """A `Tell` that shows nothing."""


class Turns:
    """The speed of every contestant in every turn."""

    def __init__(self, seen: Mapping[str, list[float]]) -> None:
        self.seen = seen

    def median(self, name: str) -> float:
        """The median speed of a contestant.

        >>> Turns({"ours": [3.0, 1.0, 2.0]}).median("ours")
        2.0
        """
        return median(self.seen[name])

    def ratio(self, ours: str, other: str) -> float:
        """The median, over the turns, of how many times as fast as the other one it was.

        >>> Turns({"ours": [2.0, 40.0, 3.0], "other": [1.0, 10.0, 1.0]}).ratio("ours", "other")
        3.0
        """
        return median(a / b for a, b in zip(self.seen[ours], self.seen[other], strict=True))


def take_turns(contestants: Mapping[str, Contestant], turns: int, tell: Tell = silent, what: str = "") -> Turns:
    """Let every contestant run once per turn."""
    names = [*contestants]
    seen: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            tell(f"{what}: {name}, turn {turn + 1} of {turns}")
            seen[name].append(contestants[name]())
    return Turns(seen)


def rate(run: Callable[[], object], amount: float, at_least_s: float = 0.0) -> float:
    """`amount` times the runs per second; it runs again until `at_least_s` is over."""
    begun, count = perf_counter(), 0
    while True:
        run()
        count += 1
        took = perf_counter() - begun
        if took >= at_least_s:
            return count * amount / max(took, 1e-9)
