"""Owns how well the worst-served devices do: the mean of a metric over the tenth of devices where it is worst.

Rules kept here:
- Every device counts once, however many samples it holds.
- Which end is the worse one, the name of the metric says, as for the best version. NaN is worse than every number.
"""

from collections.abc import Iterable, Mapping
from math import ceil, isnan

from offbeat.protocol.best import small_is_good

WORST_TENTH = "_worst_tenth"
"""Behind a metric's name: its mean over the worst-served tenth of devices."""
PART = 10


def worst_tenth(metric: str, values: Iterable[float]) -> float | None:
    """The mean of the worst tenth of a metric's values by device, at least one; None where there is none.

    >>> worst_tenth("accuracy", [0.9, 0.5, 0.8]), worst_tenth("loss", [0.1, 2.0, 4.0] * 5)
    (0.5, 4.0)
    """
    sign = -1.0 if small_is_good(metric) else 1.0
    ordered = sorted(values, key=lambda value: (not isnan(value), sign * value))
    worst = ordered[: ceil(len(ordered) / PART)]
    return sum(worst) / len(worst) if worst else None


def worst_served(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """`NAME_worst_tenth` of every metric, given what was measured on each device.

    >>> worst_served([{"accuracy": 0.9, "loss": 0.2}, {"accuracy": 0.6, "loss": 0.7}])
    {'accuracy_worst_tenth': 0.6, 'loss_worst_tenth': 0.7}
    """
    by_name: dict[str, list[float]] = {}
    for report in reports:
        for name, value in report.items():
            by_name.setdefault(name, []).append(value)
    found = {name: worst_tenth(name, values) for name, values in by_name.items()}
    return {f"{name}{WORST_TENTH}": value for name, value in found.items() if value is not None}
