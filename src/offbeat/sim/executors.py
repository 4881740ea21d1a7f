"""Owns how local trainings are carried out: what an executor is, and those that train in this process: `inline`,
`batched` (one tensor program, here or in each of several processes) and `compiled` (compiled loops, over the cores).

Rules kept here:
- A training is a pure function of its job, so an executor decides when and where, never what comes out.
- A job is submitted when its task starts and awaited when its update arrives; whatever was submitted and is not yet
  done may run together. So is the evaluation of a version, when nothing depends on what it shows.
- Nothing is trained here before a result is needed. The schedule is never changed to fill a tensor program: how full
  it was is reported.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from offbeat.core.layout import Model
from offbeat.errors import InvalidValue
from offbeat.task import DeviceState, Task, Trained, Update, Work, checked_metrics, evaluate, keeps_state, solve

Jobs = Sequence[tuple[Model, Work]]
"""Trainings as (x_tau, work)."""
TrainedJobs = list[tuple[Model, Trained]]
"""(x_new, report) of every training, in the order of the jobs."""
STATEFUL = "it keeps state between tasks, which `inline`, `processes` and `ray` carry"
"""Why a task is not trained together with others."""


@dataclass(eq=False, slots=True)
class Job:
    x_tau: Model
    work: Work
    state: DeviceState | None = None
    """Of the device, where the task keeps one."""
    update: Update | None = None
    handle: Any = None
    """By which its executor finds it again."""

    @property
    def done(self) -> bool:
        return self.update is not None


@dataclass(eq=False, slots=True)
class PendingEvaluation:
    x: Model
    metrics: Mapping[str, float] | None = None
    handle: Any = None

    @property
    def done(self) -> bool:
        return self.metrics is not None


Pending = Job | PendingEvaluation


class Executor(Protocol):
    name: str

    @property
    def task(self) -> Task: ...

    def submit(self, x_tau: Model, work: Work, state: DeviceState | None = None) -> Job:
        """Take a training on; it may begin at once or later."""

    def measure(self, x: Model) -> PendingEvaluation:
        """Take the evaluation of a global model on; it may begin at once or later."""

    def finish(self, jobs: Sequence[Pending]) -> None:
        """Return when these are done; others may be done on the way."""

    def cancel(self, job: Job) -> None:
        """The job is not needed any more."""

    def report(self) -> dict[str, float]:
        """Figures about how the work was done, for the summary of the run."""

    def close(self) -> None:
        """End processes and threads."""


# --- in this process -------------------------------------------------------------------------------------------------


class Inline:
    """Trains one after the other, when the result is needed."""

    name = "inline"

    def __init__(self, task: Task) -> None:
        self.task = task

    def submit(self, x_tau: Model, work: Work, state: DeviceState | None = None) -> Job:
        return Job(x_tau, work, state)

    def measure(self, x: Model) -> PendingEvaluation:
        return PendingEvaluation(x)

    def finish(self, jobs: Sequence[Pending]) -> None:
        for job in jobs:
            if isinstance(job, PendingEvaluation):
                job.metrics = job.metrics or self.evaluate(job.x)
        self._train([job for job in jobs if isinstance(job, Job) and not job.done])

    def _train(self, needed: Sequence[Job]) -> None:
        for job in needed:
            job.update = solve(self.task, job.x_tau, job.work, job.state)

    def evaluate(self, x: Model) -> Mapping[str, float]:
        return evaluate(self.task, x)

    def cancel(self, job: Job) -> None:
        """Nothing was begun."""

    def report(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing outlives a training."""


class Together(Inline):
    """Trains all that was submitted, together, when the first of it is needed."""

    def __init__(self, task: Task, name: str, train: Callable[[Jobs], tuple[TrainedJobs, int]]) -> None:
        super().__init__(task)
        self.name, self._train_jobs = name, train
        self.jobs = self.programs = 0
        self._waiting: dict[Job, None] = {}

    def submit(self, x_tau: Model, work: Work, state: DeviceState | None = None) -> Job:
        job = Job(x_tau, work, state)
        self._waiting[job] = None
        return job

    def _train(self, needed: Sequence[Job]) -> None:
        if not needed:
            return
        batch = [*(self._waiting | dict.fromkeys(needed))]
        results, programs = self._train_jobs([(job.x_tau, job.work) for job in batch])
        for job, (x_new, trained) in zip(batch, results, strict=True):
            job.update = Update(x_new.freeze(), job.work, trained)
        self._waiting.clear()
        self.jobs += len(batch)
        self.programs += programs

    def cancel(self, job: Job) -> None:
        self._waiting.pop(job, None)

    def report(self) -> dict[str, float]:
        """How many trainings a tensor program had, on average, and how many programs there were."""
        return {"lanes_mean": self.jobs / max(self.programs, 1), "programs": self.programs}


@runtime_checkable
class Batchable(Task, Protocol):
    """A task that may be able to train many at once; what comes out of a job does not depend on the jobs beside it."""

    def batchable(self) -> str | None:
        """Why it cannot; None where it can."""

    def train_many(self, jobs: Jobs) -> tuple[TrainedJobs, int]:
        """The results, and how many runs of the tensor program they took."""


class Spread(Protocol):
    """Processes that train together what each is given."""

    @property
    def batched_name(self) -> str: ...

    def train_many(self, jobs: Jobs) -> tuple[TrainedJobs, int]: ...

    def report(self) -> dict[str, float]: ...

    def close(self) -> None: ...


def obstacle(task: Task) -> str | None:
    """Why trainings of this task cannot be batched; None where they can."""
    if keeps_state(task):
        return STATEFUL
    return task.batchable() if isinstance(task, Batchable) else f"{type(task).__name__} has no `train_many`"


class Batched(Together):
    """Trains as one tensor program, here; or as one in each of several processes."""

    def __init__(self, task: Task, over: Spread | None = None) -> None:
        reason = obstacle(task)
        if reason is not None or not isinstance(task, Batchable):
            raise InvalidValue(f"this task cannot be batched: {reason}; use the executor `inline` or `processes`")
        where: Batchable | Spread = over or task
        super().__init__(task, "batched" if over is None else over.batched_name, lambda jobs: where.train_many(jobs))
        self.over = over

    def report(self) -> dict[str, float]:
        return super().report() | ({} if self.over is None else self.over.report())

    def close(self) -> None:
        if self.over is not None:
            self.over.close()


@runtime_checkable
class Compilable(Task, Protocol):
    def compilable(self) -> str | None:
        """Why it cannot; None where it can."""

    def train_compiled(self, jobs: Jobs, threads: int) -> TrainedJobs: ...

    def evaluate_compiled(self, model: Model) -> Mapping[str, float]: ...


@runtime_checkable
class Carriable(Task, Protocol):
    def carried(self, devices: int, seeds: Iterable[int]) -> Task | None:
        """The task for processes that need only compiled loops; None where it needs more."""


def compiling_obstacle(task: Task) -> str | None:
    if keeps_state(task):
        return STATEFUL
    return task.compilable() if isinstance(task, Compilable) else f"{type(task).__name__} has no `train_compiled`"


class CompiledLoops(Together):
    """Trains each in a compiled loop, over some threads, and evaluates in one."""

    def __init__(self, task: Task, threads: int) -> None:
        reason = compiling_obstacle(task)
        if reason is not None or not isinstance(task, Compilable):
            raise InvalidValue(f"this task cannot be compiled: {reason}; use the executor `auto` or `inline`")
        super().__init__(task, "compiled", lambda jobs: (task.train_compiled(jobs, self.threads), 1))
        self.threads, self._evaluate = threads, task.evaluate_compiled

    def evaluate(self, x: Model) -> Mapping[str, float]:
        return checked_metrics(self._evaluate(x))


def evaluated_here(executor: Executor, x: Model) -> Mapping[str, float]:
    """What this executor measures of a model, before any of its processes is asked."""
    return executor.evaluate(x) if isinstance(executor, Inline) else evaluate(executor.task, x)


@runtime_checkable
class Programmable(Task, Protocol):
    """A task that can train by another program than its usual one, with bits of its own."""

    def program_obstacle(self, program: str) -> str | None:
        """Why it cannot; None where it can."""

    def train_by(self, program: str) -> None:
        """Do so from now on."""
