"""Owns `offbeat demo`: the same devices, the same clock, once asynchronously and once in groups that wait."""

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from offbeat.core.rules import Rule, fedasync, fedavg
from offbeat.core.staleness import polynomial
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.sim.engine import History, check_in_flight_max, lognormal_seconds, run

ALPHA, SIGMA = 0.6, 1.0
TARGET = 0.9
CLOCK_MAX_S = 10_000.0


def race(folder: Path, *, devices: int, in_flight_max: int, virtual_s: float, seed: int, as_json: bool) -> None:
    """Run both methods, print what was learnt, draw the picture."""
    if not 1 <= virtual_s <= CLOCK_MAX_S:
        raise InvalidValue(f"virtual-s is {virtual_s:g} but must lie in 1..{CLOCK_MAX_S:g} seconds")
    if seed < 0:
        raise InvalidValue(f"seed is {seed} but must be a whole number >= 0")
    plots, digits = _optional()
    task = digits(devices)
    check_in_flight_max(in_flight_max, devices)
    picture = _writable(folder) / "demo.png"
    seconds = lognormal_seconds(devices, SIGMA, seed)
    click.echo(_opening(seconds, in_flight_max, virtual_s))
    methods: dict[str, tuple[Rule, bool]] = {
        "FedAsync": (fedasync(ALPHA, polynomial(0.5)), False),
        "FedAvg": (fedavg(in_flight_max), True),
    }
    histories, wall_s = {}, {}
    for name, (rule, grouped) in methods.items():
        begun = time.perf_counter()
        with _Bar(name, virtual_s) as bar:
            histories[name] = run(
                task,
                rule,
                seconds,
                in_flight_max=in_flight_max,
                until_s=virtual_s,
                seed=seed,
                grouped=grouped,
                on_progress=bar.show,
            )
        wall_s[name] = time.perf_counter() - begun
    plots.race(picture, histories)
    summaries = {name: _summary(history, virtual_s, wall_s[name]) for name, history in histories.items()}
    _print_results(summaries, virtual_s)
    click.echo(f"Picture: {picture}")
    if as_json:
        click.echo(json.dumps({**summaries["FedAsync"], "fedavg": summaries["FedAvg"], "picture": str(picture)}))


def _optional() -> tuple[Any, Any]:
    """What the demo needs beyond the core; said in one line where it is missing."""
    try:
        from offbeat import plots
        from offbeat.tasks.digits import digits
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "demo") from error
    return plots, digits


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".offbeat-can-write").touch()
        (folder / ".offbeat-can-write").unlink()
    except OSError as error:
        raise OffbeatError(f"cannot write to {folder}: {error.strerror}; choose another folder with --dir") from error
    return folder


def _opening(seconds: list[float], in_flight_max: int, virtual_s: float) -> str:
    fast, middle, slow = np.percentile(seconds, (5, 50, 95))
    return (
        f"{len(seconds)} devices share 1,437 images of handwritten digits; {in_flight_max} work at a time.\n"
        f"A task takes {fast:.1f} s on a fast device, {middle:.1f} s on a middling one, {slow:.1f} s on a slow one.\n"
        f"Both methods get {virtual_s:g} s of virtual time on the same devices."
    )


class _Bar:
    """Progress of one method on the virtual clock; silent where the output is not a terminal."""

    def __init__(self, name: str, virtual_s: float) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(f"{name:<9}"), BarColumn(), TextColumn("{task.fields[news]}"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bar = self.progress.add_task(name, total=virtual_s, news="")

    def __enter__(self) -> "_Bar":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, history: History, at_s: float) -> None:
        """Move the bar to this moment of the virtual clock."""
        accuracy = history.evaluations[-1].metrics["accuracy"]
        staleness = history.updates[-1].staleness
        news = f"{at_s:5.1f} s  epoch {history.t:<5} staleness {staleness:<4} accuracy {accuracy:.1%}"
        self.progress.update(self.bar, completed=at_s, news=news)


def _summary(history: History, virtual_s: float, wall_s: float) -> dict[str, Any]:
    staleness = [update.staleness for update in history.updates]
    reached = [e.at_s for e in history.evaluations if e.metrics["accuracy"] >= TARGET]
    return {
        "t": history.t,
        "applied": len(history.updates),
        "gradients": history.gradients,
        "virtual_s": virtual_s,
        "wall_s": round(wall_s, 2),
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "staleness_largest": max(staleness, default=0),
        **history.evaluations[-1].metrics,
        "target_reached_s": reached[0] if reached else None,
        "x_sha256": hashlib.sha256(history.x.vector.tobytes()).hexdigest(),
    }


def _print_results(summaries: dict[str, dict[str, Any]], virtual_s: float) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("method", "accuracy", f"{TARGET:.0%} after", "epochs", "updates", "gradients", "mean staleness"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, row in summaries.items():
        reached = row["target_reached_s"]
        table.add_row(
            name,
            f"{row['accuracy']:.1%}",
            f"{reached:g} s" if reached is not None else f"not in {virtual_s:g} s",
            f"{row['t']:,}",
            f"{row['applied']:,}",
            f"{row['gradients']:,}",
            f"{row['staleness_mean']:.1f}",
        )
    Console(highlight=False).print(table)
    wall_s = sum(row["wall_s"] for row in summaries.values())
    click.echo(f"Simulated twice {virtual_s:g} s in {wall_s:.1f} s.")
