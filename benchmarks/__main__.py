"""Owns `python -m benchmarks`: measures Offbeat on this machine beside the limit, plain code and the peers."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks import report, run
from benchmarks.bars import PARTS
from benchmarks.scale import FULL, QUICK
from benchmarks.turns import Tell
from offbeat.cli.options import FILE, FOLDER, JSON
from offbeat.errors import OffbeatError
from offbeat.storage.json_file import read_json

TERMINATED = 143


class Refused(click.ClickException):
    """A mistake of the user's: one line, and exit status 2."""

    exit_code = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("what", type=click.Choice([*PARTS, "all"]), default="all")
@click.option("--quick", is_flag=True, help="Takes a minute; models of 1e8 float32 and of 100 MB are left out.")
@click.option("--peers", is_flag=True, help="Measure Flower and APPFL as well; the first time, they are installed.")
@click.option("--dir", "folder", type=FOLDER, default=Path("runs/bench"), show_default=True, help="For files.")
@click.option("--markdown", type=FILE, help="Write the tables to this file as Markdown.")
@click.option("--against", type=FILE, help="Fail where a ratio is below half of the one recorded in this file.")
@click.option("--record", type=FILE, help="Write the ratios to this file, for --against.")
@JSON
def main(
    what: str,
    quick: bool,
    peers: bool,
    folder: Path,
    markdown: Path | None,
    against: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast Offbeat is on this machine: kernel, sim, net, startup, or all of them."""
    try:
        recorded = _read(against) if against else {}
        with _ending(), _telling() as tell:
            parts = [*PARTS] if what == "all" else [what]
            found = run.bench(parts, QUICK if quick else FULL, folder, peers=peers, tell=tell)
        _show(found, markdown, record)
    except OffbeatError as error:
        raise Refused(str(error)) from error
    if as_json:
        click.echo(json.dumps(found.as_json()))
    _refuse_regressions(found, recorded)


def _show(found: run.Bench, markdown: Path | None, record: Path | None) -> None:
    click.echo(report.words(found.results, found.machine))
    if markdown:
        _write(markdown, report.markdown(found.results, found.machine))
    if record:
        _write(record, json.dumps(report.ratios(found.as_json()), indent=2) + "\n")


def _refuse_regressions(found: run.Bench, recorded: dict[str, float]) -> None:
    worse = report.regressions(found.as_json(), recorded)
    for line in worse:
        click.echo(line, err=True)
    if worse:
        raise SystemExit(1)


@contextmanager
def _ending() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does, with every process that was started."""

    def end(*_: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _telling() -> Iterator[Tell]:
    """Shows what is measured now: on a terminal in one line that changes, elsewhere in a line each."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: click.echo(what, err=True)
        return
    with console.status("starting") as line:
        yield line.update


def _read(path: Path) -> dict[str, float]:
    found: Any = read_json(path)
    try:
        return {str(key): float(ratio) for key, ratio in found.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise OffbeatError(f"{path} holds no ratios; write such a file with --record") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise OffbeatError(f"cannot write {path}: {error.strerror}; choose another file") from error


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
