"""Owns what asynchrony does to a run: how stale updates are, what they weigh, who works when, how many at a time."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from offbeat import method
from offbeat.protocol.messages import Spent
from offbeat.storage.fleet_fold import EndedTask, WorkerTotals
from offbeat.web.json_twins import thinned
from offbeat.web.run_reader import RunReader

BINS_MAX = 100
WEIGHTS_SHOWN = 1000
STALENESS_BINS, WEIGHT_BINS = 250, 4
"""Where there are more different weights: their product is what is shown at most."""
CURVE_POINTS = 200
CURVE_LEAST = 16
"""The curve goes at least this far, also where nothing was that stale yet."""
WORKERS_MAX, TASKS_MAX, STEPS_MAX = 60, 1500, 500


def asynchrony(reading: RunReader) -> dict[str, Any]:
    fold, fleet = reading.fold, reading.fleet
    steps = open_over_time(fleet.leased_at, fleet.ended_at, STEPS_MAX)
    return {
        "staleness": histogram(fold.staleness, BINS_MAX),
        "weights": weights(reading.versions.weights),
        "function": function(reading),
        "timeline": timeline(reading),
        "in_flight": [{"at_s": at, "in_flight": count} for at, count in steps],
        "sequence": reading.sequence,
    }


def histogram(counts: Counter[int], most: int) -> list[dict[str, int]]:
    """Bins of equal width, from `from` up to and without `to`; empty ones are there as well.

    >>> histogram(Counter({0: 5, 3: 1}), 2)
    [{'from': 0, 'to': 2, 'count': 5}, {'from': 2, 'to': 4, 'count': 1}]
    """
    width = -(-(max(counts, default=-1) + 1) // most)
    binned: Counter[int] = Counter()
    for value, count in counts.items():
        binned[value // width] += count
    bins = range(max(binned, default=-1) + 1)
    return [{"from": b * width, "to": (b + 1) * width, "count": binned[b]} for b in bins]


def weights(counts: Counter[tuple[int, float]]) -> list[dict[str, Any]]:
    """Every pair of staleness and alpha_t; where they are too many, of each neighbourhood the most frequent one."""
    pairs = _neighbourhoods(counts) if len(counts) > WEIGHTS_SHOWN else counts
    return [{"staleness": u, "alpha_t": alpha_t, "count": count} for (u, alpha_t), count in sorted(pairs.items())]


def _neighbourhoods(counts: Counter[tuple[int, float]]) -> dict[tuple[int, float], int]:
    width = -(-(max(u for u, _ in counts) + 1) // STALENESS_BINS)
    least, most = min(w for _, w in counts), max(w for _, w in counts)
    height = (most - least) / (WEIGHT_BINS - 1) or 1.0
    found: dict[tuple[int, int], tuple[int, tuple[int, float]]] = {}
    total: Counter[tuple[int, int]] = Counter()
    for pair, count in counts.items():
        place = (pair[0] // width, round((pair[1] - least) / height))
        total[place] += count
        found[place] = max(found.get(place, (0, pair)), (count, pair))
    return {pair: total[place] for place, (_, pair) in found.items()}


def function(reading: RunReader) -> list[dict[str, Any]]:
    """What the rule makes an update weigh, by its staleness; empty where that is no function of it."""
    last = max(CURVE_LEAST, reading.fold.staleness_largest)
    t = max(reading.fold.t, last) + 1
    curve = method.rule_curve(reading.settings, t, thinned(range(last + 1), CURVE_POINTS))
    return [{"staleness": u, "alpha_t": alpha_t} for u, alpha_t in curve]


def open_over_time(begun: Sequence[float], ended: Sequence[float], most: int) -> list[tuple[float, int]]:
    """How many were open at moments: wherever that changed or, if it changed more often, at even distances.

    >>> open_over_time([0.0, 0.0, 2.0], [1.0, 2.0], 10)
    [(0.0, 2), (1.0, 1), (2.0, 1)]
    """
    first, second = (np.sort(np.asarray(moments, np.float64), kind="stable") for moments in (begun, ended))
    if len(first) + len(second) > most:  # both are about in order, which a stable sort is quick with
        moments = np.linspace(first[0], max(first[-1], *second[-1:]), most)
    else:
        moments = np.unique(np.concatenate([first, second]))
    counts = np.searchsorted(first, moments, "right") - np.searchsorted(second, moments, "right")
    return list(zip(moments.tolist(), counts.tolist(), strict=True))


# --- who works when --------------------------------------------------------------------------------------------------


def timeline(reading: RunReader) -> dict[str, Any]:
    """The newest tasks of the workers that were seen last."""
    chosen = sorted(reading.fleet.workers.values(), key=lambda worker: (-worker.seen_at, worker.number))[:WORKERS_MAX]
    active = [worker for worker in chosen if worker.tasks]
    tasks = _open(reading, active) + _ended(reading, {worker.number for worker in active})
    tasks = sorted(tasks, key=lambda task: int(task["task"]), reverse=True)[:TASKS_MAX]
    _tell_spent(reading, tasks)
    return {
        "from_s": min((task["leased_s"] for task in tasks), default=0.0),
        "to_s": reading.now(),
        "workers": [{"worker": worker.number, "name": worker.name} for worker in active],
        "tasks": tasks,
        "spent": spent_in_all(tasks),
    }


def _open(reading: RunReader, workers: list[WorkerTotals]) -> list[dict[str, Any]]:
    held = [(worker.number, worker.task) for worker in workers if worker.task is not None]
    since = reading.fleet.open
    return [_task(EndedTask(task, number, since[task][1], 0.0, None, None, ""), reading) for number, task in held]


def _ended(reading: RunReader, workers: set[int]) -> list[dict[str, Any]]:
    """Of a task that was released and came late, what came; one that its worker got back is open."""
    found: dict[int, EndedTask] = {}
    for stored in reversed(reading.fleet.recent):
        if stored[1] in workers and len(found) < TASKS_MAX and stored[0] not in reading.fleet.open:
            found.setdefault(stored[0], EndedTask._make(stored))
    return [_task(ended, reading) for ended in found.values()]


def _task(ended: EndedTask, reading: RunReader) -> dict[str, Any]:
    arrived = ended.staleness is not None
    return {
        "task": ended.task,
        "worker": ended.worker,
        "leased_s": ended.leased_at,
        "arrived_s": ended.ended_at if arrived else None,
        "released_s": ended.ended_at if ended.outcome and not arrived else None,
        "mixed_s": reading.versions.mixed_at(ended.t) if ended.outcome == "applied" else None,
        "staleness": ended.staleness,
        "outcome": ended.outcome or None,
    }


# --- where the time goes ---------------------------------------------------------------------------------------------


def _tell_spent(reading: RunReader, tasks: list[dict[str, Any]]) -> None:
    """Add to each task that arrived how long its worker downloaded, trained and uploaded; null where it did not say."""
    arrived = [task["task"] for task in tasks if task["arrived_s"] is not None]
    with reading.ledger() as ledger:
        places = ", ".join("?" * len(arrived))
        query = f"SELECT task, detail FROM events WHERE kind = 'arrived' AND task IN ({places}) ORDER BY sequence"  # noqa: S608 (question marks)
        details = dict(ledger.select(query, tuple(arrived)))
    for task in tasks:
        said = json.loads(details.get(task["task"]) or "{}").get("spent")
        if said is None and task["arrived_s"] is not None and not reading.served:
            said = (0.0, task["arrived_s"] - task["leased_s"], 0.0)  # simulated, with links that take no time
        task["spent"] = None if said is None else Spent(*said)._asdict()


def spent_in_all(tasks: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of the tasks of which it is known, by what they were spent on; they are all of their time.

    >>> spent = {"download_s": 1.0, "train_s": 5.0, "upload_s": 2.0}
    >>> spent_in_all([{"leased_s": 10.0, "arrived_s": 20.0, "mixed_s": 20.5, "spent": spent}])
    {'download_s': 1.0, 'train_s': 5.0, 'waiting_s': 2.0, 'upload_s': 2.0, 'queued_s': 0.5}
    """
    total = dict.fromkeys(("download_s", "train_s", "waiting_s", "upload_s", "queued_s"), 0.0)
    for task in tasks:
        if task["spent"] is None:
            continue
        for name, seconds in task["spent"].items():
            total[name] += seconds
        total["waiting_s"] += max(0.0, task["arrived_s"] - task["leased_s"] - sum(task["spent"].values()))
        total["queued_s"] += max(0.0, (task["mixed_s"] or task["arrived_s"]) - task["arrived_s"])
    return total
