"""Flower's fleets, asynchronously: `FedAsync` for a ServerApp, and a mod that adds the proximal term to a ClientApp."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from offbeat.errors import MissingExtra

if TYPE_CHECKING:
    from offbeat.flower.proximal import proximal_mod
    from offbeat.flower.strategy import Applied, FedAsync, Result

__all__ = ["Applied", "FedAsync", "Result", "proximal_mod"]

_LATER = {"Applied": "strategy", "FedAsync": "strategy", "Result": "strategy", "proximal_mod": "proximal"}

if find_spec("flwr") is None:
    raise MissingExtra("flwr", "flower")


def __getattr__(name: str) -> Any:
    """Imported on first use: a node starts a process per task, and should not load the server's parts each time."""
    if name in _LATER:
        return getattr(import_module(f"offbeat.flower.{_LATER[name]}"), name)
    raise AttributeError(f"module 'offbeat.flower' has no attribute {name!r}")
