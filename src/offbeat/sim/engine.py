"""Owns the virtual clock: tasks in flight wait in a heap of (time, sequence) until they arrive.

Rules kept here:
- One seed, one run. Every random number is keyed by what it is for, never drawn from a stream that something else
  uses; ties in time are decided by the sequence number.
- A training is done when its result arrives, from the version that its task was given. That gives the same numbers
  as doing it in between, and nothing is computed for a task that never arrives.
- Asynchronous and synchronous training are the same loop. `grouped` alone differs: it starts the next tasks only when
  none is in flight, so everybody waits for the slowest.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from offbeat.core.kernel import Updater, mixed
from offbeat.core.layout import Model
from offbeat.core.rules import Facts, Mix, Rule
from offbeat.errors import InvalidValue
from offbeat.task import Task, Work, solve, start

SCHEDULER_STREAM = 1
SPEED_STREAM = 2


class InFlight(NamedTuple):
    """A task on its way; compared by the first two fields alone, because `sequence` is unique."""

    arrives_s: float
    sequence: int
    work: Work
    tau: int
    x_tau: Model


class Applied(NamedTuple):
    """One update that was mixed in."""

    at_s: float
    t: int
    tau: int
    staleness: int
    device: int
    mix: Mix
    gradients: int


class Evaluated(NamedTuple):
    """Metrics of x_t."""

    at_s: float
    t: int
    gradients: int
    metrics: Mapping[str, float]


@dataclass
class History:
    """What happened in a run."""

    x: Model
    t: int = 0
    gradients: int = 0
    updates: list[Applied] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    left_in_flight: list[int] = field(default_factory=list)
    """The staleness that the tasks still in flight at the end had gathered."""


def lognormal_seconds(devices: int, sigma: float, seed: int) -> list[float]:
    """Seconds per task of every device: log-normal around 1, keyed by device, the same for every method."""
    return [float(np.exp(sigma * _rng(seed, SPEED_STREAM, device).standard_normal())) for device in range(devices)]


def run(
    task: Task,
    rule: Rule,
    seconds: Sequence[float],
    *,
    in_flight_max: int,
    until_s: float,
    seed: int = 0,
    grouped: bool = False,
    evaluate_every_s: float = 1.0,
    on_progress: Callable[[History, float], None] = lambda _history, _at_s: None,
) -> History:
    """Train until the virtual clock shows `until_s`, with one device for every entry of `seconds`."""
    check_in_flight_max(in_flight_max, len(seconds))
    x = start(task, seed)
    history, memory, w = History(x), rule.memory, x
    history.evaluations.append(Evaluated(0.0, 0, 0, task.evaluate(x)))
    heap: list[InFlight] = []
    counts = [0] * len(seconds)
    with Updater() as updater:
        while True:
            if not (grouped and heap):
                _trigger(heap, history, seconds, counts, in_flight_max, seed)
            if heap[0].arrives_s > until_s:
                break
            arrived = heapq.heappop(heap)
            _evaluate_until(task, history, arrived.arrives_s, evaluate_every_s)
            update = solve(task, arrived.x_tau, arrived.work)
            updater.admit(update.x_new)
            facts = Facts(history.t + 1, arrived.tau, arrived.work.device, update.trained.samples)
            mix, memory = rule.decide(facts, memory)
            w = mixed(updater, w, mix, update.x_new, arrived.x_tau if mix.base else None).freeze()
            history.gradients += update.trained.gradients
            history.updates.append(_applied(arrived, facts, mix, update.trained.gradients))
            if mix.publish:
                history.t, history.x = facts.t, w
            on_progress(history, arrived.arrives_s)
    _evaluate_until(task, history, until_s, evaluate_every_s)
    history.left_in_flight = [history.t - waiting.tau for waiting in heap]
    return history


def check_in_flight_max(in_flight_max: int, devices: int) -> None:
    """Refuse a limit that no number of devices could use."""
    if not 1 <= in_flight_max <= devices:
        raise InvalidValue(f"in_flight_max is {in_flight_max} but must lie in 1..{devices}, the number of devices")


def _trigger(
    heap: list[InFlight], history: History, seconds: Sequence[float], counts: list[int], in_flight_max: int, seed: int
) -> None:
    """Start tasks on devices drawn at random from the idle ones, as many as there is room for."""
    busy = {waiting.work.device for waiting in heap}
    now = history.updates[-1].at_s if history.updates else 0.0
    idle = [device for device in range(len(seconds)) if device not in busy]
    room = in_flight_max - len(heap)
    sequence = sum(counts)
    for device in _rng(seed, SCHEDULER_STREAM, sequence).choice(idle, min(room, len(idle)), replace=False):
        work = Work(int(device), counts[device], seed)
        heapq.heappush(heap, InFlight(now + seconds[device], sequence, work, history.t, history.x))
        counts[device] += 1
        sequence += 1


def _applied(arrived: InFlight, facts: Facts, mix: Mix, gradients: int) -> Applied:
    return Applied(arrived.arrives_s, facts.t, facts.tau, facts.staleness, facts.device, mix, gradients)


def _evaluate_until(task: Task, history: History, at_s: float, every_s: float) -> None:
    """Record the metrics of the newest version at every multiple of `every_s` that the clock passes before `at_s`."""
    newest = history.evaluations[-1]
    while newest.at_s + every_s <= at_s:
        unchanged = newest.t == history.t
        metrics = newest.metrics if unchanged else task.evaluate(history.x)
        newest = Evaluated(newest.at_s + every_s, history.t, history.gradients, metrics)
        history.evaluations.append(newest)


def _rng(seed: int, stream: int, number: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, number, 0)))
