"""Owns the arithmetic on flat buffers: applies coefficients, finds NaN and the largest value, measures distances.

Rules kept here:
- One expression, in float32, each operation rounded by itself: (keep*w + new*x_new) + base*x_tau. A coefficient of 0
  skips its term, and the first term that is left is written, not added to 0. So alpha = 1 gives x_new and alpha = 0
  gives w, bit for bit; the lerp form w + a*(x_new - w) would not. Coefficients arrive as float64 and are rounded to
  float32 once, each for itself.
- Work is cut into fixed chunks that fit a core's cache. Several queued updates are applied chunk by chunk in one
  pass over memory, four of the usual kind in one loop, with the bits of one by one.
- Distances are float64, summed within a fixed chunk over fixed lanes and then over the chunks in their order: the
  number of threads does not change them.
- Compiled code (`compiled.py`, `step_code.py`) and blocked numpy, below, give the same bits. Loading compiled code
  takes a second, so numpy does small work.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import isfinite, sqrt
from struct import Struct
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from offbeat.core.layout import Model, Vector, aligned
from offbeat.core.rules import Mix
from offbeat.core.step_program import Part, StepProgram, run_numpy
from offbeat.errors import InvalidValue

CHUNK = 32_768
LANES = 256
STRIDE = 64 * CHUNK
"""Elements that are done before a `between` callback is called."""
SPREAD_MIN = 1 << 21
"""Elements from which several threads are faster than one: to wake one takes as long as to mix a million."""
THREADS_MAX = 64
MAGNITUDE = np.uint32(0x7FFFFFFF)
"""The bits of a float32 without its sign: as whole numbers they are in the order of the absolute values, NaN last."""
_WORD, _FLOAT = Struct("<I"), Struct("<f")
WORTH = 1 << 25
"""Elements after which compiled code is loaded: with fewer, it would save less time than that takes."""

CODE_WORTH = 1 << 21
"""Elements after which a plan is made machine code: numpy took about as long for them as that takes."""

Between = Callable[[], None]
Sums = npt.NDArray[np.float64]
Difference = tuple[Vector, Vector]
"""Two vectors that stand for the first minus the second."""


class Term(NamedTuple):
    mix: Mix
    x_new: Vector
    x_tau: Vector | None = None


class Measured(NamedTuple):
    distance: float
    """From another vector."""
    largest: float
    """The largest absolute value."""


class Updater:
    """Applies updates to flat vectors with one or more threads; use it as a context manager or `close` it."""

    def __init__(self, threads: int = 1, compiled: bool | None = None) -> None:
        """`compiled`: None takes numba where it is installed and worth it, False is numpy, True insists on numba."""
        if not 1 <= threads <= THREADS_MAX:
            raise InvalidValue(f"threads is {threads} but must lie in 1..{THREADS_MAX}; one per core is enough")
        installed = find_spec("numba") is not None  # it is in the extra `fast`
        if compiled and not installed:
            raise InvalidValue("compiled=True needs numba; run: pip install 'offbeat[fast]'")
        self.threads = threads
        self.compiled = installed if compiled is None else compiled
        self._insists, self._left = bool(compiled), 0 if compiled else WORTH
        self._loops: Any = None
        """The module of compiled loops, once it is loaded."""
        self._pool = ThreadPoolExecutor(threads - 1, "updater") if threads > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown()

    def warm(self) -> None:
        """Compile now what the first update would wait for: that takes seconds, in which a fleet runs ahead."""
        self._left = 0
        frozen = np.zeros(1, np.float32)
        frozen.setflags(write=False)  # versions and updates are: numba compiles anew for what may be written to
        self.mix(np.empty_like(frozen), frozen, [Term(Mix(1.0, 0.0, 0.0, publish=True), frozen)])
        self.distance(frozen, frozen)
        self.finite(frozen)
        if self.compiled:
            self._loaded("offbeat.core.step_code")

    def mix(self, out: Vector, w: Vector, terms: Sequence[Term], *, between: Between | None = None) -> None:
        """Write w, with every term mixed in one after the other, to `out` (which may be w itself).

        `between` is called between strides, when nothing is being read: a caller can give the memory of mapped vectors
        back there.
        """
        in_place = _address(out) == _address(w)
        _refuse_unfit(out, w, terms, in_place=in_place)
        if not terms:
            out[:] = w
            return
        if len(terms) == 1 and w.size <= CHUNK and between is None:
            self.mix_small(out, w, terms[0])
            return
        loops = self._compiled_for(w.size * len(terms))
        if loops is not None:
            addresses = np.array([[_address(t.x_new), _address(t.x_tau)] for t in terms], np.uintp)
            coefficients = np.array([t.mix[:3] for t in terms], np.float32)
            vectors = (out, w, addresses, coefficients)
            self._walk(w.size, lambda lo, hi: loops.mix(*vectors, in_place, lo, hi), between)
        else:
            self._walk(w.size, lambda lo, hi: _mix_numpy(out, w, terms, lo, hi), between)

    def mix_small(self, out: Vector, w: Vector, term: Term) -> None:
        """`mix` of one term in one chunk; nothing is checked. A simulated task is over in the time that checks take."""
        loops, (keep, new, base, _) = self._compiled_for(w.size), term.mix
        if loops is not None:
            x_tau = term.x_new if term.x_tau is None else term.x_tau
            loops.mix_one(out, w, term.x_new, x_tau, keep, new, base)
        else:
            _combine_numpy(out, w, term, np.empty_like(out), 0, w.size)

    def distance(self, x: Vector, reference: Vector, *, between: Between | None = None) -> float:
        """||x - reference||: infinite or NaN where one of them holds infinity or NaN, and only there."""
        return self.measured(x, reference, between=between).distance

    def measured(self, x: Vector, reference: Vector, *, between: Between | None = None) -> "Measured":
        """||x - reference|| and the largest |x|, in one pass over memory."""
        _refuse_unlike(x, reference)
        squares, seen = np.zeros(_chunks(x.size)), list[int]()
        loops = self._compiled_for(x.size)
        work = _squares_numpy if loops is None else loops.squares
        self._walk(x.size, lambda lo, hi: seen.append(int(work(x, reference, squares, lo, hi))), between)
        return Measured(sqrt(np.add.accumulate(squares)[-1]), _of_bits(max(seen)))

    def inner(self, a: Difference, b: Difference, *, between: Between | None = None) -> float:
        """The inner product of two differences of vectors, in float64: its bits depend on no number of threads."""
        _refuse_unlike(*a, *b)
        sums = np.zeros(_chunks(a[0].size))
        loops = self._compiled_for(a[0].size)
        work = _products_numpy if loops is None else loops.products
        self._walk(a[0].size, lambda lo, hi: work(*a, *b, sums, lo, hi), between)
        return float(np.add.accumulate(sums)[-1])

    def run(self, program: StepProgram, *, between: Between | None = None) -> None:
        """Do the steps of a program in one pass over memory."""
        program.refuse_unfit()
        for part, start, stop in program.parts():
            work = self._work_of(program, part, start, stop)
            if stop - start <= CHUNK and between is None:
                work(start, stop)
            else:
                self._walk(stop - start, lambda lo, hi, s=start, w=work: w(s + lo, s + hi), between)  # type: ignore[misc]

    def _work_of(self, program: StepProgram, part: Part, start: int, stop: int) -> Callable[[int, int], None]:
        """Machine code where what its plan did so far is worth it, else numpy."""
        program.plan.elements += stop - start
        if self.compiled and (self._insists or program.plan.elements > CODE_WORTH):
            codes = self._loaded("offbeat.core.step_code")
            if codes is not None:
                work: Callable[[int, int], None] = codes.work_of(program, part, start, stop)
                return work
        return partial(run_numpy, program, part)

    def finite(self, x: Vector, *, between: Between | None = None) -> bool:
        """Is all of x finite? Several times as fast as to measure its distance from another vector."""
        return isfinite(self.largest(x, between=between))

    def largest(self, x: Vector, *, between: Between | None = None) -> float:
        """The largest |x|: NaN where there is one, else infinite where there is an infinity."""
        _refuse_unlike(x)
        loops, seen = self._compiled_for(x.size), list[int]()
        look = _largest_numpy if loops is None else loops.largest
        if x.size <= CHUNK and between is None:
            return _of_bits(int(look(x, 0, x.size)))
        self._walk(x.size, lambda lo, hi: seen.append(int(look(x, lo, hi))), between)
        return _of_bits(max(seen))

    def _compiled_for(self, elements: int) -> Any:
        """The compiled loops; they are loaded when what was done so far is worth it, or where numba is there anyway."""
        if self._loops is not None:
            return self._loops
        self._left -= elements
        if self.compiled and (self._left < 0 or "numba" in sys.modules):
            self._loops = self._loaded("offbeat.core.compiled")
        return self._loops

    def _loaded(self, module: str) -> Any:
        """A module that needs numba; None where it cannot be loaded: then blocked numpy does the same work."""
        try:
            return import_module(module)
        except (ImportError, RuntimeError) as error:  # it fits another numpy, or has no folder for its cache
            if self._insists:
                raise InvalidValue(f"compiled=True, but numba cannot be loaded: {error}") from error
            self.compiled = False
            return None

    def _walk(self, size: int, work: Callable[[int, int], None], between: Between | None) -> None:
        """Run `work(lo, hi)` on all elements: at once, or in strides where there is a `between` callback."""
        stride = size if between is None else STRIDE
        for start in range(0, size, stride):
            self._shards(start, min(start + stride, size), work)
            if between is not None:
                between()

    def _shards(self, start: int, stop: int, work: Callable[[int, int], None]) -> None:
        """Run `work(lo, hi)` on disjoint shards made of whole chunks, one per thread; what is small, on this one."""
        if self._pool is None or stop - start < SPREAD_MIN:
            work(start, stop)
            return
        chunks = _chunks(stop - start)
        edges = [start + CHUNK * (chunks * i // self.threads) for i in range(self.threads)] + [stop]
        shards = [(lo, hi) for lo, hi in pairwise(edges) if lo < hi]
        waiting = [self._pool.submit(work, lo, hi) for lo, hi in shards[1:]]
        work(*shards[0])
        for shard in waiting:
            shard.result()


def mixed(
    updater: Updater, w: Model, mix: Mix, x_new: Model, x_tau: Model | None = None, buffer: Vector | None = None
) -> Model:
    """A new model: w with one update mixed in; what is carried follows the update."""
    out = Model(w.layout, aligned(w.layout.size) if buffer is None else buffer, x_new.carried)
    term = Term(mix, x_new.vector, x_tau.vector if x_tau is not None else None)
    if w.layout is x_new.layout and len(out.vector) <= CHUNK and (x_tau is not None or mix.base == 0):
        updater.mix_small(out.vector, w.vector, term)  # models of one layout fit, and `out` is new
    else:
        updater.mix(out.vector, w.vector, [term])
    return out


def _refuse_unfit(out: Vector, w: Vector, terms: Sequence[Term], *, in_place: bool) -> None:
    """Everything that can be wrong with a mixing, found before anything is written."""
    updates = [*(t.x_new for t in terms), *(t.x_tau for t in terms if t.x_tau is not None)]
    _refuse_unlike(out, w, *updates)
    if not out.flags.writeable:
        raise InvalidValue("out is read-only, as published versions are; mix into a free buffer")
    if any(t.mix.base != 0 and t.x_tau is None for t in terms):  # also None or NaN: compiled code would read from 0
        raise InvalidValue("a term has a coefficient for x_tau but no x_tau was given")
    others = updates if in_place else [w, *updates]
    if any(np.may_share_memory(out, array) for array in others):
        raise InvalidValue("out overlaps w or an update; mix into w itself or into a buffer of its own")


def _refuse_unlike(first: Vector, *others: Vector) -> None:
    if first.size == 0:
        raise InvalidValue("the vector is empty: there is nothing to mix")
    if first.ndim != 1:
        raise InvalidValue(f"a vector has shape {list(first.shape)} but must have one dimension")
    for array in (first, *others):
        if array.shape != first.shape or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise InvalidValue(
                f"a vector is {array.dtype}{list(array.shape)}; here all are contiguous float32{list(first.shape)}"
            )


def _chunks(size: int) -> int:
    return -(-size // CHUNK)


def _address(vector: Vector | None) -> int:
    return int(vector.__array_interface__["data"][0]) if vector is not None else 0


# --- blocked numpy ---------------------------------------------------------------------------------------------------


def _mix_numpy(out: Vector, w: Vector, terms: Sequence[Term], start: int, stop: int) -> None:
    product = np.empty(min(CHUNK, stop - start), np.float32)
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        before = w[lo:hi]
        for term in terms:
            _combine_numpy(out[lo:hi], before, term, product[: hi - lo], lo, hi)
            before = out[lo:hi]


def _combine_numpy(out: Vector, before: Vector, term: Term, product: Vector, lo: int, hi: int) -> None:
    keep, new, base = map(np.float32, term.mix[:3])
    parts = ((keep, before), (new, term.x_new[lo:hi]), (base, None if term.x_tau is None else term.x_tau[lo:hi]))
    written = False
    with np.errstate(over="ignore", invalid="ignore"):  # a model that overflows shows in what is measured next
        for factor, part in parts:
            if factor and part is not None:
                np.multiply(part, factor, out=product if written else out)
                if written:
                    np.add(out, product, out=out)
                written = True
    if not written:
        out[:] = 0


def _largest_numpy(x: Vector, start: int, stop: int) -> int:
    """The bits of the largest |x|, as whole numbers in the order of absolute values: infinity, and NaN above it."""
    bits = x[start:stop].view(np.uint32)
    return max(int((bits[lo : lo + CHUNK] & MAGNITUDE).max()) for lo in range(0, len(bits), CHUNK))


def _of_bits(bits: int) -> float:
    value: float = _FLOAT.unpack(_WORD.pack(bits))[0]
    return value


def _products_numpy(a: Vector, a_0: Vector, b: Vector, b_0: Vector, sums: Sums, start: int, stop: int) -> None:
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        with np.errstate(invalid="ignore", over="ignore"):
            products = (a[lo:hi].astype(np.float64) - a_0[lo:hi]) * (b[lo:hi].astype(np.float64) - b_0[lo:hi])
            sums[lo // CHUNK] = _sum_of_lanes(products)


def _sum_of_lanes(values: Sums) -> float:
    """Row after row over fixed lanes, as the compiled loop does, and then the lanes in their order."""
    whole = len(values) - len(values) % LANES
    lanes = np.add.reduce(values[:whole].reshape(-1, LANES), axis=0)
    lanes[: len(values) - whole] += values[whole:]
    return float(np.add.accumulate(lanes)[-1])


def _squares_numpy(x: Vector, reference: Vector, sums: Sums, start: int, stop: int) -> int:
    found = 0
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        with np.errstate(invalid="ignore"):
            squares = np.square(x[lo:hi].astype(np.float64) - reference[lo:hi])
        sums[lo // CHUNK] = _sum_of_lanes(squares)
        found = max(found, _largest_numpy(x, lo, hi))  # the chunk is in the cache: no second pass over memory
    return found
