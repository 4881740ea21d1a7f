"""Owns the overview of a run: where it stands, how fast it goes, and how it is in one sentence."""

from collections.abc import Sequence
from typing import Any

from offbeat.settings import EPOCHS, QUEUE_MAX, room_for
from offbeat.storage.fleet_fold import RATE_UPDATES
from offbeat.storage.version_fold import VersionFold
from offbeat.web.json_twins import metrics_of, said, thinned
from offbeat.web.run_reader import RunReader

CURVE_POINTS = 500
SILENCE_S = 300.0
"""A run whose last update is older than this is worth a look."""


def overview(reading: RunReader) -> dict[str, Any]:
    fold, fleet, now = reading.fold, reading.fleet, reading.now()
    newest = reading.versions.evaluations[-1] if reading.versions.evaluations else None
    return {
        "run": about(reading),
        "health": health(reading),
        "t": fold.t,
        "epochs": epochs_of(reading.ends),
        "applied": fold.applied,
        "gradients": fold.gradients,
        "in_flight": 0 if reading.state == "finished" else len(fleet.open),  # what is still out is not wanted any more
        "queued": fleet.queued,
        "workers": fleet.here(),
        "silent": fleet.silent(),
        "paused": fleet.paused,
        "rejected": dict(fold.rejected()),
        "duplicates": fold.duplicates,
        "updates_per_minute": 60.0 * updates_per_s(fleet.applied_at, now),
        "eta_s": eta_s(reading),
        "at_s": now,
        "staleness_mean": fold.staleness_mean,
        "staleness_largest": fold.staleness_largest,
        "metrics": metrics_of(newest.detail) if newest else {},
        "metrics_t": newest.t if newest else None,
        "curve": curve(reading.versions, CURVE_POINTS),
        "sequence": reading.sequence,
    }


def about(reading: RunReader) -> dict[str, Any]:
    settings = reading.settings
    return {
        "name": reading.name,
        "dir": str(reading.folder),
        "task": settings.get("task"),
        "rule": rule_of(settings),
        "state": reading.state,
        "served": reading.served,
    }


def rule_of(settings: dict[str, Any]) -> str | None:
    """The rule with what it depends on, as a method of `compare` is written.

    >>> rule_of({"rule": "fedasync", "alpha": 0.6, "staleness_fn": "polynomial:0.5"})
    'fedasync, alpha 0.6, polynomial:0.5'
    """
    rule = settings.get("rule")
    if rule is None or str(rule).startswith("fedavg"):  # a mean, in which neither has a part
        return rule
    alpha = [f"alpha {settings['alpha']:g}"] if "alpha" in settings else []
    return ", ".join([str(rule), *alpha, *filter(None, [settings.get("staleness_fn")])])


def curve(versions: VersionFold, most: int) -> list[dict[str, Any]]:
    """The metrics of evaluated versions; `gradients` and `at_s` are those of the version, not of its evaluation."""
    return [
        {
            "t": t,
            "gradients": versions.gradients_in(t),
            "at_s": versions.mixed_at(t),
            "metrics": metrics_of(detail),
        }
        for _, _, t, detail in thinned(versions.evaluations, most)
    ]


# --- how fast --------------------------------------------------------------------------------------------------------


def updates_per_s(applied_at: Sequence[float], now: float) -> float:
    """Over the newest updates until now; over the whole run while they are few."""
    full = len(applied_at) > RATE_UPDATES
    since, count = (applied_at[0], RATE_UPDATES) if full else (0.0, len(applied_at))
    return count / (now - since) if now > since else 0.0


def versions_per_s(versions: VersionFold, now: float) -> float:
    t = len(versions.published_at) - 1
    before = max(0, t - RATE_UPDATES)
    since = versions.published_at[before]
    return (t - before) / (now - since) if now > since else 0.0


def eta_s(reading: RunReader) -> float | None:
    """Seconds to the end at this rate, whichever end comes first; null where none is in sight."""
    fold, settings, now = reading.fold, reading.ends, reading.now()
    rate, epochs = versions_per_s(reading.versions, now), epochs_of(settings)
    if reading.state != "running":
        return None
    ends = []
    if settings.get("until_s") is not None:
        ends.append(float(settings["until_s"]) - now)
    if epochs and rate:
        ends.append((epochs - fold.t) / rate)
    if settings.get("gradients") and rate and fold.gradients:
        ends.append((settings["gradients"] - fold.gradients) / (rate * fold.gradients / fold.t))
    return said(max(0.0, min(ends))) if ends else None


def epochs_of(settings: dict[str, Any]) -> int | None:
    """After how many versions the run ends; as `method.plan_of` has it."""
    ends = (settings.get(name) for name in ("epochs", "gradients", "until_s", "target"))
    return EPOCHS if all(end is None for end in ends) else settings.get("epochs")


# --- how it is -------------------------------------------------------------------------------------------------------


def health(reading: RunReader) -> dict[str, str]:
    """The most urgent thing to say about the run, in one sentence."""
    level, sentence = _health(reading)
    return {"level": level, "sentence": sentence}


def _health(reading: RunReader) -> tuple[str, str]:
    fold, trouble = reading.fold, reading.trouble()
    if trouble:
        return "bad", f"trouble: {trouble}"
    if reading.state == "finished":
        reason, failed = fold.ended or (reading.summary or {}).get("ended"), (reading.summary or {}).get("failed")
        return "bad" if failed else "good", f"finished: {reason or f'{fold.t} epochs'}"
    if reading.state == "interrupted":
        return "bad", f"interrupted at epoch {fold.t}: start it again with the same command and it goes on"
    if reading.fleet.paused:
        return "warning", "paused by an administrator: no task is given out until the run is resumed"
    return _of_fleet(reading) or _of_queue(reading) or ("good", "healthy")


def _of_fleet(reading: RunReader) -> tuple[str, str] | None:
    here, quarantined = reading.fleet.here(), reading.fleet.quarantined()
    if reading.served and not here:
        return "warning", "no workers: start some with offbeat work"
    if quarantined:
        words = f"{quarantined} worker{'s' if quarantined > 1 else ''} quarantined"
        return ("bad", f"all {here} workers are quarantined") if quarantined == here else ("warning", words)
    if here and reading.fleet.silent() == here:
        return "bad", f"all {here} workers are silent: look at the network, or start some with offbeat work"
    return None


def _of_queue(reading: RunReader) -> tuple[str, str] | None:
    fleet, chosen = reading.fleet, reading.settings
    room = chosen.get("queue_max", QUEUE_MAX)
    if reading.served and room == QUEUE_MAX:
        room = room_for(chosen.get("in_flight_max") or 0)
    if fleet.queued >= room:
        return "warning", "queue full: workers are told to wait"
    last = fleet.applied_at[-1] if fleet.applied_at else 0.0
    silent_s = reading.now() - last
    if reading.served and silent_s >= SILENCE_S:
        return "warning", f"no update for {_duration(silent_s)}"
    return None


def _duration(seconds: float) -> str:
    """In the largest unit of which there are two.

    >>> _duration(310), _duration(7300), _duration(200_000)
    ('5 minutes', '2 hours', '2 days')
    """
    for unit, size in (("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 60:.0f} minutes"
