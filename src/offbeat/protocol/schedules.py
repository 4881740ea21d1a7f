"""Owns how gamma changes in the course of a run: with t, or with what evaluations show.

Rule kept here: a schedule is a pure function of t and the evaluations so far, so a replay gives the same rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Evaluated
from offbeat.protocol.scheduler import GammaSchedule


@dataclass(frozen=True, slots=True)
class Step:
    """gamma until version `epoch`, and `factor` times that from there on.

    >>> Step(0.1, 800, 0.5)(799, []), Step(0.1, 800, 0.5)(800, [])
    (0.1, 0.05)
    """

    gamma: float
    epoch: int
    factor: float
    uses_evaluations = False

    def __call__(self, t: int, evaluations: Sequence[Evaluated]) -> float:  # noqa: ARG002 (t is enough)
        return self.gamma * (self.factor if t >= self.epoch else 1.0)


@dataclass(frozen=True, slots=True)
class Plateau:
    """gamma, and `factor` times as much after every evaluation at which the metric was not lower than ever before."""

    gamma: float
    metric: str
    factor: float
    uses_evaluations = True

    def __call__(self, t: int, evaluations: Sequence[Evaluated]) -> float:  # noqa: ARG002 (the metrics decide)
        best, gamma = inf, self.gamma
        for evaluation in evaluations:
            value = evaluation.metrics[self.metric]
            if not value < best:
                gamma *= self.factor
            best = min(best, value)
        return gamma


def gamma_schedule(spec: str, gamma: float | None) -> GammaSchedule | None:
    """The schedule that a settings string names; None where gamma stays.

    >>> gamma_schedule("plateau:loss,0.25", 20.0)
    Plateau(gamma=20.0, metric='loss', factor=0.25)
    """
    name, _, rest = spec.partition(":")
    if name == "constant" and not rest:
        return None
    if gamma is None:
        raise InvalidValue(f"gamma_schedule {spec!r} needs gamma: this task does not tell its own")
    what, _, number = rest.rpartition(",")
    try:
        factor = float(number)
        if name == "step" and 0 < factor < inf:
            return Step(gamma, int(what), factor)
        if name == "plateau" and what and 0 < factor <= 1:
            return Plateau(gamma, what, factor)
    except ValueError:
        pass
    raise InvalidValue(f"gamma_schedule {spec!r} is unknown; use constant, step:T,F or plateau:METRIC,F (0 < F <= 1)")
