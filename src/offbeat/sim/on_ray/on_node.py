"""Owns the function that nodes run: it does something with a task that is made once per process.

Rules kept here:
- A process keeps one task, of the run that used it last.
- An error is returned, not raised, so that one of the task's own code arrives as it was, with its traceback as a note.
- A node whose packages differ from the driver's is refused: its bits might differ.
"""

import os
import pickle
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

from offbeat.core.layout import Array, Layout
from offbeat.errors import OffbeatError
from offbeat.hosting.task_host import Pushed, TaskHost

PACKAGES = ("offbeat", "numpy", "torch")
"""The packages that decide the bits, beside the kind of CPU."""

Result = TypeVar("Result")
ErrorAnswer = tuple[Exception | None, Result | None]


class TaskParcel(NamedTuple):
    """A task as it is sent to nodes, with the driver's folder and packages.

    It travels as an array of its pickled bytes, which processes read from the object store without a copy.
    """

    payload: bytes
    layout: Layout
    folder: str
    packages: dict[str, str]


_made: tuple[str, TaskHost] | None = None


def _task(key: str, parcel: Array) -> TaskHost:
    """The task that this process keeps; it is made where the process has none, or another one."""
    global _made
    if _made is None or _made[0] != key:
        sent: TaskParcel = pickle.loads(parcel.data)  # noqa: S301 (packed by the driver that this process belongs to)
        refuse_other_packages(packages(), sent.packages)
        go_to(sent.folder)
        host = TaskHost()
        host.load(sent.payload, sent.layout)
        _made = key, host
    return _made[1]


def do_on_node(do: Callable[..., Result], key: str, parcel: Array, *arguments: Any) -> ErrorAnswer[Result]:
    return told(lambda: do(_task(key, parcel), *arguments))


def train_many(task: TaskHost, *arguments: Any) -> tuple[list[Pushed], int]:
    """Train together; the arguments are the models, and a sequence of what is to be done from each."""
    *models, works = arguments
    return task.train_many([*zip(models, works, strict=True)])


def be_ready(task: TaskHost) -> None:
    """Nothing more: that a process has made the task tells that some node has room."""


def told(do: Callable[[], Result]) -> ErrorAnswer[Result]:
    try:
        return None, do()
    except Exception as error:
        return _sendable(error), None


def _sendable(error: Exception) -> Exception:
    """The error, or its words where it cannot be pickled; with the traceback where it is none of Offbeat's own."""
    if not isinstance(error, OffbeatError):
        error.add_note("".join(traceback.format_exception(error)))
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


def refuse_other_packages(node: Mapping[str, Any], driver: Mapping[str, Any]) -> None:
    """The packages of a node must be those of the driver."""
    for name in sorted({*node, *driver}):
        if node.get(name) != driver.get(name):
            raise OffbeatError(
                f"{name} is {node.get(name)} on a node of the Ray cluster and {driver.get(name)} where the run was "
                "started; install the same version, or the bits may differ"
            )


def go_to(folder: str) -> None:
    """Work in the driver's folder, where nodes share a disk: tasks and traces may be named from there."""
    with suppress(OSError):
        os.chdir(folder)
