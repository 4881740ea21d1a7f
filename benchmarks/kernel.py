"""Owns the benchmark of mixing: one update, and several queued ones, beside the triad of the same size.

Rules kept here:
- Mixing is out of place into a buffer of the server's own pool, as the server's mixer does it.
- A size that does not fit into half of the free memory is left out, and the results say so.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import rule_vectors
from benchmarks.machine import memory_available
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.triad import BYTES_MOVED, Triad, triads
from benchmarks.turns import Contestant, Tell, Turns, rate, take_turns
from offbeat.core.buffer_pool import BufferPool
from offbeat.core.kernel import Term, Updater
from offbeat.core.layout import Vector, aligned
from offbeat.core.rules import Mix

THREADS = (1, 2)
QUEUED = 8
"""Queued updates in the bar."""
MIX = Mix(keep=0.6, new=0.4, base=0.0, publish=True)
BYTES = 4
GIGA = 1e9


class Mixing:
    """A model, queued updates and a pool of buffers, as a server has them."""

    def __init__(self, size: int, updates: int) -> None:
        self._pool = BufferPool(size)
        self.w = self._pool.take()
        self.w[:] = 1.0
        self.updates = [_filled(size, 1.0 + number) for number in range(updates)]

    def one_pass(self, updater: Updater, count: int) -> None:
        """Mix `count` updates in one pass."""
        out = self._pool.take()
        updater.mix(out, self.w, [Term(MIX, x_new) for x_new in self.updates[:count]])
        self.w = out

    def one_by_one(self, updater: Updater, count: int) -> None:
        """Mix `count` updates, each in a pass of its own."""
        for x_new in self.updates[:count]:
            out = self._pool.take()
            updater.mix(out, self.w, [Term(MIX, x_new)])
            self.w = out

    def move(self, triad: Triad) -> None:
        """Run the triad on the same vectors."""
        out = self._pool.take()
        triad(out, self.w, self.updates[0])
        self.w = out


def run(results: Results, scale: Scale, tell: Tell, _folder: Path) -> None:
    """Measure every size that fits, and rules over several vectors."""
    for size in scale.kernel_sizes:
        queued = _that_fit(results, size, scale.kernel_queued)
        if queued:
            for threads in THREADS:
                _measure(results, scale, tell, size, threads, queued)
    rule_vectors.run(results, scale, tell)


def _that_fit(results: Results, size: int, queued: Sequence[int]) -> list[int]:
    """The numbers of queued updates that there is memory for."""
    room = memory_available() // 2
    fit = [count for count in queued if (count + 3) * size * BYTES <= room]
    for count in (count for count in queued if count not in fit):
        results.skip(f"kernel: {count} updates of {size:.0e} float32 need more than half of the free memory")
    return fit


def _measure(results: Results, scale: Scale, tell: Tell, size: int, threads: int, queued: Sequence[int]) -> None:
    mixing, name = Mixing(size, max(queued)), f"{size:.0e}".replace("e+0", "e")
    with Updater(threads) as updater, ThreadPoolExecutor(max(1, threads - 1)) as pool:
        contestants = _contestants(mixing, updater, triads(threads, pool), queued, scale.kernel_s)
        updater.warm()
        for once in contestants.values():  # compiles, and touches every page, before anything is measured
            once()
        turns = take_turns(contestants, scale.turns, tell, f"kernel, {name} float32, {threads} threads")
    _put(results, turns, name, threads, queued)


def _contestants(
    mixing: Mixing, updater: Updater, triads: Sequence[Triad], queued: Sequence[int], at_least_s: float
) -> dict[str, Contestant]:
    moved = mixing.w.size * BYTES_MOVED / GIGA

    def limit() -> float:
        return max(rate(partial(mixing.move, triad), moved, at_least_s) for triad in triads)

    def one() -> float:
        return rate(partial(mixing.one_pass, updater, 1), moved, at_least_s)

    found: dict[str, Contestant] = {"triad": limit, "one": one}
    for count in [count for count in queued if count > 1]:
        found[f"pass {count}"] = partial(rate, partial(mixing.one_pass, updater, count), count, at_least_s)
        found[f"single {count}"] = partial(rate, partial(mixing.one_by_one, updater, count), count, at_least_s)
    return found


def _put(results: Results, turns: Turns, name: str, threads: int, queued: Sequence[int]) -> None:
    results.note_turns(f"kernel, one update, {name}, threads {threads}", "GB/s", turns, "one", "triad")
    for count in [count for count in queued if count > 1]:
        what = f"kernel, {count} queued, {name}, threads {threads}"
        results.note_turns(what, "updates/s", turns, f"pass {count}", f"single {count}")
    if threads != max(THREADS):
        return
    if f"kernel_one_{name}" in results.figures:
        results.put_turns(f"kernel_one_{name}", turns, "one", "triad")
    if f"kernel_queued_{name}" in results.figures and QUEUED in queued:
        results.put_turns(f"kernel_queued_{name}", turns, f"pass {QUEUED}", f"single {QUEUED}")


def _filled(size: int, value: float) -> Vector:
    vector = aligned(size)
    vector[:] = np.float32(value)
    return vector
