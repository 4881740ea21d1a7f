"""Owns which evaluated versions are wanted although newer ones are there: the one at the target, and the best.

The coordinator decides which they are; a driver keeps their vectors.
"""

from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Evaluated


def may_want(c: Coordinator) -> bool:
    """May an evaluated version be wanted when newer ones are there?"""
    return c.plan.target is not None or c.plan.keep_best is not None


def would_want(c: Coordinator, event: Evaluated) -> bool:
    """Is this version wanted later, if this is what its evaluation shows?"""
    target, best = c.plan.target, c.plan.keep_best
    reaches = target is not None and target.reached(event.metrics) and not c.end_reason
    return reaches or (best is not None and best.better(event, c.outcome.best))


def evaluation_of(c: Coordinator, t: int) -> Evaluated | None:
    """The latest evaluation of a version."""
    return next((evaluation for evaluation in reversed(c.evaluations) if evaluation.t == t), None)
