"""Owns what a target leaves: its picture (PNG, SVG), its numbers (CSV), its summary (JSON)."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offbeat.plots import COLOURS
from offbeat.reproduce.curves import Curve, Results
from offbeat.reproduce.targets import Target
from offbeat.sim.curve import CurvePoint
from offbeat.storage.json_file import write_json

AXES = {"gradients": "gradients applied to the global model", "virtual_s": "virtual time (s)"}
HUES = {"Const": COLOURS[0], "Poly": COLOURS[1], "Hinge": COLOURS[2], "FedAvg": "#444444", "SGD": "#444444"}
"""A colour for each way of weighing; the baselines are grey."""
SHADES = ("-", (0, (5, 1.5)), (0, (1, 1)))
"""A line for each alpha, and for each kind of baseline."""
PERPLEXITY_MAX = 600.0


class End(NamedTuple):
    """The end of a curve over its seeds."""

    label: str
    mean: float
    spread: float
    best: float
    """The mean over the seeds of the best value on the way."""
    gradients: int
    seeds: int
    wall_s: float


def write(target: Target, results: Results, folder: Path) -> dict[str, Any]:
    """Picture, numbers and summary of what is there; answers the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = [end for curve in target.curves if (end := _end(curve, target, results))]
    figure = Figure(figsize=(8.5, 5), layout="constrained", dpi=120)
    draw = {"curves": _curves, "ends": _ends, "grid": _grid}[target.kind]
    draw(figure.subplots(), target, results)
    with mpl.rc_context({"svg.hashsalt": target.name}):  # the same numbers give the same file
        figure.savefig(folder / f"{target.name}.png", metadata={"Software": None})
        figure.savefig(folder / f"{target.name}.svg", metadata={"Date": None})
    _numbers(folder / f"{target.name}.csv", ends)
    summary = {
        "target": target.name,
        "title": target.title,
        "metric": target.metric,
        "curves": [e._asdict() for e in ends],
    }
    write_json(folder / f"{target.name}.json", summary)
    return summary


def label_of(curve: Curve, target: Target) -> str:
    """What the target calls it: by its place in the figure, where its curves differ in that alone."""
    return next((f"{line} {x}" for line, x, hashed in target.places.values() if hashed == curve.hash), curve.label)


def _end(curve: Curve, target: Target, results: Results) -> End | None:
    runs = [points for seed, points in results.points(curve).items() if seed in curve.seeds]
    if not runs:
        return None
    finals = [points[-1].metrics[target.metric] for points in runs]
    pick = min if target.metric == "perplexity" else max
    best = [pick(point.metrics[target.metric] for point in points) for points in runs]
    walls = [run["wall_s"] for run in results.facts(curve)["runs"].values()]
    label = label_of(curve, target)
    spread = stdev(finals) if len(finals) > 1 else 0.0
    return End(label, fmean(finals), spread, fmean(best), runs[0][-1].gradients, len(runs), round(sum(walls), 1))


def _numbers(path: Path, ends: Sequence[End]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(End._fields)
        for end in ends:
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in end])


# --- pictures --------------------------------------------------------------------------------------------------------


def _curves(axes: Axes, target: Target, results: Results) -> None:
    """Metric against gradients or time: mean over the seeds, spread as a band; curves that are one run, once."""
    drawn: dict[str, list[str]] = {}
    for curve in target.curves:
        drawn.setdefault(curve.hash, []).append(curve.label)
    by_hash = {curve.hash: curve for curve in reversed(target.curves)}
    seen: dict[str, int] = {}
    for hashed, labels in drawn.items():
        runs = [points for seed, points in results.points(by_hash[hashed]).items() if seed in by_hash[hashed].seeds]
        hue = next((name for name in HUES if name in labels[0]), "Const")
        style = SHADES[2] if hue == "FedAvg" else SHADES[seen.get(hue, 0) % len(SHADES)]
        seen[hue] = seen.get(hue, 0) + 1
        if runs:
            _band(axes, joined(labels), runs, target, HUES[hue], style)
    _labels(axes, target, AXES[target.axis], max(len(results.points(curve)) for curve in target.curves))
    if target.metric == "perplexity":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.set_ylim(low, min(high, PERPLEXITY_MAX))
    axes.legend(frameon=False, fontsize="small")


def joined(labels: Sequence[str]) -> str:
    """One label for curves that are the same run.

    >>> joined(["FedAsync+Const, alpha 0.6", "FedAsync+Hinge, alpha 0.6"])
    'FedAsync+Const = Hinge, alpha 0.6'
    """
    first, *others = labels
    method, comma, rest = first.partition(",")
    names = [other.partition(",")[0].rpartition("+")[2] for other in others]
    return " = ".join([method, *names]) + comma + rest


def _band(
    axes: Axes, label: str, runs: Sequence[Sequence[CurvePoint]], target: Target, colour: str, style: Any
) -> None:
    at = np.array([[getattr(p, "at" if target.axis == "virtual_s" else "gradients") for p in run] for run in runs])
    values = np.array([[point.metrics[target.metric] for point in run] for run in runs])
    middle = values.mean(axis=0)
    axes.plot(at.mean(axis=0), middle, linestyle=style, color=colour, linewidth=1.8, label=label)
    if len(runs) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(at.mean(axis=0), middle - spread, middle + spread, color=colour, alpha=0.15, linewidth=0)


def _ends(axes: Axes, target: Target, results: Results) -> None:
    """The final metric against the maximum staleness."""
    by_hash = {curve.hash: curve for curve in target.curves}
    lines: dict[str, list[tuple[float, End]]] = {}
    for line, x, hashed in target.places.values():
        end = _end(by_hash[hashed], target, results)
        if end:
            lines.setdefault(line, []).append((x, end))
    for (line, places), colour in zip(lines.items(), COLOURS, strict=False):
        x, ends = zip(*sorted(places), strict=True)
        means, spreads = [end.mean for end in ends], [end.spread for end in ends]
        axes.errorbar(x, means, yerr=spreads, marker="o", capsize=3, color=colour, label=f"FedAsync+{line}")
    _labels(
        axes, target, "maximum staleness", max((end.seeds for places in lines.values() for _, end in places), default=0)
    )
    axes.legend(frameon=False)


def _grid(axes: Axes, target: Target, results: Results) -> None:
    """The final metric of every combination, side by side."""
    by_hash = {curve.hash: curve for curve in target.curves}
    names = list(dict.fromkeys(x for _, x, _ in target.places.values()))
    seeds = 0
    for k, colour, shift in ((4, COLOURS[0], -0.12), (16, COLOURS[1], 0.12)):
        found = [
            (names.index(x), _end(by_hash[h], target, results)) for line, x, h in target.places.values() if line == k
        ]
        there = [(x, end) for x, end in found if end]
        seeds = max([seeds, *(end.seeds for _, end in there)])
        x = [place + shift for place, _ in there]
        means, spreads = [end.mean for _, end in there], [end.spread for _, end in there]
        axes.errorbar(x, means, yerr=spreads, fmt="o", capsize=3, color=colour, label=f"maximum staleness {k}")
    axes.set_xticks(
        range(len(names)), [f"gamma {g:g}\nrho {r:g}\nalpha {a:g}" for g, r, a in names], fontsize="x-small"
    )
    _labels(axes, target, "", seeds)
    axes.legend(frameon=False)


def _labels(axes: Axes, target: Target, x: str, seeds: int) -> None:
    spread = f"{seeds} seeds: mean and standard deviation" if seeds > 1 else "1 seed"
    name = {"accuracy": "top-1 accuracy on the test set", "perplexity": "perplexity on the test set"}[target.metric]
    axes.set(xlabel=x, ylabel=name, title=f"{target.title} ({spread})")
    axes.grid(alpha=0.3)
