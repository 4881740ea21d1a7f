"""Owns comparisons: everything is checked, what has not been run is run over all cores, and the runs are summed up.

Rules kept here:
- Every run has its folder, so an interrupted comparison goes on where it was, and finished runs are not run again.
- What is wrong for all runs of a method is found before the first begins, and before anything is written.
- Runs that fail do not keep the others from finishing; which failed, and why, is said at the end.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple, Self

from offbeat.core.rules import AVERAGED
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.loading import described
from offbeat.hosting.task_identity import identities
from offbeat.sim.backends import Backend
from offbeat.sim.choose import ANYWHERE, CarriedTasks, ExecutorPool
from offbeat.sim.curve import CURVE, CurvePoint, read_curve
from offbeat.sim.lockstep import Failure, draw
from offbeat.sim.run import Simulation, plots
from offbeat.sim.spec import ComparedRun, Spec
from offbeat.storage.json_file import plain, read_json
from offbeat.storage.lock import Lock
from offbeat.storage.run_folder import LOCK, SETTINGS, SUMMARY, RunFolder

NAMED_MAX = 3
"""Reasons that the error gives, and runs that it names for each."""


def compare(
    spec: Spec | Path | str,
    folder: Path | str,
    *,
    processes: int | None = None,
    on: Literal["here", "ray"] = "here",
    ray_address: str | None = None,
    pictures: bool = True,
    on_progress: Callable[[float, int], None] = lambda *_: None,
) -> "Comparison":
    """Run what has not been run, over all cores, and sum it up; `spec` may be the path of its file.

    `on` is here or ray, for the cluster at `ray_address`. `pictures` draws every run. Progress is told in runs done, of
    all runs; `on_progress` may raise `StopRequested`.
    """
    spec, folder = spec if isinstance(spec, Spec) else Spec.read(spec), Path(folder)
    entries = spec.entries(folder)
    if (folder / SETTINGS).exists():
        raise InvalidValue(f"{folder} is the folder of a run; choose another --dir for the comparison")
    task = identities(spec.task)
    waiting = [entry for entry in entries if not _is_done(entry, task)]
    done = len(entries) - len(waiting)
    place = Backend(on, processes, ray_address)
    place.check(entries)
    on_progress(done, len(entries))
    if waiting:
        carried = check(spec, waiting)
        with _writing(folder):
            failures = place.run(
                spec.task,
                waiting,
                lambda far: on_progress(done + far, len(entries)),
                carried=carried,
                pictures=pictures,
            )
        _refuse_failed(failures, len(entries))
    if pictures:
        for entry in entries:
            draw(entry.folder)
    on_progress(len(entries), len(entries))
    return Comparison.read(spec, folder)


def check(spec: Spec, entries: Sequence[ComparedRun]) -> CarriedTasks:
    """Build one run of every method, without a folder: what is wrong with it is said in one line.

    Returns the tasks that other processes need not load again.
    """
    executors, first = ExecutorPool(spec.task), dict[str, ComparedRun]()
    for entry in entries:
        first.setdefault(entry.method, entry)
    try:
        for entry in first.values():
            try:
                executor = executors.lend(entry.settings)
                measured = Simulation(executor.task, entry.settings, executor).metrics_0
            except Exception as error:
                raise InvalidValue(f"method {entry.method!r}: {described(error, spec.task)}") from error
            refuse_unknown_metric(spec, entry.method, measured)
        return executors.carry(entry.settings for entry in entries)
    finally:
        executors.close()


def _is_done(entry: ComparedRun, task: Sequence[str]) -> bool:
    """Finished, and with these settings; with others the folder must not be used."""
    if not (entry.folder / SETTINGS).exists():
        return False
    there = RunFolder.open(entry.folder).settings
    if there.get("task") not in task:
        raise InvalidValue(
            f"{entry.folder} holds a run of task {there.get('task')}, not {task[0]}; choose another --dir"
        )
    for name, value in plain(entry.settings.as_dict()).items():
        if not _filled_in(name, value, entry) and there.get(name) != value:
            raise InvalidValue(
                f"{entry.folder} holds a run with {name} = {there.get(name)!r}, not {value!r}; choose another --dir"
            )
    return (entry.folder / SUMMARY).exists()


def _filled_in(name: str, value: object, entry: ComparedRun) -> bool:
    """Does a run write down something else than it was told? Which executor it was makes no other run of it."""
    return name in ("executor", *ANYWHERE) or (name == "devices" and (value is None or entry.settings.on_one_machine))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make the folder; one comparison at a time writes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(folder / LOCK)
    except OSError as error:
        raise OffbeatError(f"cannot write to {folder}: {error.strerror}; choose another folder with --dir") from error
    try:
        yield
    finally:
        lock.release()


def _refuse_failed(failures: Sequence[Failure], count: int) -> None:
    if not failures:
        return
    reasons: dict[str, list[str]] = {}
    for failure in failures:
        reasons.setdefault(failure.message, []).append(f"{failure.method} (seed {failure.seed})")
    told = [f"{_some(runs, ', ')}: {reason}" for reason, runs in reasons.items()]
    raise OffbeatError(
        f"{len(failures)} of {count} runs failed: {_some(told, '; ')}. "
        "The finished ones are kept; the same command takes up what is missing"
    )


def _some(what: Sequence[str], between: str) -> str:
    more = f" and {len(what) - NAMED_MAX} more" if len(what) > NAMED_MAX else ""
    return between.join(what[:NAMED_MAX]) + more


# --- what a comparison shows -----------------------------------------------------------------------------------------


class ComparisonRow(NamedTuple):
    """One method, summed up over the seeds: mean and sample standard deviation."""

    method: str
    seeds: int
    metric: float
    metric_spread: float
    reached_s: float | None
    """Mean virtual time at which the reference's final metric was reached, over the seeds that reached it."""
    reached_spread: float
    reached_by: int
    t: float
    gradients: float
    virtual_s: float
    bytes: float
    staleness: float
    lanes_mean: float | None
    """Trainings per batch, where they were batched."""
    failed: int
    """Runs that diverged, stood still, or had all their updates refused."""
    average: float | None = None
    """The metric of the averaged model, where the method keeps one."""
    average_spread: float = math.nan


@dataclass
class Comparison:
    spec: Spec
    curves: dict[str, list[list[CurvePoint]]]
    summaries: dict[str, list[dict[str, Any]]]

    @classmethod
    def read(cls, spec: Spec, folder: Path) -> Self:
        curves: dict[str, list[list[CurvePoint]]] = {name: [] for name in spec.methods}
        summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in spec.methods}
        for entry in spec.entries(folder):
            curve = read_curve(entry.folder / CURVE)
            refuse_unknown_metric(spec, entry.method, curve[-1].metrics)
            curves[entry.method].append(curve)
            summaries[entry.method].append(read_json(entry.folder / SUMMARY))
        return cls(spec, curves, summaries)

    def rows(self) -> list[ComparisonRow]:
        return [self._row(name) for name in self.spec.methods]

    @property
    def table(self) -> str:
        rows, reach = self.rows(), self.spec.reach
        columns = {"method": [row.method for row in rows], "seeds": [str(row.seeds) for row in rows]}
        columns[self.spec.metric] = [_with_spread(row.metric, row.metric_spread, 4) for row in rows]
        if any(row.average is not None for row in rows):
            averages = ["" if row.average is None else _with_spread(row.average, row.average_spread, 4) for row in rows]
            columns[self.spec.metric + AVERAGED] = averages
        if reach is not None:
            columns[f"{reach}'s final {self.spec.metric} after"] = [_reached_text(row) for row in rows]
        columns |= {
            "epochs": [f"{row.t:,.0f}" for row in rows],
            "gradients": [f"{row.gradients:,.0f}" for row in rows],
            "virtual s": [f"{row.virtual_s:,.1f}" for row in rows],
            "MB": [f"{row.bytes / 1e6:,.1f}" for row in rows],
            "staleness": [f"{row.staleness:.1f}" for row in rows],
        }
        if any(row.lanes_mean is not None for row in rows):
            columns["lanes"] = ["" if row.lanes_mean is None else f"{row.lanes_mean:.1f}" for row in rows]
        if any(row.failed for row in rows):
            columns["failed"] = [str(row.failed) if row.failed else "" for row in rows]
        return _aligned(columns)

    def plot(self, folder: Path | str) -> list[Path]:
        """Draw the metric against virtual time, epochs, gradients and bytes; returns the files."""
        files: list[Path] = plots().comparison(Path(folder), self)
        return files

    def _row(self, name: str) -> ComparisonRow:
        summaries = self.summaries[name]
        finals = [curve[-1].metrics[self.spec.metric] for curve in self.curves[name]]
        averages = [curve[-1].metrics.get(self.spec.metric + AVERAGED) for curve in self.curves[name]]
        known = [value for value in averages if value is not None]
        reached = [at for at in self._reached(name) if at is not None]
        lanes = [summary["lanes_mean"] for summary in summaries if "lanes_mean" in summary]
        return ComparisonRow(
            name,
            len(summaries),
            mean(finals),
            spread_of(finals),
            mean(reached) if reached else None,
            spread_of(reached),
            len(reached),
            t=mean(summary["t"] for summary in summaries),
            gradients=mean(summary["gradients"] for summary in summaries),
            virtual_s=mean(summary["virtual_s"] for summary in summaries),
            bytes=mean(summary["bytes_down"] + summary["bytes_up"] for summary in summaries),
            staleness=mean(summary["staleness_mean"] for summary in summaries),
            lanes_mean=mean(lanes) if lanes else None,
            failed=sum(bool(summary.get("failed")) for summary in summaries),
            average=mean(known) if known else None,
            average_spread=spread_of(known),
        )

    def _reached(self, name: str) -> Iterator[float | None]:
        """Per seed, when this method first had the final metric of the reference with the same seed."""
        against = self.spec.reference(name)
        if against is None:
            return
        for reference, curve in zip(self.curves[against], self.curves[name], strict=True):
            sign = -1 if self.spec.lower_is_better else 1
            goal = sign * reference[-1].metrics[self.spec.metric]
            yield next((p.at for p in curve if sign * p.metrics.get(self.spec.metric, math.nan) >= goal), None)


def refuse_unknown_metric(spec: Spec, method: str, measured: Mapping[str, float]) -> None:
    if spec.metric not in measured:
        raise InvalidValue(f"metric is {spec.metric!r} but {method} has {', '.join(measured) or 'none'}")


def spread_of(values: Sequence[float]) -> float:
    """The sample standard deviation; NaN where there is none: of one value, or where a run diverged.

    >>> spread_of([1.0, 3.0]), spread_of([1.0]), spread_of([1.0, float("inf")])
    (1.4142135623730951, nan, nan)
    """
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def _with_spread(value: float, spread: float, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if math.isnan(spread) else f" ± {spread:.{digits}f}")


def _reached_text(row: ComparisonRow) -> str:
    if row.reached_s is None:
        return "not reached"
    some = "" if row.reached_by == row.seeds else f" ({row.reached_by} of {row.seeds})"
    return f"{_with_spread(row.reached_s, row.reached_spread, 1)} s{some}"


def _aligned(columns: dict[str, list[str]]) -> str:
    """Columns side by side: the first to the left, numbers to the right."""
    widths = [max(len(cell) for cell in (heading, *cells)) for heading, cells in columns.items()]
    lines = [tuple(columns), *zip(*columns.values(), strict=True)]
    return "\n".join(
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))])
        for first, *rest in lines
    )
