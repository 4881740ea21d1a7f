"""Owns `offbeat report`: a run, or a folder of runs, as one HTML file.

What it needs is imported when it runs.
"""

import json
from contextlib import suppress
from pathlib import Path

import click

from offbeat.cli.look import CA, TOKEN
from offbeat.cli.options import FILE, FOLDER, JSON
from offbeat.cli.progress import bar_of_runs
from offbeat.errors import OffbeatError


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("out", metavar="[OUT.html]", type=FILE, required=False)
@TOKEN
@CA
@JSON
def report(folder: Path, out: Path | None, token: str | None, ca: Path | None, as_json: bool) -> None:
    """Write a report as one HTML file.

    DIR is the folder of a run, or holds the folders of several. The file opens offline; without OUT.html it is
    DIR/report.html.
    """
    from offbeat.report import report as write
    from offbeat.report.words import size

    with bar_of_runs("runs", transient=True) as tell:
        path = write(folder, out, trouble=_trouble(folder, token, ca), tell=tell)
    count = path.stat().st_size
    click.echo(json.dumps({"path": str(path), "bytes": count}) if as_json else f"Wrote {path} ({size(count)})")


def _trouble(folder: Path, token: str | None, ca: Path | None) -> str | None:
    """The trouble that a running server reports; the folder of the run does not record it."""
    from offbeat.cli.remote import WHERE, call, url_of

    if (folder / WHERE).is_file():
        with suppress(OffbeatError):  # it was killed, or wants a token: the report is written without it
            return call(url_of(str(folder)), "GET", "/v1/status", token, ca).get("trouble") or None
    return None
