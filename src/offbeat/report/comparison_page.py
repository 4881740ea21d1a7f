"""Owns the report of several runs: curves over each other, a table of results, and the settings that differ.

Rules kept here:
- Runs that differ in nothing but the seed are one line: mean, and the spread as a band.
- A run that cannot be read is named with its reason; the others are reported all the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from markupsafe import Markup

from offbeat.core.rules.average import of_versions
from offbeat.report import pictures, wording
from offbeat.report.facts import ReportedRun, Unreadable
from offbeat.report.page import ABOUT, PER_RUN, default_settings, differing, render, settings_list
from offbeat.report.run_curve import averaged

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


@dataclass(frozen=True, slots=True)
class ComparedMethod:
    """Runs that differ in nothing but the seed."""

    label: str
    runs: Sequence[ReportedRun]

    @property
    def settings(self) -> Mapping[str, Any]:
        """What they have in common, and the first one's seed."""
        return self.runs[0].settings

    def finals(self, metric: str) -> list[float]:
        """The last value of every run that has one."""
        return [last for run in self.runs if (last := run.curve.last(metric)) is not None]

    def counted(self, name: str) -> list[float | None]:
        return [run.results.get(name) for run in self.runs]

    @property
    def seconds(self) -> list[float]:
        return [run.curve.ended_at for run in self.runs]


def methods_of(runs: Sequence[ReportedRun]) -> list[ComparedMethod]:
    """Runs by method, in the order in which they came."""
    found: dict[tuple[str, str], list[ReportedRun]] = {}
    for run in runs:
        same = {name: one for name, one in run.settings.items() if name not in PER_RUN}
        found.setdefault((run.label, repr(sorted(same.items()))), []).append(run)
    return [ComparedMethod(label, members) for (label, _), members in found.items()]


def comparison_page(
    title: str, runs: Sequence[ReportedRun], at: datetime, unreadable: Sequence[Unreadable] = ()
) -> str:
    methods, metrics = methods_of(runs), _metrics(runs)
    return render(
        "comparison.html",
        title=title,
        at=at,
        runs=runs,
        methods=methods,
        metrics=metrics,
        unfinished=sum(run.state != "finished" for run in runs),
        legend=[(*pictures.look(number), one.label) for number, one in enumerate(methods[: pictures.LINES_MAX])],
        overlays={name: list(_overlay(methods, number, name)) for number, name in enumerate(metrics[:METRICS_MAX])},
        undrawn_methods=len(methods[pictures.LINES_MAX :]),
        undrawn=len(metrics[METRICS_MAX:]),
        counts={name: said for name, said in COUNTS.items() if any(name in run.results for run in runs)},
        differing=differing([method.settings for method in methods]),
        listed=runs[:LISTED_MAX],
        wrong_known=any(run.wrong is not None for run in runs),
        unreadable=unreadable,
        **_common(methods),
    )


def _metrics(runs: Sequence[ReportedRun]) -> list[str]:
    """All metrics: what most runs have comes first, and what a task names last before its others.

    Those of averaged models come after them.
    """
    names = dict.fromkeys(name for run in runs for name in reversed(run.curve.metrics))
    of_x = of_versions(names)
    return sorted(names, key=lambda name: (name not in of_x, -sum(name in run.curve.metrics for run in runs)))


def _overlay(methods: Sequence[ComparedMethod], number: int, metric: str) -> Iterator[Markup]:
    clock, longest = _clock(methods)
    unit, seconds = wording.time_axis(longest)
    axes = (
        ("t", "epochs", "epochs (versions published)", 1.0),
        ("at", "time", f"{clock} ({unit})", seconds),
        ("gradients", "gradients", "gradients (local iterations applied)", 1.0),
    )
    most = max(30, POINTS_MAX // max(1, len(methods)))
    for axis, short, label, scale in axes:
        curves = [averaged([run.curve.along(axis, metric) for run in method.runs], most) for method in methods]
        scaled = [(x / scale, mean, spread) for x, mean, spread in curves]
        key = f"overlay-{number}-{short}"
        yield pictures.overlay(key, scaled, label=label, metric=metric, short=short)


def _clock(methods: Sequence[ComparedMethod]) -> tuple[str, float]:
    """What time is called, and how long the longest run took."""
    runs = [run for method in methods for run in method.runs]
    names = {"run time" if run.settings.get("served") else "virtual time" for run in runs}
    return names.pop() if len(names) == 1 else "time", max((run.curve.ended_at for run in runs), default=0.0)


def _common(methods: Sequence[ComparedMethod]) -> dict[str, Any]:
    settings, usual = methods[0].settings, default_settings()
    apart = {*differing([method.settings for method in methods]), *PER_RUN}
    common = [name for name in settings if name not in apart]
    changed = [name for name in common if name in ABOUT or settings[name] != usual.get(name)]
    rest = [name for name in common if name not in changed]
    return {"common": settings_list(settings, changed), "common_defaults": settings_list(settings, rest)}
