"""Owns the pictures: one run, and a comparison of methods."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offbeat.protocol.messages import Decision
from offbeat.sim.compare import Comparison
from offbeat.sim.run import Point, Run

mpl.use("Agg")

COLOURS = ("#0b6e99", "#c1440e", "#5b7c2c", "#7a4a8c", "#b8860b", "#444444", "#1a9988", "#d45087")
AXES: Mapping[str, tuple[str, Callable[[Point], float]]] = {
    "virtual time": ("virtual time (s)", lambda point: point.at),
    "epochs": ("epochs", lambda point: point.t),
    "gradients": ("gradients", lambda point: point.gradients),
    "bytes": ("sent over the network (MB)", lambda point: point.bytes / 1e6),
}


def run(path: Path, result: Run, metric: str | None = None) -> None:
    """A run's metric against virtual time, and how stale its updates were."""
    names = list(result.metrics[-1].metrics) if result.metrics else []
    if not names:
        return  # nothing was measured, so there is nothing to draw
    metric = metric or names[-1]
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.plot(
        [p.at for p in result.metrics], [p.metrics[metric] for p in result.metrics], color=COLOURS[0], linewidth=2
    )
    left.set(xlabel="virtual time (s)", ylabel=metric, title=f"{result.summary['settings']['rule']}: {metric}")
    _grid(left)
    staleness(right, result.ledger)
    figure.savefig(path)


def race(path: Path, runs: Mapping[str, Run], metric: str = "accuracy") -> None:
    """Several runs under one clock, and the staleness of the first one."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    end = max(result.summary["virtual_s"] for result in runs.values())
    for (name, result), colour in zip(runs.items(), COLOURS, strict=False):
        values = [100 * point.metrics[metric] for point in result.metrics]
        at = [point.at for point in result.metrics]
        at, values = [*at, end], [*values, values[-1]]
        left.step(at, values, where="post", color=colour, linewidth=2, label=f"{name}: {values[-1]:.1f} %")
    left.set(xlabel="virtual time (s)", ylabel=f"test {metric} (%)", ylim=(0, 100), title="Same devices, same clock")
    left.set_xlim(0, end)
    left.legend(loc="lower right", frameon=False)
    _grid(left)
    staleness(right, next(iter(runs.values())).ledger)
    figure.savefig(path)


def staleness(axes: Axes, decisions: Sequence[Decision]) -> None:
    """How stale the updates were, and what weight each got."""
    seen = [decision.staleness for decision in decisions]
    weights = [decision.mix.new if decision.mix else 0.0 for decision in decisions]
    largest = max(1, int(np.percentile(seen, 99))) if seen else 1
    axes.hist(seen, bins=[edge - 0.5 for edge in range(largest + 2)], color="#b8c4cc")
    axes.set(xlabel="staleness (versions)", ylabel="updates", title="How stale, and what weight")
    axes.set_xlim(-0.5, largest + 0.5)
    right = axes.twinx()
    right.plot(seen, weights, ".", color=COLOURS[0], markersize=4)
    right.set_ylabel("alpha_t of each update (dots)", color=COLOURS[0])
    right.set_ylim(0, 1.05)


def comparison(folder: Path, result: Comparison) -> list[Path]:
    """The metric of every method against each axis: mean over the seeds, and the spread as a band; PNG and SVG."""
    written = []
    for name, (label, value) in AXES.items():
        figure = Figure(figsize=(7, 4.5), layout="constrained", dpi=120)
        axes = figure.subplots()
        for (method, curves), colour in zip(result.curves.items(), COLOURS * 4, strict=False):
            _band(axes, method, curves, value, result.spec.metric, colour)
        seeds = len(result.spec.seeds)
        axes.set(xlabel=label, ylabel=result.spec.metric, title=f"{result.spec.task}, {seeds} seeds: mean and spread")
        axes.legend(frameon=False)
        _grid(axes)
        for ending in ("png", "svg"):
            path = folder / f"{result.spec.metric}-{name.replace(' ', '-')}.{ending}"
            figure.savefig(path)
            written.append(path)
    return written


def _band(
    axes: Axes, name: str, curves: Sequence[Sequence[Point]], value: Callable[[Point], float], metric: str, colour: str
) -> None:
    end = min(value(curve[-1]) for curve in curves)
    at = np.linspace(0, end, 300)
    values = np.array([_held(at, [value(p) for p in c], [p.metrics[metric] for p in c]) for c in curves])
    middle, spread = values.mean(axis=0), values.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(at))
    axes.plot(at, middle, color=colour, linewidth=2, label=name)
    axes.fill_between(at, middle - spread, middle + spread, color=colour, alpha=0.2, linewidth=0)


def _held(at: npt.NDArray[np.float64], x: Sequence[float], y: Sequence[float]) -> npt.NDArray[np.float64]:
    """The value of the newest version at these moments: it holds until the next evaluation."""
    index = np.searchsorted(np.asarray(x), at, side="right") - 1
    return np.asarray(y, dtype=np.float64)[np.clip(index, 0, None)]


def _grid(axes: Axes) -> None:
    axes.grid(alpha=0.3)
