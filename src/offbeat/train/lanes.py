"""Owns how trainings of one task share a tensor program: whether they can, and which run together.

Rules kept here:
- The shape of a lane's batches depends on its own device and settings and on nothing else. Lanes of equal shape share
  a run of the program. A lane with fewer iterations than the others is read out when it is done; results that its
  place in the program yields afterwards are not used.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from offbeat.core.layout import Array, Layout, Model, Vector, same_layout
from offbeat.task import Trained
from offbeat.train.flat import FlatModule
from offbeat.train.samples import Drawn, Jobs, LoadSamples, SamplePool, with_classes
from offbeat.train.sgd import Batch, Loss, seeded, solve_proximal
from offbeat.train.solver import Solver
from offbeat.train.stacked import CrossEntropy, Program, lane_loss, obstacle

SAMPLES_AT_ONCE = 2**17
"""Samples of all lanes that are laid out ahead: long trainings are done in several spans of iterations."""


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
        program, width = self.program, self._width(lanes[0])
        inputs, targets = map(torch.from_numpy, self.pool.arrays)
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


def lanes_of(flat: FlatModule, loss: Loss, solver: Solver, load: LoadSamples, devices_max: int) -> Lanes | str:
    """The lanes of a task, or one sentence that says why there are none."""
    found = flat_obstacle(flat) or obstacle(flat.module)
    if found is not None:
        return found
    pool = SamplePool(load, devices_max)
    size = min(pool.place(0)[1], solver.batch_size)
    inputs, targets = (torch.from_numpy(array[:size]) for array in pool.arrays)
    batch, step = (inputs, targets), probe(flat, solver, size)
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
        solve_proximal(step.solver, flat, loss, [batch], flat.parameters.clone())
    return flat.values.numpy().copy()


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
