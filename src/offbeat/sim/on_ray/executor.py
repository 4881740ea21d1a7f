"""Owns the executor that trains on a Ray cluster, with the bits of `inline`.

Rule kept here: nothing is started before the first training; one actor per CPU, or per share of a GPU, holds the task.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offbeat.core.layout import Layout, Model
from offbeat.errors import InvalidValue
from offbeat.hosting.task_host import packed
from offbeat.sim.executors import Job, Pending, PendingEvaluation
from offbeat.sim.on_ray.cluster import Cluster, installed
from offbeat.sim.on_ray.crew import Crew, Errand, Where
from offbeat.sim.on_ray.sources import travelling
from offbeat.sim.on_ray.trainer import Trainer
from offbeat.task import Task, Trained, Update, Work, evaluate

ACTORS_MAX = 4096


class Wishes(NamedTuple):
    """What is set about Ray; the names of the settings without `ray_`."""

    address: str | None = None
    gpus: float = 0.0
    results_max: int = 256


class Hiring(Where, Protocol):
    """What the executor needs of a cluster."""

    def places(self, gpus: float) -> int: ...

    def hire(self, kind: type, *arguments: Any, gpus: float = 0.0) -> Any: ...

    def close(self) -> None: ...


class OnItsWay(Job):
    """A training on the cluster."""

    __slots__ = ("errand",)

    def __init__(self, x_tau: Model, work: Work) -> None:
        super().__init__(x_tau, work)
        self.errand = Errand("train", [x_tau], (work,))


class Watched(PendingEvaluation):
    """An evaluation on the cluster."""

    __slots__ = ("errand",)

    def __init__(self, x: Model) -> None:
        super().__init__(x)
        self.errand = Errand("evaluate", [x])


class Ray:
    """Trains in `count` actors."""

    def __init__(
        self,
        task: Task,
        count: int | None = None,
        wishes: Wishes = Wishes(),  # noqa: B008 (it cannot change)
        connect: Callable[[str | None], Hiring] = Cluster,
    ) -> None:
        _check(count, wishes)
        installed()
        self.name = "ray" if count is None else f"ray:{count}"
        self.task, self.count, self._wishes, self._connect = task, count, wishes, connect
        self._payload = packed(task, travelling(task))
        self._cluster: Hiring | None = None
        self._crew: Crew | None = None

    @property
    def batched_name(self) -> str:
        """What `batched` is called that spreads over this."""
        return f"{self.name}+batched"

    def submit(self, x_tau: Model, work: Work) -> OnItsWay:
        """The next free actor takes it."""
        job = OnItsWay(x_tau, work)
        self._hired(x_tau.layout).add(job.errand)
        return job

    def measure(self, x: Model) -> Watched:
        """The next free actor takes it."""
        evaluation = Watched(x)
        self._hired(x.layout).add(evaluation.errand)
        return evaluation

    def finish(self, jobs: Sequence[Pending]) -> None:
        """Wait for these."""
        for job in jobs:
            if isinstance(job, Watched) and not job.done:
                job.metrics = self._hired(job.x.layout).answer(job.errand)
            elif isinstance(job, OnItsWay) and not job.done:
                x_new, trained = self._hired(job.x_tau.layout).answer(job.errand)
                job.update = Update(_own(job.x_tau.layout, x_new), job.work, trained)

    def gather(self, layout: Layout) -> None:
        """Wait until all actors are there, which no run needs to: it begins with those that are."""
        self._hired(layout).gather()

    def train_many(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        """Trainings of a task that can batch them, an equal part in each actor; as its own `train_many`."""
        layout = jobs[0][0].layout
        crew = self._hired(layout)
        size = -(-len(jobs) // len(crew))
        errands = [_together(jobs[start : start + size]) for start in range(0, len(jobs), size)]
        for errand in errands:
            crew.add(errand)
        try:
            answers = [crew.answer(errand) for errand in errands]
        finally:
            for errand in errands:
                crew.drop(errand)
        pushed = [(_own(layout, x_new), trained) for results, _ in answers for x_new, trained in results]
        return pushed, sum(programs for _, programs in answers)

    def _hired(self, layout: Layout) -> Crew:
        if self._crew is None:
            cluster = self._cluster = self._connect(self._wishes.address)
            gpus, arguments = self._wishes.gpus, (self._payload, layout, str(Path.cwd()))
            count = self.count or cluster.places(gpus)
            self._crew = Crew(
                cluster, lambda: cluster.hire(Trainer, *arguments, gpus=gpus), count, self._wishes.results_max
            )
        return self._crew

    def cancel(self, job: Job) -> None:
        """One that has not begun will not begin."""
        if isinstance(job, OnItsWay) and self._crew is not None:
            self._crew.drop(job.errand)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """Here, while the others work."""
        return evaluate(self.task, model)

    def report(self) -> dict[str, float]:
        """How many actors there were, and how many trainings were lost and done again."""
        return {} if self._crew is None else {"actors": len(self._crew), "redone": self._crew.redone}

    def close(self) -> None:
        """End the actors, and leave the cluster."""
        crew, cluster = self._crew, self._cluster
        self._crew = self._cluster = None
        try:
            if crew is not None:
                crew.close()
        finally:
            if cluster is not None:
                cluster.close()


def _check(count: int | None, wishes: Wishes) -> None:
    if count is not None and not 1 <= count <= ACTORS_MAX:
        raise InvalidValue(f"executor ray:{count} is not possible; ray:N has 1..{ACTORS_MAX} actors")
    if not 0 <= wishes.gpus < float("inf") or (wishes.gpus > 1 and wishes.gpus % 1):
        raise InvalidValue(f"ray_gpus is {wishes.gpus:g} but must be a share of one GPU (0..1), or a whole number")
    if wishes.results_max < 1:
        raise InvalidValue(f"ray_results_max is {wishes.results_max} but must be >= 1")


def _together(jobs: Sequence[tuple[Model, Work]]) -> Errand:
    """Jobs that say from which of the models they start; each model travels once."""
    models = {id(x_tau): x_tau for x_tau, _ in jobs}
    numbers = {key: number for number, key in enumerate(models)}
    return Errand("train_many", [*models.values()], ([(numbers[id(x_tau)], work) for x_tau, work in jobs],))


def _own(layout: Layout, bare: Any) -> Model:
    """A copy: what was fetched is part of the object store, which has room for few."""
    return Model(layout, *bare).copy().freeze()
