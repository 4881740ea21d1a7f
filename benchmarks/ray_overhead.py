"""What a task costs beside its training: the executor `ray` against `processes`, with as many trainings at once.

The task does nothing, so that only sending, waiting and fetching are left. Both take turns in one run, so that a busy
machine slows them alike; the figures are medians over the turns, the ratio is the median of the ratios within a turn,
and the load is printed. Run: python benchmarks/ray_overhead.py [turns] [address of a Ray cluster]
"""

import os
import sys
from collections.abc import Mapping
from statistics import median
from time import perf_counter

import numpy as np

from offbeat.core.layout import Array, Model
from offbeat.sim.executors import Executor
from offbeat.sim.on_ray.executor import Ray, Wishes
from offbeat.sim.processes import Processes
from offbeat.task import Trained, Work, start

COUNT = 2
IN_FLIGHT = 32
TASKS = 128
SIZES = (2_410, 100_000, 1_000_000)
"""Floats of the model: that of the digits task, and larger ones."""


class Idle:
    """A task that changes nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def initial(self, seed: int) -> Mapping[str, Array]:
        return {"x": np.random.default_rng(seed).normal(size=self.size).astype(np.float32)}

    def train(self, model: Model, work: Work) -> Trained:  # noqa: ARG002
        return Trained(samples=1, gradients=1)

    def evaluate(self, model: Model) -> Mapping[str, float]:  # noqa: ARG002
        return {}


def turn(executor: Executor, versions: list[Model]) -> float:
    """Milliseconds per task, with `IN_FLIGHT` in flight and four to a version."""
    begun, jobs = perf_counter(), []
    for number in range(TASKS):
        jobs.append(executor.submit(versions[number // 4], Work(0, number)))
        if len(jobs) == IN_FLIGHT:
            executor.finish([jobs.pop(0)])
    executor.finish(jobs)
    return (perf_counter() - begun) / TASKS * 1e3


def measured(size: int, turns: int, address: str | None) -> tuple[float, float, float]:
    """Milliseconds per task of processes and of Ray, and Ray's as a multiple of the processes'."""
    task = Idle(size)
    processes, ray = Processes(task, COUNT), Ray(task, COUNT, Wishes(address))
    try:
        seen = []
        for number in range(turns + 1):
            versions = [start(task, TASKS * number + seed) for seed in range(TASKS // 4)]
            seen.append((turn(processes, versions), turn(ray, versions)))
    finally:
        processes.close()
        ray.close()
    there = seen[1:]  # the first turn starts the processes
    return median(p for p, _ in there), median(r for _, r in there), median(r / p for p, r in there)


def main(turns: int, address: str | None) -> None:
    print(f"{COUNT} of each, {IN_FLIGHT} in flight, {turns} turns; load {os.getloadavg()[0]:.1f} at the beginning")
    print(f"{'floats':>9} {'processes ms':>13} {'ray ms':>8} {'ratio':>6} {'load':>5}")
    for size in SIZES:
        processes, ray, ratio = measured(size, turns, address)
        print(f"{size:>9,} {processes:>13.2f} {ray:>8.2f} {ratio:>6.1f} {os.getloadavg()[0]:>5.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9, sys.argv[2] if len(sys.argv) > 2 else None)
