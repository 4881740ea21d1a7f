"""Owns trainings of small perceptrons as one compiled loop each, spread over the cores by threads.

Rules kept here:
- A training draws the samples that it would draw by itself, from the same stream, and depends on nothing beside it:
  the bits are the same on any number of threads. They are those of `loops`, not of torch: close, but not the same.
- A task that the loop cannot train gets one sentence that says why, before anything is compiled. The loop's gradient
  is compared with torch's before it is used. A device whose samples do not fit the loop is trained by the task itself.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np
import torch
from torch import nn

from offbeat.core.layout import Array, Layout, Model, aligned_copy
from offbeat.errors import InvalidValue
from offbeat.task import Trained
from offbeat.train.flat import FlatModule, same_layout
from offbeat.train.lanes import (
    Batches,
    Drawing,
    Drawn,
    Jobs,
    Load,
    SamplePool,
    alone,
    disagrees,
    flat_obstacle,
    probe,
    with_classes,
)
from offbeat.train.solver import Loss, Solver
from offbeat.train.stacked import CrossEntropy, Mse, lane_loss, obstacle

JOBS_MIN = 4
"""Trainings that are worth another thread."""
ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 1, nn.Tanh: 2, nn.Sigmoid: 3}
"""Modules that may follow a linear layer, and their numbers in `loops`."""


class Chain:
    def __init__(self, layers: Array, layout: Layout, pool: SamplePool, solver: Solver, *, of_classes: bool) -> None:
        self.layers, self.layout, self.pool, self.solver = layers, layout, pool, solver
        self.of_classes = of_classes
        self._refused: set[int] = set()

    def takes(self, device: int) -> bool:
        if device not in self._refused:
            try:
                self.pool.place(device)
            except InvalidValue:
                self._refused.add(device)
        return device not in self._refused

    def train(self, jobs: Jobs, threads: int) -> list[tuple[Model, Trained]]:
        done: list[tuple[Model, Trained]] = []
        most = self.pool.devices_max
        for lo in range(0, len(jobs), most):  # all devices of one round are in the pool at the same time
            done += self.run(self.pool.drawn(jobs[lo : lo + most], _draw_many), threads)
        return done

    def run(self, drawn: Sequence[Drawn], threads: int = 1) -> list[tuple[Model, Trained]]:
        from offbeat.train.loops import train_many  # it takes a moment to load, and not every run needs it

        for one in drawn:
            self.layout = same_layout(self.layout, one.x_tau.layout)
        models, losses = np.stack([one.x_tau.vector for one in drawn]), np.zeros(len(drawn))
        begins = self.pool.begins([one.device for one in drawn])
        limits = np.float32(self.solver.weight_decay), inf if self.solver.clip is None else self.solver.clip
        tables: tuple[Any, ...] = (models, losses, *_tables(drawn, begins), self.layers, *self._samples(), *limits)
        shares = max(1, min(threads, len(drawn) // JOBS_MIN))
        (first, last), *others = pairwise(len(drawn) * share // shares for share in range(shares + 1))
        waiting = [_threads(threads).submit(train_many, lo, hi, *tables) for lo, hi in others]
        try:
            train_many(first, last, *tables)
        finally:
            for share in waiting:
                share.result()
        results = zip(drawn, models, losses.tolist(), strict=True)
        return [(Model(self.layout, aligned_copy(row)), one.reported(loss)) for one, row, loss in results]

    def _samples(self) -> tuple[Array, Array, Array]:
        """Inputs, classes, answers; either classes or answers is empty."""
        inputs, targets = (tensor.numpy() for tensor in self.pool.tensors)
        inputs = inputs.reshape(len(inputs), -1)
        if self.of_classes:
            return inputs, targets, np.empty((0, 0), np.float32)
        return inputs, np.empty(0, np.int64), targets.reshape(len(targets), -1)


def _draw_many(trainings: Sequence[Drawing]) -> list[Batches]:
    from offbeat.train.compiled_draws import draw_many  # as above

    return draw_many(trainings)


@cache
def _threads(most: int) -> ThreadPoolExecutor:
    """Kept for all trainings of this process: to start a thread takes as long as two of the smallest ones."""
    return ThreadPoolExecutor(most, "training")


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not live on in a fork


def _tables(drawn: Sequence[Drawn], begins: Sequence[int]) -> tuple[Array, Array, Array, Array]:
    sizes, iterations = [one.indices.shape[1] for one in drawn], [len(one.counts) for one in drawn]
    indices = np.concatenate([one.indices.ravel() for one in drawn])
    counts = np.concatenate([one.counts for one in drawn])
    first = accumulate((one.indices.size for one in drawn[:-1]), initial=0)
    first_count = accumulate(iterations[:-1], initial=0)
    trainings = np.array([begins, sizes, iterations, [*first], [*first_count]], np.int64)
    rates = np.array([(one.solver.gamma, one.solver.gamma * one.solver.rho) for one in drawn], np.float32)
    return np.ascontiguousarray(trainings.T), indices, counts, rates


def chain_of(flat: FlatModule, loss: Loss, solver: Solver, load: Load, devices_max: int) -> Chain | str:
    """The compiled form of a task, or one sentence that says why there is none."""
    found = _obstacle(flat)
    if found is not None:
        return found
    inputs, targets = load(0)
    size = min(len(inputs), solver.batch_size)
    batch = inputs[:size], targets[:size]
    with torch.no_grad():
        outputs = flat.module(batch[0])
    kind, layers = lane_loss(loss, outputs, batch[1]), _layers(flat.module, flat.layout)
    of_classes = isinstance(kind, CrossEntropy)
    if not of_classes and not isinstance(kind, Mse):
        return "its loss is neither cross_entropy nor mse_loss with their default arguments"
    if inputs.dtype != torch.float32 or not (of_classes or targets.dtype == torch.float32):
        return "its samples are not float32"
    features, columns = int(layers[0, 0]), int(layers[-1, 1])
    if outputs.shape != (size, columns) or inputs[0].numel() != features:
        return "its samples have more dimensions than its layers"
    pool = SamplePool(with_classes(load, columns) if of_classes else load, devices_max)
    try:
        pool.place(0)
    except InvalidValue as error:
        return str(error)
    step = probe(flat, solver, size)
    chain = Chain(layers, flat.layout, pool, step.solver, of_classes=of_classes)
    ((x_new, _),) = chain.run([step])
    if disagrees(x_new.vector, alone(flat, loss, step, batch), step.x_tau.vector):
        return "its model has another gradient in the compiled loop than in torch"
    chain.solver = solver
    return chain


def _obstacle(flat: FlatModule) -> str | None:
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'offbeat[fast]')"
    found = flat_obstacle(flat) or module_obstacle(flat.module)
    if found is None:
        try:
            import_module("offbeat.train.loops")
        except (ImportError, RuntimeError) as error:  # numba does not fit this numpy, or has no folder for its cache
            return f"numba cannot be loaded: {error}"
    return found


def module_obstacle(module: nn.Module) -> str | None:
    """Why this module is no chain of linear layers; None where it is one."""
    found = obstacle(module)
    if found is not None:
        return found
    linear_seen = activated = False
    for _, leaf in module.named_modules(remove_duplicate=False):
        kind = type(leaf)
        if kind in (nn.Sequential, nn.Identity, nn.Dropout) or (kind is nn.Flatten and not linear_seen):
            continue
        if kind is nn.Linear:
            linear_seen, activated = True, False
        elif kind in ACTIVATIONS and linear_seen and not activated:
            activated = True
        else:
            return f"{kind.__name__} is not where a compiled loop can have it: only behind nn.Linear, and once"
    return None if linear_seen else "it has no nn.Linear"


def _layers(module: nn.Module, layout: Layout) -> Array:
    rows: list[list[int]] = []
    own = 0
    for name, leaf in module.named_modules(remove_duplicate=False):
        if isinstance(leaf, nn.Linear):
            prefix = f"{name}." if name else ""
            bias = -1 if leaf.bias is None else layout.places[f"{prefix}bias"].offset
            rows.append([leaf.in_features, leaf.out_features, 0, layout.places[f"{prefix}weight"].offset, bias, own])
            own += (leaf.in_features + 1) * leaf.out_features
        elif type(leaf) in ACTIVATIONS:
            rows[-1][2] = ACTIVATIONS[type(leaf)]
    return np.array(rows, np.int64)
