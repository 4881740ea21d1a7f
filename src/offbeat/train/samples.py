"""Owns which samples trainings of one task see, many trainings at a time: the data of all devices in use, end to end.

It needs no torch.

Rules kept here:
- A training draws the samples that it would draw alone, from the same stream.
- Data lie end to end, so the batches of many trainings are gathered in one call and nothing is copied per training.
  When too many devices are in use, the pool is emptied and filled again.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from offbeat.core.layout import Array, Model
from offbeat.errors import InvalidValue
from offbeat.task import Trained, Work
from offbeat.train.solver import Solver, stream

Samples = tuple[Array, Array]
"""Inputs and targets."""
LoadSamples = Callable[[int], Samples]
Jobs = Sequence[tuple[Model, Work, Solver]]
Drawing = tuple[Work, Solver, int]
"""A training's batches are to be drawn: with which solver, from how many samples."""
Batches = tuple[Array, Array]
"""Indices (iterations, size), and how many of each batch count."""
DrawMany = Callable[[Sequence[Drawing]], list[Batches]]


def draw_one_by_one(trainings: Sequence[Drawing]) -> list[Batches]:
    return [solver.draw(samples, stream(work)) for work, solver, samples in trainings]


class Drawn(NamedTuple):
    """One training, with the batches that were drawn for it."""

    x_tau: Model
    device: int
    solver: Solver
    samples: int
    indices: Array
    """(iterations, size): which of the device's samples every batch holds, the short ones filled up."""
    counts: Array
    """How many samples of each batch count."""

    def reported(self, loss: float) -> Trained:
        return Trained(self.samples, len(self.counts), {"training_loss": loss})


class SamplePool:
    """The samples of many devices end to end; a device's data are loaded when they are first needed."""

    def __init__(self, load: LoadSamples, devices_max: int) -> None:
        self.load, self.devices_max = load, devices_max
        self.arrays: list[Array] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._used = 0

    def place(self, device: int) -> tuple[int, int]:
        """Where a device's samples begin, and how many there are."""
        return self._places.get(device) or self._add(device)

    def of(self, device: int) -> Samples:
        begin, count = self.place(device)
        inputs, targets = (array[begin : begin + count] for array in self.arrays)
        return inputs, targets

    def begins(self, devices: Sequence[int]) -> list[int]:
        """Where the samples of these devices begin, all of them in the pool at the same time."""
        if len(self._places.keys() | devices) > self.devices_max:
            self._clear()
        return [self.place(device)[0] for device in devices]

    def drawn(self, jobs: Jobs, draw_many: DrawMany = draw_one_by_one) -> list[Drawn]:
        """The trainings on the batches that each would draw alone."""
        self.begins([work.device for _, work, _ in jobs])
        samples = [self.place(work.device)[1] for _, work, _ in jobs]
        batches = draw_many([(work, solver, count) for (_, work, solver), count in zip(jobs, samples, strict=True)])
        return [
            Drawn(x_tau, work.device, solver, count, *drawn)
            for (x_tau, work, solver), count, drawn in zip(jobs, samples, batches, strict=True)
        ]

    def _clear(self) -> None:
        self._places, self._used = {}, 0

    def _add(self, device: int) -> tuple[int, int]:
        new = self.load(device)
        self.arrays = self.arrays or [part[:0] for part in new]
        for ours, part in zip(self.arrays, new, strict=True):
            if (ours.shape[1:], ours.dtype) != (part.shape[1:], part.dtype):
                theirs, before = (f"{array.dtype}{list(array.shape[1:])}" for array in (part, ours))
                raise InvalidValue(f"a sample of device {device} is {theirs}, others are {before}; train it inline")
        if len(self._places) >= self.devices_max:
            self._clear()
        begin, samples = self._used, len(new[0])
        self.arrays = [_written(ours, part, begin) for ours, part in zip(self.arrays, new, strict=True)]
        self._places[device] = begin, samples
        self._used += samples
        return begin, samples


def _written(ours: Array, part: Array, begin: int) -> Array:
    """The pool's array, grown if necessary, with the part written at `begin`."""
    end = begin + len(part)
    if end > len(ours):
        grown = np.empty((max(end, 2 * len(ours)), *part.shape[1:]), part.dtype)
        grown[:begin] = ours[:begin]
        ours = grown
    ours[begin:end] = part
    return ours


def with_classes(load: LoadSamples, classes: float = inf) -> LoadSamples:
    """Refuses classes below 0, which torch's cross_entropy ignores, and those that the model does not have.

    Lanes cannot ignore a sample; a compiled loop checks no index.
    """

    def checked(device: int) -> Samples:
        inputs, targets = load(device)
        if int(targets.min()) < 0:
            raise InvalidValue(
                f"device {device} has the class {int(targets.min())}; lanes take none below 0: train it inline"
            )
        if int(targets.max()) >= classes:
            raise InvalidValue(f"device {device} has the class {int(targets.max())}, but the model has {classes}")
        return inputs, targets

    return checked
