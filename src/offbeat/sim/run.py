"""Owns one simulated run from its settings to its result: `Simulation` runs, `Run` is what came out.

Rules kept here:
- A run that has a folder leaves its ledger, metrics, model and summary there, and can be interrupted at any moment:
  begun again with the same settings it goes on from the last checkpoint and ends with the same bits.
- Wall time decides when a checkpoint is written and nothing else.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from offbeat import method
from offbeat.core.kernel import Updater
from offbeat.core.layout import Model
from offbeat.core.rules import Rule
from offbeat.errors import InvalidValue, MissingExtra
from offbeat.loading import adapted, identity, load
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Decision, Evaluated
from offbeat.protocol.scheduler import GammaSchedule, Scheduler
from offbeat.protocol.schedules import Plateau
from offbeat.settings import Settings
from offbeat.sim import choose
from offbeat.sim.curve import CONTRIBUTION, CURVE, CurvePoint, CurveRecorder, write_contribution, write_curve
from offbeat.sim.engine import Engine
from offbeat.sim.executors import Executor, Pending
from offbeat.sim.plane import Plane
from offbeat.sim.replay import Replayed
from offbeat.storage.ledger import Ledger
from offbeat.storage.model_file import load_models, save_models
from offbeat.storage.rows import as_arrival
from offbeat.storage.run_folder import RunFolder
from offbeat.task import Task, start

CHECKPOINT_EVERY_S = 30.0
EVENTS_AT_ONCE = 5_000
"""Events after which a run that needs no training still lets others have a look: it may be asked to stop."""
BYTES_PER_FLOAT = 4
RESULTS = (
    *("t", "epochs", "applied", "gradients", "virtual_s", "wall_s", "staleness_mean", "staleness_largest"),
    *("x_sha256", "bytes_down", "bytes_up", "ended", "executor", "lanes_mean", "programs", "processes"),
    *("actors", "redone", "dir", "task", "settings"),
)
"""What a summary says; a task's metrics must have other names."""


class Stop(Exception):
    """Raised by whoever watches a run, to stop it where it stands."""


@dataclass
class Run:
    """What came out of a run."""

    summary: dict[str, Any]
    x: Model = field(repr=False)
    contribution: dict[int, tuple[float, float]] = field(repr=False)
    """Per device, the sum of alpha_t of its updates, and what of that survives in x."""
    metrics: list[CurvePoint] = field(repr=False)
    folder: Path | None = None
    decisions: list[Decision] | None = field(default=None, repr=False)
    """Kept here only where there is no folder to read them from."""

    @cached_property
    def ledger(self) -> list[Decision]:
        """Every decision that was applied, in order."""
        if self.decisions is not None or self.folder is None:
            return self.decisions or []
        with RunFolder.open(self.folder).ledger() as ledger:
            return [decision for decision in ledger.decisions() if decision.mix]

    def plot(self, path: str | Path) -> None:
        """Draw metric and staleness to a file; its ending says the format (png, svg, pdf)."""
        try:
            plots = import_module("offbeat.plots")  # by name: pictures are an extra, and a layer above
        except ModuleNotFoundError as error:
            raise MissingExtra(str(error.name), "plots") from error
        plots.run(Path(path), self)


class Simulation:
    """One run under way; `advance` it and do what it asks for, until it is finished."""

    def __init__(
        self,
        task: Task,
        settings: Settings,
        executor: Executor | None = None,
        *,
        rule: Rule | None = None,
        gamma: GammaSchedule | None = None,
        folder: Path | None = None,
        updater: Updater | None = None,
    ) -> None:
        """`executor` may be shared with other runs of the same task, and is then closed by whoever shares it.

        `rule` and `gamma` take the place of what the settings name.
        """
        self.task, self.rule = task, rule or method.rule_of(settings)
        devices = method.devices_of(task, settings)
        self.plan = method.plan_of(settings, self.rule, devices, choose.window_of(settings))
        scheduler = method.scheduler_of(task, settings, self.rule, devices, gamma)
        self.x_0 = start(task, settings.seed)
        size = self.x_0.layout.size
        self.source = choose.source_of(task, settings, self.rule, devices, size * BYTES_PER_FLOAT, self.plan.epochs)
        self.shared = executor is not None
        self.executor, self.word = choose.Chosen(executor) if executor else self._chosen(settings, folder)
        self.settings = replace(settings, executor=self.executor.name, devices=devices, **choose.ANYWHERE)  # type: ignore[arg-type]
        self.updater = updater or Updater()
        self.curve = CurveRecorder(size * BYTES_PER_FLOAT, keep_decisions=folder is None)
        self.begun = time.perf_counter()
        self.coordinator = Coordinator(
            self.rule, self.plan, scheduler, seed=settings.seed, available=self.source.available
        )
        self.metrics_0 = self.executor.evaluate(self.x_0)
        self._check_metrics(scheduler)
        recorded = {"task": identity(task), **self.settings.as_dict()}
        self.folder = RunFolder.begin(folder, recorded) if folder is not None else None
        self.ledger: Ledger | None = self.folder.ledger() if self.folder else None
        self._checkpointed = time.monotonic()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, task: Task | Path | str, settings: Settings, **options: Any) -> Self:
        """A run of a task given by name, by file or as an object."""
        task = str(task) if isinstance(task, Path) else task
        if not isinstance(task, str | Task):
            raise InvalidValue(
                f"{task!r} is no task: give a name, a path, or an object with initial, train and evaluate"
            )
        return cls(load(task, settings) if isinstance(task, str) else adapted(task, settings), settings, **options)

    # --- running -----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Is there nothing left to do?"""
        return self.engine.finished

    def share(self) -> float:
        """How much of the run is done, as far as its end is known: between 0 and 1."""
        c, plan = self.coordinator, self.plan
        ways = (c.t / plan.epochs if plan.epochs else 0.0, c.gradients / plan.gradients if plan.gradients else 0.0)
        return min(1.0, max(*ways, c.at / plan.until_s))

    def advance(self) -> list[Pending]:
        """Go on; returns what must be done before the next call."""
        jobs = self.engine.advance(handled_max=self.engine.handled + EVENTS_AT_ONCE)
        if self.folder and not self.finished and time.monotonic() - self._checkpointed > CHECKPOINT_EVERY_S:
            self.checkpoint()
        return jobs

    def run(self, on_progress: Callable[["Simulation"], None] = lambda _: None) -> Run:
        """Run to the end; `on_progress` may raise `Stop`, and the run can go on later from where it stands."""
        try:
            while not self.finished:
                self.executor.finish(self.advance())
                on_progress(self)
            return self.result()
        except Stop:
            self.checkpoint()
            raise
        finally:
            self.close()
            if not self.shared:
                self.executor.close()

    def result(self) -> Run:
        """What came out; written to the run's folder, if it has one."""
        counted = self.coordinator.contribution
        surviving = counted.surviving()
        contribution = {device: (mass, surviving.get(device, 0.0)) for device, mass in sorted(counted.mass.items())}
        path = self.folder.path if self.folder else None
        run = Run(self._summary(), self.plane.x, contribution, self.curve.points, path, self.curve.decisions)
        if self.folder and self.ledger:
            self.ledger.flush()
            write_curve(self.folder.path / CURVE, run.metrics)
            write_contribution(self.folder.path / CONTRIBUTION, run.contribution)
            self.folder.finish(run.summary, run.x)
        return run

    def close(self) -> None:
        """Close the run's files; an unfinished run can be begun again."""
        if self.folder:
            self.folder.close()

    # --- beginning, and beginning again ------------------------------------------------------------------------------

    def _chosen(self, settings: Settings, folder: Path | None) -> choose.Chosen:
        recorded = RunFolder.recorded(folder, "executor") if folder and settings.executor == "auto" else None
        asked = recorded or settings.executor
        return choose.executor_of(
            self.task,
            asked,
            parameters=self.x_0.layout.size,
            in_flight_max=self.plan.in_flight_max,
            wishes=choose.wishes_of(settings, asked),
        )

    def _begin(self) -> None:
        self.plane = Plane(self.x_0, self.coordinator, self.executor, self.updater, seed=self.settings.seed)
        if self.folder and self.ledger and self.folder.checkpoint_path.exists():
            self._resume(self.folder, self.ledger)
            return
        if self.ledger:
            self.ledger.truncate_after(0)
            self.curve.rows = self.ledger.record
        self.engine = Engine(self.coordinator, self.source, self.plane, self.curve.record, mix_s=self.settings.mix_s)
        self.engine.feed(Evaluated(0.0, 0, self.metrics_0))

    def _check_metrics(self, scheduler: Scheduler) -> None:
        """Nothing may wait for a metric that will never come, or have the name of a result."""
        known = ", ".join(self.metrics_0) or "none: it has no test data"
        target, gamma = self.plan.target, scheduler.gamma
        if target and target.metric not in self.metrics_0:
            raise InvalidValue(f"target is {target} but the task's metrics are {known}; the run would never end")
        if isinstance(gamma, Plateau) and gamma.metric not in self.metrics_0:
            raise InvalidValue(f"gamma_schedule looks at {gamma.metric!r} but the task's metrics are {known}")
        for name in RESULTS:
            if name in self.metrics_0:
                raise InvalidValue(f"the task calls a metric {name!r}, which is the name of a result; rename it")

    def _resume(self, folder: RunFolder, ledger: Ledger) -> None:
        models, metadata = load_models(folder.checkpoint_path, self.x_0.layout)
        ledger.truncate_after(int(metadata["mark"]))
        evaluations = iter(ledger.evaluations())
        replayed = Replayed(iter([as_arrival(row) for row in ledger.rows("arrived")]), evaluations)
        self.engine = Engine(self.coordinator, self.source, replayed, self.curve.record, mix_s=self.settings.mix_s)
        self.engine.feed(next(evaluations))
        self.engine.advance(handled_max=int(metadata["handled"]))
        self.plane.restore(models, replayed.leased.values(), replayed.started.values(), replayed.evaluated)
        self.engine.plane, self.curve.rows = self.plane, ledger.record
        self.begun -= float(metadata["wall_s"])

    def checkpoint(self) -> None:
        """Write down where the run stands."""
        if not self.folder or not self.ledger:
            return
        self.ledger.flush()
        metadata = {"mark": self.ledger.mark(), "handled": self.engine.handled, "wall_s": self.wall_s()}
        text = {name: str(value) for name, value in metadata.items()}
        save_models(self.folder.checkpoint_path, self.plane.models(), text)
        self._checkpointed = time.monotonic()

    # --- the summary -------------------------------------------------------------------------------------------------

    def wall_s(self) -> float:
        """Seconds that the run has taken, those before an interruption included."""
        return time.perf_counter() - self.begun

    def _summary(self) -> dict[str, Any]:
        c, fold = self.coordinator, self.curve.fold
        newest = c.evaluations[-1].metrics if c.evaluations else {}
        return {
            "t": c.t,
            "epochs": self.plan.epochs,
            "applied": c.applied,
            "gradients": c.gradients,
            "virtual_s": c.at,
            "wall_s": round(self.wall_s(), 3),
            "staleness_mean": fold.staleness_mean,
            "staleness_largest": fold.staleness_largest,
            **newest,
            "x_sha256": hashlib.sha256(self.plane.x.vector.tobytes()).hexdigest(),
            "bytes_down": self.curve.sent * self.curve.model_bytes,
            "bytes_up": self.curve.arrived * self.curve.model_bytes,
            "ended": c.ending or "nothing was left to happen",
            "executor": self.executor.name,
            **self.executor.report(),
            "dir": str(self.folder.path) if self.folder else None,
            "task": identity(self.task),
            "settings": self.settings.as_dict(),
        }
