"""Owns `offbeat simulate`: one run, a progress bar, a summary in words or as JSON."""

import json
from pathlib import Path
from typing import Any

import click

from offbeat.cli.progress import Bar
from offbeat.settings import Settings
from offbeat.sim.run import Run, Simulation


def simulate(task: str, settings: Settings, folder: Path | None, *, as_json: bool) -> None:
    """Run and report."""
    simulation = Simulation.of(task, settings, folder=folder)
    click.echo(
        f"{task}: {simulation.rule.spec}, {simulation.settings.devices} devices, {simulation.executor.name}", err=True
    )
    if simulation.folder and simulation.folder.resumed:
        click.echo(f"Going on from epoch {simulation.coordinator.t}.", err=True)
    with Bar(task) as bar:
        run = simulation.run(bar.show)
    if folder is not None:
        _draw(run, folder)
    click.echo(json.dumps(run.summary) if as_json else _words(run.summary))


def _draw(run: Run, folder: Path) -> None:
    """Pictures into the run's folder, where matplotlib is installed."""
    try:
        from offbeat import plots
    except ModuleNotFoundError:
        click.echo("No pictures: matplotlib is not installed; run: pip install 'offbeat[plots]'", err=True)
        return
    for ending in ("png", "svg"):
        plots.run(folder / f"run.{ending}", run)


def _words(summary: dict[str, Any]) -> str:
    metrics = {name: summary[name] for name in ("accuracy", "perplexity", "loss") if name in summary}
    lines = [
        f"epochs      {summary['t']:,} ({summary['ended']}), {summary['applied']:,} updates, "
        f"{summary['gradients']:,} gradients",
        *(f"{name:<11} {value:.4f}" for name, value in metrics.items()),
        f"staleness   mean {summary['staleness_mean']:.1f}, largest {summary['staleness_largest']}",
        f"time        {summary['virtual_s']:,.1f} s virtual, {summary['wall_s']:.1f} s real, {summary['executor']}",
        f"model       sha256 {summary['x_sha256'][:16]}...",
    ]
    if summary["dir"]:
        lines.append(f"folder      {summary['dir']}")
    return "\n".join(lines)
