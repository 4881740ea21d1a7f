"""Owns `offbeat reproduce`: run a target of the paper, draw its figure, print its numbers."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from offbeat.cli.options import needs_extra, writing_to
from offbeat.cli.progress import INTERRUPTED, bar_of_runs, plain_table, stopping
from offbeat.report import curve_run, report_curves
from offbeat.reproduce.paper import As
from offbeat.reproduce.target_runs import CurveResults, run_target
from offbeat.reproduce.targets import ReproductionTarget
from offbeat.reproduce.targets import target as target_of
from offbeat.sim.backends import Backend
from offbeat.sim.curve import CurvePoint
from offbeat.sim.run import StopRequested
from offbeat.storage.json_file import plain

CHECKOUT, ELSEWHERE = Path("docs/reproduction"), Path("runs/reproduction")


def reproduce(
    *, target: str, scale: str, as_: As, folder: Path | None, work: Path, as_json: bool, **place: Any
) -> None:
    wanted = target_of(target, scale, as_)
    where = Backend(**place)
    where.check(())
    folder = (folder or (CHECKOUT if CHECKOUT.is_dir() else ELSEWHERE)) / f"{scale}-{as_}"
    with needs_extra("demo"):
        from offbeat.reproduce import figures
    results = CurveResults(folder)
    with writing_to(folder):
        results.folder.mkdir(parents=True, exist_ok=True)
    try:
        with bar_of_runs(wanted.name) as show, stopping(show) as watch:
            run_target(wanted, results, work, **where._asdict(), tell=watch)
    except StopRequested:
        figures.write(wanted, results, folder)
        click.echo("Stopped; the same command goes on from there.", err=True)
        raise SystemExit(INTERRUPTED) from None
    summary = figures.write(wanted, results, folder)
    Console(highlight=False, width=110).print(_table(wanted, summary["curves"]))
    _report(wanted, results, folder)
    click.echo(f"Picture, numbers, report, curves: {folder / wanted.name}.png, .csv, .html, {folder / 'curves'}")
    if as_json:
        click.echo(json.dumps(plain({**summary, "dir": str(folder)})))


def _report(wanted: ReproductionTarget, results: CurveResults, folder: Path) -> None:
    from offbeat.reproduce.figures import label_of

    runs = [
        curve_run(
            label_of(curve, wanted), {"task": curve.task, **curve.settings(seed).as_dict()}, points, _ends(points)
        )
        for curve in wanted.curves
        for seed, points in sorted(results.points(curve).items())
    ]
    report_curves(folder / f"{wanted.name}.html", wanted.title, runs)


def _ends(points: list[CurvePoint]) -> dict[str, float | None]:
    return {"t": points[-1].t, "gradients": points[-1].gradients}


def _table(wanted: ReproductionTarget, ends: list[dict[str, object]]) -> Table:
    headings = ("curve", wanted.metric, "best", "gradients", "seeds", "run for (s)")
    table = plain_table(*headings, left=("curve",), title=wanted.title)
    for end in ends:
        table.add_row(
            str(end["label"]),
            f"{end['mean']:.4f}" + (f" ± {end['spread']:.4f}" if end["seeds"] != 1 else ""),
            f"{end['best']:.4f}",
            f"{end['gradients']:,}",
            str(end["seeds"]),
            f"{end['wall_s']:,.0f}",
        )
    return table
