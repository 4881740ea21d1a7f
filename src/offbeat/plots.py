"""Owns the pictures."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offbeat.sim.engine import History

mpl.use("Agg")

COLOURS = ("#0b6e99", "#c1440e", "#5b7c2c", "#7a4a8c")


def race(path: Path, histories: Mapping[str, History]) -> None:
    """Accuracy against virtual time of every method, and staleness with the weight it got, of the first one."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for (name, history), colour in zip(histories.items(), COLOURS, strict=False):
        at_s = [e.at_s for e in history.evaluations]
        accuracy = [100 * e.metrics["accuracy"] for e in history.evaluations]
        left.plot(at_s, accuracy, color=colour, linewidth=2, label=f"{name}: {accuracy[-1]:.1f} %")
    left.set(xlabel="virtual time (s)", ylabel="test accuracy (%)", ylim=(0, 100), title="Same devices, same clock")
    left.set_xlim(0, max(history.evaluations[-1].at_s for history in histories.values()))
    left.legend(loc="lower right", frameon=False)
    left.grid(alpha=0.3)
    _staleness(right, *next(iter(histories.items())))
    figure.savefig(path)


def _staleness(axes: Axes, name: str, history: History) -> None:
    staleness = np.array([update.staleness for update in history.updates])
    alpha_t = np.array([update.mix.new for update in history.updates])
    largest = max(1, int(np.percentile(staleness, 99))) if len(staleness) else 1
    axes.hist(staleness, bins=[edge - 0.5 for edge in range(largest + 2)], color="#b8c4cc")
    axes.set(xlabel="staleness (versions)", ylabel="updates", title=f"{name}: how stale, and what weight")
    axes.set_xlim(-0.5, largest + 0.5)
    weights = axes.twinx()
    weights.plot(staleness, alpha_t, ".", color=COLOURS[0], markersize=4)
    weights.set_ylabel("alpha_t of each update (dots)", color=COLOURS[0])
    weights.set_ylim(0, 1)
