"""Owns the runs of a target: results of curves as files that can be committed, and the running of what has none.

Rules kept here:
- A curve is identified by the hash of everything that determines it, so results of other settings are never its own.
- Results are kept seed by seed, as runs finish: an interrupted reproduction keeps the runs that it has finished.
"""

import csv
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.hosting.loading import load
from offbeat.reproduce.targets import FigureCurve, ReproductionTarget
from offbeat.sim.backends import HERE, Backend
from offbeat.sim.curve import CURVE, CurvePoint, read_curve
from offbeat.sim.spec import ComparedRun
from offbeat.storage.disk import aside
from offbeat.storage.json_file import read_json, write_json
from offbeat.storage.run_folder import SUMMARY

FOLDER = "curves"

Tell = Callable[[float, int], None]


class CurveResults:
    """Results of curves in a folder: a CSV file of points for each, and a JSON file of its settings and runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER

    def points(self, curve: FigureCurve) -> dict[int, list[CurvePoint]]:
        path = self._path(curve, "csv")
        if not path.exists():
            return {}
        found: dict[int, list[CurvePoint]] = {}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                seed, t, gradients = (int(row.pop(name)) for name in ("seed", "t", "gradients"))
                at = float(row.pop("virtual_s"))
                found.setdefault(seed, []).append(
                    CurvePoint(t, at, gradients, 0, {name: float(value) for name, value in row.items()})
                )
        return found

    def facts(self, curve: FigureCurve) -> dict[str, Any]:
        path = self._path(curve, "json")
        return read_json(path) if path.exists() else {}

    def add(self, curve: FigureCurve, seed: int, points: Sequence[CurvePoint], facts: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        there = self.points(curve) | {seed: list(points)}
        runs = self.facts(curve).get("runs", {}) | {str(seed): dict(facts)}
        settings = {name: value for name, value in curve.settings(0).as_dict().items() if name != "seed"}
        about = {"label": curve.label, "task": curve.task, "hash": curve.hash, "settings": settings, "runs": runs}
        names = list(points[-1].metrics)
        with aside(self._path(curve, "csv")) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["seed", "t", "gradients", "virtual_s", *names])
            for number, curve_points in sorted(there.items()):
                for point in curve_points:
                    values = (f"{point.metrics[name]:.6g}" for name in names)
                    writer.writerow([number, point.t, point.gradients, f"{point.at:.6g}", *values])
        write_json(self._path(curve, "json"), about)

    def _path(self, curve: FigureCurve, ending: str) -> Path:
        return self.folder / f"{curve.name}.{ending}"


def run_target(
    target: ReproductionTarget,
    results: CurveResults,
    work: Path,
    *,
    processes: int | None = None,
    on: str = HERE,
    ray_address: str | None = None,
    tell: Tell = lambda *_: None,
) -> None:
    """Run what has no result, on all cores; `tell` is given the number of finished runs and of all runs.

    It may raise `StopRequested`.
    """
    wanted = dict.fromkeys((curve, seed) for curve in target.curves for seed in curve.seeds)
    entries: dict[ComparedRun, FigureCurve] = {}
    for curve, seed in wanted:
        if seed not in results.points(curve):
            folder = work / curve.name / f"seed-{seed}"
            entry = ComparedRun(curve.name, seed, curve.settings(seed), folder)
            entries.setdefault(entry, curve)  # two labels may share one run
    done = len(wanted) - len(entries)

    def heard(far: float) -> None:
        _harvest(entries, results)
        tell(done + far, len(wanted))

    place = Backend(on, processes, ray_address)
    place.check([*entries])
    heard(0.0)
    if entries:
        first, curve = next(iter(entries.items()))
        load(curve.task, first.settings)  # fetches the data, or raises with what to do
        # seed by seed, so that every curve has its first seed before any has its last
        failures = place.run(curve.task, sorted(entries, key=lambda entry: entry.seed), heard)
        _harvest(entries, results)
        if failures:
            why = "; ".join(f"{failure.method} (seed {failure.seed}): {failure.message}" for failure in failures[:3])
            raise OffbeatError(
                f"{len(failures)} of {len(wanted)} runs failed: {why}. The results of the others are kept"
            )
    tell(len(wanted), len(wanted))


def _harvest(entries: dict[ComparedRun, FigureCurve], results: CurveResults) -> None:
    """Keep the results of runs that have finished since the last call."""
    for entry, curve in list(entries.items()):
        if (entry.folder / SUMMARY).exists():
            summary = read_json(entry.folder / SUMMARY)
            results.add(curve, entry.seed, read_curve(entry.folder / CURVE), facts(summary))
            del entries[entry]


def facts(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("t", "applied", "gradients", "staleness_mean", "staleness_largest", "x_sha256", "wall_s")
    return {name: summary[name] for name in names} | {
        "offbeat": version("offbeat"),
        "torch": version("torch"),
        "machine": platform.machine(),
    }
