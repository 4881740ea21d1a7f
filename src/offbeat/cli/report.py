"""Owns `offbeat report`: a run, or a folder of runs, as one HTML file.

What it needs is imported when it runs.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from offbeat.cli.look import CA, TOKEN
from offbeat.cli.options import FILE, FOLDER, JSON
from offbeat.errors import OffbeatError


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("out", metavar="[OUT.html]", type=FILE, required=False)
@TOKEN
@CA
@JSON
def report(folder: Path, out: Path | None, token: str | None, ca: Path | None, as_json: bool) -> None:
    """Write what the run in DIR, or all runs under it, came to: one HTML file that opens offline.

    Without OUT.html it is DIR/report.html.
    """
    from offbeat.report import report as write
    from offbeat.report.wording import size

    with _progress() as tell:
        path = write(folder, out, trouble=_trouble(folder, token, ca), tell=tell)
    count = path.stat().st_size
    click.echo(json.dumps({"path": str(path), "bytes": count}) if as_json else f"Wrote {path} ({size(count)})")


@contextmanager
def _progress() -> Iterator[Callable[[float, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("runs", total=None)
        yield lambda done, count: progress.update(bar, completed=done, total=count)


def _trouble(folder: Path, token: str | None, ca: Path | None) -> str | None:
    """What a run's server says is wrong, if one runs and answers: its folder does not tell that."""
    from offbeat.cli.remote import WHERE, call, url_of

    if (folder / WHERE).is_file():
        with suppress(OffbeatError):  # it was killed, or does not let us look: the files tell the rest
            return call(url_of(str(folder)), "GET", "/v1/status", token, ca).get("trouble") or None
    return None
