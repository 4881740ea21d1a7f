"""Offbeat trains one model across many devices that answer whenever they can.

It implements Asynchronous Federated Optimization (FedAsync; Xie, Koyejo, Gupta).
"""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from offbeat.core.rules import Facts, Mix, Rule, delta, fedasync, fedavg, fedbuff, scaled_from
from offbeat.core.staleness import constant, exponential, hinge, polynomial
from offbeat.errors import OffbeatError
from offbeat.task import Task, Trained, Work

__version__ = version("offbeat")

__all__ = [
    "Facts",
    "Mix",
    "OffbeatError",
    "Rule",
    "Task",
    "Trained",
    "Work",
    "constant",
    "delta",
    "exponential",
    "fedasync",
    "fedavg",
    "fedbuff",
    "hinge",
    "polynomial",
    "scaled_from",
]


def __getattr__(name: str) -> ModuleType:
    """`offbeat.torch` is imported when it is first used: the server needs no torch."""
    if name == "torch":
        return import_module("offbeat.torch")
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
