"""Owns the report of several runs: curves over each other, a table of results, and the settings that differ.

Rules kept here:
- Runs that differ in nothing but the seed are one line: mean, and the spread as a band.
- A run that cannot be read is named with its reason; the others are reported all the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from offbeat.report import pictures, words
from offbeat.report.chosen import ABOUT, PER_RUN, defaults, differing, settings_list, shown
from offbeat.report.curves import RunCurve, averaged
from offbeat.report.page import (
    NOTHING,
    Html,
    document,
    joined,
    paragraph,
    picture,
    section,
    swatch,
    table,
    tag,
    text,
    value,
)
from offbeat.report.page import pictures as side_by_side
from offbeat.sim.comparison import spread_of

METRICS_MAX = 3
"""Metrics that are drawn."""
POINTS_MAX = 6_000
"""Of all lines in one picture."""
LISTED_MAX = 300
"""Runs that are listed one by one."""
COUNTS = {
    "t": "epochs",
    "applied": "updates",
    "refused": "refused",
    "gradients": "gradients",
    "staleness_mean": "mean staleness",
}


class Measured(NamedTuple):
    """A run as a comparison sees it."""

    label: str
    """Its method."""
    settings: Mapping[str, Any]
    curve: RunCurve
    results: Mapping[str, float | None]
    """COUNTS, by name; what is not known is left out."""
    state: str = "finished"
    wrong: int | None = None
    """How many things went wrong; None where nobody knows."""
    name: str = ""
    """Where it is."""


@dataclass(frozen=True, slots=True)
class Line:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: Sequence[Measured]

    @property
    def settings(self) -> Mapping[str, Any]:
        """What they have in common, and the first one's seed."""
        return self.runs[0].settings

    def finals(self, metric: str) -> list[float]:
        """The last value of every run that has one."""
        return [last for run in self.runs if (last := run.curve.last(metric)) is not None]


class Unreadable(NamedTuple):
    """A run that could not be read, and why."""

    name: str
    why: str


def lines_of(runs: Sequence[Measured]) -> list[Line]:
    """Runs by method, in the order in which they came."""
    found: dict[tuple[str, str], list[Measured]] = {}
    for run in runs:
        same = {name: one for name, one in run.settings.items() if name not in PER_RUN}
        found.setdefault((run.label, repr(sorted(same.items()))), []).append(run)
    return [Line(label, members) for (label, _), members in found.items()]


def comparison_page(title: str, runs: Sequence[Measured], at: datetime, unreadable: Sequence[Unreadable] = ()) -> str:
    """The whole file."""
    lines = lines_of(runs)
    metrics = _metrics(runs)
    own = section("runs", "All runs", _runs(runs, metrics), _unreadable(unreadable))
    sections = {
        "curves": ("Curves", section("curves", "Curves", _overlays(lines, metrics))),
        "results": ("Results", section("results", "Results", _results(lines, metrics))),
        "differ": ("Settings that differ", section("differ", "Settings that differ", _differing(lines))),
        "runs": ("All runs", own),
        "same": ("Common settings", section("same", "Settings that all have in common", _common(lines))),
    }
    heading = tag("h1", text(title))
    unfinished = sum(run.state != "finished" for run in runs)
    said = f"{words.many(len(runs), 'run')} of {words.many(len(lines), 'method')}"
    said += f"; {unfinished:,} not finished." if unfinished else ", all finished."
    return document(words.clean(title), joined((heading, paragraph(text(said)))), sections, at)


def _metrics(runs: Sequence[Measured]) -> list[str]:
    """All metrics: what most runs have comes first, and what a task names last before its others."""
    names = dict.fromkeys(name for run in runs for name in reversed(run.curve.metrics))
    return sorted(names, key=lambda name: -sum(name in run.curve.metrics for run in runs))


# --- pictures --------------------------------------------------------------------------------------------------------


def _overlays(lines: Sequence[Line], metrics: Sequence[str]) -> Html:
    if not metrics:
        return paragraph(text("Nothing was measured, so there is nothing to draw."))
    shown_metrics = metrics[:METRICS_MAX]
    drawn = [
        joined((tag("h3", text(name)), side_by_side(*_overlay(lines, number, name))))
        for number, name in enumerate(shown_metrics)
    ]
    spread = any(len(line.runs) > 1 for line in lines)
    said = "A line is the mean of its seeds, the band their standard deviation." if spread else ""
    left = len(lines) - pictures.LINES_MAX
    said += f" The last {left:,} methods are not drawn." if left > 0 else ""
    more = len(metrics) - len(shown_metrics)
    said += f" {words.many(more, 'metric')} more not drawn." if more else ""
    return joined((_legend(lines), *drawn, paragraph(text(said), kind="soft") if said else NOTHING))


def _overlay(lines: Sequence[Line], number: int, metric: str) -> Iterator[Html]:
    clock, longest = _clock(lines)
    unit, seconds = words.time_axis(longest)
    axes = (
        ("t", "epochs", "epochs (versions published)", 1.0),
        ("at", "time", f"{clock} ({unit})", seconds),
        ("gradients", "gradients", "gradients (local iterations applied)", 1.0),
    )
    most = max(30, POINTS_MAX // max(1, len(lines)))
    for axis, short, label, scale in axes:
        curves = [averaged([run.curve.along(axis, metric) for run in line.runs], most) for line in lines]
        scaled = [(x / scale, mean, spread) for x, mean, spread in curves]
        key = f"overlay-{number}-{short}"
        yield picture(pictures.overlay(key, scaled, label=label, metric=metric, short=short))


def _clock(lines: Sequence[Line]) -> tuple[str, float]:
    """What time is called, and how long the longest run took."""
    runs = [run for line in lines for run in line.runs]
    names = {"run time" if run.settings.get("served") else "virtual time" for run in runs}
    return names.pop() if len(names) == 1 else "time", max((run.curve.ended_at for run in runs), default=0.0)


def _legend(lines: Sequence[Line]) -> Html:
    items = [
        tag("li", swatch(*pictures.look(number)), text(line.label))
        for number, line in enumerate(lines[: pictures.LINES_MAX])
    ]
    return tag("ul", *items, class_="legend")


# --- tables ----------------------------------------------------------------------------------------------------------


def _results(lines: Sequence[Line], metrics: Sequence[str]) -> Html:
    known = {name: said for name, said in COUNTS.items() if any(name in r.results for line in lines for r in line.runs)}
    rows = [
        [
            text(line.label),
            value(len(line.runs)),
            *(_mean(line.finals(metric)) for metric in metrics),
            *(_mean([run.results.get(name) for run in line.runs]) for name in known),
            _time([run.curve.ended_at for run in line.runs]),
        ]
        for line in lines
    ]
    return table("methods", ("method", "runs", *metrics, *known.values(), "time"), rows)


def _mean(values: Sequence[float | None]) -> Html:
    known = [float(one) for one in values if one is not None]
    if not known:
        return text(words.UNKNOWN)
    return value(sum(known) / len(known), words.with_spread(known, spread_of(known)))


def _time(seconds: Sequence[float]) -> Html:
    mean = sum(seconds) / len(seconds)
    return value(mean, words.duration(mean))


def _runs(runs: Sequence[Measured], metrics: Sequence[str]) -> Html:
    counted = any(run.wrong is not None for run in runs)
    rows = [
        [
            text(run.name or run.label),
            tag("span", text(run.state), class_=run.state),
            value(run.settings.get("seed")),
            *(_exactly(run.curve.last(metric)) for metric in metrics),
            value(run.results.get("t")),
            *([value(run.wrong)] if counted else []),
        ]
        for run in runs[:LISTED_MAX]
    ]
    headings = ("run", "state", "seed", *metrics, "epochs", *(("went wrong",) if counted else ()))
    shown_table = table("each", headings, rows, words=2)
    more = len(runs) - len(rows)
    return joined((shown_table, paragraph(text(f"And {words.many(more, 'run')} more.")) if more > 0 else NOTHING))


def _exactly(exact: float | None) -> Html:
    return value(exact, words.number(exact))


def _differing(lines: Sequence[Line]) -> Html:
    names = differing([line.settings for line in lines])
    if not names:
        return paragraph(text("None, but for the seed."))
    rows = [
        [text(line.label), *(tag("code", text(shown(line.settings.get(name)), 200)) for name in names)]
        for line in lines
    ]
    return table("differing", ("method", *names), rows, words=1 + len(names))


def _common(lines: Sequence[Line]) -> Html:
    settings, usual = lines[0].settings, defaults()
    apart = {*differing([line.settings for line in lines]), *PER_RUN}
    common = [name for name in settings if name not in apart]
    changed = [name for name in common if name in ABOUT or settings[name] != usual.get(name)]
    rest = [name for name in common if name not in changed]
    default = joined((tag("h3", text("As by default")), settings_list(settings, rest)))
    return joined((settings_list(settings, changed), default if rest else NOTHING))


def _unreadable(unreadable: Sequence[Unreadable]) -> Html:
    if not unreadable:
        return NOTHING
    rows = [(text(one.name), text(one.why)) for one in unreadable]
    return joined((tag("h3", text("Runs that cannot be read")), table("unreadable", ("run", "why"), rows, words=2)))
