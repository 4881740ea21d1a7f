"""Owns the averaged model: a mean of the versions beside x_t, which the rule and the workers know nothing of.

    mean_t = (1 - c_t)*mean_{t-1} + c_t*x_t,   mean_0 = x_0

c_t depends on t alone, so nothing of it is recorded. Float buffers (BatchNorm's statistics) are those of x_t.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from offbeat.core.staleness import spec_parts
from offbeat.errors import InvalidValue

AVERAGED = "_average"
"""What the metrics of the averaged model are called: as those of x_t, with this behind it."""


def with_average(metrics: Mapping[str, float], of_mean: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a version and of the averaged model in one.

    >>> with_average({"accuracy": 0.8}, {"accuracy": 0.9})
    {'accuracy': 0.8, 'accuracy_average': 0.9}
    """
    return {**metrics, **{f"{name}{AVERAGED}": value for name, value in of_mean.items()}}


def of_versions(names: Iterable[str]) -> list[str]:
    """The metrics without those of the averaged model.

    >>> of_versions(["loss", "accuracy", "loss_average", "accuracy_average", "other_average"])
    ['loss', 'accuracy', 'other_average']
    """
    names = list(names)
    return [name for name in names if not (name.endswith(AVERAGED) and name.removesuffix(AVERAGED) in names)]


def refuse_averaged_names(names: Iterable[str]) -> None:
    """Where there is an average, a task's own metrics must not be called like those of the averaged model."""
    for name in names:
        if name.endswith(AVERAGED):
            raise InvalidValue(
                f"the task calls a metric {name!r}, but names that end in {AVERAGED} are for the averaged model; "
                "rename it, or leave out --average"
            )


def refuse_best_average(metric: str) -> None:
    if metric.endswith(AVERAGED):
        raise InvalidValue(
            f"keep_best is {metric}, but what is kept are versions, not averaged models; "
            f"name a metric without {AVERAGED}"
        )


@dataclass(frozen=True, slots=True)
class Average:
    spec: str
    share: Callable[[int], float] = field(repr=False, compare=False)
    """c_t: what version t counts in the mean."""


def poly(p: float = 8.0) -> Average:
    """Late versions count more: c_t = (p + 1)/(t + p), so version i weighs about i^p. p = 0 is the plain mean.

    Shamir, Zhang 2013, arXiv 1212.1824.

    >>> [round(poly(8).share(t), 4) for t in (1, 2, 10, 100)]
    [1.0, 0.9, 0.5, 0.0833]
    """
    if not (math.isfinite(p) and p >= 0):
        raise InvalidValue(f"average: poly's P is {p!r} but must be a finite number >= 0; 8 is usual")
    return Average(f"poly:{p:g}", lambda t: min(1.0, (p + 1.0) / (t + p)))


def ema(c: float) -> Average:
    """The newest version counts c, the one before it c*(1 - c), and so on.

    >>> ema(0.02).share(500)
    0.02
    """
    if not 0.0 < c <= 1.0:
        raise InvalidValue(f"average: ema's C is {c!r} but must lie in (0, 1]; 0.02 averages about 100 versions")
    return Average(f"ema:{c:g}", lambda _: c)


def average_from_spec(spec: str) -> Average | None:
    """The average that a settings string names; None where there is none.

    >>> average_from_spec("none"), average_from_spec("poly:8")
    (None, Average(spec='poly:8'))
    """
    if "+" in spec:
        raise InvalidValue(f"average is {spec!r}, but an average of an average is not kept: use poly:P or ema:C")
    match spec_parts(spec.strip()):
        case "none", []:
            return None
        case "poly", []:
            return poly()
        case "poly", [p]:
            return poly(p)
        case "ema", [c]:
            return ema(c)
    raise InvalidValue(f"average {spec!r} is unknown; use poly:P, ema:C or none, for instance poly:8")
