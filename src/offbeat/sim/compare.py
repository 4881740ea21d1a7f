"""Owns comparisons: methods x settings x seeds from one TOML file, run over all cores, summed up over the seeds.

Rules kept here:
- Every run has its folder, so an interrupted comparison goes on where it was, and finished runs are not run again.
- Runs that share a task advance in lockstep and fill the batches of one executor together; none changes its schedule.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, Self

from offbeat.errors import InvalidValue
from offbeat.loading import OVERRIDES, load, takes_seed
from offbeat.settings import Settings, read_toml
from offbeat.sim import choose
from offbeat.sim.executors import Executor, Job
from offbeat.sim.processes import cores
from offbeat.sim.run import CURVE, Point, Simulation, read_curve
from offbeat.storage.run_folder import RunFolder

KEYS = {"task", "seeds", "metric", "lower_is_better", "reach", "settings", "methods", "grid"}
SUMMARY = "summary.json"
PROGRESS_EVERY_S = 0.5


class Entry(NamedTuple):
    """One run of a comparison."""

    method: str
    seed: int
    settings: Settings
    folder: Path


@dataclass(frozen=True, slots=True)
class Spec:
    """What is compared."""

    task: str
    seeds: tuple[int, ...]
    methods: Mapping[str, Mapping[str, Any]]
    metric: str = "accuracy"
    reach: str | None = None
    """The method whose final metric the others' times are measured to."""
    lower_is_better: bool = False

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a TOML file; docs/simulation.md describes it."""
        text = read_toml(path)
        unknown = text.keys() - KEYS
        if unknown:
            raise InvalidValue(f"{path}: unknown key {sorted(unknown)[0]!r}; use {', '.join(sorted(KEYS))}")
        methods, seeds = text.get("methods"), text.get("seeds", [0])
        if not isinstance(methods, dict) or not all(isinstance(method, dict) for method in methods.values()):
            raise InvalidValue(f"{path} needs a table [methods.NAME] for every method, with its settings")
        if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) for seed in seeds):
            raise InvalidValue(f"{path}: seeds must be a list of whole numbers, such as [1, 2, 3]")
        common, grid = text.get("settings", {}), text.get("grid", {})
        spread = dict(_spread(methods, common, grid))
        rest = {key: text[key] for key in ("metric", "reach", "lower_is_better") if key in text}
        spec = cls(text.get("task", "digits"), tuple(seeds), spread, **rest)
        if spec.reach is not None and spec.reach not in spread:
            raise InvalidValue(f"{path}: reach is {spec.reach!r} but must be one of {', '.join(spread)}")
        for method in spread.values():
            choose.rule_of(Settings.of(method))
        return spec

    def entries(self, folder: Path) -> list[Entry]:
        """All runs, with their folders."""
        return [
            Entry(name, seed, Settings.of({**method, "seed": seed}), folder / _safe(name) / f"seed-{seed}")
            for name, method in self.methods.items()
            for seed in self.seeds
        ]


def _spread(
    methods: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method with every combination of the grid, and what they have in common."""
    for name, method in methods.items():
        for values in product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            label = " ".join([name, *(f"{key}={value}" for key, value in chosen.items())])
            yield label, {**common, **chosen, **method}


def _safe(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_.=" else "-" for letter in name)


def compare(
    spec: Spec,
    folder: Path,
    *,
    processes: int | None = None,
    on_progress: Callable[[float, int], None] = lambda *_: None,
) -> "Comparison":
    """Run what has not been run, over all cores, and sum it up; progress is told in runs done, of all runs."""
    entries = spec.entries(folder)
    waiting = [entry for entry in entries if not _is_done(entry)]
    done, count = len(entries) - len(waiting), processes or cores()
    on_progress(done, len(entries))
    shares = [share for i in range(count) if (share := waiting[i::count])]
    if len(shares) == 1:
        run_share(spec.task, shares[0], lambda under_way: on_progress(done + under_way, len(entries)))
    elif shares:
        _run_shares(spec.task, shares, lambda under_way: on_progress(done + under_way, len(entries)))
    on_progress(len(entries), len(entries))
    return Comparison.read(spec, folder)


def _run_shares(task_spec: str, shares: list[list[Entry]], tell: Callable[[float], None]) -> None:
    """Every share in a process of its own; they tell how far they are through a queue."""
    context = get_context("spawn")
    news = context.Queue()
    with ProcessPoolExecutor(len(shares), context, initializer=_listen, initargs=(news,)) as pool:
        waiting = {pool.submit(_run_here, task_spec, share, number) for number, share in enumerate(shares)}
        far = [0.0] * len(shares)
        while waiting:
            finished, waiting = wait(waiting, timeout=PROGRESS_EVERY_S, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
            while not news.empty():
                number, under_way = news.get()
                far[number] = under_way
            tell(sum(far))


_news: Any = None


def _listen(news: Any) -> None:
    """In a child: where to tell how far it is."""
    global _news
    _news = news


def _run_here(task_spec: str, entries: Sequence[Entry], number: int) -> None:
    """In a child: run a share, and tell about it now and then."""
    told = 0.0

    def tell(under_way: float) -> None:
        nonlocal told
        if time.monotonic() - told > PROGRESS_EVERY_S or under_way == len(entries):
            told = time.monotonic()
            _news.put((number, under_way))

    run_share(task_spec, entries, tell)


def run_share(
    task_spec: str, entries: Sequence[Entry], tell: Callable[[float], None] = lambda _under_way: None
) -> None:
    """Run these in lockstep: all go on as far as they can, then the trainings that they need are done together."""
    executors: dict[tuple[Any, ...], Executor] = {}
    running: list[Simulation] = []
    try:
        running.extend(_begun(task_spec, entry, executors) for entry in entries)
        while running:
            needed: dict[int, tuple[Executor, list[Job]]] = {}
            for simulation in running:
                _, jobs = needed.setdefault(id(simulation.executor), (simulation.executor, []))
                jobs.extend(simulation.advance())
            for executor, jobs in needed.values():
                executor.finish(jobs)
            for simulation in [s for s in running if s.finished]:
                simulation.result()
                simulation.close()
                running.remove(simulation)
            tell(len(entries) - len(running) + sum(simulation.share() for simulation in running))
    finally:
        for simulation in running:
            simulation.close()
        for executor in executors.values():
            executor.close()


def _is_done(entry: Entry) -> bool:
    """Finished, and with these settings; with others the folder must not be used."""
    if not (entry.folder / SUMMARY).exists():
        return False
    there = RunFolder.open(entry.folder).settings
    for name, value in entry.settings.as_dict().items():
        filled_in = name in ("devices", "executor") and value in (None, "auto")
        if not filled_in and there.get(name) != value:
            raise InvalidValue(
                f"{entry.folder} holds a run with {name} = {there.get(name)!r}, not {value!r}; choose another --dir"
            )
    return True


def _begun(task_spec: str, entry: Entry, executors: dict[tuple[Any, ...], Executor]) -> Simulation:
    settings = entry.settings
    concerned = ("devices", "partition", "executor", "in_flight_max", "device_model", *OVERRIDES)
    seed = settings.seed if takes_seed(task_spec) else None
    key = (settings.rule == "sgd", seed, *(getattr(settings, name) for name in concerned))
    shared = executors.get(key)
    task = shared.task if shared is not None else load(task_spec, settings)
    simulation = Simulation(task, settings, shared, folder=entry.folder)
    executors[key] = simulation.executor
    return simulation


class Row(NamedTuple):
    """One method, summed up over the seeds: mean and sample standard deviation."""

    method: str
    metric: float
    metric_spread: float
    reached_s: float | None
    """Mean virtual time at which the reference's final metric was reached, over the seeds that reached it."""
    reached_spread: float
    reached_by: int
    """How many seeds reached it."""
    t: float
    gradients: float
    virtual_s: float
    bytes: float
    staleness: float


@dataclass
class Comparison:
    """The results of a comparison."""

    spec: Spec
    curves: dict[str, list[list[Point]]]
    summaries: dict[str, list[dict[str, Any]]]

    @classmethod
    def read(cls, spec: Spec, folder: Path) -> Self:
        """From the runs' folders."""
        curves: dict[str, list[list[Point]]] = {name: [] for name in spec.methods}
        summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in spec.methods}
        for entry in spec.entries(folder):
            curve = read_curve(entry.folder / CURVE)
            if spec.metric not in curve[-1].metrics:
                known = ", ".join(curve[-1].metrics) or "none"
                raise InvalidValue(f"metric is {spec.metric!r} but {entry.method} has {known}")
            curves[entry.method].append(curve)
            summaries[entry.method].append(json.loads((entry.folder / SUMMARY).read_text()))
        return cls(spec, curves, summaries)

    def rows(self) -> list[Row]:
        """A row per method."""
        return [self._row(name) for name in self.spec.methods]

    def _row(self, name: str) -> Row:
        summaries = self.summaries[name]
        finals = [curve[-1].metrics[self.spec.metric] for curve in self.curves[name]]
        reached = [at for at in self._reached(name) if at is not None]
        return Row(
            name,
            mean(finals),
            _spread_of(finals),
            mean(reached) if reached else None,
            _spread_of(reached),
            len(reached),
            t=mean(summary["t"] for summary in summaries),
            gradients=mean(summary["gradients"] for summary in summaries),
            virtual_s=mean(summary["virtual_s"] for summary in summaries),
            bytes=mean(curve[-1].bytes for curve in self.curves[name]),
            staleness=mean(summary["staleness_mean"] for summary in summaries),
        )

    def _reached(self, name: str) -> Iterator[float | None]:
        """Per seed, when this method first had the final metric of the reference with the same seed."""
        if self.spec.reach is None:
            return
        for reference, curve in zip(self.curves[self.spec.reach], self.curves[name], strict=True):
            sign = -1 if self.spec.lower_is_better else 1
            goal = sign * reference[-1].metrics[self.spec.metric]
            yield next((point.at for point in curve if sign * point.metrics[self.spec.metric] >= goal), None)


def _spread_of(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else math.nan
