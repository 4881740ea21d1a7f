"""Owns `offbeat compare`: run a comparison, print and write its table, draw its pictures, report on it."""

import csv
import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from offbeat.cli.simulate import INTERRUPTED, stopping
from offbeat.errors import MissingExtra
from offbeat.report import report
from offbeat.sim.backends import Backend
from offbeat.sim.compare import Comparison, ComparisonRow
from offbeat.sim.compare import compare as run_comparison
from offbeat.sim.run import StopRequested
from offbeat.sim.spec import Spec
from offbeat.storage.json_file import plain

TABLE = "comparison.csv"


def compare(spec_path: Path, folder: Path, *, place: Backend, as_json: bool) -> None:
    """Run and report."""
    spec = Spec.read(spec_path)
    try:
        result = _run(spec, folder, place)
    except StopRequested:
        click.echo("Stopped; the same command goes on from there.", err=True)
        raise SystemExit(INTERRUPTED) from None
    rows = result.rows()
    _write(folder / TABLE, rows)
    _draw(folder, result)
    click.echo(result.table)
    click.echo(f"Runs, table, pictures, report: {folder}")
    if as_json:
        click.echo(json.dumps(plain({"dir": str(folder), "rows": [row._asdict() for row in rows]}), allow_nan=False))


def _run(spec: Spec, folder: Path, place: Backend) -> Comparison:
    """With a bar; Ctrl-C and SIGTERM stop it."""
    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with bar, stopping() as stop_if_asked:
        runs = bar.add_task("runs", total=None)

        def watch(done: float, total: int) -> None:
            bar.update(runs, completed=done, total=total)
            stop_if_asked()

        return run_comparison(spec, folder, **place._asdict(), pictures=True, on_progress=watch)


def _write(path: Path, rows: list[ComparisonRow]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(ComparisonRow._fields)
        writer.writerows(rows)


def _draw(folder: Path, result: Comparison) -> None:
    try:
        result.plot(folder)
        report(folder)
    except MissingExtra as error:
        click.echo(f"No pictures: {error}", err=True)
