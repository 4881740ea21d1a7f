"""Owns a histogram: values counted by upper bounds, as Prometheus shows them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any


class Buckets:
    """A histogram: how many values there were up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """A value, once or more often; a bound belongs to the bucket that it ends."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has it: up to each bound, the last being infinity.

        >>> two = Buckets([0, 1]); two.add(1); two.add(5); two.cumulative()
        [('0.0', 0.0), ('1.0', 1.0), ('+Inf', 2.0)]
        """
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]

    def state(self) -> dict[str, Any]:
        return {"counts": list(self.counts), "sum": self.sum}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.counts, self.sum = list(state["counts"]), state["sum"]
