"""Owns the report of one run: what was trained, what came out, how stale, with what weight."""

from collections.abc import Iterator
from datetime import datetime
from math import isfinite
from typing import NamedTuple

from markupsafe import Markup

from offbeat import method
from offbeat.report import pictures, wording
from offbeat.report.chosen import settings_tables
from offbeat.report.contributions import contributions
from offbeat.report.facts import RunFacts
from offbeat.report.histograms import quantile, shown_to
from offbeat.report.page import render
from offbeat.report.wrong import wrong_section

METRICS_MAX = 6
"""Metrics that are drawn; all are in the table."""
RULE_POINTS_MAX = 200


CONTENTS = {
    "results": "Results",
    "curve": "Curve",
    "staleness": "Staleness",
    "contributions": "Contributions",
    "wrong": "What went wrong",
    "settings": "Settings",
}


class MetricAt(NamedTuple):
    """A metric's value, and of which version."""

    value: float
    t: float


def run_page(facts: RunFacts, at: datetime, trouble: str | None = None) -> str:
    """The whole file; `trouble` is what a server says that cannot be seen in its folder."""
    task = str(facts.settings.get("task") or "a task")
    names = list(facts.curve.metrics)
    drawn = [picture for number, name in enumerate(names[:METRICS_MAX]) for picture in _curve(facts, number, name)]
    return render(
        "run.html",
        title=f"{task}: report of a run",
        at=at,
        contents=CONTENTS,
        facts=facts,
        task=task,
        method=_method(facts),
        in_short=_in_short(facts),
        aim=_aim(facts),
        metrics={name: _ends(facts, name) for name in names},
        curves=drawn,
        undrawn=len(names[METRICS_MAX:]),
        asynchrony=_asynchrony(facts),
        **contributions(facts),
        **wrong_section(facts, trouble),
        **settings_tables(facts.settings),
    )


def _method(facts: RunFacts) -> str:
    settings = facts.settings
    devices = "devices unknown" if facts.device_count is None else wording.many(facts.device_count, "device")
    kind = "served to real workers" if facts.is_served else "simulated"
    return f"Rule {settings.get('rule', 'unknown')}, {devices}, seed {settings.get('seed', 'unknown')}; {kind}."


def _in_short(facts: RunFacts) -> str:
    """The run in a sentence."""
    fold, aim = facts.fold, _aim(facts)
    metrics = ", ".join(f"{name} {wording.number(facts.curve.last(name))}" for name in list(facts.curve.metrics)[:3])
    first = f"Epoch {wording.whole(facts.t)}{aim} after {wording.duration(facts.at)} of {facts.clock}"
    second = f"{wording.many(fold.applied, 'update')} applied and {wording.whole(facts.refused)} refused"
    return f"{first}: {second}, mean staleness {wording.number(fold.staleness_mean)}" + f"; {metrics}." * bool(metrics)


def _aim(facts: RunFacts) -> str:
    epochs = facts.summary.get("epochs") or facts.settings.get("epochs")
    return f" of {wording.whole(epochs)}" if isinstance(epochs, int) else ""


def _ends(facts: RunFacts, name: str) -> list[MetricAt | None]:
    """Where a metric began and ended, and how far it went; which end is better, the reader knows."""
    values, epochs = facts.curve.metrics[name].values, facts.curve.metrics[name].t
    finite = [index for index, one in enumerate(values) if isfinite(one)]
    chosen = [0, len(values) - 1]
    chosen += [pick(finite, key=values.__getitem__) for pick in (min, max)] if finite else []
    found: list[MetricAt | None] = [MetricAt(values[index], epochs[index]) for index in chosen]
    return found + [None] * (4 - len(chosen))


# --- pictures --------------------------------------------------------------------------------------------------------


def _curve(facts: RunFacts, number: int, metric: str) -> Iterator[Markup]:
    x, y = facts.curve.along("t", metric)
    yield pictures.curve(f"curve-{number}-epochs", x, y, label="epochs (versions published)", metric=metric)
    x, y = facts.curve.along("at", metric)
    unit, seconds = wording.time_axis(float(x[-1]))
    label = f"{facts.clock} ({unit})"
    yield pictures.curve(f"curve-{number}-time", x / seconds, y, label=label, metric=metric)


def _asynchrony(facts: RunFacts) -> list[tuple[Markup, str]]:
    """Two pictures, each with what it shows."""
    applied, refused = facts.fold.staleness, facts.staleness_refused()
    if not applied:
        return []
    largest, seen = shown_to(applied), shown_to(applied + refused)
    histogram = pictures.staleness("staleness-bars", applied, refused, seen)
    label = "share of its version" if _groups(facts) else "alpha_t (coefficient of x_new)"
    dots = pictures.weights("weights", facts.devices.weights, _rule_line(facts, largest), largest, label, facts.t)
    grouped = "Updates of a group share one version; each has its part of the mean." if _groups(facts) else ""
    said = grouped or "Each dot is updates of one staleness and weight; larger dots are more updates."
    return [(histogram, _staleness_words(facts, seen)), (dots, said)]


def _staleness_words(facts: RunFacts, largest: int) -> str:
    counts = facts.fold.staleness
    both = counts + facts.staleness_refused()
    beyond = sum(count for staleness, count in both.items() if staleness > largest)
    middle = f"Of those applied: mean {wording.number(facts.fold.staleness_mean)}, median {quantile(counts, 0.5)}, "
    most = f"19 of 20 at most {quantile(counts, 0.95)}, largest {max(counts)}."
    return middle + most + (f" {wording.many(beyond, 'update')} beyond the right edge." if beyond else "")


def _groups(facts: RunFacts) -> bool:
    return str(facts.settings.get("rule", "")).startswith("fedavg")


def _rule_line(facts: RunFacts, largest: int) -> list[tuple[int, float]]:
    places = sorted({round(largest * step / RULE_POINTS_MAX) for step in range(RULE_POINTS_MAX + 1)})
    return method.rule_curve(facts.settings, max(facts.t, largest + 1), places)
