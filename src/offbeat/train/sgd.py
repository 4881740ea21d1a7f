"""Owns how torch solves the local problem: SGD on g(x; z) = f(x; z) + rho/2 * ||x - x_tau||^2, and its randomness.

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

import numpy as np
import torch
from torch import Tensor

from offbeat.task import Work
from offbeat.train.flat import FlatModule
from offbeat.train.solver import Solver

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Parts = list[tuple[Tensor, Tensor, Tensor]]
"""Parameters, gradients and x_tau of every part."""

PART = 2**15
"""Elements of a part: three times 128 KiB stay in a cache of half a megabyte. A multiple of every vector's length, so
that the same elements go through the same instructions as without parts."""


def take_step(solver: Solver, parameters: Tensor, gradients: Tensor, x_tau: Tensor) -> None:
    """One iteration on flat tensors, in place; `gradients` holds grad f at `parameters`, and is 0 afterwards."""
    _step(solver, parts_of(parameters, gradients, x_tau), gradients)


def _step(solver: Solver, parts: Parts, gradients: Tensor) -> None:
    scale = None
    if solver.clip is not None:
        norm = float(torch.linalg.vector_norm(gradients))
        scale = solver.clip / norm if norm > solver.clip else None
    pull = solver.gamma * solver.rho
    for x, gradient, start in parts:
        if scale is not None:
            gradient.mul_(scale)
        if solver.weight_decay:
            gradient.add_(x, alpha=solver.weight_decay)
        if solver.rho:
            x.lerp_(start, pull)
        x.add_(gradient, alpha=-solver.gamma)
        gradient.zero_()


def solve_proximal(
    solver: Solver,
    flat: FlatModule,
    loss: Loss,
    batches: Iterable[Batch],
    x_tau: Tensor,
    program: Loss | None = None,
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
            _step(solver, parts, flat.gradients)
            total += value
        iterations += 1
    return iterations, float(total) / max(iterations, 1)


def parts_of(parameters: Tensor, gradients: Tensor, x_tau: Tensor) -> Parts:
    """Views of three flat tensors, part by part; an accelerator takes them whole."""
    size = PART if parameters.device.type == "cpu" else max(parameters.numel(), 1)
    return [*zip(*(torch.split(vector, size) for vector in (parameters, gradients, x_tau)), strict=True)]


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
