"""Offbeat trains one model across many devices that answer whenever they can.

It implements Asynchronous Federated Optimization (FedAsync; Xie, Koyejo, Gupta).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offbeat.core.rules import Facts, Mix, Rule, delta, fedasync, fedavg, fedbuff, scaled_from
from offbeat.core.staleness import constant, exponential, hinge, polynomial
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat import devices, rules, staleness
    from offbeat.sim.api import simulate
    from offbeat.sim.compare import compare
    from offbeat.sim.run import Run
    from offbeat.storage.export import export_ledger
    from offbeat.task import DeviceState, StatefulTask, Task, Trained, Work

    __version__: str

__all__ = [
    "DeviceState",
    "Facts",
    "Mix",
    "OffbeatError",
    "Rule",
    "Run",
    "StatefulTask",
    "Task",
    "Trained",
    "Work",
    "compare",
    "constant",
    "delta",
    "devices",
    "exponential",
    "export_ledger",
    "fedasync",
    "fedavg",
    "fedbuff",
    "hinge",
    "polynomial",
    "rules",
    "scaled_from",
    "simulate",
    "staleness",
]

_MODULES = ("devices", "flower", "rules", "staleness", "torch")
_LATER = {
    "DeviceState": "offbeat.task",
    "Run": "offbeat.sim.run",
    "StatefulTask": "offbeat.task",
    "Task": "offbeat.task",
    "Trained": "offbeat.task",
    "Work": "offbeat.task",
    "compare": "offbeat.sim.compare",
    "export_ledger": "offbeat.storage.export",
    "simulate": "offbeat.sim.api",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: these need numpy, torch or Flower, and `offbeat --help` must not wait for them."""
    if name in _MODULES:
        return import_module(f"offbeat.{name}")
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("offbeat")
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
