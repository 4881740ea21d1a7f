"""Owns the local solver and its randomness: SGD on g(x; z) = f(x; z) + rho/2 * ||x - x_tau||^2 (Algorithm 1).

One iteration, with the gradient taken at x:  x <- x - gamma * (grad f(x; z) + rho * (x - x_tau)).
It is done in the authors' order, first the proximal pull and then the gradient step, which is the same step (the
gradient was taken before) but leaves x exactly alone while x = x_tau. All of it, and clearing the gradient for the next
iteration, is done part by part, each small enough for the processor's cache: vectors that do not fit are read once from
memory instead of three times. Elements do not depend on each other, so parts change no bit.

numpy's and torch's global generators, which dropout and user code draw from, are seeded for a training and restored
after it; so is the number of torch's threads. Nothing that a training draws depends on what ran before it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import InvalidValue
from offbeat.task import Work
from offbeat.train.flat import FlatModule

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Parts = list[tuple[Tensor, Tensor, Tensor]]
"""Parameters, gradients and x_tau of every part."""

PART = 2**15
"""Elements of a part: three times 128 KiB stay in a cache of half a megabyte. A multiple of every vector's length, so
that the same elements go through the same instructions as without parts."""
SORTED_SAMPLES_MAX = 256
"""Up to this many samples, sorting random numbers is faster than a call of `choice` per iteration."""
SORTED_MAX = 2**20
"""Random numbers that are sorted at once."""
SEED_WORDS = 3
"""How many 64-bit words `seeded` takes from a stream; a test compares the two."""


@dataclass(frozen=True, slots=True)
class Solver:
    gamma: float = 0.1
    rho: float = 0.005
    weight_decay: float = 0.0
    clip: float | None = None
    """Largest norm of the gradient of f; a longer one is scaled down to it."""
    batch_size: int = 50
    local_passes: int | None = None
    """Passes over the device's data, shuffled, the last batch of a pass short where it must be."""
    local_iterations: int | None = None
    """H iterations, each on min(batch_size, n_i) samples drawn afresh: the paper."""

    def __post_init__(self) -> None:
        _require("gamma", self.gamma, right=self.gamma > 0, allowed="> 0")
        _require("rho", self.rho, right=self.rho >= 0, allowed=">= 0; 0 switches the proximal term off")
        _require("weight_decay", self.weight_decay, right=self.weight_decay >= 0, allowed=">= 0")
        if self.clip is not None:
            _require("clip", self.clip, right=self.clip > 0, allowed="> 0, or None for no clipping")
        for name in ("batch_size", "local_passes", "local_iterations"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidValue(f"{name} is {value!r} but must be a whole number >= 1")
        if self.local_passes is not None and self.local_iterations is not None:
            raise InvalidValue("give local_passes or local_iterations, not both: each says how much one task trains")

    def iterations(self, samples: int) -> int:
        size = min(self.batch_size, samples)
        return self.local_iterations or (self.local_passes or 1) * -(-samples // size)

    def batches(self, samples: int, rng: np.random.Generator) -> list[np.ndarray]:
        indices, counts = self.draw(samples, rng)
        return [batch[:count] for batch, count in zip(indices, counts.tolist(), strict=True)]

    def draw(self, samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """All batches at once: indices (iterations, size), and how many of each count; the rest fills short batches."""
        size = min(self.batch_size, samples)
        if self.local_iterations is not None:
            return _subsets(rng, self.local_iterations, samples, size), np.full(self.local_iterations, size)
        each = -(-samples // size)
        indices, counts = [], np.full((self.local_passes or 1, each), size)
        for _ in counts:
            order = rng.permutation(samples)
            filling = np.full(each * size - samples, order[(each - 1) * size])
            indices.append(np.concatenate([order, filling]).reshape(each, size))
        counts[:, -1] = samples - (each - 1) * size
        return np.concatenate(indices), counts.ravel()

    def step(self, parameters: Tensor, gradients: Tensor, x_tau: Tensor) -> None:
        """One iteration on flat tensors, in place; `gradients` holds grad f at `parameters`, and is 0 afterwards."""
        self._step(parts_of(parameters, gradients, x_tau), gradients)

    def _step(self, parts: Parts, gradients: Tensor) -> None:
        scale = None
        if self.clip is not None:
            norm = float(torch.linalg.vector_norm(gradients))
            scale = self.clip / norm if norm > self.clip else None
        pull = self.gamma * self.rho
        for x, gradient, start in parts:
            if scale is not None:
                gradient.mul_(scale)
            if self.weight_decay:
                gradient.add_(x, alpha=self.weight_decay)
            if self.rho:
                x.lerp_(start, pull)
            x.add_(gradient, alpha=-self.gamma)
            gradient.zero_()

    def solve(
        self, flat: FlatModule, loss: Loss, batches: Iterable[Batch], x_tau: Tensor, program: Loss | None = None
    ) -> tuple[int, float]:
        """Train the module from its current values; returns the number of iterations and the mean loss.

        A `program` calculates the loss of (inputs, targets) in another way than by calling the module.
        """
        flat.module.train()
        parts = parts_of(flat.parameters, flat.gradients, x_tau)
        iterations, total = 0, torch.zeros((), device=flat.values.device)
        flat.gradients.zero_()  # a training before this one may have failed halfway
        for inputs, targets in batches:
            value = loss(flat.module(inputs), targets) if program is None else program(inputs, targets)
            value.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self._step(parts, flat.gradients)
                total += value
            iterations += 1
        return iterations, float(total) / max(iterations, 1)


def parts_of(parameters: Tensor, gradients: Tensor, x_tau: Tensor) -> Parts:
    """Views of three flat tensors, part by part; an accelerator takes them whole."""
    size = PART if parameters.device.type == "cpu" else max(parameters.numel(), 1)
    return [*zip(*(torch.split(vector, size) for vector in (parameters, gradients, x_tau)), strict=True)]


def _subsets(rng: np.random.Generator, rows: int, samples: int, size: int) -> np.ndarray:
    """In every row, `size` of the samples without replacement; for small data all rows are drawn at once."""
    if samples <= SORTED_SAMPLES_MAX and rows * samples <= SORTED_MAX:
        return rng.random(rows * samples).reshape(rows, samples).argsort(axis=1)[:, :size]
    return np.stack([rng.choice(samples, size, replace=False) for _ in range(rows)])


def _require(name: str, value: float, *, right: bool, allowed: str) -> None:
    if not (right and isfinite(value)):
        raise InvalidValue(f"{name} is {value!r} but must be a finite number {allowed}")


@contextmanager
def keyed(work: Work) -> Iterator[np.random.Generator]:
    """The random stream of one training, with the global generators seeded from it, on one thread."""
    rng = work.rng()
    with seeded(rng), one_thread():
        yield rng


@contextmanager
def seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of torch and numpy from this stream, and restore them afterwards."""
    before = np.random.get_state()  # noqa: NPY002 (it belongs to the user's code)
    with torch.random.fork_rng():
        torch.manual_seed(int(rng.integers(2**63)))
        np.random.seed(rng.integers(2**32, size=4, dtype=np.uint32))  # noqa: NPY002 (see above)
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: results do not depend on the cores, and trainings do not compete for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stream(work: Work) -> np.random.Generator:
    """A training's random stream in the state that `keyed` yields it in: the seeds of global generators are drawn."""
    rng = work.rng()
    rng.bit_generator.advance(SEED_WORDS)  # type: ignore[attr-defined]  # default_rng's PCG64 has it
    return rng
