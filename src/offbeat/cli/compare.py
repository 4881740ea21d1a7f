"""Owns `offbeat compare`: run a comparison, print and write its table, draw its pictures."""

import csv
import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offbeat.errors import OffbeatError
from offbeat.sim.compare import Comparison, Row, Spec
from offbeat.sim.compare import compare as run_comparison
from offbeat.storage.json_file import plain


def compare(spec_path: Path, folder: Path, *, processes: int | None, as_json: bool) -> None:
    """Run and report."""
    spec = Spec.read(spec_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffbeatError(f"cannot write to {folder}: {error.strerror}; choose another folder with --dir") from error
    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("runs", total=None)
        result = run_comparison(
            spec,
            folder,
            processes=processes,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    rows = result.rows()
    _write(folder / "comparison.csv", rows)
    _draw(folder, result)
    Console(highlight=False, width=120).print(_table(spec, rows))
    click.echo(f"Runs, table and pictures: {folder}")
    if as_json:
        click.echo(json.dumps(plain({"dir": str(folder), "rows": [row._asdict() for row in rows]})))


def _write(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)


def _draw(folder: Path, result: Comparison) -> None:
    try:
        from offbeat import plots
    except ModuleNotFoundError:
        click.echo("No pictures: matplotlib is not installed; run: pip install 'offbeat[plots]'", err=True)
        return
    plots.comparison(folder, result)


def _table(spec: Spec, rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    reach = [f"{spec.reach}'s final {spec.metric} after"] if spec.reach else []
    for heading in ("method", spec.metric, *reach, "epochs", "gradients", "virtual s", "MB", "staleness"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        reached = f"{row.reached_s:.1f} ± {row.reached_spread:.1f} s" if row.reached_s is not None else "not reached"
        if row.reached_s is not None and row.reached_by < len(spec.seeds):
            reached += f" ({row.reached_by} of {len(spec.seeds)})"
        table.add_row(
            row.method,
            f"{row.metric:.4f} ± {row.metric_spread:.4f}",
            *([reached] if spec.reach else []),
            f"{row.t:,.0f}",
            f"{row.gradients:,.0f}",
            f"{row.virtual_s:,.1f}",
            f"{row.bytes / 1e6:,.1f}",
            f"{row.staleness:.1f}",
        )
    return table
