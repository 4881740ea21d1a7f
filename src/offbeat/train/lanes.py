"""Owns how trainings of one task share a tensor program: whether they can, on which samples, and which run together.

Rules kept here:
- A lane draws the samples that the same training would draw alone, from the same stream.
- The shape of a lane's batches depends on its own device and settings and on nothing else. Lanes of equal shape share
  a run of the program. A lane with fewer iterations than the others is read out when it is done; results that its
  place in the program yields afterwards are not used.
- The samples of all devices in use lie end to end, so the batches of all lanes are gathered in one call and nothing is
  copied per training. When too many devices are in use, the pool is emptied and filled again.
"""

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offbeat.core.layout import Array, Layout, Model, Vector
from offbeat.errors import InvalidValue
from offbeat.task import Trained, Work
from offbeat.train.flat import FlatModule, same_layout
from offbeat.train.solver import Batch, Loss, Solver, seeded, stream
from offbeat.train.stacked import CrossEntropy, Program, lane_loss, obstacle

Load = Callable[[int], Batch]
Jobs = Sequence[tuple[Model, Work, Solver]]
Drawing = tuple[Work, Solver, int]
"""A training's batches are to be drawn: with which solver, from how many samples."""
Batches = tuple[Array, Array]
"""Indices (iterations, size), and how many of each batch count."""
DrawMany = Callable[[Sequence[Drawing]], list[Batches]]

SAMPLES_AT_ONCE = 2**17
"""Samples of all lanes that are laid out ahead: long trainings are done in several spans of iterations."""


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

    def __init__(self, load: Load, devices_max: int) -> None:
        self.load, self.devices_max = load, devices_max
        self.tensors: list[Tensor] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._used = 0

    def place(self, device: int) -> tuple[int, int]:
        """Where a device's samples begin, and how many there are."""
        return self._places.get(device) or self._add(device)

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
        self.tensors = self.tensors or [part[:0] for part in new]
        for ours, part in zip(self.tensors, new, strict=True):
            if (ours.shape[1:], ours.dtype) != (part.shape[1:], part.dtype):
                theirs, before = (f"{t.dtype}{list(t.shape[1:])}" for t in (part, ours))
                raise InvalidValue(f"a sample of device {device} is {theirs}, others are {before}; train it inline")
        if len(self._places) >= self.devices_max:
            self._clear()
        begin, samples = self._used, len(new[0])
        self.tensors = [_written(ours, part, begin) for ours, part in zip(self.tensors, new, strict=True)]
        self._places[device] = begin, samples
        self._used += samples
        return begin, samples


def _written(ours: Tensor, part: Tensor, begin: int) -> Tensor:
    """The pool's tensor, grown if necessary, with the part written at `begin`."""
    end = begin + len(part)
    if end > len(ours):
        grown = part.new_empty((max(end, 2 * len(ours)), *part.shape[1:]))
        grown[:begin] = ours[:begin]
        ours = grown
    ours[begin:end] = part
    return ours


class Lanes:
    def __init__(self, program: Program, layout: Layout, pool: SamplePool) -> None:
        self.program, self.layout, self.pool = program, layout, pool

    def train(self, jobs: Jobs) -> tuple[list[tuple[Model, Trained]], int]:
        """x_new and the report of every job, in order, and how many runs of the program they took."""
        drawn, most = self.pool.drawn(jobs), self.program.lanes
        groups: dict[object, list[int]] = {}
        for number, lane in enumerate(drawn):
            groups.setdefault(self._shape(lane), []).append(number)
        runs: list[list[int]] = []
        for group in groups.values():
            longest_first = sorted(group, key=lambda number: -len(drawn[number].counts))
            runs += [longest_first[lo : lo + most] for lo in range(0, len(group), most)]
        done: dict[int, tuple[Model, Trained]] = {}
        for run in runs:
            done |= zip(run, self.run([drawn[number] for number in run]), strict=True)
        return [done[number] for number in range(len(jobs))], len(runs)

    def run(self, lanes: Sequence[Drawn]) -> list[tuple[Model, Trained]]:
        """Train lanes of equal shape, the longest first."""
        for lane in lanes:
            self.layout = same_layout(self.layout, lane.x_tau.layout)
        begins, done = self.pool.begins([lane.device for lane in lanes]), list[Vector]()
        self.program.load([lane.x_tau.vector for lane in lanes], [lane.solver.gamma for lane in lanes])
        iterations, total = len(lanes[0].counts), np.zeros(self.program.lanes)
        step = max(1, SAMPLES_AT_ONCE // (self.program.lanes * self._width(lanes[0])))
        for lo in range(0, iterations, step):
            total += self._go_on(lanes, begins, slice(lo, min(lo + step, iterations)), done)
        return [
            (Model(self.layout, x_new), lane.reported(loss / len(lane.counts)))
            for lane, x_new, loss in zip(lanes, reversed(done), total.tolist(), strict=False)
        ]

    def _go_on(self, lanes: Sequence[Drawn], begins: list[int], span: slice, done: list[Vector]) -> Array:
        """Does a span of iterations, reads out finished lanes, the last first, and returns the summed loss of each."""
        program, (inputs, targets), width = self.program, self.pool.tensors, self._width(lanes[0])
        shape, (index, counts) = (program.lanes, width), _batches(lanes, begins, span, program.lanes, width)
        weights = _weights(counts, width)
        with torch.inference_mode(program.loss.weighted):  # cheaper calls, where no autograd is needed
            batch = inputs.new_empty((prod(shape), *inputs.shape[1:]))
            answers = targets.index_select(0, index.view(-1)).view(len(index), *shape, *targets.shape[1:])
            parts = zip(index, answers, weights, lanes[0].counts[span].tolist(), strict=True)
            for iteration, (rows, *rest) in enumerate(parts, start=span.start + 1):
                torch.index_select(inputs, 0, rows, out=batch)
                program.iterate(batch.view(*shape, *inputs.shape[1:]), *rest)
                while len(done) < len(lanes) and len(lanes[-1 - len(done)].counts) == iteration:
                    done.append(program.taken(len(lanes) - 1 - len(done)))
            losses = program.loss.losses(weights).numpy()
        return np.asarray(np.where(counts > 0, losses, 0).sum(axis=0))

    def _width(self, lane: Drawn) -> int:
        """The number of samples that its batches are filled up to in the program."""
        return _width(lane.indices.shape[1], lane.solver.batch_size, self.program.grain)

    def _shape(self, lane: Drawn) -> object:
        """A key that is equal for lanes that may share a run: their batches have equal shapes in every iteration."""
        if self.program.loss.weighted:
            return self._width(lane)
        first, last = int(lane.counts[0]), int(lane.counts[-1])
        return first if first == last else lane.counts.tobytes()


def _batches(
    lanes: Sequence[Drawn], begins: Sequence[int], span: slice, places: int, width: int
) -> tuple[Tensor, Array]:
    """Pool indices of all samples of a span, (iterations, places * width), and how many count in every batch."""
    iterations = span.stop - span.start
    index = np.zeros((iterations, places, width), np.int64)
    counts = np.zeros((iterations, places), np.int64)
    for place, (lane, begin) in enumerate(zip(lanes, begins, strict=True)):
        indices = lane.indices[span]
        own, size = slice(len(indices)), indices.shape[1]
        np.add(indices, begin, out=index[own, place, :size])
        if size < width:
            index[own, place, size:] = index[own, place, :1]
        counts[own, place] = lane.counts[span]
    return torch.from_numpy(index.reshape(iterations, -1)), counts


def _weights(counts: Array, width: int) -> Tensor:
    """The weight of every sample, (iterations, places, width, 1); 0 in lanes that are done."""
    share = (1 / np.maximum(counts, 1)).astype(np.float32)
    weights = np.where(np.arange(width) < counts[..., np.newaxis], share[..., np.newaxis], np.float32(0))
    return torch.from_numpy(weights).unsqueeze(-1)


def lanes_of(flat: FlatModule, loss: Loss, solver: Solver, load: Load, devices_max: int) -> Lanes | str:
    """The lanes of a task, or one sentence that says why there are none."""
    found = flat_obstacle(flat) or obstacle(flat.module)
    if found is not None:
        return found
    pool = SamplePool(load, devices_max)
    size = min(pool.place(0)[1], solver.batch_size)
    batch, step = (pool.tensors[0][:size], pool.tensors[1][:size]), probe(flat, solver, size)
    with torch.no_grad():
        over_lanes = lane_loss(loss, flat.module(batch[0]), batch[1])
    if isinstance(over_lanes, CrossEntropy):
        pool.load = with_classes(load)
    lanes = Lanes(Program(flat.module, flat.layout, over_lanes, step.solver), flat.layout, pool)
    found = _disagreement(lanes, flat, loss, step, batch)
    lanes.program.solver = solver
    return lanes if found is None else found


def _disagreement(lanes: Lanes, flat: FlatModule, loss: Loss, step: Drawn, batch: Batch) -> str | None:
    """Compares one gradient of device 0 in a lane and without lanes; returns what is wrong, or None."""
    once, again = (alone(flat, loss, step, batch, seed) for seed in (0, 1))
    if not np.array_equal(once, again, equal_nan=True):
        return "its loss gives two answers for one batch; it may draw random numbers"
    try:
        ((x_new, _),) = lanes.run([step])
    except Exception as error:  # the user's loss may fail in any way over lanes
        first, _, _ = str(error).strip().partition("\n")
        return f"its loss does not work over lanes: {type(error).__name__}: {first}"
    same = not disagrees(x_new.vector, once, step.x_tau.vector)
    return None if same else "its model or its loss has another gradient in lanes than alone"


def probe(flat: FlatModule, solver: Solver, size: int) -> Drawn:
    """One gradient step from the module's values on the first samples of device 0, to compare with torch's."""
    solver = Solver(gamma=1.0, rho=0.0, batch_size=solver.batch_size)
    x_tau = Model(flat.layout, flat.values.numpy().copy())
    return Drawn(x_tau, 0, solver, size, np.arange(size)[np.newaxis], np.full(1, size))


def disagrees(x_new: Vector, alone: Vector, x_tau: Vector) -> bool:
    """Does one step from x_tau differ from the same step taken alone by more than rounding?"""
    tolerance = 1e-3 * np.abs(alone - x_tau).max() + 1e-6 * np.abs(x_tau).max()
    return not np.allclose(x_new, alone, rtol=0, atol=float(tolerance), equal_nan=True)


def alone(flat: FlatModule, loss: Loss, step: Drawn, batch: Batch, seed: int = 0) -> Vector:
    flat.load(step.x_tau)
    with seeded(np.random.default_rng(seed)):
        step.solver.solve(flat, loss, [batch], flat.parameters.clone())
    return flat.values.numpy().copy()


def with_classes(load: Load, classes: float = inf) -> Load:
    """Refuses classes below 0, which torch's cross_entropy ignores, and those that the model does not have.

    Lanes cannot ignore a sample; a compiled loop checks no index.
    """

    def checked(device: int) -> Batch:
        inputs, targets = load(device)
        if int(targets.min()) < 0:
            raise InvalidValue(
                f"device {device} has the class {int(targets.min())}; lanes take none below 0: train it inline"
            )
        if int(targets.max()) >= classes:
            raise InvalidValue(f"device {device} has the class {int(targets.max())}, but the model has {classes}")
        return inputs, targets

    return checked


def flat_obstacle(flat: FlatModule) -> str | None:
    """What keeps a module from lanes and compiled loops alike; None where nothing does."""
    if flat.values.device.type != "cpu":
        return f"it trains on {flat.values.device.type}, and lanes are laid out for the CPU"
    if flat.layout.tied:
        return "parameters {} and {} are tied".format(*flat.layout.tied[0])
    for name, parameter in flat.module.named_parameters():
        if not parameter.requires_grad:
            return f"parameter {name} is frozen"
    for name, _ in flat.module.named_buffers():
        return f"{name} is a buffer, which lanes do not have"
    return None


def _width(size: int, batch_size: int, grain: int) -> int:
    """How wide the batches of a lane are: what it needs, rounded up to batch_size / 1, 2, 4, ... and then to the grain.

    >>> [_width(size, 50, 4) for size in (50, 26, 25, 14, 3, 1)]
    [52, 52, 28, 28, 4, 4]
    """
    width = batch_size
    while (half := -(-width // 2)) >= size and half < width:
        width = half
    return -(-width // grain) * grain
