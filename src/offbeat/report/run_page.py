"""Owns the report of one run: what was trained, what came out, how stale, with what weight."""

from collections.abc import Iterator
from datetime import datetime
from math import isfinite
from typing import Any, NamedTuple

from markupsafe import Markup

from offbeat import method
from offbeat.core.rules.average import AVERAGED, of_versions
from offbeat.protocol.worst_served import WORST_TENTH
from offbeat.report import pictures, wording
from offbeat.report.contributions import contributions
from offbeat.report.facts import RunFacts
from offbeat.report.page import render, settings_tables
from offbeat.report.troubles import mishaps

METRICS_MAX = 6
"""Metrics that are drawn; all are in the table."""
RULE_POINTS_MAX = 200
REASONS_SHOWN = 10


class MetricAt(NamedTuple):
    value: float
    t: float


def run_page(facts: RunFacts, at: datetime, trouble: str | None = None) -> str:
    """The whole file; `trouble` is what a server says that cannot be seen in its folder."""
    task = str(facts.settings.get("task") or "a task")
    names = list(facts.curve.metrics)
    drawn = of_versions(names)
    wrong = mishaps(facts.fold, facts.troubles)
    return render(
        "run.html",
        title=f"{task}: report of a run",
        at=at,
        facts=facts,
        task=task,
        metrics={name: _ends(facts, name) for name in names},
        curves=[picture for number, name in enumerate(drawn[:METRICS_MAX]) for picture in _curve(facts, number, name)],
        undrawn=len(drawn[METRICS_MAX:]),
        worst={name: value for name, value in facts.summary.items() if name.endswith(WORST_TENTH)},
        asynchrony=_asynchrony(facts),
        wrong=wrong,
        trouble=trouble,
        is_well=facts.state == "finished" and not trouble and all(mishap.is_harmless for mishap in wrong),
        bad=facts.troubles.bad.most_common(REASONS_SHOWN),
        **contributions(facts.devices),
        **settings_tables(facts.settings),
    )


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
    """A metric against epochs and against time, with that of the averaged model where there is one."""
    is_averaged = metric + AVERAGED in facts.curve.metrics
    unit, seconds = wording.time_axis(float(facts.curve.along("at", metric)[0][-1]))
    axes = (("t", "epochs", "epochs (versions published)", 1.0), ("at", "time", f"{facts.clock} ({unit})", seconds))
    for axis, short, label, scale in axes:
        x, y = facts.curve.along(axis, metric)
        at, mean = facts.curve.along(axis, metric + AVERAGED)
        beside = (at / scale, mean) if is_averaged else None
        yield pictures.curve(f"curve-{number}-{short}", x / scale, y, label=label, metric=metric, mean=beside)


def _asynchrony(facts: RunFacts) -> dict[str, Any]:
    """Two pictures, and what is said of them."""
    applied, refused = facts.fold.staleness, facts.staleness_refused()
    if not applied:
        return {}
    both = applied + refused
    largest, seen = pictures.shown_to(applied), pictures.shown_to(both)
    label = "share of its version" if facts.is_grouped else "alpha_t (coefficient of x_new)"
    rule = _rule_line(facts, largest)
    return {
        "histogram": pictures.staleness("staleness-bars", applied, refused, seen),
        "median": pictures.quantile(applied, 0.5),
        "most": pictures.quantile(applied, 0.95),
        "beyond": sum(count for staleness, count in both.items() if staleness > seen),
        "dots": pictures.weights("weights", facts.devices.weights, rule, largest, label, facts.t),
    }


def _rule_line(facts: RunFacts, largest: int) -> list[tuple[int, float]]:
    places = sorted({round(largest * step / RULE_POINTS_MAX) for step in range(RULE_POINTS_MAX + 1)})
    return method.rule_curve(facts.settings, max(facts.t, largest + 1), places)
