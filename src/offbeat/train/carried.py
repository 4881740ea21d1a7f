"""Owns a task that another process has loaded: its chain, its samples and its x_0, which compiled loops need, and no
more. The processes of a comparison begin with it at once, without torch and without the task's file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from offbeat.core.layout import Model
from offbeat.task import Trained, Work
from offbeat.train.layer_chain import Chain, ChainLayers
from offbeat.train.samples import SamplePool, Samples
from offbeat.train.solver import Solver

SOLVERS_CACHED = 64
CARRIED_BYTES_MAX = 2**26
"""A task with more data is loaded where it is needed."""


def leased(solver: Solver, gamma: float | None, local_iterations: int | None) -> Solver:
    """The solver of a training whose lease says its own rate or number of iterations."""
    if gamma is not None:
        solver = replace(solver, gamma=gamma)
    if local_iterations is not None:
        solver = replace(solver, local_passes=None, local_iterations=local_iterations)
    return solver


@dataclass
class CarriedTask:
    layers: ChainLayers
    solver: Solver
    data: Sequence[Samples]
    """Of every device, as the loops take them."""
    test: Samples | None
    starts: Mapping[int, Model]
    """x_0, by the seed."""
    ordinary_iterations: float | None
    identity: str
    known_as: tuple[str, ...]
    """What a run's folder calls the task."""

    @property
    def devices(self) -> int:
        return len(self.data)

    @property
    def gamma(self) -> float:
        return self.solver.gamma

    def initial(self, seed: int) -> Model:
        return self.starts[seed].copy()

    def samples(self, device: int) -> int:
        return len(self.data[device][0])

    def iterations(self, work: Work) -> int:
        return self._leased(work).iterations(self.samples(work.device))

    def train(self, model: Model, work: Work) -> Trained:
        ((x_new, trained),) = self.train_compiled([(model, work)], 1)
        model.vector[:] = x_new.vector
        return trained

    def evaluate(self, model: Model) -> dict[str, float]:
        return self._chain.evaluate(model)

    def compilable(self) -> str | None:
        return None

    def train_compiled(self, jobs: Sequence[tuple[Model, Work]], threads: int) -> list[tuple[Model, Trained]]:
        fit = [(x_tau, work, self._leased(work)) for x_tau, work in jobs]
        return self._chain.train(fit, threads)

    def evaluate_compiled(self, model: Model) -> dict[str, float]:
        return self.evaluate(model)

    @cached_property
    def _chain(self) -> Chain:
        pool = SamplePool(self.data.__getitem__, max(len(self.data), 1))
        return Chain(self.layers, pool, self.solver, self.test)

    @cached_property
    def _leased(self) -> Callable[[Work], Solver]:
        solvers = lru_cache(SOLVERS_CACHED)(leased)
        return lambda work: solvers(self.solver, work.gamma, work.local_iterations)
