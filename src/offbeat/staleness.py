"""The staleness functions: `offbeat.simulate(task, staleness_fn=offbeat.staleness.hinge(10, 4))`."""

from offbeat.core.staleness import constant, exponential, hinge, polynomial

__all__ = ["constant", "exponential", "hinge", "polynomial"]
