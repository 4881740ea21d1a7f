"""Owns the running of a target: curves and seeds without a result are run on all cores, and kept as they finish."""

import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import OffbeatError
from offbeat.hosting.loading import load
from offbeat.reproduce.figure_curves import CurveResults, FigureCurve
from offbeat.reproduce.targets import ReproductionTarget
from offbeat.sim.backends import HERE, Backend
from offbeat.sim.curve import CURVE, read_curve
from offbeat.sim.spec import ComparedRun
from offbeat.storage.json_file import read_json
from offbeat.storage.run_folder import SUMMARY

Tell = Callable[[float, int], None]


class SeedRun(NamedTuple):
    """One run of a target: a curve with one of its seeds."""

    curve: FigureCurve
    seed: int


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
    """Run what has no result; `tell` is given the number of finished runs and of all runs, and may raise `Stop`."""
    wanted = list(dict.fromkeys(SeedRun(curve, seed) for curve in target.curves for seed in curve.seeds))
    missing = _missing(wanted, results)
    done = len(wanted) - len(missing)
    entries = {
        ComparedRun(run.curve.name, run.seed, run.curve.settings(run.seed), _folder(work, run)): run for run in missing
    }

    def heard(far: float) -> None:
        _harvest(entries, results)
        tell(done + far, len(wanted))

    place = Backend(on, processes, ray_address)
    place.check([*entries])
    heard(0.0)
    if entries:
        load(
            missing[0].curve.task, missing[0].curve.settings(missing[0].seed)
        )  # fetches the data, or raises with what to do
        failures = place.run(missing[0].curve.task, _ordered(entries), heard)
        _harvest(entries, results)
        if failures:
            why = "; ".join(f"{failure.method} (seed {failure.seed}): {failure.message}" for failure in failures[:3])
            raise OffbeatError(
                f"{len(failures)} of {len(wanted)} runs failed: {why}. The results of the others are kept"
            )
    tell(len(wanted), len(wanted))


def _missing(wanted: Sequence[SeedRun], results: CurveResults) -> list[SeedRun]:
    """Runs without a result, each once: two labels may share one run."""
    found: dict[tuple[str, int], SeedRun] = {}
    for run in wanted:
        if run.seed not in results.points(run.curve):
            found.setdefault((run.curve.name, run.seed), run)
    return list(found.values())


def _ordered(entries: Iterable[ComparedRun]) -> list[ComparedRun]:
    """Seed by seed, so that every curve has its first seed before any has its last."""
    return sorted((entry for entry in entries if not (entry.folder / SUMMARY).exists()), key=lambda e: e.seed)


def _folder(work: Path, run: SeedRun) -> Path:
    return work / run.curve.name / f"seed-{run.seed}"


def _harvest(entries: dict[ComparedRun, SeedRun], results: CurveResults) -> None:
    """Keep the results of runs that have finished since the last call."""
    for entry, run in list(entries.items()):
        if (entry.folder / SUMMARY).exists():
            summary = read_json(entry.folder / SUMMARY)
            results.add(run.curve, run.seed, read_curve(entry.folder / CURVE), facts(summary))
            del entries[entry]


def facts(summary: dict[str, Any]) -> dict[str, Any]:
    """Facts about a run that are kept beside its curve."""
    names = ("t", "applied", "gradients", "staleness_mean", "staleness_largest", "x_sha256", "wall_s")
    return {name: summary[name] for name in names} | {
        "offbeat": version("offbeat"),
        "torch": version("torch"),
        "machine": platform.machine(),
    }
