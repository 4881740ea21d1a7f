"""Owns the executor that trains on a Ray cluster, with the bits of `inline`.

Rule kept here: nothing is started before the first training.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.core.layout import Layout, Model
from offbeat.errors import InvalidValue
from offbeat.hosting.task_host import TaskHost, packed
from offbeat.sim.executors import Job, Pending, PendingEvaluation
from offbeat.sim.on_ray.cluster import Cluster, installed
from offbeat.sim.on_ray.on_node import TaskParcel, packages, train_many
from offbeat.sim.on_ray.remote_jobs import RemoteJob, RemoteJobs
from offbeat.sim.on_ray.task_files import travelling
from offbeat.task import DeviceState, Task, Trained, Update, Work, evaluate

AT_ONCE_MAX = 4096


class Wishes(NamedTuple):
    """The settings about Ray, without the `ray_` of their names."""

    address: str | None = None
    gpus: float = 0.0
    results_max: int = 256


class Ray:
    """Trains `count` at once, each in a process of some node."""

    def __init__(
        self,
        task: Task,
        count: int | None = None,
        wishes: Wishes = Wishes(),  # noqa: B008 (it cannot change)
        connect: Callable[[str | None], Cluster] = Cluster,
    ) -> None:
        _check(count, wishes)
        installed()
        self.name = "ray" if count is None else f"ray:{count}"
        self.task, self.count, self._wishes, self._connect = task, count, wishes, connect
        self._payload = packed(task, travelling(task))
        self._cluster: Cluster | None = None
        self._remote: RemoteJobs | None = None
        self._jobs: dict[Pending, RemoteJob] = {}

    @property
    def batched_name(self) -> str:
        """The name of `batched` that spreads over this."""
        return f"{self.name}+batched"

    def submit(self, x_tau: Model, work: Work, state: DeviceState | None = None) -> Job:
        job = Job(x_tau, work, state)
        self._jobs[job] = self._remote_jobs(x_tau.layout).add(TaskHost.train, [x_tau], work, state)
        return job

    def measure(self, x: Model) -> PendingEvaluation:
        evaluation = PendingEvaluation(x)
        self._jobs[evaluation] = self._remote_jobs(x.layout).add(TaskHost.evaluate, [x])
        return evaluation

    def finish(self, jobs: Sequence[Pending]) -> None:
        for job in jobs:
            if job.done or self._remote is None:
                continue
            answer = self._remote.answer(self._jobs[job])
            del self._jobs[job]
            if isinstance(job, PendingEvaluation):
                job.metrics = answer
            else:
                x_new, trained, brought = answer
                job.update = Update(_own(job.x_tau.layout, x_new), job.work, trained, brought)

    def train_many(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        """Trainings of a task that can batch them, an equal part in each process; as its own `train_many`."""
        layout = jobs[0][0].layout
        remote = self._remote_jobs(layout)
        size = -(-len(jobs) // remote.count)
        parts = [_together(remote, jobs[start : start + size]) for start in range(0, len(jobs), size)]
        try:
            answers = [remote.answer(part) for part in parts]
        finally:
            for part in parts:
                remote.drop(part)
        pushed = [(_own(layout, x_new), trained) for results, _ in answers for x_new, trained in results]
        return pushed, sum(programs for _, programs in answers)

    def _remote_jobs(self, layout: Layout) -> RemoteJobs:
        """The cluster is connected to when the first job comes."""
        if self._remote is None:
            self._cluster = self._connect(self._wishes.address)
            parcel = TaskParcel(self._payload, layout, str(Path.cwd()), packages())
            wishes = self._wishes
            self._remote = RemoteJobs(self._cluster, parcel, self.count, wishes.gpus, wishes.results_max)
        return self._remote

    def cancel(self, job: Job) -> None:
        """A job that has not begun will not begin."""
        if job in self._jobs and self._remote is not None:
            self._remote.drop(self._jobs.pop(job))

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """In this process, while the nodes work."""
        return evaluate(self.task, model)

    def report(self) -> dict[str, float]:
        """How many trainings run at once, and how many were lost and done again."""
        return {} if self._remote is None else {"actors": self._remote.count, "redone": self._remote.redone}

    def close(self) -> None:
        """Stop the jobs that run, and leave the cluster."""
        remote, cluster = self._remote, self._cluster
        self._remote, self._cluster, self._jobs = None, None, {}
        try:
            if remote is not None:
                remote.close()
        finally:
            if cluster is not None:
                cluster.close()


def _check(count: int | None, wishes: Wishes) -> None:
    if count is not None and not 1 <= count <= AT_ONCE_MAX:
        raise InvalidValue(f"executor ray:{count} is not possible; ray:N has 1..{AT_ONCE_MAX} processes")
    if not 0 <= wishes.gpus < float("inf") or (wishes.gpus > 1 and wishes.gpus % 1):
        raise InvalidValue(f"ray_gpus is {wishes.gpus:g} but must be a share of one GPU (0..1), or a whole number")
    if wishes.results_max < 1:
        raise InvalidValue(f"ray_results_max is {wishes.results_max} but must be >= 1")


def _together(remote: RemoteJobs, jobs: Sequence[tuple[Model, Work]]) -> RemoteJob:
    models, works = zip(*jobs, strict=True)
    return remote.add(train_many, models, works)


def _own(layout: Layout, bare: Any) -> Model:
    """A copy: a fetched model is part of the object store and would take up room there."""
    return Model(layout, *bare).copy().freeze()
