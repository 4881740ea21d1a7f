"""Owns a task in another process: how it is sent there, and what it does there.

Rules kept here:
- A process gets the task once: by the recipe it was loaded with, else pickled (cloudpickle where it is installed).
- What goes wrong when the task is made is told when the first training is asked for.
- x_tau may be read-only, or shared with others: every training has a copy of its own.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from offbeat.core.layout import Array, Layout, Model, Vector
from offbeat.errors import InvalidValue
from offbeat.task import Task, Trained, Work, evaluate

Recipe = tuple[Callable[..., Task], tuple[Any, ...], dict[str, Any]]
"""A function, by import path, and the arguments that make the task anew."""


class Bare(NamedTuple):
    """A model without its layout, which both sides know."""

    vector: Vector
    carried: dict[str, Array]

    @classmethod
    def of(cls, model: Model) -> "Bare":
        """What of a model travels."""
        return cls(model.vector, model.carried)


Pushed = tuple[Bare, Trained]


class CannotTravel(InvalidValue):
    """The task cannot be sent to another process."""


def packed(task: Task, recipe: Recipe | None = None) -> bytes:
    """What another process makes the task from; refused with a sentence where it cannot travel."""
    recipe = recipe or getattr(task, "recipe", None)
    try:
        return _pickler().dumps(recipe if recipe is not None else task)  # type: ignore[no-any-return]
    except Exception as error:
        raise CannotTravel(f"cannot be sent to other processes ({error}); put it in a file") from error


def _pickler() -> Any:
    """cloudpickle takes what was defined in a notebook; without it, only what can be imported travels."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle


class Holder:
    """A task, held by a process that trains for others."""

    def __init__(self, payload: bytes, layout: Layout) -> None:
        self._layout = layout
        self._task: Task | Exception
        try:
            self._task = _made(payload)
        except Exception as error:
            self._task = InvalidValue(f"the task could not be made in another process: {type(error).__name__}: {error}")

    def train(self, x_tau: Bare, work: Work) -> Pushed:
        """Train from x_tau."""
        model = self._copy(x_tau)
        trained = self._held().train(model, work)
        return Bare.of(model), trained

    def train_many(self, jobs: Sequence[tuple[Bare, Work]]) -> tuple[list[Pushed], int]:
        """Train together; as the task's own `train_many`."""
        task: Any = self._held()
        results, programs = task.train_many([(self._copy(x_tau), work) for x_tau, work in jobs])
        return [(Bare.of(x_new), trained) for x_new, trained in results], programs

    def evaluate(self, x: Bare) -> dict[str, float]:
        """Metrics of a global model."""
        return dict(evaluate(self._held(), self._copy(x)))

    def _held(self) -> Task:
        if isinstance(self._task, Exception):
            raise self._task
        return self._task

    def _copy(self, bare: Bare) -> Model:
        return Model(self._layout, *bare).copy()


def _made(payload: bytes) -> Task:
    made: Any = pickle.loads(payload)  # noqa: S301 (packed by the run that this process belongs to)
    if not isinstance(made, tuple):
        return made  # type: ignore[no-any-return]
    function, arguments, options = made
    return function(*arguments, **options)  # type: ignore[no-any-return]
