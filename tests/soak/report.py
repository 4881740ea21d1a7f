"""Owns what a soak leaves behind: every number as JSON, the same as a Markdown table, and a picture.

Rules kept here:
- What is told is worked out from the record, minute by minute; nothing is estimated.
- Moments are seconds from the beginning, sizes are bytes; the picture says its units.
"""

import json
import os
import platform
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offbeat.server.context import VERSION
from tests.soak.probe import quantile
from tests.soak.soak import Soak

MB = 1e6
MINUTE_S = 60.0
COLOURS = ("#0b6e99", "#c1440e", "#5b7c2c", "#7a4a8c")


def facts_of(soak: Soak) -> dict[str, Any]:
    """Everything that was measured."""
    replay, record, audit = soak.audit.replay, soak.record, soak.audit
    return {
        "failure": soak.failure[0] if soak.failure else None,
        "seed": soak.settings.seed,
        "seconds": round(soak.struck_s, 1),
        "settings": {name: getattr(soak.settings, name) for name in soak.settings.__slots__},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "offbeat": VERSION},
        "totals": _totals(soak),
        "x_sha256": None if replay is None else replay.x_sha256,
        "lies": {f"{lie}: {answer}": count for (lie, answer), count in sorted(audit.lies.items())},
        "minutes": [_minute(soak, number) for number in range(-(-int(soak.struck_s) // int(MINUTE_S)))],
        "samples": record.samples,
        "blows": record.blows,
        "ready_s": record.ready_s,
    }


def _totals(soak: Soak) -> dict[str, Any]:
    record, audit, samples = soak.record, soak.audit, soak.record.samples
    return {
        "server_killed": record.count("server", "killed"),
        **{f"workers_{deed}": record.count("worker", deed) for deed in ("killed", "stalled", "left")},
        "acknowledged": len(audit.acknowledged),
        "applied": audit.applied,
        "lost": 0 if not soak.failure else None,
        "doubled": 0 if not soak.failure else None,
        "replayed": audit.applied - audit.skipped,
        "checkpoints_compared": audit.checkpoints,
        "lies": audit.lies.total(),
        "readmitted": soak.probe.readmitted,
        "updates_per_s": round(audit.applied / soak.struck_s, 2),
        **_spread("ready", [seconds for _, seconds in record.ready_s]),
        **_spread("health", _waits(soak, "/v1/health", 0.0, soak.now)),
        **_spread("status", _waits(soak, "/v1/status", 0.0, soak.now)),
        **{f"{name}_most": max((one.get(name, 0) for one in samples), default=0) for name in MEASURED},
    }


MEASURED = ("memory_bytes", "descriptors", "disk_bytes", "ledger_bytes")


def _minute(soak: Soak, number: int) -> dict[str, Any]:
    begin, end = number * MINUTE_S, (number + 1) * MINUTE_S
    record = soak.record
    samples = [one for one in record.samples if begin <= one["at_s"] < end]
    blows = [(who, deed) for at, who, deed in record.blows if begin <= at < end]
    found: dict[str, Any] = {"minute": number, "server_killed": blows.count(("server", "killed"))}
    found |= {f"workers_{deed}": blows.count(("worker", deed)) for deed in ("killed", "stalled", "left")}
    if samples:
        seconds = max(1.0, samples[-1]["at_s"] - samples[0]["at_s"])
        found |= {"updates_per_s": round((samples[-1]["applied"] - samples[0]["applied"]) / seconds, 2)}
        found |= {name: samples[-1][name] for name in ("acknowledged", "applied")}
        found |= {name: max((one.get(name, 0) for one in samples), default=0) for name in MEASURED}
    found |= _spread("ready", [seconds for at, seconds in record.ready_s if begin <= at < end])
    found |= _spread("health", _waits(soak, "/v1/health", begin, end))
    return found | _spread("status", _waits(soak, "/v1/status", begin, end))


def _waits(soak: Soak, path: str, begin: float, end: float) -> list[float]:
    moments = ((one, one.at - soak.began) for one in soak.probe.answers)
    return [one.seconds for one, at in moments if one.path == path and begin <= at < end]


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Half of them, nearly all, the largest; in seconds."""
    shares = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    found = {f"{name}_{word}_s": quantile(values, share) for word, share in shares.items()}
    return {f"{name}_count": len(values)} | {k: v if v is None else round(v, 4) for k, v in found.items()}


# --- words -----------------------------------------------------------------------------------------------------------


def markdown(facts: dict[str, Any]) -> str:
    """The totals as a table that can be pasted into docs/reliability.md."""
    totals, settings = facts["totals"], facts["settings"]
    model = f"{settings['parameters'] + 4:,} parameters, {settings['workers']} workers and {settings['liars']} that lie"
    rows = [
        ("length, seed", f"{facts['seconds']:,.0f} s, {facts['seed']}"),
        ("fleet", model),
        ("server killed", f"{totals['server_killed']:,} times"),
        (
            "workers killed, stalled, left",
            f"{totals['workers_killed']:,}, {totals['workers_stalled']:,}, {totals['workers_left']:,} times",
        ),
        ("lies told, workers readmitted from quarantine", f"{totals['lies']:,}, {totals['readmitted']:,}"),
        ("updates acknowledged, applied", f"{totals['acknowledged']:,}, {totals['applied']:,}"),
        ("acknowledged and lost, applied twice", f"{_or_failed(totals['lost'])}, {_or_failed(totals['doubled'])}"),
        (
            "updates replayed with numpy, checkpoints compared",
            f"{totals['replayed']:,}, {totals['checkpoints_compared']:,}",
        ),
        ("updates per second, the time without a server included", f"{totals['updates_per_s']:g}"),
        ("from start to ready", _seconds(totals, "ready")),
        ("`/v1/health` while the server is up", _seconds(totals, "health")),
        ("`/v1/status` while the server is up", _seconds(totals, "status")),
        (
            "memory and descriptors of the server, most",
            f"{totals['memory_bytes_most'] / MB:.0f} MB, {totals['descriptors_most']:.0f}",
        ),
        (
            "run folder and the ledger in it, most",
            f"{totals['disk_bytes_most'] / MB:.1f} MB, {totals['ledger_bytes_most'] / MB:.1f} MB",
        ),
    ]
    return "\n".join(["| what | measured |", "|---|---|", *(f"| {what} | {found} |" for what, found in rows)]) + "\n"


def _or_failed(value: int | None) -> str:
    return "not known: the soak failed" if value is None else str(value)


def _seconds(totals: dict[str, Any], name: str) -> str:
    if not totals[f"{name}_count"]:
        return "never measured"
    p50, p99, most = (1000 * totals[f"{name}_{word}_s"] for word in ("p50", "p99", "most"))
    return f"p50 {p50:.0f} ms, p99 {p99:.0f} ms, most {most:.0f} ms ({totals[f'{name}_count']:,} times)"


# --- the picture -----------------------------------------------------------------------------------------------------


def picture(facts: dict[str, Any]) -> Figure:
    """Kills, updates, memory, descriptors, disk and waiting times against the time."""
    figure = Figure(figsize=(12, 9), dpi=110, layout="constrained")
    kills, updates, memory, descriptors, disk, waits = figure.subplots(3, 2, sharex=True).flat
    _kills(kills, facts)
    samples = facts["samples"]
    at = [one["at_s"] / MINUTE_S for one in samples]
    updates.plot(at, [one["acknowledged"] for one in samples], color=COLOURS[0])
    updates.set(ylabel="updates acknowledged, none lost" if not facts["failure"] else "updates acknowledged")
    _measured(memory, samples, "memory_bytes", MB, "memory of the server (MB)")
    _measured(descriptors, samples, "descriptors", 1, "open descriptors of the server")
    for colour, name, label in ((0, "disk_bytes", "run folder"), (1, "ledger_bytes", "its ledger")):
        disk.plot(at, [one[name] / MB for one in samples], color=COLOURS[colour], label=label)
    disk.set(ylabel="on the disk (MB)")
    disk.legend(frameon=False)
    _latency(waits, facts)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    for axes in (disk, waits):
        axes.set_xlabel("time (minutes)")
    figure.suptitle(
        f"{facts['totals']['server_killed']:,} kills of the server, {facts['totals']['workers_killed']:,} of workers"
    )
    return figure


def _kills(axes: Axes, facts: dict[str, Any]) -> None:
    for colour, who, deed in ((1, "server", "killed"), (0, "worker", "killed"), (2, "worker", "stalled")):
        at = [moment / MINUTE_S for moment, whom, done in facts["blows"] if (whom, done) == (who, deed)]
        axes.step([0.0, *at], range(len(at) + 1), where="post", color=COLOURS[colour], label=f"{who} {deed}")
    axes.set(ylabel="times, since the beginning")
    axes.legend(frameon=False)


def _measured(axes: Axes, samples: list[dict[str, float]], name: str, unit: float, label: str) -> None:
    seen = [one for one in samples if name in one]
    axes.plot([one["at_s"] / MINUTE_S for one in seen], [one[name] / unit for one in seen], ".", color=COLOURS[0], ms=3)
    axes.set(ylabel=label)


def _latency(axes: Axes, facts: dict[str, Any]) -> None:
    for colour, name in enumerate(("health", "status")):
        seen = [one for one in facts["minutes"] if one[f"{name}_count"]]
        middle = [one["minute"] + 0.5 for one in seen]
        axes.plot(middle, [1000 * one[f"{name}_p99_s"] for one in seen], "o-", ms=3, color=COLOURS[colour], label=name)
    axes.set(ylabel="p99 per minute (ms)")
    axes.legend(frameon=False)


def write(soak: Soak, folder: Path) -> dict[str, Any]:
    """soak.json, soak.md and soak.png in this folder."""
    facts = facts_of(soak)
    (folder / "soak.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "soak.md").write_text(markdown(facts))
    picture(facts).savefig(folder / "soak.png")
    return facts
