"""Owns how counts become bars: quantiles, where a picture ends, and the bars of a histogram."""

from collections.abc import Mapping

BARS_MAX = 60
LONG_TAIL = 3
"""Where the largest staleness is this many times that of nearly all updates, the picture ends before it."""
ALL_BUT_A_FEW = 0.995
SHOWN_MIN = 5
"""Even where nothing was stale, there is an axis."""


def quantile(counts: Mapping[int, int], part: float) -> int:
    """The smallest value that this part of all does not exceed.

    >>> quantile({0: 5, 1: 4, 7: 1}, 0.5), quantile({0: 5, 1: 4, 7: 1}, 0.95), quantile({}, 0.5)
    (0, 7, 0)
    """
    wanted, seen = part * sum(counts.values()), 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen >= wanted:
            return value
    return 0


def shown_to(counts: Mapping[int, int]) -> int:
    """The largest staleness that a picture shows: a few stragglers do not squeeze all others.

    >>> shown_to({0: 900, 10: 100, 4000: 1}), shown_to({0: 5, 9: 5}), shown_to({0: 5})
    (10, 9, 5)
    """
    largest, most = max(counts, default=0), max(SHOWN_MIN, quantile(counts, ALL_BUT_A_FEW))
    return most if largest > LONG_TAIL * most else max(SHOWN_MIN, largest)


def bars(counts: Mapping[int, int], largest: int, most: int = BARS_MAX) -> tuple[list[float], list[int]]:
    """Edges and heights of a histogram; where there are too many values, several share a bar.

    >>> bars({0: 5, 1: 4, 3: 1}, 3)
    ([-0.5, 0.5, 1.5, 2.5, 3.5], [5, 4, 0, 1])
    """
    width = -(-(largest + 1) // most)
    heights = [0] * -(-(largest + 1) // width)
    for value, count in counts.items():
        if value <= largest:
            heights[value // width] += count
    return [width * index - 0.5 for index in range(len(heights) + 1)], heights
