"""Owns `offbeat race`: FedAsync and FedAvg on the same simulated devices, for the same virtual time."""

import json
from pathlib import Path

import click
import numpy as np
from rich.console import Console

from offbeat.cli.options import cannot_write_to, needs_extra
from offbeat.cli.progress import bar_of_run, plain_table
from offbeat.errors import InvalidValue
from offbeat.settings import Settings
from offbeat.sim.devices import device_model
from offbeat.sim.run import Run, Simulation

DEVICE_MODEL = "lognormal:1"
TARGET = 0.9
CLOCK_MAX_S = 10_000.0


def race(folder: Path, *, devices: int, in_flight_max: int, virtual_s: float, seed: int, as_json: bool) -> None:
    if not 1 <= virtual_s <= CLOCK_MAX_S:
        raise InvalidValue(f"virtual-s is {virtual_s:g} but must lie in 1..{CLOCK_MAX_S:g} seconds")
    with needs_extra("demo"):
        import torch  # noqa: F401 (imported here so that its absence is reported here)

        from offbeat import plots
    common = Settings(
        devices=devices, in_flight_max=in_flight_max, device_model=DEVICE_MODEL, until_s=virtual_s, seed=seed
    )
    rules = {"FedAsync": ("fedasync", 5), "FedAvg": (f"fedavg:{in_flight_max}", 1)}
    simulations = {
        name: Simulation.of("digits", Settings.of({**common.as_dict(), "rule": rule, "evaluate_every": every}))
        for name, (rule, every) in rules.items()
    }
    picture = _writable(folder) / "race.png"
    click.echo(_opening(devices, in_flight_max, virtual_s, seed))
    runs = {}
    for name, simulation in simulations.items():
        with bar_of_run(name) as show:
            runs[name] = simulation.run(show)
    plots.race(picture, runs)
    _print_results(runs, virtual_s)
    click.echo(f"Picture: {picture}")
    if as_json:
        answer = {name: {**run.summary, "target_reached_s": _reached(run)} for name, run in runs.items()}
        click.echo(json.dumps({**answer["FedAsync"], "fedavg": answer["FedAvg"], "picture": str(picture)}))


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".offbeat-can-write").touch()
        (folder / ".offbeat-can-write").unlink()
    except OSError as error:
        raise cannot_write_to(folder, error) from error
    return folder


def _opening(devices: int, in_flight_max: int, virtual_s: float, seed: int) -> str:
    model = device_model(DEVICE_MODEL, seed)
    fast, middle, slow = np.percentile([model.compute_s(device, 0) for device in range(devices)], (5, 50, 95))
    return (
        f"{devices} devices share 1,437 images of handwritten digits; {in_flight_max} work at a time.\n"
        f"A task takes {fast:.1f} s on a fast device, {middle:.1f} s on a middling one, {slow:.1f} s on a slow one.\n"
        f"Both methods get {virtual_s:g} s of virtual time on the same devices."
    )


def _reached(run: Run) -> float | None:
    return next((point.at for point in run.metrics if point.metrics["accuracy"] >= TARGET), None)


def _print_results(runs: dict[str, Run], virtual_s: float) -> None:
    headings = ("method", "accuracy", f"{TARGET:.0%} after", "epochs", "updates", "gradients", "mean staleness")
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
