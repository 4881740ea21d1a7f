"""Owns the pictures: one run, several runs under one clock, and a comparison of methods.

Rules kept here:
- Axes say what they show and in which unit; where there are several seeds, a band shows their spread.
- However many methods there are, each is drawn and looks like no other.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offbeat.core.rules.average import AVERAGED, of_versions
from offbeat.protocol.messages import Decision
from offbeat.sim.compare import Comparison
from offbeat.sim.curve import CURVE, CurvePoint, read_curve
from offbeat.sim.run import Run
from offbeat.sim.spec import safe
from offbeat.storage.run_folder import RunFolder

COLOURS = ("#0b6e99", "#c1440e", "#5b7c2c", "#7a4a8c", "#b8860b", "#444444", "#1a9988", "#d45087")
DASHES = ("-", "--", ":", "-.")
MARKERS = ("", "o", "s", "^", "v", "D", "x", "+", "*")
ENDINGS = ("png", "svg")
BARS = "#b8c4cc"
LEGEND_INSIDE_MAX = 8
"""Methods whose legend has room inside the axes."""
LEGEND_ROWS_MAX = 22
LONGER_MANY = 5
"""Where one method runs more than this many times as long as another, the axis is logarithmic."""
SAMPLES = 400


class Axis(NamedTuple):
    label: str
    of: Callable[[CurvePoint], float]


AXES = {
    "virtual time": Axis("virtual time (s)", lambda point: point.at),
    "epochs": Axis("epochs (versions published)", lambda point: point.t),
    "gradients": Axis("gradients (local iterations applied)", lambda point: point.gradients),
    "bytes": Axis("sent over the network, both ways (MB)", lambda point: point.bytes / 1e6),
}

# --- one run ---------------------------------------------------------------------------------------------------------


def run(path: Path, result: Run) -> None:
    """A run's metric against virtual time, and how stale its updates were."""
    figure = _of_run(result.summary["settings"]["rule"], result.metrics, result.ledger)
    if figure is not None:
        figure.savefig(path)


def run_folder(path: Path) -> list[Path]:
    folder = RunFolder.open(path)
    with folder.ledger() as ledger:
        applied = [decision for decision in ledger.decisions() if decision.mix]
    figure = _of_run(folder.settings["rule"], read_curve(path / CURVE), applied)
    return _saved(figure, path, "run") if figure is not None else []


def _of_run(rule: str, points: Sequence[CurvePoint], decisions: Sequence[Decision]) -> Figure | None:
    names = list(points[-1].metrics) if points else []
    if not names:
        return None  # nothing was measured, so there is nothing to draw
    metric = of_versions(names)[-1]
    figure = Figure(figsize=(10, 4), dpi=120)  # margins by hand: working them out takes longer than the rest
    figure.subplots_adjust(left=0.09, right=0.94, bottom=0.13, top=0.92, wspace=0.18)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    left.plot([point.at for point in points], _values(points, metric), color=COLOURS[0], linewidth=2)
    if metric + AVERAGED in names:
        left.lines[0].set_label("newest version")
        at, mean = [point.at for point in points], _values(points, metric + AVERAGED)
        left.plot(at, mean, color=COLOURS[1], linewidth=2, linestyle="--", label="averaged model")
        left.legend(frameon=False)
    left.set(xlabel=AXES["virtual time"].label, ylabel=metric, title=f"{rule}: {metric}")
    left.grid(alpha=0.3)
    staleness(right, decisions)
    return figure


def staleness(axes: Axes, decisions: Sequence[Decision]) -> None:
    seen = [decision.staleness for decision in decisions]
    largest = max(1, int(np.percentile(seen, 99))) if seen else 1
    counts = np.bincount(np.asarray(seen, dtype=np.int64), minlength=largest + 1)[: largest + 1]
    axes.stairs(counts, np.arange(largest + 2) - 0.5, fill=True, color=BARS)
    cut = f"; {max(seen)} at most" if seen and max(seen) > largest else ""
    axes.set(xlabel=f"staleness (versions{cut})", ylabel="updates (bars)", title="How stale, and what weight")
    axes.set_xlim(-0.5, largest + 0.5)
    dots = sorted({(decision.staleness, decision.mix.new if decision.mix else 0.0) for decision in decisions})
    right = axes.twinx()
    right.plot([dot[0] for dot in dots], [dot[1] for dot in dots], ".", color=COLOURS[0], markersize=4)
    right.set_ylabel("coefficient of x_new (dots)", color=COLOURS[0])
    right.set_ylim(0, 1.05)


# --- several ---------------------------------------------------------------------------------------------------------


def race(path: Path, runs: Mapping[str, Run], metric: str = "accuracy") -> None:
    """Several runs under one clock, and the staleness of the first one."""
    figure = Figure(figsize=(10, 4), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    end = max(result.summary["virtual_s"] for result in runs.values())
    for number, (name, result) in enumerate(runs.items()):
        values = [100 * point.metrics[metric] for point in result.metrics]
        at = [point.at for point in result.metrics]
        at, values = [*at, end], [*values, values[-1]]
        left.step(at, values, where="post", label=f"{name}: {values[-1]:.1f} %", **style(number))
    left.set(xlabel="virtual time (s)", ylabel=f"test {metric} (%)", ylim=(0, 100), title="Same devices, same clock")
    left.set_xlim(0, end)
    left.legend(loc="lower right", frameon=False)
    left.grid(alpha=0.3)
    staleness(right, next(iter(runs.values())).ledger)
    figure.savefig(path)


def comparison(folder: Path, result: Comparison) -> list[Path]:
    """The metric of every method against each axis: mean over the seeds, and the spread as a band; PNG and SVG."""
    written = []
    for name, axis in AXES.items():
        figure = _of_comparison(result, axis)
        written += _saved(figure, folder, safe(f"{result.spec.metric}-{name}"))
    return written


def _of_comparison(result: Comparison, axis: Axis) -> Figure:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    at, logarithmic = _moments([*result.curves.values()], axis.of)
    for number, (method, curves) in enumerate(result.curves.items()):
        _band(axes, method, curves, axis.of, result.spec.metric, at, style(number))
    if logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel=axis.label + ", log scale" * logarithmic, ylabel=result.spec.metric, title=_title(result))
    axes.margins(x=0.02)
    axes.grid(alpha=0.3)
    _legend(figure, axes, list(result.curves))
    return figure


def style(number: int) -> dict[str, Any]:
    """How the line of the n-th method looks: colours first, then dashes, then markers."""
    rest, colour = divmod(number, len(COLOURS))
    rest, dash = divmod(rest, len(DASHES))
    return {
        "color": COLOURS[colour],
        "linestyle": DASHES[dash],
        "marker": MARKERS[rest % len(MARKERS)],
        "markevery": 0.1,
        "markersize": 5,
        "linewidth": 2,
    }


def _title(result: Comparison) -> str:
    seeds, task = result.spec.seeds, Path(result.spec.task).name
    return f"{task}, seed {seeds[0]}" if len(seeds) == 1 else f"{task}: mean of {len(seeds)} seeds ± standard deviation"


def _legend(figure: Figure, axes: Axes, names: Sequence[str]) -> None:
    """Inside where it has room, else to the right of the axes, in a figure that is wider for it."""
    if len(names) <= LEGEND_INSIDE_MAX:
        axes.legend(frameon=False, loc="best")
        return
    columns = -(-len(names) // LEGEND_ROWS_MAX)
    figure.set_figwidth(7.5 + columns * (0.7 + 0.075 * max(map(len, names))))
    figure.legend(frameon=False, loc="outside right upper", ncols=columns, fontsize="small", handlelength=3)


Numbers = npt.NDArray[np.float64]


def _moments(
    groups: Sequence[Sequence[Sequence[CurvePoint]]], of: Callable[[CurvePoint], float]
) -> tuple[Numbers, bool]:
    """Where on an axis the methods are looked at, and whether it is logarithmic."""
    ends = [max(of(curve[-1]) for curve in curves) for curves in groups]
    first = min((of(point) for curves in groups for curve in curves for point in curve if of(point) > 0), default=1.0)
    if min(ends) > 0 and max(ends) > LONGER_MANY * min(ends):
        return np.geomspace(first, max(ends), SAMPLES), True
    return np.linspace(0, max(ends), SAMPLES), False


def _band(
    axes: Axes,
    name: str,
    curves: Sequence[Sequence[CurvePoint]],
    of: Callable[[CurvePoint], float],
    metric: str,
    at: Numbers,
    look: Mapping[str, Any],
) -> None:
    """Mean and spread until the last seed has ended; those that ended before keep what they reached."""
    end = max(of(curve[-1]) for curve in curves)
    at = np.append(at[at < end], end)
    values = np.array([_held(at, [of(point) for point in curve], _values(curve, metric)) for curve in curves])
    middle, spread = values.mean(axis=0), values.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(at))
    axes.plot(at, middle, drawstyle="steps-post", label=name, **look)
    axes.fill_between(at, middle - spread, middle + spread, step="post", color=look["color"], alpha=0.2, linewidth=0)


def _values(points: Sequence[CurvePoint], metric: str) -> Numbers:
    """The metric along a curve; what cannot be drawn is a gap."""
    values = np.array([point.metrics.get(metric, np.nan) for point in points], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def _held(at: Numbers, x: Sequence[float], y: Numbers) -> Numbers:
    """The value of the newest version at these moments: it holds until the next evaluation."""
    index = np.searchsorted(np.asarray(x), at, side="right") - 1
    return y[np.clip(index, 0, None)]


def _saved(figure: Figure, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.{ending}" for ending in ENDINGS]
    for path in paths:
        figure.savefig(path)
    return paths
