"""Owns `offbeat bench`: measures Offbeat on this machine beside the limit, plain code and the peers."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offbeat.cli.options import FILE, FOLDER, JSON
from offbeat.errors import OffbeatError

if TYPE_CHECKING:
    from offbeat.bench.run import Bench
    from offbeat.bench.turns import Tell

TERMINATED = 143
NAMES = ("kernel", "sim", "net", "startup")


@click.command()
@click.argument("what", type=click.Choice([*NAMES, "all"]), default="all")
@click.option("--quick", is_flag=True, help="A minute's worth; 1e8 float32 and 100 MB are left out.")
@click.option("--peers", is_flag=True, help="Run Flower and APPFL, too; they are installed the first time.")
@click.option("--dir", "folder", type=FOLDER, default=Path("runs/bench"), show_default=True, help="For files.")
@click.option("--markdown", type=FILE, help="Write the tables to this file as Markdown.")
@click.option("--against", type=FILE, help="Fail where a ratio is below half of the one recorded in this file.")
@click.option("--record", type=FILE, help="Write the ratios to this file, for --against.")
@JSON
def bench(
    what: str,
    quick: bool,
    peers: bool,
    folder: Path,
    markdown: Path | None,
    against: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast Offbeat is here: kernel, sim, net, startup, or all of them."""
    from offbeat.bench import report
    from offbeat.bench.run import bench as run
    from offbeat.bench.scale import FULL, QUICK

    recorded = _read(against) if against else {}
    with _ending(), _telling() as tell:
        found = run([*NAMES] if what == "all" else [what], QUICK if quick else FULL, folder, peers=peers, tell=tell)
    click.echo(report.words(found.results, found.machine))
    if markdown:
        _write(markdown, report.markdown(found.results, found.machine))
    if record:
        _write(record, json.dumps(report.ratios(found.as_json()), indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(found.as_json()))
    _refuse_regressions(found, recorded)


def _refuse_regressions(found: "Bench", recorded: dict[str, float]) -> None:
    from offbeat.bench.report import regressions

    worse = regressions(found.as_json(), recorded)
    for line in worse:
        click.echo(line, err=True)
    if worse:
        raise SystemExit(1)


@contextmanager
def _ending() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: every process that was started is ended, too."""

    def end(*_: object) -> None:
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _telling() -> Iterator["Tell"]:
    """What is measured now, in one line that changes; where that is impossible, in a line each."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: click.echo(what, err=True)
        return
    with console.status("begins") as line:
        yield line.update


def _read(path: Path) -> dict[str, float]:
    from offbeat.storage.json_file import read_json

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
