"""Owns the report of one run: what was trained, what came out, how stale, with what weight."""

from collections.abc import Iterator
from datetime import datetime
from math import isfinite
from typing import Any

from offbeat import method
from offbeat.core.rules import Facts as RuleFacts
from offbeat.errors import InvalidValue
from offbeat.report import pictures, words
from offbeat.report.chosen import settings_tables
from offbeat.report.contributions import contributions
from offbeat.report.facts import RunFacts
from offbeat.report.histograms import quantile, shown_to
from offbeat.report.page import (
    NOTHING,
    Html,
    document,
    facts_table,
    joined,
    paragraph,
    picture,
    section,
    table,
    tag,
    text,
    value,
)
from offbeat.report.page import pictures as side_by_side
from offbeat.report.wrong import wrong_section
from offbeat.settings import Settings

METRICS_MAX = 6
"""Metrics that are drawn; all are in the table."""
RULE_POINTS_MAX = 200


def run_page(facts: RunFacts, at: datetime, trouble: str | None = None) -> str:
    """The whole file; `trouble` is what a server says that cannot be seen in its folder."""
    task = facts.settings.get("task") or "a task"
    sections = {
        "results": ("Results", section("results", "Results", _results(facts), _metrics(facts))),
        "curve": ("Curve", section("curve", "How the metric went", _curves(facts))),
        "staleness": ("Staleness", section("staleness", "How stale, and what weight", _asynchrony(facts))),
        "contributions": ("Contributions", section("contributions", "Whose data count", contributions(facts))),
        "wrong": ("What went wrong", section("wrong", "What went wrong", wrong_section(facts, trouble))),
        "settings": ("Settings", section("settings", "Settings", settings_tables(facts.settings))),
    }
    return document(words.clean(f"{task}: report of a run"), _head(facts, str(task)), sections, at)


def _head(facts: RunFacts, task: str) -> Html:
    settings = facts.settings
    devices = "devices unknown" if facts.device_count is None else words.many(facts.device_count, "device")
    kind = "served to real workers" if facts.is_served else "simulated"
    said = f"Rule {settings.get('rule', 'unknown')}, {devices}, seed {settings.get('seed', 'unknown')}; {kind}."
    state = tag("span", text(facts.state), class_=f"state {facts.state}")
    where = paragraph(tag("code", text(facts.folder)), kind="soft")
    return joined((tag("h1", text(task)), paragraph(state, text(" " + said)), paragraph(text(_in_short(facts))), where))


def _in_short(facts: RunFacts) -> str:
    """The run in a sentence."""
    fold, aim = facts.fold, _aim(facts)
    metrics = ", ".join(f"{name} {words.number(facts.curve.last(name))}" for name in list(facts.curve.metrics)[:3])
    first = f"Epoch {words.whole(facts.t)}{aim} after {words.duration(facts.at)} of {facts.clock}"
    second = f"{words.many(fold.applied, 'update')} applied and {words.whole(facts.refused)} refused"
    return f"{first}: {second}, mean staleness {words.number(fold.staleness_mean)}" + f"; {metrics}." * bool(metrics)


def _aim(facts: RunFacts) -> str:
    epochs = facts.summary.get("epochs") or facts.settings.get("epochs")
    return f" of {words.whole(epochs)}" if isinstance(epochs, int) else ""


# --- results ---------------------------------------------------------------------------------------------------------


def _results(facts: RunFacts) -> Html:
    fold, reason = facts.fold, f" ({facts.reason})" if facts.reason else ""
    rows = [
        ("state", "State", text(facts.state + reason)),
        ("t", "Epochs (versions published)", joined((value(facts.t), text(_aim(facts))))),
        ("applied", "Updates applied", value(fold.applied)),
        ("refused", "Updates refused", value(facts.refused)),
        ("gradients", "Gradients applied", value(fold.gradients)),
        ("staleness-mean", "Staleness, mean", value(fold.staleness_mean, words.number(fold.staleness_mean))),
        ("staleness-largest", "Staleness, largest", value(fold.staleness_largest)),
        ("at", facts.clock.capitalize(), value(facts.at, words.duration(facts.at))),
        ("tasks", "Tasks leased", value(facts.tasks)),
        ("devices", "Devices that contributed", joined((value(len(facts.devices.updates)), text(_of_devices(facts))))),
    ]
    return facts_table([*rows, *_from_summary(facts)])


def _of_devices(facts: RunFacts) -> str:
    return "" if facts.device_count is None else f" of {words.whole(facts.device_count)}"


def _from_summary(facts: RunFacts) -> Iterator[tuple[str, str, Html]]:
    """What only a finished run knows."""
    summary = facts.summary
    if not facts.is_served and "wall_s" in summary:
        yield "wall", "Took", value(summary["wall_s"], words.duration(summary["wall_s"]))
    for key, name in (("bytes_down", "Sent to devices"), ("bytes_up", "Received from devices")):
        if key in summary:
            yield key.replace("_", "-"), name, value(summary[key], words.size(summary[key]))
    if "executor" in summary:
        lanes = f", {words.number(summary['lanes_mean'])} lanes on average" if "lanes_mean" in summary else ""
        yield "executor", "Trained by", text(f"{summary['executor']}{lanes}")
    if "x_sha256" in summary:
        yield "x-sha256", "Final model, sha256", tag("code", text(summary["x_sha256"]), class_="hash")


def _metrics(facts: RunFacts) -> Html:
    """Where every metric began and ended, and how far it went; which end is better, the reader knows."""
    if not facts.curve.metrics:
        return paragraph(text("No version was evaluated."))
    rows = [[text(name), *_ends(facts, name)] for name in facts.curve.metrics]
    return table("metrics", ("metric", "first", "last", "lowest", "highest"), rows)


def _ends(facts: RunFacts, name: str) -> Iterator[Html]:
    values, epochs = facts.curve.metrics[name].values, facts.curve.metrics[name].t
    finite = [index for index, one in enumerate(values) if isfinite(one)]
    chosen = [0, len(values) - 1]
    chosen += [pick(finite, key=values.__getitem__) for pick in (min, max)] if finite else []
    for index in chosen:
        epoch = tag("span", text(f" (epoch {words.whole(epochs[index])})"), class_="soft")
        yield joined((value(values[index], words.number(values[index])), epoch))
    yield from [text(words.UNKNOWN)] * (4 - len(chosen))


# --- pictures --------------------------------------------------------------------------------------------------------


def _curves(facts: RunFacts) -> Html:
    if not facts.curve.metrics:
        return paragraph(text("Nothing was measured, so there is nothing to draw."))
    shown = list(facts.curve.metrics)[:METRICS_MAX]
    drawn = [figure for number, name in enumerate(shown) for figure in _curve(facts, number, name)]
    more = len(facts.curve.metrics) - len(shown)
    said = paragraph(text(f"{words.many(more, 'metric')} more not drawn."), kind="soft") if more else NOTHING
    return joined((side_by_side(*drawn), said))


def _curve(facts: RunFacts, number: int, metric: str) -> Iterator[Html]:
    x, y = facts.curve.along("t", metric)
    yield picture(pictures.curve(f"curve-{number}-epochs", x, y, label="epochs (versions published)", metric=metric))
    x, y = facts.curve.along("at", metric)
    unit, seconds = words.time_axis(float(x[-1]))
    label = f"{facts.clock} ({unit})"
    yield picture(pictures.curve(f"curve-{number}-time", x / seconds, y, label=label, metric=metric))


def _asynchrony(facts: RunFacts) -> Html:
    applied, refused = facts.fold.staleness, facts.staleness_refused()
    if not applied:
        return paragraph(text("No update was applied."))
    largest, seen = shown_to(applied), shown_to(applied + refused)
    histogram = pictures.staleness("staleness-bars", applied, refused, seen)
    label = "share of its version" if _groups(facts) else "alpha_t (coefficient of x_new)"
    dots = pictures.weights("weights", facts.devices.weights, _rule_line(facts, largest), largest, label, facts.t)
    grouped = "Updates of a group share one version; each has its part of the mean." if _groups(facts) else ""
    said = grouped or "Each dot is updates of one staleness and weight; larger dots are more updates."
    return side_by_side(picture(histogram, text(_staleness_words(facts, seen))), picture(dots, text(said)))


def _staleness_words(facts: RunFacts, largest: int) -> str:
    counts = facts.fold.staleness
    both = counts + facts.staleness_refused()
    beyond = sum(count for staleness, count in both.items() if staleness > largest)
    middle = f"Of those applied: mean {words.number(facts.fold.staleness_mean)}, median {quantile(counts, 0.5)}, "
    most = f"19 of 20 at most {quantile(counts, 0.95)}, largest {max(counts)}."
    return middle + most + (f" {words.many(beyond, 'update')} beyond the right edge." if beyond else "")


def _groups(facts: RunFacts) -> bool:
    return str(facts.settings.get("rule", "")).startswith("fedavg")


def _rule_line(facts: RunFacts, largest: int) -> list[tuple[int, float]]:
    """What the rule in the settings gives to every staleness now; nothing where that says little."""
    try:
        known: dict[str, Any] = {n: v for n, v in facts.settings.items() if n in Settings.names()}
        rule = method.rule_of(Settings.of(known))
        if rule.group or rule.needs_distance:
            return []
        t = max(facts.t, largest + 1)
        places = sorted({round(largest * step / RULE_POINTS_MAX) for step in range(RULE_POINTS_MAX + 1)})
        return [(u, rule.decide(RuleFacts(t=t, tau=t - 1 - u), rule.memory)[0].new) for u in places]
    except InvalidValue:  # of another version of Offbeat: the updates themselves are drawn all the same
        return []
