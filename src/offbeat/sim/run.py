"""Owns one simulated run from its settings to its result: `Simulation` runs, `Run` is what came out.

Rules kept here:
- A run that has a folder leaves its ledger, metrics, model and summary there, and can be interrupted at any moment:
  begun again with the same settings it goes on from the last checkpoint and ends with the same bits.
- Wall time decides when a checkpoint is written and nothing else.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from offbeat.core.kernel import Updater
from offbeat.core.layout import Array, Model
from offbeat.core.rules import Rule
from offbeat.errors import InvalidValue, MissingExtra
from offbeat.hosting.loading import adapted, load
from offbeat.hosting.task_identity import identities, identity_of_object, names_in
from offbeat.method import method_of
from offbeat.protocol.messages import Decision, Evaluated
from offbeat.protocol.scheduler import GammaSchedule, Plateau
from offbeat.settings import Settings
from offbeat.sim.choose import ANYWHERE, Chosen, executor_of, wishes_of
from offbeat.sim.curve import CONTRIBUTION, CURVE, CurvePoint, CurveRecorder, write_contribution, write_curve
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import source_of, window_of
from offbeat.sim.executors import Executor, Pending
from offbeat.sim.plane import Plane, Replayed
from offbeat.storage.model_file import load_models, save_models
from offbeat.storage.rows import as_arrival
from offbeat.storage.run_folder import RunFolder
from offbeat.task import Task, evaluate, start_with_frozen

CHECKPOINT_EVERY_S = 30.0
EVENTS_AT_ONCE = 5_000
"""Events after which `advance` returns though no training is needed: the run may be asked to stop."""
BYTES_PER_FLOAT = 4
RESULTS = (
    *("t", "epochs", "applied", "gradients", "virtual_s", "wall_s", "staleness_mean", "staleness_largest"),
    *("x_sha256", "bytes_down", "bytes_up", "ended", "executor", "lanes_mean", "programs", "processes"),
    *("actors", "redone", "dir", "task", "settings"),
)
"""What a summary says; a task's metrics must have other names."""


class StopRequested(Exception):
    """Raised by what watches a run, to stop it where it stands."""


@dataclass
class Run:
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
        plots().run(Path(path), self)


def plots() -> ModuleType:
    """`offbeat.plots`, imported by name: pictures are an extra, and a layer above."""
    try:
        return import_module("offbeat.plots")
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "plots") from error


def _known_as(task: Task, x_0: Model, frozen: Mapping[str, Array]) -> tuple[str, ...]:
    """The names of a task: of its file, or of the object where there is none."""
    own = identities(task)
    return own if hasattr(task, "identity") else (identity_of_object(task, x_0, frozen), *own)


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
        accept_changed_task: bool = False,
    ) -> None:
        """`executor` may be shared with other runs of the same task; then it is not closed here.

        `rule` and `gamma` take the place of what the settings name. `accept_changed_task` resumes a run whose task is
        not the one that it began with.
        """
        self.task, self.method = task, method_of(settings, task, rule, gamma, window_of(settings))
        self.rule, self.plan = self.method.rule, self.method.plan
        self.x_0, frozen = start_with_frozen(task, settings.seed)
        known_as = identities(task) if folder is None else _known_as(task, self.x_0, frozen)
        self.names = names_in(folder, known_as, accept_changed=accept_changed_task)
        model_bytes = self.x_0.layout.size * BYTES_PER_FLOAT
        self.source = source_of(task, settings, self.rule, self.method.devices, model_bytes, self.plan.epochs)
        self.shared = executor is not None
        self.executor, self.word = Chosen(executor) if executor else self._chosen(settings, folder)
        self.settings = replace(settings, executor=self.executor.name, devices=self.method.devices, **ANYWHERE)  # type: ignore[arg-type]
        self.begun, self._checkpointed = time.perf_counter(), time.monotonic()
        self.metrics_0 = evaluate(task, self.x_0)
        self._check_metrics()
        self.curve = CurveRecorder(model_bytes, keep_decisions=folder is None)
        self.coordinator = self.method.coordinator(self.source.available)
        self.plane = Plane(self.x_0, self.coordinator, self.executor, updater or Updater(), seed=settings.seed)
        self._open(folder)

    @classmethod
    def of(cls, task: Task | Path | str, settings: Settings, **options: Any) -> Self:
        task = str(task) if isinstance(task, Path) else task
        if not isinstance(task, str | Task):
            raise InvalidValue(
                f"{task!r} is no task: give a name, a path, or an object with initial, train and evaluate"
            )
        return cls(load(task, settings) if isinstance(task, str) else adapted(task, settings), settings, **options)

    # --- running -----------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
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
        """Run to the end; `on_progress` may raise `StopRequested`, and the run can go on later from where it stands."""
        try:
            while not self.finished:
                self.executor.finish(self.advance())
                on_progress(self)
            return self.result()
        except StopRequested:
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

    def _chosen(self, settings: Settings, folder: Path | None) -> Chosen:
        recorded = RunFolder.recorded(folder, "executor") if folder and settings.executor == "auto" else None
        asked = recorded or settings.executor
        return executor_of(
            self.task,
            asked,
            parameters=self.x_0.layout.size,
            in_flight_max=self.plan.in_flight_max,
            wishes=wishes_of(settings, asked),
        )

    def _open(self, folder: Path | None) -> None:
        """Begin the run in its folder, if it has one, or go on from the checkpoint that is there."""
        recorded = {"task": self.names.recorded, **self.settings.as_dict()}
        self.folder = RunFolder.begin(folder, recorded) if folder is not None else None
        try:
            self.ledger = self.folder.ledger() if self.folder else None
            self.engine = self._resumed() or self._started()
            self._accept_task()
        except BaseException:
            self.close()
            raise

    def _accept_task(self) -> None:
        """Record that the run goes on with a changed task; a checkpoint keeps the record where the run is cut again."""
        if self.names.changed and self.ledger:
            c = self.coordinator
            self.ledger.record_task_accepted(c.at, c.t, self.names.now)
            self.checkpoint()

    def _started(self) -> Engine:
        if self.ledger:
            self.ledger.truncate_after(0)
            self.curve.rows = self.ledger.record
        engine = Engine(self.coordinator, self.source, self.plane, self.curve.record, mix_s=self.settings.mix_s)
        engine.feed(Evaluated(0.0, 0, self.metrics_0))
        return engine

    def _resumed(self) -> Engine | None:
        if not self.folder or not self.ledger or not self.folder.checkpoint_path.exists():
            return None
        models, metadata = load_models(self.folder.checkpoint_path, self.x_0.layout)
        self.ledger.truncate_after(int(metadata["mark"]))
        evaluations = iter(self.ledger.evaluations())
        replayed = Replayed(iter([as_arrival(row) for row in self.ledger.rows("arrived")]), evaluations)
        engine = Engine(self.coordinator, self.source, replayed, self.curve.record, mix_s=self.settings.mix_s)
        engine.feed(next(evaluations))
        engine.advance(handled_max=int(metadata["handled"]))
        self.plane.restore(models, replayed.leased.values(), replayed.started.values(), replayed.evaluated)
        engine.plane, self.curve.rows = self.plane, self.ledger.record
        self.begun -= float(metadata["wall_s"])
        return engine

    def _check_metrics(self) -> None:
        """Nothing may wait for a metric that will never come, or have the name of a result."""
        known = ", ".join(self.metrics_0) or "none: it has no test data"
        target, gamma = self.plan.target, self.method.scheduler.gamma
        if target and target.metric not in self.metrics_0:
            raise InvalidValue(f"target is {target} but the task's metrics are {known}; the run would never end")
        if isinstance(gamma, Plateau) and gamma.metric not in self.metrics_0:
            raise InvalidValue(f"gamma_schedule looks at {gamma.metric!r} but the task's metrics are {known}")
        for name in RESULTS:
            if name in self.metrics_0:
                raise InvalidValue(f"the task calls a metric {name!r}, which is the name of a result; rename it")

    def checkpoint(self) -> None:
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
            "ended": c.end_reason or "nothing was left to happen",
            "executor": self.executor.name,
            **self.executor.report(),
            "dir": str(self.folder.path) if self.folder else None,
            "task": self.names.now,
            "settings": self.settings.as_dict(),
        }
