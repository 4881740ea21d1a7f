"""Owns a task in another process: how it is sent there, and what is asked of it there.

Rules kept here:
- A task travels as the recipe it was loaded with; where it has none, pickled (by cloudpickle where that is installed).
- A model travels without its layout, which both sides know; or as a file, by its path.
- What goes wrong in a task is an answer, with the place in the task's file; the process lives on.
- The process ends as soon as its parent is gone, even in the middle of a training.
"""

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from offbeat.core.layout import Array, Layout, Model, Vector
from offbeat.core.model_base import ModelBase, base_of
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting import child
from offbeat.hosting.loading import described
from offbeat.hosting.task_identity import identity
from offbeat.storage.disk import aside
from offbeat.task import (
    DeviceState,
    Task,
    Trained,
    Work,
    evaluate,
    keeps_state,
    start,
    start_with_frozen,
    train_in_place,
)
from offbeat.wire import body_of, header_of, unpack

Recipe = tuple[Callable[..., Task], tuple[Any, ...], dict[str, Any]]
"""A function, by import path, and the arguments that make the task anew."""

SCRIPT = ("sys_argv", "init_main_from_name", "init_main_from_path")
"""What a process needs to import the script of another, in the words of `multiprocessing.spawn`."""


class Bare(NamedTuple):
    """A model without its layout."""

    vector: Vector
    carried: dict[str, Array]

    @classmethod
    def of(cls, model: Model) -> "Bare":
        return cls(model.vector, model.carried)


Pushed = tuple[Bare, Trained]


class CannotTravel(InvalidValue):
    """The task cannot be sent to another process."""


@dataclass(frozen=True, slots=True)
class TaskDescription:
    """What a server knows of a task; the names are the task's own, so that a description can stand in for the task."""

    identity: str
    devices: int | None
    made_for: int | None
    gamma: float | None
    batch_norm: str | None
    refreshes: bool
    """Would it run its own code whenever an update is mixed? Mixing is done in another process."""
    metrics: tuple[str, ...]
    """What it measures on its test data; empty where it has none."""
    batch_size: int | None = None
    local_passes: int | None = None
    local_iterations: int | None = None
    """How much a training does; None where the task does not say it, or did not when the run began."""
    base: str = ""
    """The digest of its layout and frozen arrays; empty where it is not known."""
    frozen: Mapping[str, str] = field(default_factory=dict)
    """The digest of every frozen array."""
    keeps_state: bool = False
    """Do its devices keep something between their tasks?"""

    @classmethod
    def of(cls, task: Task, metrics: Sequence[str], base: ModelBase | None = None) -> "TaskDescription":
        policy = getattr(task, "batch_norm", None)
        policy = policy if isinstance(policy, str) else None
        devices, made_for, gamma = (getattr(task, name, None) for name in ("devices", "made_for", "gamma"))
        digest, frozen = base or ("", {})
        return cls(
            identity(task),
            None if devices is None else int(devices),  # Python's own number: a run's folder keeps it as JSON
            None if made_for is None else int(made_for),
            None if gamma is None else float(gamma),
            policy,
            hasattr(task, "refresh") and policy in (None, "newest"),
            tuple(metrics),
            batch_size=_count(task, "batch_size"),
            local_passes=_count(task, "local_passes"),
            local_iterations=_count(task, "local_iterations"),
            base=digest,
            frozen=frozen,
            keeps_state=keeps_state(task),
        )


def _count(task: Task, name: str) -> int | None:
    """A whole number that the task says about itself."""
    value = getattr(task, name, None)
    return int(value) if isinstance(value, int | np.integer) and value >= 1 else None


# --- a task on its way -----------------------------------------------------------------------------------------------


def packed(task: Task, recipe: Recipe | None = None) -> bytes:
    """What another process makes the task from; `CannotTravel` where that is not possible."""
    recipe = recipe or getattr(task, "recipe", None)
    try:
        if recipe is not None:
            return pickle.dumps(recipe)
        return _pickled(task)
    except Exception as error:
        raise CannotTravel(f"cannot be sent to other processes ({error}); put it in a file") from error


def _pickled(task: Task) -> bytes:
    """A task that was defined in a script or a notebook; without cloudpickle, its process imports the script again."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        script = {name: value for name, value in spawn.get_preparation_data("task").items() if name in SCRIPT}
        return pickle.dumps((_from_script, (script, pickle.dumps(task)), {}))
    return pickle.dumps((pickle.loads, (cloudpickle.dumps(task),), {}))


def _from_script(script: dict[str, Any], pickled: bytes) -> Task:
    child.importing_script = True
    spawn.prepare(script)
    child.importing_script = False
    return pickle.loads(pickled)  # type: ignore[no-any-return]  # noqa: S301 (packed by the parent)


def unpacked(payload: bytes) -> Task:
    function, arguments, options = pickle.loads(payload)  # noqa: S301 (packed by the parent)
    return function(*arguments, **options)  # type: ignore[no-any-return]


# --- a task in its process -------------------------------------------------------------------------------------------


class TaskHost:
    def __init__(self) -> None:
        self._task: Task | None = None
        self._layout: Layout | None = None
        self._x_0: tuple[int, Model] | None = None
        """Made for the description and kept for `initial`: a warm-up may have taken long."""

    def load(self, payload: bytes, layout: Layout | None = None) -> None:
        """Make the task; the layout of its models, where it is known, need not be asked for."""
        self._task = self._layout = self._x_0 = None
        self._task, self._layout = unpacked(payload), layout

    def describe(self, seed: int) -> tuple[TaskDescription, Layout]:
        """What a server wants to know; x_0 and its metrics are made only where the layout is not known."""
        task, metrics, base = self._loaded(), [], None
        if self._layout is None:
            x_0, frozen = start_with_frozen(task, seed)
            base = base_of(x_0.layout, frozen)
            metrics = list(evaluate(task, x_0.copy()))
            self._layout, self._x_0 = x_0.layout, (seed, x_0)
        return TaskDescription.of(task, metrics, base), self._layout

    def initial(self, seed: int, out: Path) -> Layout:
        """Write x_0 to a file, whole and durable."""
        made, self._x_0 = self._x_0, None
        x_0 = made[1] if made is not None and made[0] == seed else start(self._loaded(), seed)
        self._layout = x_0.layout
        with aside(out) as temporary, temporary.open("wb") as file:
            file.write(header_of(x_0.layout))
            file.writelines(body_of(x_0))
        return x_0.layout

    def train(
        self, x_tau: Bare, work: Work, state: DeviceState | None = None
    ) -> tuple[Bare, Trained, DeviceState | None]:
        model = self._copy(x_tau)
        return Bare.of(model), *train_in_place(self._loaded(), model, work, state)

    def train_many(self, jobs: Sequence[tuple[Bare, Work]]) -> tuple[list[Pushed], int]:
        task: Any = self._loaded()
        results, programs = task.train_many([(self._copy(x_tau), work) for x_tau, work in jobs])
        return [(Bare.of(x_new), trained) for x_new, trained in results], programs

    def evaluate(self, x: Bare | Path) -> dict[str, float]:
        """Metrics of a global model, or of the one in a file."""
        self._x_0 = None  # a run that goes on does not ask for it
        return dict(evaluate(self._loaded(), self._mapped(x) if isinstance(x, Path) else self._copy(x)))

    def _loaded(self) -> Task:
        if self._task is None:
            raise InvalidValue("no task is loaded; send a request to load one first")
        return self._task

    def _copy(self, bare: Bare) -> Model:
        """x_tau may be read-only, or shared with other trainings."""
        return Model(self._known_layout(), *bare).copy()

    def _mapped(self, file: Path) -> Model:
        try:
            return unpack(np.memmap(file, np.uint8, mode="r").data, self._known_layout())
        except (OSError, ValueError) as error:
            raise InvalidValue(f"{file} is no model of this task: {error}") from error

    def _known_layout(self) -> Layout:
        if self._layout is None:
            raise InvalidValue("the layout of the task's models is not known; ask for its description first")
        return self._layout


class TaskFailure(NamedTuple):
    """What went wrong in the task: in one line, as the task's traceback, and as the error itself where it travels."""

    line: str
    story: str
    pickled: bytes

    def error(self) -> BaseException:
        """For a parent that has imported the task, too: its error may be of a class of its own."""
        try:
            error: BaseException = pickle.loads(self.pickled)  # noqa: S301 (pickled by our child)
        except Exception:
            error = OffbeatError(self.line)
        error.add_note(f"In another process:\n{self.story}")
        return error


def serve(parent: "Connection[Any, Any]", spec: str = "", nice: int = 0) -> None:
    """In a child: answer requests, one after the other, until the parent is gone; `spec` names the task in errors."""
    child.listen_to_signals()
    os.nice(nice)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    waiting: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
    threading.Thread(target=_read, args=(parent, waiting), name="requests", daemon=True).start()
    host = TaskHost()
    while True:
        answer = answer_to(host, *waiting.get(), spec=spec)
        with suppress(OSError):  # the parent is gone; the other thread is about to see it
            parent.send(answer)


def _read(parent: "Connection[Any, Any]", waiting: "SimpleQueue[tuple[str, tuple[Any, ...]]]") -> None:
    with suppress(EOFError, OSError):
        while True:
            waiting.put(parent.recv())
    os._exit(0)  # the other thread may be in the middle of a training, and would not hear of anything milder


def answer_to(host: TaskHost, verb: str, arguments: Sequence[Any], spec: str = "") -> Any:
    """What the host returns, or `TaskFailure`; whatever the task raises, this process goes on."""
    try:
        return getattr(host, verb)(*arguments)
    except BaseException as error:  # a task may raise SystemExit, too
        line, pickled = described(error, spec, anywhere=True), b""
        with suppress(Exception):
            pickled = pickle.dumps(error)
        if isinstance(error, OffbeatError):
            return TaskFailure(line, "", pickled)
        return TaskFailure(f"task {spec} fails to {verb}: {line}", traceback.format_exc(), pickled)
