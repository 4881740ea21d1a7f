"""Owns `offbeat serve`: a server for one run, and its status in one line on a terminal."""

import asyncio
import logging
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from offbeat.cli.metric_words import metric_line, metrics_in
from offbeat.cli.options import SERVER_TABLE, given, needs_extra, settings_of
from offbeat.cli.progress import FAILED, spinner
from offbeat.errors import InvalidValue
from offbeat.settings import read_toml
from offbeat.storage.run_folder import RunFolder
from offbeat.trackers.follower import Following

SHOWN_EVERY_S = 0.5


def serve(
    *,
    task: str,
    folder: Path | None,
    settings_file: Path | None,
    access: Path | None,
    insecure: bool,
    x_0: Path | None,
    drop_damaged: bool,
    accept_loss: bool,
    exit_when_finished: bool,
    accept_changed_task: bool,
    log_events: str | None,
    track: tuple[str, ...],
    **flags: Any,
) -> None:
    with needs_extra("serve"):
        from offbeat.server.server import ServeOptions
        from offbeat.server.server import serve as run_server
        from offbeat.server.settings import AccessSettings, ServerSettings
        from offbeat.web.app import furnish
    ours = {field.name for field in fields(ServerSettings)}
    of_run = {name: value for name, value in flags.items() if name not in ours}
    of_server = _table(settings_file, ours) | given({name: flags[name] for name in ours})
    options = ServeOptions(
        task,
        folder or Path("runs") / f"serve-{Path(task.partition(':')[0]).stem}",
        settings_of(settings_file, of_run),
        ServerSettings(**of_server),
        AccessSettings(access, insecure),
        x_0,
        drop_damaged,
        exit_when_finished,
        log_events=log_events,
        accept_loss=accept_loss,
        accept_changed_task=accept_changed_task,
        extend=furnish,
    )
    tracking = Following(options.folder, track) if track else None
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    with ExitStack() as following, ExitStack() as start:
        start.enter_context(spinner("starting"))

        def ready(server: Any) -> "asyncio.Task[None]":
            start.close()
            if tracking is not None:
                following.enter_context(tracking)  # not before: only now is there a run
            return _ready(server)

        failed = run_server(options, ready)
    if exit_when_finished:
        _say_results(options.folder)
    if failed and exit_when_finished:
        click.echo(f"The run has failed: {failed}.", err=True)
        raise SystemExit(FAILED)


def _say_results(folder: Path) -> None:
    summary = RunFolder.open(folder).summary
    if summary is not None:
        said = metric_line(metrics_in(summary)) or "nothing was measured"
        click.echo(f"Version {summary['result_t']}: {said}", err=True)


def _table(settings_file: Path | None, known: set[str]) -> dict[str, Any]:
    found = read_toml(settings_file).get(SERVER_TABLE, {}) if settings_file else {}
    if not isinstance(found, dict) or not found.keys() <= known:
        wrong = sorted(found.keys() - known) if isinstance(found, dict) else found
        raise InvalidValue(f"{settings_file}: [server] has {wrong}; use {', '.join(sorted(known))}")
    return found


def _ready(server: Any) -> "asyncio.Task[None]":
    """Print where the server is; on a terminal, keep a line with its status up to date."""
    c, order = server.run.coordinator, server.options
    if server.extension:
        click.echo("\n".join(server.extension), err=True)
    elif c.t or c.leases:
        click.echo(f"Going on from epoch {c.t} with {len(c.leases)} tasks in flight.", err=True)
    click.echo(f"Serving {order.task} at {server.url} ({c.rule.spec}; folder {order.folder})", err=True)
    if server.begun.room.words():
        click.echo(server.begun.room.words(), err=True)
    click.echo(f"Its page: {server.url}/", err=True)
    click.echo(f"A worker: offbeat work {order.task} --server {server.url}", err=True)
    task: asyncio.Task[None] = server.loop.create_task(_show(server))
    return task


async def _show(server: Any) -> None:
    from offbeat.server.views import status_of

    console = Console(stderr=True)
    if not console.is_terminal:
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(line_of(await status_of(server.context))), refresh=True)
            await asyncio.sleep(SHOWN_EVERY_S)


def line_of(status: Mapping[str, Any]) -> str:
    epochs = f"/{status['epochs']}" if status["epochs"] else ""
    parts = [
        f"epoch {status['t']}{epochs}",
        metric_line(status["metrics"]),
        f"staleness {status['staleness_mean']:.1f}",
        f"{status['workers']} workers, {status['in_flight']} working, {status['queued']} queued",
        f"{status['rejected']} refused" if status["rejected"] else "",
        f"finished: {status['reason']}" if status["finished"] else "",
        f"TROUBLE: {status['trouble']}" if status["trouble"] else "",
    ]
    return "  |  ".join(part for part in parts if part)
