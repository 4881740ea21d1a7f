"""Offbeat trains one model across many devices that answer whenever they can.

It implements Asynchronous Federated Optimization (FedAsync; Xie, Koyejo, Gupta).
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from offbeat.core.rules import Facts, Mix, Rule, delta, fedasync, fedavg, fedbuff, scaled_from
from offbeat.core.staleness import constant, exponential, hinge, polynomial
from offbeat.errors import OffbeatError
from offbeat.task import Task, Trained, Work

if TYPE_CHECKING:
    from offbeat.sim.api import simulate
    from offbeat.sim.compare import compare
    from offbeat.sim.run import Run
    from offbeat.storage.export import export_ledger

__version__ = version("offbeat")

__all__ = [
    "Facts",
    "Mix",
    "OffbeatError",
    "Rule",
    "Run",
    "Task",
    "Trained",
    "Work",
    "compare",
    "constant",
    "delta",
    "exponential",
    "export_ledger",
    "fedasync",
    "fedavg",
    "fedbuff",
    "hinge",
    "polynomial",
    "scaled_from",
    "simulate",
]

_LATER = {
    "Run": "offbeat.sim.run",
    "compare": "offbeat.sim.compare",
    "export_ledger": "offbeat.storage.export",
    "simulate": "offbeat.sim.api",
}


def __getattr__(name: str) -> Any:
    """`offbeat.torch`, `offbeat.flower` and the simulator are imported when they are first used: few need them all."""
    if name in ("flower", "torch"):
        return import_module(f"offbeat.{name}")
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
