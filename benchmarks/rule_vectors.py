"""Owns the benchmark of rules over several vectors: an update that publishes a version, beside the triad of that size.

Rules kept here:
- The update goes through `Vectors`, as the server's mixer does it: buffers of a pool, vectors that stay as they are.
- Bytes are those of the full vectors that are read and written, each once: a slot that is 0 is neither, and does not
  count.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import numpy as np

from benchmarks.machine import memory_available
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.triad import BYTES_MOVED, Triad, triads
from benchmarks.turns import Contestant, Tell, Turns, rate, take_turns
from offbeat.core.kernel import Between, Updater
from offbeat.core.layout import Layout, Model, aligned
from offbeat.core.rules import Facts, Rule, ace, ca2fl, compose, dcasgd, fadas, fedbuff, momentum, nesterov
from offbeat.core.step_program import StepProgram
from offbeat.core.vectors import Order, Standing, Vectors

SIZE = 10**7
THREADS = (1, 2)
BYTES, GIGA = 4, 1e9
VECTORS_MAX = 100
"""Vectors that are alive at a time, at most: every rule keeps its buffers, since fresh memory is slow."""
WARM_UPDATES = 4
"""After these a rule has all buffers that it needs, and its code is made."""
KEY = "kernel_rule_1e7"
RULES = {
    "fedbuff + momentum": compose(fedbuff(1), momentum(0.9)),
    "fadas": fadas(1),
    "nesterov": nesterov(1),
    "ca2fl": ca2fl(1),
    "ace": ace(0.1),
    "dcasgd": dcasgd(0.5, 0.1),
}
"""Every update publishes a version, which is when they move the most."""


class CountingUpdater(Updater):
    """Remembers how many vectors the last program moved."""

    moved = 0

    def run(self, program: StepProgram, *, between: Between | None = None) -> None:
        self.moved = len(program.inputs) + len(program.outputs)
        super().run(program, between=between)


class RuleAtWork:
    """A rule and its vectors; every call mixes one update."""

    def __init__(self, rule: Rule, updater: CountingUpdater, models: Sequence[Model]) -> None:
        x_0, self._x_new, self._x_tau = models
        self._rule, self._memory, self._versions = rule, rule.memory, count(2)
        self._updater, self._vectors = updater, Vectors(Standing.first(x_0), updater)
        for _ in range(WARM_UPDATES):
            self()

    def __call__(self) -> None:
        t = next(self._versions)
        answer, self._memory = self._rule.decide(Facts(t, 0), self._memory)
        self._vectors.apply([Order(answer, self._x_new, self._x_tau, t)])

    def gigabytes_per_second(self, at_least_s: float) -> float:
        self()  # others had the caches
        return rate(self, self._updater.moved * BYTES * SIZE / GIGA, at_least_s)


def run(results: Results, scale: Scale, tell: Tell) -> None:
    """Measure every rule on one thread and on two, where vectors of this size are measured."""
    if SIZE not in scale.kernel_sizes:
        return
    if memory_available() // 2 < VECTORS_MAX * SIZE * BYTES:
        results.skip(f"kernel: rules over vectors of {SIZE:.0e} float32 need more than half of the free memory", KEY)
        return
    layout = Layout.of({"x": np.empty(SIZE, np.float32)})
    models = [_model(layout, value) for value in (1.0, 2.0, 1.5)]
    for threads in THREADS:
        with CountingUpdater(threads) as updater, ThreadPoolExecutor(max(1, threads - 1)) as pool:
            updater.warm()
            contestants = _contestants(updater, models, triads(threads, pool), scale.kernel_s)
            contestants["triad"]()  # it is compiled, and touches every page, before anything is measured
            turns = take_turns(contestants, scale.turns, tell, f"rules over vectors, {threads} threads")
        _put(results, turns, threads)


def _contestants(
    updater: CountingUpdater, models: Sequence[Model], triads: Sequence[Triad], at_least_s: float
) -> dict[str, Contestant]:
    moved, out = SIZE * BYTES_MOVED / GIGA, aligned(SIZE)
    w, x = models[0].vector, models[1].vector

    def limit() -> float:
        return max(rate(partial(triad, out, w, x), moved, at_least_s) for triad in triads)

    rules = {name: RuleAtWork(rule, updater, models) for name, rule in RULES.items()}
    return {"triad": limit} | {name: partial(rule.gigabytes_per_second, at_least_s) for name, rule in rules.items()}


def _put(results: Results, turns: Turns, threads: int) -> None:
    for name in RULES:
        results.note_turns(f"kernel, {name}, 1e7, threads {threads}", "GB/s", turns, name, "triad")
    if threads == max(THREADS):
        slowest = min(RULES, key=lambda name: turns.ratio(name, "triad"))
        results.put_turns(KEY, turns, slowest, "triad")


def _model(layout: Layout, value: float) -> Model:
    vector = aligned(SIZE)
    vector[:] = np.float32(value)
    return Model(layout, vector).freeze()
