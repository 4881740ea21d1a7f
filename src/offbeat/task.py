"""Owns what the rest of Offbeat asks of a learning task, whatever framework it is written in.

Rules kept here:
- A task has three verbs: `initial`, `train`, `evaluate`. They see a model as named numpy views of one flat vector.
- A training is a pure function of (x_tau, device, task number, local iterations, gamma, seed) and, where the task keeps
  state, the state of its device. Its randomness is keyed by seed, device and task number and never drawn from a shared
  stream, so it does not matter where or when it runs, and adding a device changes no other device's numbers.
- The state of a device is a value: a training is given one and brings another. It becomes the device's own only when
  the update that it came with is applied.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from offbeat.core.layout import NO_ARRAYS, Array, Model
from offbeat.errors import InvalidValue

KEPT_DTYPES = frozenset(
    {"bool", "float16", "float32", "float64", "complex64"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes of arrays that a device can keep: those that a safetensors file holds."""


@dataclass(frozen=True, slots=True)
class Work:
    """One local training as the server leased it; together with x_tau it determines x_new to the last bit."""

    device: int
    number: int = 0
    """How many tasks this device was given before."""
    seed: int = 0
    local_iterations: int | None = None
    """H, where the scheduler sets it; else the task's own setting holds."""
    gamma: float | None = None
    """The local rate, where the scheduler sets it; else the task's own setting holds."""

    def __post_init__(self) -> None:
        for name in ("device", "number", "seed"):
            if getattr(self, name) < 0:
                raise InvalidValue(f"{name} is {getattr(self, name)} but must be a whole number >= 0")

    def rng(self) -> np.random.Generator:
        """The random stream of this training and of no other.

        >>> int(Work(device=3, number=1).rng().integers(1000))
        133
        """
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.device, self.number)))


class Trained(NamedTuple):
    """What a device reports beside its model."""

    samples: int
    """How many samples the device holds, the same in every training: its weight under FedAvg."""
    gradients: int
    """How many local iterations were done, at most as many as were asked for."""
    metrics: Mapping[str, float] = {}


class DeviceState(Mapping[str, Array]):
    """What a device keeps between its tasks: read-only arrays by name, copied when the state is made.

    >>> state = DeviceState({"momentum": np.zeros(2)}, number=3)
    >>> state["momentum"].shape, state.number
    ((2,), 3)
    """

    __slots__ = ("_arrays", "_number")

    def __init__(self, arrays: Mapping[str, Array] = NO_ARRAYS, number: int = 0) -> None:
        self._arrays = {name: _kept_array(name, array) for name, array in arrays.items()}
        self._number = number

    @property
    def number(self) -> int:
        """How many states the device had before this one; 0 where it has kept nothing yet."""
        return self._number

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"DeviceState({', '.join(self) or 'empty'}; number {self.number})"

    def __reduce__(self) -> tuple[type["DeviceState"], tuple[dict[str, Array], int]]:
        """Made anew in the other process, because a pickled array arrives writable."""
        return DeviceState, (self._arrays, self._number)


def _kept_array(name: object, array: object) -> Array:
    """A read-only copy, in the byte order of this machine."""
    if not isinstance(name, str) or not name:
        raise InvalidValue(f"an array that a device keeps is called {name!r}; give it a name that is text")
    try:
        kept: Array = np.array(array, order="C")
    except ValueError as error:
        raise InvalidValue(f"{name!r} cannot be kept, for it is no array: {error}") from error
    if kept.dtype.name not in KEPT_DTYPES:
        raise InvalidValue(f"{name!r} is {kept.dtype}, but a device keeps {', '.join(sorted(KEPT_DTYPES))}; convert it")
    kept = kept.astype(kept.dtype.newbyteorder("="), copy=False)
    kept.setflags(write=False)
    return kept


@runtime_checkable
class Task(Protocol):
    """A learning task. `offbeat.torch.Task` is one for PyTorch; these three methods make one for anything else.

    A task may have more, and is held to what it says. `samples(device)`: how many samples the device holds, known
    before the first training. `frozen()`: named arrays that neither travel nor change and are alike on all workers.
    `batch_size` with `local_passes`, or `local_iterations`: how many iterations a training does where a lease does not
    say it. `keeps_state = True`: it is a `StatefulTask`, and its devices keep something between their tasks.
    `evaluate_on(model, device)`: metrics of a global model on what the device holds out, measured at the end of a
    simulated run.
    """

    def initial(self, seed: int) -> Mapping[str, Array]:
        """x_0: named float32 arrays, or a `Model` where buffers or frozen arrays are among them."""
        ...

    def train(self, model: Model, work: Work) -> Trained:
        """Solve the local problem. `model` holds x_tau and is this training's own: leave x_new in it."""
        ...

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """Metrics of a global model on test data; empty where there are none."""
        ...


class StatefulTask(Protocol):
    """A task whose devices keep something from one training to the next: a momentum, personal layers, a residue."""

    @property
    def keeps_state(self) -> bool: ...

    def initial(self, seed: int) -> Mapping[str, Array]: ...

    def train(self, model: Model, work: Work, state: DeviceState) -> tuple[Trained, Mapping[str, Array]]:
        """Like `Task.train`; returns also the arrays that the device keeps if its update is applied."""
        ...

    def evaluate(self, model: Model) -> Mapping[str, float]: ...


def keeps_state(task: object) -> bool:
    """Is this a `StatefulTask`, or the description of one?"""
    return bool(getattr(task, "keeps_state", False))


@dataclass(frozen=True, slots=True)
class Update:
    """What a worker pushes: the model it trained, and what it says about it."""

    x_new: Model = field(repr=False)
    work: Work
    trained: Trained
    state: DeviceState | None = None
    """What its device keeps from now on if the update is applied; None where the task keeps no state."""


def start(task: Task, seed: int) -> Model:
    """x_0 of a task as a published, read-only model."""
    return start_with_frozen(task, seed)[0]


def start_with_frozen(task: Task, seed: int) -> tuple[Model, Mapping[str, Array]]:
    """x_0 likewise, and the frozen arrays that belong to it: as `Model.of` was told, or as the task's `frozen` says."""
    arrays = task.initial(seed)
    x_0 = (arrays if isinstance(arrays, Model) else Model.of(arrays)).freeze()
    told, x_0.frozen = x_0.frozen, NO_ARRAYS  # not kept in memory as long as x_0 is
    frozen = getattr(task, "frozen", None)
    return x_0, {**told, **frozen()} if callable(frozen) else told


def samples_of(task: Task, device: int) -> int | None:
    """How many samples the task holds for a device; None where it does not say so before a training."""
    samples = getattr(task, "samples", None)
    return int(samples(device)) if callable(samples) else None


def solve(task: Task, x_tau: Model, work: Work, state: DeviceState | None = None) -> Update:
    """Let a task train on its own copy of x_tau; x_tau itself is not touched.

    `state` is that of the device, where the task keeps one; without it, the device has kept nothing yet.
    """
    x_new = x_tau.copy()
    trained, brought = train_in_place(task, x_new, work, state)
    return Update(x_new.freeze(), work, trained, brought)


def train_in_place(
    task: Task, model: Model, work: Work, state: DeviceState | None = None
) -> tuple[Trained, DeviceState | None]:
    """Let a task turn x_tau into x_new; its report, and the state that the training brings, if the task keeps one."""
    if keeps_state(task):
        return _trained_from(task, model, work, DeviceState() if state is None else state)
    trained = task.train(model, work)
    if not isinstance(trained, Trained):
        raise InvalidValue(f"`train` must return offbeat.Trained(samples, gradients), not {trained!r}")
    return trained, None


def _trained_from(task: Any, model: Model, work: Work, state: DeviceState) -> tuple[Trained, DeviceState]:
    answer = task.train(model, work, state)
    trained, arrays = answer if type(answer) is tuple and len(answer) == 2 else (None, None)
    if not isinstance(trained, Trained) or not isinstance(arrays, Mapping):
        raise InvalidValue(
            "`train` of a task with keeps_state must return two things, offbeat.Trained(samples, gradients) and the "
            f"arrays to keep by name, not {_kinds_of(answer)}"
        )
    return trained, DeviceState(arrays, state.number + 1)


def _kinds_of(answer: object) -> str:
    """The types of what was returned: arrays would fill the screen."""
    if type(answer) is tuple:
        return f"({', '.join(type(part).__name__ for part in answer)})"
    return type(answer).__name__


def evaluate(task: Task, model: Model) -> Mapping[str, float]:
    """What a task measures of a global model, as names and numbers."""
    return checked_metrics(task.evaluate(model))


def checked_metrics(metrics: object) -> Mapping[str, float]:
    """What `evaluate` returned, which may be a user's code, as names and numbers."""
    if not isinstance(metrics, Mapping):
        raise InvalidValue(f"`evaluate` must return a mapping of names to numbers, not {metrics!r}")
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        raise InvalidValue(f"`evaluate` must return numbers, not {dict(metrics)!r}") from None
