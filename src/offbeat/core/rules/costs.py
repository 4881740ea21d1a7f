"""Owns what a rule costs: the vectors that it keeps, and those that its answers read and write.

Rules kept here:
- Counted from what the rule answers to made-up updates; nothing is written down by hand.
- A vector is as long as the model. What is written before it is read is not read from memory, and scratch is none.
"""

from collections.abc import Iterable
from typing import NamedTuple

from offbeat.core.rules.interface import (
    BASE,
    DOTS,
    NEW,
    PUBLISHED,
    SCRATCH,
    WORKING,
    Answer,
    Mix,
    Move,
    Rule,
    VectorStep,
    elementwise,
    read_by,
)
from offbeat.core.rules.trial import made_up

UPDATES = 100
"""Enough for two versions of every example in the library: some rules do more from the second on."""

DIFFERENCES = {"D": (NEW, BASE), "L": (PUBLISHED, BASE)}


class Traffic(NamedTuple):
    """Vectors that pass between memory and processor."""

    read: int
    written: int


class Cost(NamedTuple):
    update: Traffic | None
    """Of an update that is gathered; None where every update publishes a version."""
    version: Traffic | None
    """Of an update that publishes a version, its own part included."""


class KeptVectors(NamedTuple):
    """What stays in memory, beside x and w."""

    slots: int = 0
    caches: int | None = None
    """None: no vector per device. 0: one for each. G: at most this many, which devices share."""
    bases: bool = False
    """Are the versions kept that tasks started from?"""


def kept_by(rule: Rule) -> KeptVectors:
    return KeptVectors(len(rule.slots), rule.caches, rule.needs_base or rule.measures_base)


def cost_of(rule: Rule) -> Cost:
    """The most that an update costs under this rule.

    >>> from offbeat.core.rules import fedbuff
    >>> cost_of(fedbuff(10))
    Cost(update=Traffic(read=3, written=1), version=Traffic(read=3, written=1))
    """
    measured, costs = _measured(rule), dict[bool, Traffic]()
    for answer in made_up(rule, UPDATES):
        read, written = traffic(_steps(answer))
        publishes = bool(answer.publish)
        costs[publishes] = max(costs.get(publishes, Traffic(0, 0)), Traffic(read + measured, written), key=sum)
    return Cost(costs.get(False), costs.get(True))


def traffic(steps: Iterable[VectorStep]) -> Traffic:
    read, written = set[str](), set[str]()
    for step in elementwise(tuple(steps)):
        read.update(name for name in read_by(step) if name not in written and not name.startswith(SCRATCH))
        if not step.into.startswith(SCRATCH):
            written.add(step.into)
    return Traffic(len(read), len(written))


def _measured(rule: Rule) -> int:
    """Vectors that are read to measure an update, a pass for every number."""
    passes = [DOTS[name] for name in rule.dots] + [("D", "D")] * rule.needs_distance
    return sum(len({vector for side in sides for vector in DIFFERENCES[side]}) for sides in passes)


def _steps(answer: Answer) -> tuple[VectorStep, ...]:
    if isinstance(answer, Mix):
        return (Move(WORKING, ((WORKING, answer.keep), (NEW, answer.new), (BASE, answer.base))),)
    return (*answer.steps, *answer.closing)
