"""Owns the progress display: a bar on a terminal, nothing where the output is not one."""

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from offbeat.sim.run import Simulation


class Bar:
    """Progress of one run: epochs, metric, staleness, epochs per second."""

    def __init__(self, name: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(f"{name:<9}"), BarColumn(), TextColumn("{task.fields[news]}"), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bar = self.progress.add_task(name, total=None, news="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, simulation: Simulation) -> None:
        """Move the bar to where the run stands."""
        c = simulation.coordinator
        metrics = next(reversed(c.evaluations)).metrics if c.evaluations else {}
        metric = "  ".join(f"{name} {value:.4g}" for name, value in list(metrics.items())[-1:])
        speed = c.t / max(simulation.wall_s(), 1e-9)
        news = f"epoch {c.t:<6} {metric}  staleness {simulation.curve.fold.staleness_mean:.1f}  {speed:.0f}/s"
        self.progress.update(self.bar, completed=simulation.share(), total=1, news=news)
