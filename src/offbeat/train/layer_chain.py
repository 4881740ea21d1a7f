"""Owns small perceptrons in compiled loops: many trainings, spread over the cores by threads, and evaluations.

It needs numba and no torch: a process that is handed a chain with its data begins a second earlier.

Rules kept here:
- A training draws the samples that it would draw by itself, from the same stream, and depends on nothing beside it:
  the bits are the same on any number of threads. They are those of `loops`, not of torch: close, but not the same.
- Where torch would be the faster one, or measures otherwise, there is no `test`, and torch evaluates.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from offbeat.core.layout import Array, Layout, Model, aligned_copy, same_layout
from offbeat.errors import InvalidValue
from offbeat.task import Trained
from offbeat.train.samples import Batches, Drawing, Drawn, Jobs, SamplePool, Samples
from offbeat.train.solver import Solver

JOBS_MIN = 4
"""Trainings that are worth another thread."""
NO_CLASSES, NO_ANSWERS = np.empty(0, np.int64), np.empty((0, 0), np.float32)


class ChainLayers(NamedTuple):
    """What is calculated: linear layers as a table of `loops`, where they lie in a model, and which loss it is."""

    table: Array
    layout: Layout
    of_classes: bool

    def samples(self, inputs: Array, targets: Array) -> tuple[Array, Array, Array]:
        """Inputs, classes, answers; either classes or answers is empty."""
        inputs = inputs.reshape(len(inputs), -1)
        if self.of_classes:
            return inputs, targets, NO_ANSWERS
        return inputs, NO_CLASSES, targets.reshape(len(targets), -1)


class Chain:
    def __init__(self, layers: ChainLayers, pool: SamplePool, solver: Solver, test: Samples | None = None) -> None:
        self.layers, self.layout, self.pool, self.solver, self.test = layers, layers.layout, pool, solver, test
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
        begins, samples = self.pool.begins([one.device for one in drawn]), self.layers.samples(*self.pool.arrays)
        limits = np.float32(self.solver.weight_decay), inf if self.solver.clip is None else self.solver.clip
        tables: tuple[Any, ...] = (models, losses, *_tables(drawn, begins), self.layers.table, *samples, *limits)
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

    def evaluate(self, model: Model) -> dict[str, float]:
        """Mean loss on the test data and, of classes, the share of right answers."""
        from offbeat.train.loops import evaluate  # as above

        if self.test is None:
            return {}
        self.layout = same_layout(self.layout, model.layout)
        loss, right = evaluate(model.vector, self.layers.table, *self.layers.samples(*self.test))
        return {"loss": loss, **({"accuracy": right} if self.layers.of_classes else {})}


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
