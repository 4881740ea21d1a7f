"""Owns `offbeat reproduce`: run a target of the paper, draw its figure, print its numbers."""

import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offbeat.cli.simulate import INTERRUPTED, stopping
from offbeat.errors import MissingExtra, OffbeatError
from offbeat.report import curve_run, report_curves
from offbeat.reproduce.curves import Results
from offbeat.reproduce.paper import As
from offbeat.reproduce.run import run_target
from offbeat.reproduce.targets import Target, target
from offbeat.sim.curve import CurvePoint
from offbeat.sim.places import Place
from offbeat.sim.run import Stop
from offbeat.storage.json_file import plain

CHECKOUT, ELSEWHERE = Path("docs/reproduction"), Path("runs/reproduction")


def reproduce(name: str, *, scale: str, as_: As, folder: Path | None, work: Path, place: Place, as_json: bool) -> None:
    """Run, draw and report."""
    wanted = target(name, scale, as_)
    place.check(())
    folder = (folder or (CHECKOUT if CHECKOUT.is_dir() else ELSEWHERE)) / f"{scale}-{as_}"
    try:
        from offbeat.reproduce import figures
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "demo") from error
    results = Results(folder)
    try:
        results.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffbeatError(f"cannot write to {folder}: {error.strerror}; choose another folder with --dir") from error
    try:
        _run(wanted, results, work, place)
    except Stop:
        figures.write(wanted, results, folder)
        click.echo("Stopped; the same command goes on from there.", err=True)
        raise SystemExit(INTERRUPTED) from None
    summary = figures.write(wanted, results, folder)
    Console(highlight=False, width=110).print(_table(wanted, summary["curves"]))
    _report(wanted, results, folder)
    click.echo(f"Picture, numbers, report, curves: {folder / wanted.name}.png, .csv, .html, {folder / 'curves'}")
    if as_json:
        click.echo(json.dumps(plain({**summary, "dir": str(folder)})))


def _run(wanted: Target, results: Results, work: Path, place: Place) -> None:
    console = Console(stderr=True)
    columns = (TextColumn(wanted.name), BarColumn(), TextColumn("{task.fields[news]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress, stopping() as stop_if_asked:
        bar = progress.add_task(wanted.name, total=None, news="")

        def tell(done: float, count: int) -> None:
            progress.update(bar, completed=done, total=count, news=f"{done:.1f} of {count} runs")
            stop_if_asked()

        run_target(wanted, results, work, **place._asdict(), tell=tell)


def _report(wanted: Target, results: Results, folder: Path) -> None:
    """All runs of the target as one page."""
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


def _table(wanted: Target, ends: list[dict[str, object]]) -> Table:
    table = Table(box=None, pad_edge=False, title=wanted.title, title_justify="left")
    for heading in ("curve", wanted.metric, "best", "gradients", "seeds", "run for (s)"):
        table.add_column(heading, justify="left" if heading == "curve" else "right")
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
