"""Owns the running of a target: what has no result yet is run, over all cores, and kept as it finishes."""

import platform
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import OffbeatError
from offbeat.hosting.loading import load
from offbeat.reproduce.curves import Curve, Results
from offbeat.reproduce.targets import Target
from offbeat.sim.backends import HERE, Backend
from offbeat.sim.curve import CURVE, read_curve
from offbeat.sim.spec import ComparedRun
from offbeat.storage.json_file import read_json
from offbeat.storage.run_folder import SUMMARY

Tell = Callable[[float, int], None]


class Wanted(NamedTuple):
    """A run that a target needs."""

    curve: Curve
    seed: int


def run_target(
    target: Target,
    results: Results,
    work: Path,
    *,
    processes: int | None = None,
    on: str = HERE,
    ray_address: str | None = None,
    tell: Tell = lambda *_: None,
) -> None:
    """Run what is missing; `tell` hears how many runs are done, of all, and may raise `Stop`."""
    wanted = list(dict.fromkeys(Wanted(curve, seed) for curve in target.curves for seed in curve.seeds))
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
        load(missing[0].curve.task, missing[0].curve.settings(missing[0].seed))  # fetches the data, or says what to do
        failures = place.run(missing[0].curve.task, _ordered(entries), heard)
        _harvest(entries, results)
        if failures:
            why = "; ".join(f"{failure.method} (seed {failure.seed}): {failure.message}" for failure in failures[:3])
            raise OffbeatError(f"{len(failures)} of {len(wanted)} runs failed: {why}. The others are kept")
    tell(len(wanted), len(wanted))


def _missing(wanted: Sequence[Wanted], results: Results) -> list[Wanted]:
    """One of each that has no result; two labels may share one run."""
    found: dict[tuple[str, int], Wanted] = {}
    for run in wanted:
        if run.seed not in results.points(run.curve):
            found.setdefault((run.curve.name, run.seed), run)
    return list(found.values())


def _ordered(entries: Iterable[ComparedRun]) -> list[ComparedRun]:
    """Seed by seed, so that every curve has its first seed before any has its last."""
    return sorted((entry for entry in entries if not (entry.folder / SUMMARY).exists()), key=lambda e: e.seed)


def _folder(work: Path, run: Wanted) -> Path:
    return work / run.curve.name / f"seed-{run.seed}"


def _harvest(entries: dict[ComparedRun, Wanted], results: Results) -> None:
    """Keep what has finished since."""
    for entry, run in list(entries.items()):
        if (entry.folder / SUMMARY).exists():
            summary = read_json(entry.folder / SUMMARY)
            results.add(run.curve, run.seed, read_curve(entry.folder / CURVE), facts(summary))
            del entries[entry]


def facts(summary: dict[str, Any]) -> dict[str, Any]:
    """What to remember of a run beside its curve."""
    names = ("t", "applied", "gradients", "staleness_mean", "staleness_largest", "x_sha256", "wall_s")
    return {name: summary[name] for name in names} | {
        "offbeat": version("offbeat"),
        "torch": version("torch"),
        "machine": platform.machine(),
    }
