"""Owns `offbeat simulate`: one run, a progress bar, a summary in words or as JSON."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from offbeat.cli.progress import Bar
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.loading import described
from offbeat.settings import Settings
from offbeat.sim.lockstep import draw
from offbeat.sim.run import RESULTS, Simulation, StopRequested
from offbeat.storage.json_file import plain
from offbeat.trackers.follower import Following

INTERRUPTED = 130


def simulate(task: str, settings: Settings, folder: Path | None, *, as_json: bool, track: tuple[str, ...] = ()) -> None:
    """Run and report; what goes wrong in the user's task is one line that says where."""
    if track and folder is None:
        raise InvalidValue("--track reads the run's folder; give --dir, too")
    try:
        _simulate(task, settings, folder, as_json=as_json, track=track)
    except (OffbeatError, click.ClickException):
        raise
    except Exception as error:
        raise OffbeatError(described(error, task)) from error


def _simulate(task: str, settings: Settings, folder: Path | None, *, as_json: bool, track: tuple[str, ...]) -> None:
    tracking = Following(folder, track) if folder and track else nullcontext()
    simulation = Simulation.of(task, settings, folder=folder)
    if simulation.word:
        click.echo(simulation.word, err=True)
    click.echo(
        f"{task}: {simulation.rule.spec}, {simulation.settings.devices} devices, {simulation.executor.name}", err=True
    )
    if simulation.folder and simulation.folder.resumed:
        click.echo(f"Going on from epoch {simulation.coordinator.t}.", err=True)
    try:
        with tracking, Bar(task) as bar, stopping() as stop_if_asked:
            run = simulation.run(_both(bar.show, stop_if_asked))
    except StopRequested:
        again = "the same command goes on from there" if folder is not None else "with --dir it could go on from there"
        click.echo(f"Stopped at epoch {simulation.coordinator.t}; {again}.", err=True)
        raise SystemExit(INTERRUPTED) from None
    if folder is not None and not draw(folder):
        click.echo("No pictures: matplotlib is not installed; run: pip install 'offbeat[plots]'", err=True)
    click.echo(json.dumps(plain(run.summary)) if as_json else _words(run.summary))


def _both(show: Callable[[Simulation], None], stop_if_asked: Callable[[], None]) -> Callable[[Simulation], None]:
    def watch(simulation: Simulation) -> None:
        show(simulation)
        stop_if_asked()

    return watch


@contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """Ctrl-C and SIGTERM stop the run at its next safe moment; a second one, at once."""
    asked = False

    def ask(number: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, before[signal.Signals(number)])

    def stop_if_asked() -> None:
        if asked:
            raise StopRequested

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield stop_if_asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _words(summary: dict[str, Any]) -> str:
    metrics = {name: value for name, value in summary.items() if name not in RESULTS}
    lanes = f", {summary['lanes_mean']:.1f} lanes on average" if "lanes_mean" in summary else ""
    lines = [
        f"epochs      {summary['t']:,} ({summary['ended']}), {summary['applied']:,} updates, "
        f"{summary['gradients']:,} gradients",
        *(f"{name:<11} {value:.4f}" for name, value in metrics.items()),
        f"staleness   mean {summary['staleness_mean']:.1f}, largest {summary['staleness_largest']}",
        f"time        {summary['virtual_s']:,.1f} s virtual, {summary['wall_s']:.1f} s real",
        f"trained     {summary['executor']}{lanes}",
        f"model       sha256 {summary['x_sha256'][:16]}...",
    ]
    if summary["dir"]:
        lines.append(f"folder      {summary['dir']}")
    return "\n".join(lines)
