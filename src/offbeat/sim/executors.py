"""Owns where local trainings run: here, together in one tensor program, or in other processes.

Rules kept here:
- A training is a pure function of its job, so an executor decides when and where, never what comes out.
- A job is submitted when its task starts and awaited when its update arrives; whatever was submitted and is not yet
  done may run together. So is the evaluation of a version, when nothing depends on what it shows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offbeat.core.layout import Model
from offbeat.task import Task, Update, Work, evaluate, solve


class Job:
    """One training on its way."""

    __slots__ = ("handle", "update", "work", "x_tau")

    def __init__(self, x_tau: Model, work: Work) -> None:
        self.x_tau, self.work = x_tau, work
        self.update: Update | None = None
        self.handle: Any = None
        """By which its executor finds it again."""

    @property
    def done(self) -> bool:
        """Is its update there?"""
        return self.update is not None


class PendingEvaluation:
    """One evaluation of a global model on its way."""

    __slots__ = ("handle", "metrics", "x")

    def __init__(self, x: Model) -> None:
        self.x = x
        self.metrics: Mapping[str, float] | None = None
        self.handle: Any = None
        """By which its executor finds it again."""

    @property
    def done(self) -> bool:
        """Are its metrics there?"""
        return self.metrics is not None


Pending = Job | PendingEvaluation


class Executor(Protocol):
    """Runs trainings of one task."""

    name: str

    @property
    def task(self) -> Task:
        """Whose trainings these are."""
        ...

    def submit(self, x_tau: Model, work: Work) -> Job:
        """Take a training on; it may begin at once or later."""
        ...

    def measure(self, x: Model) -> PendingEvaluation:
        """Take the evaluation of a global model on; it may begin at once or later."""
        ...

    def finish(self, jobs: Sequence[Pending]) -> None:
        """Return when these are done; others may be done on the way."""
        ...

    def cancel(self, job: Job) -> None:
        """The job is not needed any more."""
        ...

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """Metrics of a global model, here and now."""
        ...

    def report(self) -> dict[str, float]:
        """Figures about how the work was done."""
        ...

    def close(self) -> None:
        """End processes and threads."""
        ...


class Inline:
    """Trains one after the other, here, when the result is needed."""

    name = "inline"

    def __init__(self, task: Task) -> None:
        self.task = task

    def submit(self, x_tau: Model, work: Work) -> Job:
        """Nothing happens until the result is needed."""
        return Job(x_tau, work)

    def measure(self, x: Model) -> PendingEvaluation:
        """Nothing happens until the result is needed."""
        return PendingEvaluation(x)

    def finish(self, jobs: Sequence[Pending]) -> None:
        """Train and evaluate now."""
        for job in jobs:
            if isinstance(job, PendingEvaluation):
                job.metrics = job.metrics or evaluate(self.task, job.x)
            else:
                job.update = job.update or solve(self.task, job.x_tau, job.work)

    def cancel(self, job: Job) -> None:
        """Nothing was begun."""

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """Here and now."""
        return evaluate(self.task, model)

    def report(self) -> dict[str, float]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Nothing to end."""
