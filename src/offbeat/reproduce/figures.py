"""Owns the files of a target: its picture (PNG, SVG), its numbers (CSV), its summary (JSON)."""

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
from offbeat.reproduce.target_runs import CurveResults
from offbeat.reproduce.targets import FigureCurve, ReproductionTarget
from offbeat.sim.curve import CurvePoint
from offbeat.storage.json_file import write_json

AXES = {"gradients": "gradients applied to the global model", "virtual_s": "virtual time (s)"}
HUES = {"Const": COLOURS[0], "Poly": COLOURS[1], "Hinge": COLOURS[2], "FedAvg": "#444444", "SGD": "#444444"}
"""A colour for each staleness function; the baselines are grey."""
SHADES = ("-", (0, (5, 1.5)), (0, (1, 1)))
"""A line style for each alpha, and for each kind of baseline."""
PERPLEXITY_MAX = 600.0


class CurveEnd(NamedTuple):
    """The final metric of a curve, over its seeds."""

    label: str
    mean: float
    spread: float
    best: float
    """The mean over the seeds of the best value on the way."""
    gradients: int
    seeds: int
    wall_s: float


def write(target: ReproductionTarget, results: CurveResults, folder: Path) -> dict[str, Any]:
    """Write picture, numbers and summary of the results so far; returns the summary."""
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


def label_of(curve: FigureCurve, target: ReproductionTarget) -> str:
    """The curve's place in the figure, in a figure of places; elsewhere its own label."""
    return next((f"{line} {x}" for line, x, placed in target.places if placed.hash == curve.hash), curve.label)


def _end(curve: FigureCurve, target: ReproductionTarget, results: CurveResults) -> CurveEnd | None:
    runs = _runs(curve, results)
    if not runs:
        return None
    finals = [points[-1].metrics[target.metric] for points in runs]
    pick = min if target.metric == "perplexity" else max
    best = [pick(point.metrics[target.metric] for point in points) for points in runs]
    walls = [run["wall_s"] for run in results.facts(curve)["runs"].values()]
    label = label_of(curve, target)
    spread = stdev(finals) if len(finals) > 1 else 0.0
    return CurveEnd(label, fmean(finals), spread, fmean(best), runs[0][-1].gradients, len(runs), round(sum(walls), 1))


def _runs(curve: FigureCurve, results: CurveResults) -> list[list[CurvePoint]]:
    return [points for seed, points in results.points(curve).items() if seed in curve.seeds]


def _numbers(path: Path, ends: Sequence[CurveEnd]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CurveEnd._fields)
        for end in ends:
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in end])


# --- pictures --------------------------------------------------------------------------------------------------------


def _curves(axes: Axes, target: ReproductionTarget, results: CurveResults) -> None:
    """Metric against gradients or time: mean over the seeds, spread as a band. Curves of the same runs share a line."""
    same: dict[str, list[FigureCurve]] = {}
    for curve in target.curves:
        same.setdefault(curve.hash, []).append(curve)
    seen: dict[str, int] = {}
    for curves in same.values():
        runs = _runs(curves[0], results)
        hue = next((name for name in HUES if name in curves[0].label), "Const")
        style = SHADES[2] if hue == "FedAvg" else SHADES[seen.get(hue, 0) % len(SHADES)]
        seen[hue] = seen.get(hue, 0) + 1
        if runs:
            _band(axes, joined([curve.label for curve in curves]), runs, target, HUES[hue], style)
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
    axes: Axes, label: str, runs: Sequence[Sequence[CurvePoint]], target: ReproductionTarget, colour: str, style: Any
) -> None:
    at = np.array([[getattr(p, "at" if target.axis == "virtual_s" else "gradients") for p in run] for run in runs])
    values = np.array([[point.metrics[target.metric] for point in run] for run in runs])
    middle = values.mean(axis=0)
    axes.plot(at.mean(axis=0), middle, linestyle=style, color=colour, linewidth=1.8, label=label)
    if len(runs) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(at.mean(axis=0), middle - spread, middle + spread, color=colour, alpha=0.15, linewidth=0)


def _ends(axes: Axes, target: ReproductionTarget, results: CurveResults) -> None:
    lines: dict[str, list[tuple[float, CurveEnd]]] = {}
    for line, x, curve in target.places:
        if end := _end(curve, target, results):
            lines.setdefault(line, []).append((x, end))
    for (line, places), colour in zip(lines.items(), COLOURS, strict=False):
        _bars(axes, sorted(places), marker="o", color=colour, label=f"FedAsync+{line}")
    seeds = max((end.seeds for places in lines.values() for _, end in places), default=0)
    _labels(axes, target, "maximum staleness", seeds)
    axes.legend(frameon=False)


def _bars(axes: Axes, places: Sequence[tuple[float, CurveEnd]], **style: Any) -> None:
    means, spreads = [end.mean for _, end in places], [end.spread for _, end in places]
    axes.errorbar([x for x, _ in places], means, yerr=spreads, capsize=3, **style)


def _grid(axes: Axes, target: ReproductionTarget, results: CurveResults) -> None:
    names = list(dict.fromkeys(place.x for place in target.places))
    seeds = 0
    for k, colour, shift in ((4, COLOURS[0], -0.12), (16, COLOURS[1], 0.12)):
        here = [(names.index(place.x) + shift, place.curve) for place in target.places if place.line == k]
        there = [(x, end) for x, curve in here if (end := _end(curve, target, results))]
        seeds = max([seeds, *(end.seeds for _, end in there)])
        _bars(axes, there, fmt="o", color=colour, label=f"maximum staleness {k}")
    axes.set_xticks(
        range(len(names)), [f"gamma {g:g}\nrho {r:g}\nalpha {a:g}" for g, r, a in names], fontsize="x-small"
    )
    _labels(axes, target, "", seeds)
    axes.legend(frameon=False)


def _labels(axes: Axes, target: ReproductionTarget, x: str, seeds: int) -> None:
    spread = f"{seeds} seeds: mean and standard deviation" if seeds > 1 else "1 seed"
    name = {"accuracy": "top-1 accuracy on the test set", "perplexity": "perplexity on the test set"}[target.metric]
    axes.set(xlabel=x, ylabel=name, title=f"{target.title} ({spread})")
    axes.grid(alpha=0.3)
