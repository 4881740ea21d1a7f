"""Owns how long series are made short enough to be drawn."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def thinned(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, evenly spread, the first and the last included.

    >>> thinned(range(11), 3), thinned("ab", 3)
    ([0, 5, 10], ['a', 'b'])
    """
    last = len(items) - 1
    if last < most or most < 2:
        return list(items[:most])
    return [items[(number * last) // (most - 1)] for number in range(most)]


def open_over_time(begun: Sequence[float], ended: Sequence[float], most: int) -> list[tuple[float, int]]:
    """How many were open at moments: wherever that changed or, if it changed more often, at even distances.

    >>> open_over_time([0.0, 0.0, 2.0], [1.0, 2.0], 10)
    [(0.0, 2), (1.0, 1), (2.0, 1)]
    """
    first, second = (np.sort(np.asarray(moments, np.float64), kind="stable") for moments in (begun, ended))
    if len(first) + len(second) > most:  # both are about in order, which a stable sort is quick with
        moments = np.linspace(first[0], max(first[-1], *second[-1:]), most)
    else:
        moments = np.unique(np.concatenate([first, second]))
    counts = np.searchsorted(first, moments, "right") - np.searchsorted(second, moments, "right")
    return list(zip(moments.tolist(), counts.tolist(), strict=True))
