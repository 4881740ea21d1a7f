"""Owns what an actor does that holds a task: it trains and evaluates, and says with what it does so.

Rule kept here: what goes wrong is returned, not raised, so that an error of the user's arrives as it was.
"""

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from offbeat.core.layout import Layout
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.task_host import Bare, Pushed, TaskHost
from offbeat.task import Work

PACKAGES = ("offbeat", "numpy", "torch")
"""What decides the bits, beside the kind of CPU."""

Found = TypeVar("Found")
Told = tuple[Exception | None, Found | None]


class Trainer:
    """A task on some node."""

    def __init__(self, payload: bytes, layout: Layout, folder: str) -> None:
        go_to(folder)
        self._payload, self._layout = payload, layout
        self._held: TaskHost | None = None

    @property
    def _host(self) -> TaskHost:
        """With the task, which is made when it is needed first."""
        if self._held is None:
            self._held = host = TaskHost()
            try:
                host.load(self._payload, self._layout)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise InvalidValue(f"the task could not be made in another process: {why}") from error
        return self._held

    def hello(self) -> Told[dict[str, str]]:
        """Here it is; with these packages."""
        return None, packages()

    def train(self, work: Work, x_tau: Bare) -> Told[Pushed]:
        """Train from x_tau."""
        return told(lambda: self._host.train(x_tau, work))

    def train_many(self, jobs: Sequence[tuple[int, Work]], *versions: Bare) -> Told[tuple[list[Pushed], int]]:
        """Train together; a job says from which of the versions it starts."""
        return told(lambda: self._host.train_many([(versions[number], work) for number, work in jobs]))

    def evaluate(self, x: Bare) -> Told[dict[str, float]]:
        """Metrics of a global model."""
        return told(lambda: self._host.evaluate(x))


def told(do: Callable[[], Found]) -> Told[Found]:
    """What came out, or what went wrong."""
    try:
        return None, do()
    except Exception as error:
        return _sendable(error), None


def _sendable(error: Exception) -> Exception:
    """The error itself, or its words where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (made on the line itself)
    except Exception:
        return OffbeatError(f"{type(error).__name__}: {error}")
    return error


def packages() -> dict[str, str]:
    """The versions that are installed here, without the part that says for which machine they were built."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]
    return found


def refuse_other_packages(there: dict[str, str]) -> None:
    """What a node says it has must be what is here."""
    here = packages()
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            raise OffbeatError(
                f"{name} is {there.get(name)} on a node of the Ray cluster and {here.get(name)} here; "
                "install the same, or the bits may differ"
            )


def go_to(folder: str) -> None:
    """Work in the driver's folder, where nodes share a disk: tasks and traces may be named from there."""
    with suppress(OSError):
        os.chdir(folder)
