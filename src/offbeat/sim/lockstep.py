"""Owns the runs of one process: a share of a comparison's runs, in lockstep.

Rules kept here:
- All runs under way go on as far as they can, then the trainings that they need are done together. No run changes its
  schedule for that.
- Where trainings are batched, at most OPEN_MAX runs are under way, for each holds files open. Elsewhere nothing is
  gained by that, and one run is finished before the next begins.
- A run that fails is noted and the others go on. One that is stopped leaves a checkpoint.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import MissingExtra
from offbeat.hosting.loading import described
from offbeat.sim.choose import ExecutorPool
from offbeat.sim.executors import Pending, Together
from offbeat.sim.run import Simulation, StopRequested, plots
from offbeat.sim.spec import ComparedRun
from offbeat.storage.run_folder import PICTURE, RunFolder

OPEN_MAX = 64

Tell = Callable[[float], None]


class Failure(NamedTuple):
    method: str
    seed: int
    message: str


class UnderWay(NamedTuple):
    entry: ComparedRun
    simulation: Simulation

    @property
    def together(self) -> bool:
        """Are its trainings done together with those of other runs, so that an error may be any run's?"""
        return isinstance(self.simulation.executor, Together)


def run_share(
    executors: ExecutorPool,
    entries: Sequence[ComparedRun],
    tell: Tell = lambda _far: None,
    *,
    pictures: bool = False,
) -> list[Failure]:
    """Run these and return what failed; `tell` hears how many are done, and may raise `StopRequested`.

    The executors are closed at the end.
    """
    return Share(executors, entries, tell, pictures=pictures).run()


class Share:
    def __init__(self, executors: ExecutorPool, entries: Sequence[ComparedRun], tell: Tell, *, pictures: bool) -> None:
        self.failures: list[Failure] = []
        self._tell, self._executors, self._pictures = tell, executors, pictures
        self._waiting, self._count = deque(entries), len(entries)
        self._running: list[UnderWay] = []
        self._far = 0.0

    def run(self) -> list[Failure]:
        try:
            while self._waiting or self._running:
                self._turn()
        except StopRequested:
            for run in self._running:
                with suppress(Exception):  # an older checkpoint, or none, is good enough to go on from
                    run.simulation.checkpoint()
            raise
        finally:
            for run in [*self._running]:
                self._drop(run)
            self._executors.close()
        return self.failures

    def _turn(self) -> None:
        self._begin_some()
        needed = [(run, job) for run in self._running for job in self._advanced(run)]
        for run, job in needed:
            if not job.done:  # else it was done with another's
                self._do(run, job)
                self._tell(self._far)
        for run in [run for run in self._running if run.simulation.finished]:
            self._end(run)
        under_way = sum(run.simulation.share() for run in self._running)
        self._far = self._count - len(self._waiting) - len(self._running) + under_way
        self._tell(self._far)

    # --- one run -----------------------------------------------------------------------------------------------------

    def _begin_some(self) -> None:
        while self._waiting and len(self._running) < self._room():
            entry = self._waiting.popleft()
            try:
                self._running.append(self._begun(entry))
            except Exception as error:
                self._note(entry, error)
            self._tell(self._far)
        self._executors.keep(run.simulation.executor for run in self._running)

    def _room(self) -> int:
        """How many may be under way: several, if those that are share a tensor program."""
        return OPEN_MAX if all(run.together for run in self._running) else 1

    def _begun(self, entry: ComparedRun) -> UnderWay:
        recorded = RunFolder.recorded(entry.folder, "executor") if entry.settings.executor == "auto" else None
        settings = replace(entry.settings, executor=recorded) if recorded else entry.settings
        executor = self._executors.lend(settings)
        return UnderWay(entry, Simulation(executor.task, settings, executor, folder=entry.folder, extensible=False))

    def _advanced(self, run: UnderWay) -> list[Pending]:
        try:
            return run.simulation.advance()
        except Exception as error:
            self._fail(run, error)
            return []

    def _do(self, run: UnderWay, job: Pending) -> None:
        """Do the training or evaluation that a run waits for; what others wait for may be done with it."""
        try:
            run.simulation.executor.finish([job])
        except Exception as error:
            if run.together:
                self._do_alone(run, job)
            else:
                self._fail(run, error)

    def _do_alone(self, run: UnderWay, job: Pending) -> None:
        """A batch failed, and any run in it may be to blame: nothing waits any more, and this job is done alone."""
        for other in self._running:
            if other.simulation.executor is run.simulation.executor:
                other.simulation.plane.cancel_trainings()
        try:
            run.simulation.executor.finish([job])
        except Exception as error:
            self._fail(run, error)

    def _end(self, run: UnderWay) -> None:
        try:
            run.simulation.result()
            self._drop(run)
            if self._pictures:
                draw(run.entry.folder)
        except Exception as error:
            self._fail(run, error)

    def _fail(self, run: UnderWay, error: Exception) -> None:
        self._note(run.entry, error)
        self._drop(run)

    def _note(self, entry: ComparedRun, error: Exception) -> None:
        self.failures.append(Failure(entry.method, entry.seed, described(error, self._executors.task_spec)))

    def _drop(self, run: UnderWay) -> None:
        self._running = [other for other in self._running if other is not run]
        run.simulation.plane.cancel_trainings()
        with suppress(Exception):  # what failed before may fail again when it is closed
            run.simulation.close()


def draw(folder: Path) -> bool:
    """Draw a finished run, where that has not been done; False where matplotlib is not installed."""
    if (folder / PICTURE).exists():
        return True
    try:
        plots().run_folder(folder)
    except MissingExtra:
        return False
    return True
