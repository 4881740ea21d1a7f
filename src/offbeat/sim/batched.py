"""Owns the executors that train together whatever waits to be trained: `batched`, in one tensor program and one thread,
or in one such program in each of several processes, here or on a Ray cluster; `compiled`, each training in a compiled
loop of its own, over the cores.

Rules kept here:
- Nothing is trained before a result is needed; then everything that was submitted and is not done is trained with it.
- What comes out of a job does not depend on the jobs beside it; the task sees to that.
- The schedule is never changed to fill the program: how full it was is reported.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from offbeat.core.layout import Model
from offbeat.errors import InvalidValue
from offbeat.sim.executors import Job, Pending, PendingEvaluation
from offbeat.task import Task, Trained, Update, Work, evaluate


@runtime_checkable
class Batchable(Task, Protocol):
    """A task that may be able to train many at once."""

    def batchable(self) -> str | None:
        """Why it cannot; None where it can."""
        ...

    def train_many(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        """(x_new, report) of every (x_tau, work), in order, and how many runs of the tensor program they took."""
        ...


@runtime_checkable
class Compilable(Task, Protocol):
    """A task that may be able to train in compiled loops."""

    def compilable(self) -> str | None:
        """Why it cannot; None where it can."""
        ...

    def train_compiled(self, jobs: Sequence[tuple[Model, Work]], threads: int) -> list[tuple[Model, Trained]]:
        """(x_new, report) of every (x_tau, work), in order."""
        ...


class Spread(Protocol):
    """Processes that train together what each is given."""

    @property
    def batched_name(self) -> str: ...

    def train_many(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]: ...

    def report(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def obstacle(task: Task) -> str | None:
    """Why trainings of this task cannot be batched; None where they can."""
    return task.batchable() if isinstance(task, Batchable) else f"{type(task).__name__} has no `train_many`"


def compiling_obstacle(task: Task) -> str | None:
    """Why trainings of this task cannot be compiled; None where they can."""
    return task.compilable() if isinstance(task, Compilable) else f"{type(task).__name__} has no `train_compiled`"


class Together:
    """Trains all that was submitted, together, when the first of it is needed; how, its kinds say."""

    def __init__(self, task: Task, name: str) -> None:
        self.task, self.name = task, name
        self.jobs = self.programs = 0
        self._waiting: dict[Job, None] = {}

    def _trained(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        raise NotImplementedError

    def submit(self, x_tau: Model, work: Work) -> Job:
        """Wait until some result is needed."""
        job = Job(x_tau, work)
        self._waiting[job] = None
        return job

    def measure(self, x: Model) -> PendingEvaluation:
        """Nothing happens until the result is needed."""
        return PendingEvaluation(x)

    def finish(self, jobs: Sequence[Pending]) -> None:
        """Evaluate what is asked for; train these jobs and everything else that waits."""
        for job in jobs:
            if isinstance(job, PendingEvaluation):
                job.metrics = job.metrics or evaluate(self.task, job.x)
        self._train([job for job in jobs if isinstance(job, Job) and not job.done])

    def _train(self, needed: Sequence[Job]) -> None:
        if not needed:
            return
        batch = [*(self._waiting | dict.fromkeys(needed))]
        results, programs = self._trained([(job.x_tau, job.work) for job in batch])
        for job, (x_new, trained) in zip(batch, results, strict=True):
            job.update = Update(x_new.freeze(), job.work, trained)
        self._waiting.clear()
        self.jobs += len(batch)
        self.programs += programs

    def cancel(self, job: Job) -> None:
        """Do not train it, if it still waits."""
        self._waiting.pop(job, None)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """Here and now."""
        return evaluate(self.task, model)

    def report(self) -> dict[str, float]:
        """How often something was trained, and how many at once, on average."""
        return {"lanes_mean": self.jobs / max(self.programs, 1), "programs": self.programs}

    def close(self) -> None:
        """Nothing outlives a training."""


class Batched(Together):
    """Trains as one tensor program, here; or as one in each of several processes."""

    def __init__(self, task: Task, over: Spread | None = None) -> None:
        reason = obstacle(task)
        if reason is not None or not isinstance(task, Batchable):
            raise InvalidValue(f"this task cannot be batched: {reason}; use the executor `inline` or `processes`")
        super().__init__(task, "batched" if over is None else over.batched_name)
        self.over = over
        self._where: Batchable | Spread = over or task

    def _trained(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        return self._where.train_many(jobs)

    def report(self) -> dict[str, float]:
        """How many runs of the program there were, how many lanes of one were filled, and what the processes say."""
        return super().report() | ({} if self.over is None else self.over.report())

    def close(self) -> None:
        """End the processes, if there are any."""
        if self.over is not None:
            self.over.close()


class Compiled(Together):
    """Trains each in a compiled loop, over some threads."""

    def __init__(self, task: Task, threads: int) -> None:
        reason = compiling_obstacle(task)
        if reason is not None or not isinstance(task, Compilable):
            raise InvalidValue(f"this task cannot be compiled: {reason}; use the executor `auto` or `inline`")
        super().__init__(task, "compiled")
        self.threads, self._compilable = threads, task

    def _trained(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        return self._compilable.train_compiled(jobs, self.threads), 1
