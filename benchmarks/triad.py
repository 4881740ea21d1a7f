"""Owns the limit that mixing is compared with: out = w + s * x, as fast as this machine can move three vectors.

It is STREAM's triad, in float32: two vectors are read and one is written, as when one update is mixed out of place. On
several threads it is spread in two ways, by numba itself and over a pool of threads; the faster one is the limit.
Numba's own threads wait for each other in a loop, which is best on an idle machine and worst on a busy one.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from offbeat.core.layout import Vector
from offbeat.errors import MissingExtra

SCALE = np.float32(0.4)
BYTES_MOVED = 12
"""Per element."""
Triad = Callable[[Vector, Vector, Vector], None]


class Compiled(NamedTuple):
    """The loop, compiled for one thread and for several."""

    serial: Triad
    spread: Triad
    set_num_threads: Callable[[int], None]
    threads_max: int


def triads(threads: int, pool: ThreadPoolExecutor) -> list[Triad]:
    """The ways to run it on this many threads; `pool` has one thread less."""
    compiled = _compiled()
    if threads == 1:
        return [compiled.serial]
    pooled = partial(_pooled, compiled.serial, pool, threads)
    if threads > compiled.threads_max:
        return [pooled]

    def spread(out: Vector, w: Vector, x: Vector) -> None:
        compiled.set_num_threads(threads)
        compiled.spread(out, w, x)

    return [spread, pooled]


def _pooled(serial: Triad, pool: ThreadPoolExecutor, threads: int, out: Vector, w: Vector, x: Vector) -> None:
    edges = [len(out) * thread // threads for thread in range(threads + 1)]
    first, *others = [(out[lo:hi], w[lo:hi], x[lo:hi]) for lo, hi in pairwise(edges)]
    waiting = [pool.submit(serial, *shard) for shard in others]
    serial(*first)
    for shard in waiting:
        shard.result()


@cache
def _compiled() -> Compiled:
    try:
        import numba
    except ModuleNotFoundError as error:
        raise MissingExtra("numba", "fast") from error

    def serial(out: Vector, w: Vector, x: Vector) -> None:
        for i in range(len(out)):
            out[i] = w[i] + SCALE * x[i]

    def spread(out: Vector, w: Vector, x: Vector) -> None:
        for i in numba.prange(len(out)):
            out[i] = w[i] + SCALE * x[i]

    made: Any = numba.njit
    threads_max: int = numba.config.NUMBA_NUM_THREADS
    return Compiled(made(nogil=True)(serial), made(parallel=True)(spread), numba.set_num_threads, threads_max)
