"""Owns the gate: how far an update may lie from the model that it started from, ||x_new - x_tau||.

Rules kept here:
- Scalar arithmetic only: a distance and a memory go in, a factor and a memory come out. The gate sees no vector.
- A distance that is NaN or infinite is refused under every policy: there is nothing to scale.
- What is refused leaves no trace, and what is clipped is remembered at its limit: one huge update does not widen
  the gate for those that follow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args, overload

from offbeat.core.rules import Answer, Mix, Move, OnParameters, Steps, VectorStep
from offbeat.core.rules.composition import renamed
from offbeat.core.rules.interface import BASE, NEW, Elementwise, elementwise, read_by
from offbeat.errors import InvalidValue

NormPolicy = Literal["refuse", "clip"]
CLIPPED = "_clipped"
"""The update as it is let through, for steps that are not sums."""
Accepted = Sequence[float]
"""What a gate remembers: the latest accepted distances, the oldest first; never changed in place."""

MEDIAN_AFTER = 50
"""Updates that must be accepted before the median says anything."""
MEDIAN_OF = 501
"""Accepted distances that the median is taken of: the latest."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What is done about an update whose ||x_new - x_tau|| is above a limit.

    >>> Gate(norm_max=3.0).judge(6.0, [])  # refused
    (0.0, [])
    >>> Gate(norm_max=3.0, policy="clip").judge(6.0, [])  # half of the way
    (0.5, [])
    """

    norm_max: float | None = None
    policy: NormPolicy = "refuse"
    median_max: float | None = None
    """The limit as a multiple of the median of the accepted distances."""

    def __post_init__(self) -> None:
        if self.policy not in get_args(NormPolicy):
            raise InvalidValue(f"norm_policy is {self.policy!r}; use one of {', '.join(get_args(NormPolicy))}")
        if self.norm_max is None and self.median_max is None:
            raise InvalidValue("a gate needs norm_max or norm_median_max; leave the gate out to accept every distance")
        if self.norm_max is not None and not 0 < self.norm_max < math.inf:
            raise InvalidValue(
                f"norm_max is {self.norm_max!r} but must be a finite number > 0: the largest ||x_new - x_tau||"
            )
        if self.median_max is not None and not 1 <= self.median_max < math.inf:
            raise InvalidValue(
                f"norm_median_max is {self.median_max!r} but must be a finite number >= 1: "
                "how many times the median distance is accepted, for instance 10"
            )

    @property
    def needs_base(self) -> bool:
        """What is clipped is mixed with its x_tau, so leased versions must be kept."""
        return self.policy == "clip"

    def limit(self, memory: Accepted) -> float:
        """The largest distance that is accepted as it is; infinity where there is none yet.

        >>> Gate(median_max=4.0).limit([2.0] * 50)
        8.0
        """
        limit = math.inf if self.norm_max is None else self.norm_max
        if self.median_max is None or len(memory) < MEDIAN_AFTER:
            return limit
        # Models that do not move have a median of 0: a multiple of it would refuse every update for ever.
        return min(limit, self.median_max * _median(memory) or math.inf)

    def judge(self, distance: float, memory: Accepted) -> tuple[float, Accepted]:
        """What x_new - x_tau is to be multiplied by, in (0, 1], or 0: refused; and the memory after that."""
        limit = self.limit(memory)
        if not math.isfinite(distance) or (distance > limit and self.policy == "refuse"):
            return 0.0, memory
        factor = 1.0 if distance <= limit else limit / distance
        if not factor or self.median_max is None:
            return factor, memory
        return factor, [*memory, float(distance) * factor][-MEDIAN_OF:]


@overload
def clipped(mix: Mix, factor: float) -> Mix: ...
@overload
def clipped(mix: Steps, factor: float) -> Steps: ...
def clipped(mix: Answer, factor: float) -> Answer:
    """The coefficients that mix x_tau + factor*(x_new - x_tau) in place of x_new.

    >>> clipped(Mix(keep=0.5, new=0.5, base=0.0, publish=True), 0.25)
    Mix(keep=0.5, new=0.125, base=0.375, publish=True)
    """
    if factor == 1.0:
        return mix
    new, base = mix.new * factor, mix.base + mix.new * (1.0 - factor)
    if isinstance(mix, Mix):
        return Mix(mix.keep, new, base, mix.publish)
    steps = tuple(_clipped_step(step, factor) for step in mix.steps)
    if any(CLIPPED in read_by(step) for step in elementwise(steps)):
        steps = (Move(CLIPPED, _between(1.0, factor)), *steps)
    return mix._replace(new=new, base=base, steps=steps)


def _clipped_step(step: VectorStep, factor: float) -> VectorStep:
    """The step with x_tau + factor*(x_new - x_tau) in place of x_new."""
    if isinstance(step, OnParameters):
        return OnParameters(tuple(_clipped_one(one, factor) for one in step.steps))
    return _clipped_one(step, factor)


def _clipped_one(step: Elementwise, factor: float) -> Elementwise:
    """As two terms, where x_new is in a sum; elsewhere under a name of its own."""
    if not isinstance(step, Move):
        return renamed(step, {NEW: CLIPPED})
    terms = list[tuple[str, float]]()
    for name, coefficient in step.terms:
        terms += _between(coefficient, factor) if name == NEW else ((name, coefficient),)
    return Move(step.into, tuple(terms))


def _between(coefficient: float, factor: float) -> tuple[tuple[str, float], ...]:
    return (NEW, coefficient * factor), (BASE, coefficient * (1.0 - factor))


def _median(distances: Accepted) -> float:
    """The middle one, or the mean of the two in the middle; halved before they are added, which cannot overflow."""
    ranked, half = sorted(distances), len(distances) // 2
    return ranked[half] if len(ranked) % 2 else ranked[half - 1] / 2 + ranked[half] / 2
