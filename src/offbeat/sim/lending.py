"""Owns how runs share executors: runs whose trainings are of one task and one kind get the same one.

Rules kept here:
- It is known whose training each waiting one is, so a run that fails takes only its own with it.
- An executor that no run uses any more is closed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offbeat.core.layout import Model
from offbeat.hosting.loading import OFFERED, OVERRIDES, load, takes_seed
from offbeat.settings import Settings
from offbeat.sim.batched import Compiled, Together
from offbeat.sim.choose import ANYWHERE
from offbeat.sim.executors import Executor, Inline, Job, Pending, PendingEvaluation
from offbeat.sim.processes import Processes
from offbeat.sim.run import Simulation
from offbeat.task import Task, Work

OF_TASK = (*(name for name in OFFERED if name != "seed"), *OVERRIDES, "on_one_machine")
OF_EXECUTOR = ("executor", *ANYWHERE, "in_flight_max", "tasks_per_device", "device_model")
"""The settings that decide which task it is, beside the seed where it takes one, and which executor suits it."""


class Borrowed:
    """One run's part in an executor that others use, too."""

    def __init__(self, shared: Executor) -> None:
        self.shared, self.name = shared, shared.name
        self._waiting: dict[Job, None] = {}

    @property
    def task(self) -> Task:
        """Whose trainings these are."""
        return self.shared.task

    @property
    def together(self) -> bool:
        """Are the trainings of several runs done at once, so that an error may be any run's?"""
        return isinstance(self.shared, Together)

    def submit(self, x_tau: Model, work: Work) -> Job:
        """Take a training on."""
        job = self.shared.submit(x_tau, work)
        self._waiting = {waiting: None for waiting in self._waiting if not waiting.done}
        self._waiting[job] = None
        return job

    def measure(self, x: Model) -> PendingEvaluation:
        """Take the evaluation of a global model on."""
        return self.shared.measure(x)

    def finish(self, jobs: Sequence[Pending]) -> None:
        """Return when these are done; those of other runs may be done on the way."""
        self.shared.finish(jobs)

    def cancel(self, job: Job) -> None:
        """The job is not needed any more."""
        self._waiting.pop(job, None)
        self.shared.cancel(job)

    def withdraw(self) -> None:
        """Nothing of this run is done on the way any more; a batched training can still be asked for."""
        for job in self._waiting:
            if not job.done:
                self.shared.cancel(job)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """Metrics of a global model, here and now."""
        return self.shared.evaluate(model)

    def report(self) -> dict[str, float]:
        """Figures about how the work was done, for all runs together."""
        return self.shared.report()

    def close(self) -> None:
        """The executor belongs to all its runs: `Executors` closes it."""


class Executors:
    """The executors of one process."""

    def __init__(self, task_spec: str, *, alone: bool = True) -> None:
        """`alone` where no other process of the comparison runs beside this one."""
        self.task_spec, self.alone, self._seeded = task_spec, alone, takes_seed(task_spec)
        self._made: dict[tuple[Any, ...], Executor] = {}

    def lend(self, settings: Settings) -> Borrowed:
        """The executor for a run of these settings; made, with its task, where it is the first."""
        seed = settings.seed if self._seeded else None
        key = (seed, *(getattr(settings, name) for name in (*OF_TASK, *OF_EXECUTOR)))
        if key not in self._made:
            self._made[key] = self._make(settings)
        return Borrowed(self._made[key])

    def _make(self, settings: Settings) -> Executor:
        """A run chooses its executor; this one is only built to choose. With others beside it, no core is free."""
        executor = Simulation(load(self.task_spec, settings), settings).executor
        if settings.executor == "auto" and isinstance(executor, Processes) and not self.alone:
            executor.close()
            return Inline(executor.task)
        if isinstance(executor, Compiled) and not self.alone:
            executor.threads = 1
        return executor

    def keep(self, used: Iterable[Borrowed]) -> None:
        """Close all others."""
        shared = {id(borrowed.shared) for borrowed in used}
        for key, executor in [*self._made.items()]:
            if id(executor) not in shared:
                del self._made[key]
                executor.close()

    def close(self) -> None:
        """End processes and threads."""
        self.keep(())
