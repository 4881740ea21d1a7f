"""Owns what the rest of Offbeat asks of a learning task, whatever framework it is written in.

Rules kept here:
- A task has three verbs: `initial`, `train`, `evaluate`. They see a model as named numpy views of one flat vector.
- A training is a pure function of (x_tau, device, task number, local iterations, gamma, seed). Its randomness is keyed
  by seed, device and task number and never drawn from a shared stream, so it does not matter where or when it runs,
  and adding a device changes no other device's numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from offbeat.core.layout import NO_ARRAYS, Array, Model
from offbeat.errors import InvalidValue


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


@runtime_checkable
class Task(Protocol):
    """A learning task. `offbeat.torch.Task` is one for PyTorch; these three methods make one for anything else.

    A task may have more, and is held to what it says. `samples(device)`: how many samples the device holds, known
    before the first training. `frozen()`: named arrays that neither travel nor change and are alike on all workers.
    `batch_size` with `local_passes`, or `local_iterations`: how many iterations a training does where a lease does not
    say it.
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


@dataclass(frozen=True, slots=True)
class Update:
    """What a worker pushes: the model it trained, and what it says about it."""

    x_new: Model = field(repr=False)
    work: Work
    trained: Trained


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


def solve(task: Task, x_tau: Model, work: Work) -> Update:
    """Let a task train on its own copy of x_tau; x_tau itself is not touched."""
    x_new = x_tau.copy()
    trained = task.train(x_new, work)
    if not isinstance(trained, Trained):
        raise InvalidValue(f"`train` must return offbeat.Trained(samples, gradients), not {trained!r}")
    return Update(x_new.freeze(), work, trained)


def evaluate(task: Task, model: Model) -> Mapping[str, float]:
    """What a task measures of a global model, as names and numbers."""
    metrics = task.evaluate(model)
    if not isinstance(metrics, Mapping):
        raise InvalidValue(f"`evaluate` must return a mapping of names to numbers, not {metrics!r}")
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError):
        raise InvalidValue(f"`evaluate` must return numbers, not {dict(metrics)!r}") from None
