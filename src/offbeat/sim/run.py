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
from offbeat.core.rules.average import refuse_averaged_names, with_average
from offbeat.core.vectors import Kept
from offbeat.errors import InvalidValue, MissingExtra
from offbeat.hosting.loading import adapted, load
from offbeat.hosting.task_identity import identities, identity_of_object, names_in
from offbeat.method import ends_of, method_of, unlike_one_long_run, until_stuck
from offbeat.protocol.ends import Ends, refuse_reached
from offbeat.protocol.messages import Decision
from offbeat.protocol.scheduler import GammaSchedule
from offbeat.protocol.wanted import evaluation_of
from offbeat.settings import Settings
from offbeat.sim.choose import ANYWHERE, Chosen, executor_of, wishes_of
from offbeat.sim.curve import CONTRIBUTION, CURVE, TABLES, CurvePoint, CurveRecorder, write_contribution, write_curve
from offbeat.sim.disk_caches import DiskCaches
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import source_of, window_of
from offbeat.sim.executors import Executor, Pending, evaluated_here
from offbeat.sim.extending import END_BYTES_MAX, extensions_in, is_extension, refuse_without_checkpoint, settings_begun
from offbeat.sim.plane import Plane, Replayed
from offbeat.sim.result_metrics import check_metrics, check_target, worst_devices
from offbeat.sim.run_checkpoint import RunCheckpoint
from offbeat.storage.backup_marker import fork_without_id
from offbeat.storage.rows import as_arrival, task_accepted_row
from offbeat.storage.run_folder import RunFolder
from offbeat.storage.vector_room import vector_room
from offbeat.task import StatefulTask, Task, start_with_frozen

CHECKPOINT_EVERY_S = 30.0
EVENTS_AT_ONCE = 5_000
"""Events after which `advance` returns though no training is needed: the run may be asked to stop."""
BYTES_PER_FLOAT = 4


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
    best: Model | None = field(default=None, repr=False)
    """The best version, where `keep_best` says by which metric."""
    average: Model | None = field(default=None, repr=False)
    """The averaged model up to the version in `x`, where there is one."""

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
        extensible: bool = True,
    ) -> None:
        """`executor` may be shared with other runs of the same task; then it is not closed here.

        `rule` and `gamma` take the place of what the settings name. `accept_changed_task` resumes a run whose task is
        not the one that it began with. Where it is `extensible`, a finished run keeps the models that are in flight at
        its end.
        """
        asked, settings = ends_of(settings), settings_begun(settings, folder)
        self.task, self.method = task, method_of(settings, task, rule, gamma, window_of(settings))
        self.method = until_stuck(self.method)
        self.rule, self.plan, self.extensible = self.method.rule, self.method.plan, extensible
        self.x_0, frozen = start_with_frozen(task, settings.seed)
        known_as = identities(task) if folder is None else _known_as(task, self.x_0, frozen)
        self.names = names_in(folder, known_as, accept_changed=accept_changed_task)
        model_bytes = self.x_0.layout.size * BYTES_PER_FLOAT
        self.source = source_of(task, settings, self.rule, self.method.devices, model_bytes, self.plan.epochs)
        self.shared = executor is not None
        self.executor, self.word = Chosen(executor) if executor else self._chosen(settings, folder)
        self.settings = replace(settings, executor=self.executor.name, devices=self.method.devices, **ANYWHERE)  # type: ignore[arg-type]
        self.begun, self._checkpointed = time.perf_counter(), time.monotonic()
        self.metrics_0 = evaluated_here(self.executor, self.x_0)
        if self.method.average is not None:
            refuse_averaged_names(self.metrics_0)
            self.metrics_0 = with_average(self.metrics_0, self.metrics_0)
        check_metrics(self.metrics_0, self.plan, self.method.scheduler, self.method.average)
        self.curve = CurveRecorder(model_bytes, keep_decisions=folder is None)
        self.coordinator = self.method.coordinator(self.source.available)
        size, average = self.x_0.layout.size, self.method.average
        self.room = vector_room(self.rule, average, self.method.devices, size, settings.device_cache, folder)
        self._disk_caches = DiskCaches(None) if self.room.caches and self.room.where == "disk" else None
        kept: Kept = self._disk_caches or (lambda _cache, vector: vector)
        needs = (self.x_0, self.coordinator, self.executor, updater or Updater())
        self.plane = Plane(*needs, seed=settings.seed, average=average, kept=kept)
        self._at_end: RunCheckpoint | None = None
        """Once the end is known: the checkpoint of the moment before it."""
        self.extension: list[str] = []
        """Where the run goes on to another end than before: what that means, in words."""
        self._open(folder, asked)

    @classmethod
    def of(cls, task: Task | StatefulTask | Path | str, settings: Settings, **options: Any) -> Self:
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
        c, plan = self.coordinator, self.coordinator.plan
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
        path, c = self.folder.path if self.folder else None, self.coordinator
        found = self.plane.version(c.result, c.t)
        x, mean = found or (self.plane.x, self.plane.mean)
        self._result_t = c.t if found is None else c.result
        kept = self.plane.version(c.outcome.best.t, c.t) if c.outcome.best else None
        best = None if kept is None else kept.x
        points, decisions = self.curve.points, self.curve.decisions
        run = Run(self._summary(x, mean), x, contribution, points, path, decisions, best, mean)
        if self.folder and self.ledger:
            self.ledger.flush()
            run.summary["ledger_head"] = self.ledger.head.hex()
            write_curve(self.folder.path / CURVE, run.metrics)
            write_contribution(self.folder.path / CONTRIBUTION, run.contribution)
            newest = None if run.x is self.plane.x else self.plane.x
            keeps = self._kept_for_extension()
            models = {"newest": newest, "best": best, "average": run.average}
            self.folder.finish(run.summary, run.x, **models, tables=TABLES, keep_checkpoint=keeps)
        return run

    def close(self) -> None:
        """Close the run's files; an unfinished run can be begun again."""
        if self.folder:
            self.folder.close()
        if self._disk_caches:
            self._disk_caches.close()

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

    def _open(self, folder: Path | None, asked: Ends) -> None:
        """Begin the run in its folder, if it has one, or go on from the checkpoint that is there."""
        recorded = {"task": self.names.recorded, **self.settings.as_dict()}
        reopen = folder is not None and is_extension(folder, self.settings, asked)
        self.folder = RunFolder.begin(folder, recorded, reopen=reopen) if folder is not None else None
        try:
            if self.folder and reopen:
                refuse_without_checkpoint(self.folder.path)
            self.ledger = self.folder.ledger() if self.folder else None
            if not self._resumed():
                self._started()
            self._accept_task()
            if asked != Ends.of(self.coordinator.plan):
                self._extend(asked)
            if self.folder and self.ledger:
                fork_without_id(self.folder.path, self.ledger, self.coordinator.at, self.checkpoint)
        except BaseException:
            self.close()
            raise

    def _accept_task(self) -> None:
        """Record that the run goes on with a changed task; a checkpoint keeps the record where the run is cut again."""
        if self.names.changed and self.ledger:
            c = self.coordinator
            self.ledger.add(task_accepted_row(c.at, c.t, self.names.now))
            self.checkpoint()

    def _started(self) -> None:
        if self.ledger:
            self.ledger.truncate_after(0)
            self.curve.rows = self.ledger.record
        self.engine = self._engine(self.plane)
        self.engine.on_end = self._note_end
        self.engine.evaluated(0, self.metrics_0)

    def _engine(self, plane: Plane | Replayed) -> Engine:
        return Engine(self.coordinator, self.source, plane, self.curve.record, mix_s=self.settings.mix_s)

    def _resumed(self) -> bool:
        """Go back to the checkpoint, if there is one. The ledger of a finished run stays whole until it is extended."""
        if not self.folder or not self.ledger or not self.folder.checkpoint_path.exists():
            return False
        checkpoint = RunCheckpoint.read(self.folder.checkpoint_path, self.x_0.layout)
        place = checkpoint.place
        self._mark = int(place["mark"])
        if self.folder.state != "finished":
            self.ledger.truncate_after(self._mark)
        evaluations = iter(self.ledger.evaluations())
        replayed = Replayed(iter([as_arrival(row) for row in self.ledger.rows("arrived")]), evaluations)
        self.engine = engine = self._engine(replayed)
        engine.evaluated(0, next(evaluations).metrics)
        for event in extensions_in(self.ledger, self._mark):
            engine.advance(handled_max=event.handled or 0)
            engine.extend(event)
        engine.advance(handled_max=int(place["handled"]))
        self.plane.restore(checkpoint.models, replayed, checkpoint.states)
        engine.plane, self.curve.rows, engine.on_end = self.plane, self.ledger.record, self._note_end
        self._at_end = checkpoint if engine.ending and "end" in place else None
        self.begun -= float(place["wall_s"])
        return True

    def _extend(self, asked: Ends) -> None:
        """Go on to other ends than before, after the moment at which the run ended or was interrupted."""
        c, folder, ledger = self.coordinator, self.folder, self.ledger
        summary = folder.summary if folder else None
        refuse_reached(c, asked, at=float(summary["virtual_s"]) if summary else c.at)
        check_target(asked.put_into(c.plan).target, self.metrics_0)
        if folder and ledger and summary:
            folder.take_back_results()
            ledger.truncate_after(self._mark)
        before = Ends.of(c.plan)
        self.engine.extend(asked.event(c.at, self.engine.handled))
        self._at_end = None
        self.checkpoint()
        self.extension = [f"Going on from epoch {c.t_decided} to {asked} (before: {before})."]
        told = unlike_one_long_run(self.settings, self.plan, self.rule, asked)
        if window_of(self.settings) is not None and before.epochs is not None:
            told.append(f"the first tasks after epoch {before.epochs} start from it: the versions before it are gone")
        self.extension += [f"Unlike in one long run, {what}." for what in told]

    def _note_end(self) -> None:
        """The end is known: what a longer run would go on from is here, and soon no more."""
        if self.folder and self.ledger:
            self._at_end = self._standing(end="1")

    def _kept_for_extension(self) -> bool:
        """Keep the checkpoint of the moment before the end, if there is one and it is not too large."""
        if self._at_end is None or not self.extensible or self._at_end.nbytes > END_BYTES_MAX:
            return False
        self.checkpoint()
        return True

    def checkpoint(self) -> None:
        if not self.folder or not self.ledger:
            return
        (self._at_end or self._standing()).write(self.folder.checkpoint_path)
        self._checkpointed = time.monotonic()

    def _standing(self, **more: str) -> RunCheckpoint:
        """The run as it stands, after the last row of its ledger, which is written, and so many events."""
        mark = self.ledger.mark() if self.ledger else 0
        place = {"mark": mark, "handled": self.engine.handled, "wall_s": self.wall_s(), **more}
        text = {name: str(value) for name, value in place.items()}
        return RunCheckpoint(self.plane.models(), self.plane.states(), text)

    # --- the summary -------------------------------------------------------------------------------------------------

    def wall_s(self) -> float:
        """Seconds that the run has taken, those before an interruption included."""
        return time.perf_counter() - self.begun

    def _stopped(self) -> str:
        """Why a run is over that came to no end of its own."""
        c = self.coordinator
        refused = f"; all {c.judge.decisions} updates were refused" if c.all_refused else ""
        return f"nothing was left to happen{refused}"

    def _summary(self, x: Model, mean: Model | None) -> dict[str, Any]:
        c, fold = self.coordinator, self.curve.fold
        shown = evaluation_of(c, self._result_t) or (c.evaluations[-1] if c.evaluations else None)
        best = (
            {"best_t": c.outcome.best.t, "best_value": c.outcome.best.metrics[self.plan.keep_best.metric]}
            if c.outcome.best and self.plan.keep_best
            else {}
        )
        return {
            "t": c.t,
            "epochs": c.plan.epochs,
            "applied": c.applied,
            "gradients": c.gradients,
            "virtual_s": c.at,
            "wall_s": round(self.wall_s(), 3),
            "staleness_mean": fold.staleness_mean,
            "staleness_largest": fold.staleness_largest,
            **(shown.metrics if shown else {}),
            **({} if self.settings.on_one_machine else worst_devices(self.executor.task, x, self.method.devices)),
            "result_t": self._result_t,
            **({} if mean is None else {"average_t": self._result_t}),
            **best,
            "x_sha256": hashlib.sha256(x.vector.tobytes()).hexdigest(),
            "bytes_down": self.curve.sent * self.curve.model_bytes,
            "bytes_up": self.curve.arrived * self.curve.model_bytes,
            "ended": c.end_reason or self._stopped(),
            "failed": c.outcome.failed or (not c.end_reason and c.all_refused),
            "executor": self.executor.name,
            **self.executor.report(),
            "dir": str(self.folder.path) if self.folder else None,
            "task": self.names.now,
            "settings": self.settings.as_dict(),
        }
