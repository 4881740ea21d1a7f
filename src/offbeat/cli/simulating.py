"""Owns `offbeat simulate`, `compare` and `race`: progress on a terminal, the result in words or as JSON.

Rule kept here: what goes wrong in the user's task is one line that says where.
"""

import csv
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from offbeat.cli.metric_words import metric_words, metrics_in
from offbeat.cli.options import needs_extra, say_deprecated, settings_of, writing_to
from offbeat.cli.progress import FAILED, INTERRUPTED, bar_of_run, bar_of_runs, plain_table, spinner, stopping
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.hosting.loading import described
from offbeat.settings import Settings
from offbeat.sim.backends import Backend
from offbeat.sim.compare import Comparison, ComparisonRow
from offbeat.sim.compare import compare as run_comparison
from offbeat.sim.devices import device_model
from offbeat.sim.lockstep import draw
from offbeat.sim.processes import ProgramProcesses
from offbeat.sim.run import Run, Simulation, StopRequested
from offbeat.sim.spec import Spec
from offbeat.storage.json_file import plain
from offbeat.trackers.follower import Following

TABLE = "comparison.csv"
RACE_DEVICES = "lognormal:1"
RACE_TARGET = 0.9
RACE_MAX_S = 10_000.0


def simulate(
    task: str,
    folder: Path | None,
    track: tuple[str, ...],
    as_json: bool,
    settings_file: Path | None,
    accept_changed_task: bool,
    **flags: Any,
) -> None:
    if track and folder is None:
        raise InvalidValue("--track reads the run's folder; give --dir, too")
    settings = settings_of(settings_file, flags)
    try:
        simulation = Simulation.of(task, settings, folder=folder, accept_changed_task=accept_changed_task)
        _simulate(task, simulation, folder, as_json=as_json, track=track)
    except (OffbeatError, click.ClickException):
        raise
    except Exception as error:
        raise OffbeatError(described(error, task)) from error


def _simulate(task: str, simulation: Simulation, folder: Path | None, *, as_json: bool, track: tuple[str, ...]) -> None:
    tracking = Following(folder, track) if folder and track else nullcontext()
    if simulation.word:
        click.echo(simulation.word, err=True)
    click.echo(
        f"{task}: {simulation.rule.spec}, {simulation.settings.devices} devices, {simulation.executor.name}", err=True
    )
    if simulation.room.words():
        click.echo(simulation.room.words(), err=True)
    if simulation.extension:
        click.echo("\n".join(simulation.extension), err=True)
    elif simulation.folder and simulation.folder.resumed:
        changed = f" with a changed task, {simulation.names.now}" if simulation.names.changed else ""
        click.echo(f"Resuming at epoch {simulation.coordinator.t}{changed}.", err=True)
    executor = simulation.executor
    if isinstance(executor, ProgramProcesses) and executor.compiles and not simulation.finished:
        _warm_up(simulation, executor)
    try:
        with tracking, bar_of_run(task) as show, stopping(show) as watch:
            run = simulation.run(watch)
    except StopRequested:
        again = "the same command goes on from there" if folder is not None else "with --dir it could go on from there"
        click.echo(f"Stopped at epoch {simulation.coordinator.t}; {again}.", err=True)
        raise SystemExit(INTERRUPTED) from None
    if folder is not None and not draw(folder):
        click.echo("No pictures: matplotlib is not installed; run: pip install 'offbeat[plots]'", err=True)
    click.echo(json.dumps(plain(run.summary)) if as_json else _words(run.summary))
    if run.summary["failed"]:
        click.echo(f"The run has failed: {run.summary['ended']}.", err=True)
        raise SystemExit(FAILED)


def _warm_up(simulation: Simulation, executor: ProgramProcesses) -> None:
    """Compile before the run's progress is shown, and tell how long it took."""
    click.echo("Torch compiles the model: about a minute the first time, then it is kept for later runs.", err=True)
    try:
        with spinner("compiling"):
            took = executor.warm_up(simulation.x_0.layout)
    except BaseException:
        simulation.close()
        raise
    click.echo(f"Ready after {took:.0f} s.", err=True)


def _words(summary: dict[str, Any]) -> str:
    result, best = summary["result_t"], summary.get("best_t")
    lanes = f", {summary['lanes_mean']:.1f} lanes on average" if "lanes_mean" in summary else ""
    lines = [
        f"epochs      {summary['t']:,} ({summary['ended']}), {summary['applied']:,} updates, "
        f"{summary['gradients']:,} gradients",
        *([f"result      version {result}, which reached the target"] if result != summary["t"] else []),
        *(f"{name:<11} {said}" for name, said in metric_words(metrics_in(summary), ".4f").items()),
        *([f"best        version {best}, {summary['best_value']:.4f}"] if best is not None else []),
        f"staleness   mean {summary['staleness_mean']:.1f}, largest {summary['staleness_largest']}",
        f"time        {summary['virtual_s']:,.1f} s virtual, {summary['wall_s']:.1f} s real",
        f"trained     {summary['executor']}{lanes}",
        f"model       sha256 {summary['x_sha256'][:16]}...",
    ]
    if summary["dir"]:
        lines.append(f"folder      {summary['dir']}")
    return "\n".join(lines)


def compare(spec: Path, folder: Path | None, as_json: bool, **place: Any) -> None:
    folder, wanted = folder or Path("runs") / spec.stem, Spec.read(spec)
    say_deprecated({name: value for method in wanted.methods.values() for name, value in method.items()})
    try:
        with bar_of_runs("runs") as show, stopping(show) as watch:
            result = run_comparison(wanted, folder, **Backend(**place)._asdict(), pictures=True, on_progress=watch)
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


def _write(path: Path, rows: list[ComparisonRow]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(ComparisonRow._fields)
        writer.writerows(rows)


def _draw(folder: Path, result: Comparison) -> None:
    from offbeat.report import report

    try:
        result.plot(folder)
        report(folder)
    except MissingExtra as error:
        click.echo(f"No pictures: {error}", err=True)


# --- race -------------------------------------------------------------------------------------------------------------


def race(folder: Path, *, devices: int, in_flight_max: int, virtual_s: float, seed: int, as_json: bool) -> None:
    if not 1 <= virtual_s <= RACE_MAX_S:
        raise InvalidValue(f"virtual-s is {virtual_s:g} but must lie in 1..{RACE_MAX_S:g} seconds")
    with needs_extra("demo"):
        import torch  # noqa: F401 (imported here so that its absence is reported here)

        from offbeat import plots
    common = Settings(
        devices=devices, in_flight_max=in_flight_max, device_model=RACE_DEVICES, until_s=virtual_s, seed=seed
    )
    rules = {"FedAsync": ("fedasync", 5), "FedAvg": (f"fedavg:{in_flight_max}", 1)}
    simulations = {
        name: Simulation.of("digits", Settings.of({**common.as_dict(), "rule": rule, "evaluate_every": every}))
        for name, (rule, every) in rules.items()
    }
    picture = folder / "race.png"
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".offbeat-can-write").touch()
        (folder / ".offbeat-can-write").unlink()
    click.echo(_opening(devices, in_flight_max, virtual_s, seed))
    runs = {}
    for name, simulation in simulations.items():
        with bar_of_run(name) as show:
            runs[name] = simulation.run(show)
    plots.race(picture, runs)
    _print_race(runs, virtual_s)
    click.echo(f"Picture: {picture}")
    if as_json:
        answer = {name: {**run.summary, "target_reached_s": _reached(run)} for name, run in runs.items()}
        click.echo(json.dumps({**answer["FedAsync"], "fedavg": answer["FedAvg"], "picture": str(picture)}))


def _opening(devices: int, in_flight_max: int, virtual_s: float, seed: int) -> str:
    model = device_model(RACE_DEVICES, seed)
    fast, middle, slow = np.percentile([model.compute_s(device, 0) for device in range(devices)], (5, 50, 95))
    return (
        f"{devices} devices share 1,437 images of handwritten digits; {in_flight_max} work at a time.\n"
        f"A task takes {fast:.1f} s on a fast device, {middle:.1f} s on a middling one, {slow:.1f} s on a slow one.\n"
        f"Both methods get {virtual_s:g} s of virtual time on the same devices."
    )


def _reached(run: Run) -> float | None:
    return next((point.at for point in run.metrics if point.metrics["accuracy"] >= RACE_TARGET), None)


def _print_race(runs: dict[str, Run], virtual_s: float) -> None:
    headings = ("method", "accuracy", f"{RACE_TARGET:.0%} after", "epochs", "updates", "gradients", "mean staleness")
    table = plain_table(*headings, left=("method",))
    for name, run in runs.items():
        row, reached = run.summary, _reached(run)
        table.add_row(
            name,
            f"{row['accuracy']:.1%}",
            f"{reached:.0f} s" if reached is not None else f"not in {virtual_s:g} s",
            f"{row['t']:,}",
            f"{row['applied']:,}",
            f"{row['gradients']:,}",
            f"{row['staleness_mean']:.1f}",
        )
    Console(highlight=False).print(table)
    wall_s = sum(run.summary["wall_s"] for run in runs.values())
    click.echo(f"Simulating both took {wall_s:.1f} s.")
