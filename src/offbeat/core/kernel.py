"""Owns the arithmetic on flat buffers: applies coefficients, checks for NaN, measures norms.

Rules kept here:
- One expression, in float32, each operation rounded by itself: (keep*w + new*x_new) + base*x_tau. A coefficient of 0
  skips its term, and the first term that is left is written, not added to 0. So alpha = 1 gives x_new and alpha = 0
  gives w, bit for bit; the lerp form w + a*(x_new - w) would not. Coefficients arrive as float64 and are rounded to
  float32 once, each for itself.
- Work is cut into fixed chunks that fit a core's cache. Several queued updates are applied chunk by chunk in one
  pass over memory, four of the usual kind in one loop, with the bits of one by one.
- Norms are float64, summed within a fixed chunk over fixed lanes and then over the chunks in their order: the number
  of threads does not change them.
- Compiled code and blocked numpy give the same bits (no fast-math, no fused multiply-add). Compiled functions are
  serial and run without the GIL on disjoint shards, one per thread: the paper's several updaters. No `prange`: its
  threading layer aborts when two threads use it at once.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from offbeat.core.layout import Model, Vector, aligned
from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue, NotFinite

try:
    import numba
except ImportError:  # the `fast` extra is not installed: blocked numpy does the same work, with the same bits
    numba = None

CHUNK = 32_768
LANES = 256
FUSED = 4
"""Terms that are mixed in one loop."""
STRIDE = 64 * CHUNK
"""What is done before whoever wants to be called in between is called."""
THREADS_MAX = 64

Between = Callable[[], None]
Function = TypeVar("Function", bound=Callable[..., Any])
Sums = npt.NDArray[np.float64]


class Term(NamedTuple):
    """One update to mix: its coefficients and its vectors."""

    mix: Mix
    x_new: Vector
    x_tau: Vector | None = None


class Measure(NamedTuple):
    """What was seen of a vector: whether all of it is finite, its norm, and its distance from a reference."""

    finite: bool
    norm: float
    distance: float


class Updater:
    """Applies updates to flat vectors with one or more threads; use it as a context manager or `close` it."""

    def __init__(self, threads: int = 1, compiled: bool | None = None) -> None:
        """`compiled`: None takes numba where it is installed, False is numpy, True insists on numba."""
        if not 1 <= threads <= THREADS_MAX:
            raise InvalidValue(f"threads is {threads} but must lie in 1..{THREADS_MAX}; one per core is enough")
        if compiled and numba is None:
            raise InvalidValue("compiled=True needs numba; run: pip install 'offbeat[fast]'")
        self.threads = threads
        self.compiled = numba is not None if compiled is None else compiled
        self._pool = ThreadPoolExecutor(threads - 1, "updater") if threads > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        if self._pool:
            self._pool.shutdown()

    def warm(self) -> None:
        """Compile now what the first update would wait for: that takes seconds, in which a fleet runs ahead."""
        frozen = np.zeros(1, np.float32)
        frozen.setflags(write=False)  # versions and updates are: numba compiles anew for what may be written to
        self.mix(np.empty_like(frozen), frozen, [Term(Mix(1.0, 0.0, 0.0, publish=True), frozen)])
        self.measure(frozen)

    def mix(
        self, out: Vector, w: Vector, terms: Sequence[Term], *, measure: bool = False, between: Between | None = None
    ) -> list[Measure]:
        """Write w, with every term mixed in one after the other, to `out` (which may be w itself).

        With `measure`, each answer tells of the w after that term: finite? its norm, how far it moved. `between` is
        called now and then, when nothing is being read: for whoever has vectors that should not stay in memory.
        """
        _refuse_unfit(out, w, terms)
        if not terms:
            out[:] = w
            return []
        sums = np.zeros((len(terms), 2, _chunks(w.size)) if measure else (0, 0, 0))
        if self.compiled:
            addresses = np.array([[_address(t.x_new), _address(t.x_tau)] for t in terms], np.uintp)
            coefficients = np.array([t.mix[:3] for t in terms], np.float32)
            vectors, in_place = (out, w, addresses, coefficients, sums), _address(out) == _address(w)
            self._walk(w.size, lambda lo, hi: _mix_compiled(*vectors, in_place, lo, hi), between)
        else:
            self._walk(w.size, lambda lo, hi: _mix_numpy(out, w, terms, sums, lo, hi), between)
        return [_measured(*term) for term in sums]

    def measure(self, x: Vector, reference: Vector | None = None, *, between: Between | None = None) -> Measure:
        """Is x finite, what is its norm, and how far is it from the reference (from 0 without one)?"""
        origin = x if reference is None else reference
        _refuse_unlike(x, origin)
        sums = np.zeros((2, _chunks(x.size)))
        work = _measure_compiled if self.compiled else _measure_numpy
        self._walk(x.size, lambda lo, hi: work(x, origin, sums, lo, hi), between)
        measured = _measured(*sums)
        return measured if reference is not None else measured._replace(distance=measured.norm)

    def admit(self, update: Model, x_tau: Vector | None = None) -> Measure:
        """Measure an arrived update; one that holds NaN or infinity is refused by the name of the array."""
        measured = self.measure(update.vector, x_tau)
        if not measured.finite:
            bad = next((name for name, array in update.items() if not np.isfinite(array).all()), "x_tau")
            raise NotFinite(f"{bad!r} holds NaN or infinity: the update is refused and the model is unchanged")
        return measured

    def _walk(self, size: int, work: Callable[[int, int], None], between: Between | None) -> None:
        """Run `work(lo, hi)` on all of it: at once, or in strides where somebody wants to be called in between."""
        stride = size if between is None else STRIDE
        for start in range(0, size, stride):
            self._shards(start, min(start + stride, size), work)
            if between is not None:
                between()

    def _shards(self, start: int, stop: int, work: Callable[[int, int], None]) -> None:
        """Run `work(lo, hi)` on disjoint shards made of whole chunks, one per thread."""
        chunks = _chunks(stop - start)
        edges = [start + CHUNK * (chunks * i // self.threads) for i in range(self.threads)] + [stop]
        shards = [(lo, hi) for lo, hi in pairwise(edges) if lo < hi]
        waiting = [self._pool.submit(work, lo, hi) for lo, hi in shards[1:]] if self._pool else []
        work(*shards[0])
        for shard in waiting:
            shard.result()


def mixed(updater: Updater, w: Model, mix: Mix, x_new: Model, x_tau: Model | None = None) -> Model:
    """A new model: w with one update mixed in; what is carried follows the update."""
    out = Model(w.layout, aligned(w.layout.size), x_new.carried)
    updater.mix(out.vector, w.vector, [Term(mix, x_new.vector, x_tau.vector if x_tau is not None else None)])
    return out


def _refuse_unfit(out: Vector, w: Vector, terms: Sequence[Term]) -> None:
    """Everything that can be wrong with a mixing, found before anything is written."""
    updates = [*(t.x_new for t in terms), *(t.x_tau for t in terms if t.x_tau is not None)]
    _refuse_unlike(out, w, *updates)
    if not out.flags.writeable:
        raise InvalidValue("out is read-only, as published versions are; mix into a free buffer")
    if any(t.mix.base and t.x_tau is None for t in terms):
        raise InvalidValue("a term has a coefficient for x_tau but no x_tau was given")
    others = updates if _address(out) == _address(w) else [w, *updates]
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


def _measured(squares: Sums, distances: Sums) -> Measure:
    square = distance = 0.0
    for chunk in range(len(squares)):
        square += float(squares[chunk])
        distance += float(distances[chunk])
    return Measure(math.isfinite(square) and math.isfinite(distance), math.sqrt(square), math.sqrt(distance))


# --- blocked numpy ---------------------------------------------------------------------------------------------------


def _mix_numpy(out: Vector, w: Vector, terms: Sequence[Term], sums: Sums, start: int, stop: int) -> None:
    product = np.empty(CHUNK, np.float32)
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        before = w[lo:hi]
        for j, term in enumerate(terms):
            if len(sums):
                before = before.copy()
            _combine_numpy(out[lo:hi], before, term, product[: hi - lo], lo, hi)
            if len(sums):
                _sum_chunk_numpy(out[lo:hi], before, sums[j], lo // CHUNK)
            before = out[lo:hi]


def _combine_numpy(out: Vector, before: Vector, term: Term, product: Vector, lo: int, hi: int) -> None:
    keep, new, base = np.array(term.mix[:3], np.float32)
    parts = ((keep, before), (new, term.x_new[lo:hi]), (base, None if term.x_tau is None else term.x_tau[lo:hi]))
    written = False
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is for the measure to tell
        for factor, part in parts:
            if factor and part is not None:
                np.multiply(part, factor, out=product if written else out)
                if written:
                    np.add(out, product, out=out)
                written = True
    if not written:
        out[:] = 0


def _measure_numpy(x: Vector, reference: Vector, sums: Sums, start: int, stop: int) -> None:
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        _sum_chunk_numpy(x[lo:hi], reference[lo:hi], sums, lo // CHUNK)


def _sum_chunk_numpy(x: Vector, reference: Vector, sums: Sums, chunk: int) -> None:
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = wide - reference
    sums[0, chunk] = _sum_squares_numpy(wide)
    sums[1, chunk] = _sum_squares_numpy(apart)


def _sum_squares_numpy(values: npt.NDArray[np.float64]) -> float:
    squares = values * values
    whole = len(squares) - len(squares) % LANES
    lanes = np.zeros(LANES)
    for row in squares[:whole].reshape(-1, LANES):
        lanes += row
    lanes[: len(squares) - whole] += squares[whole:]
    return float(np.add.accumulate(lanes)[-1])


# --- compiled --------------------------------------------------------------------------------------------------------


def _compiled(function: Function, **options: Any) -> Function:
    """The function compiled by numba, without the GIL; as it is where numba is missing, and then never called."""
    if numba is None:
        return function
    compiled: Function = numba.njit(nogil=True, cache=True, **options)(function)
    return compiled


def _inlined(function: Function) -> Function:
    """Likewise, as a part of whoever calls it: what is known there about its vectors makes it faster."""
    return _compiled(function, inline="always")


def _pointer_from_address() -> Any:
    """A compiled function that turns an address into a pointer; numba has none ready-made."""
    if numba is None:
        return None

    def _pointer(_: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return numba.types.CPointer(numba.types.float32)(address), codegen

    return numba.extending.intrinsic(_pointer)


_pointer = _pointer_from_address()


@_compiled
def _vector_at(address: int, lo: int, size: int) -> Vector:
    """Some of the float32 vector at an address: how any number of updates is passed to one compiled function."""
    array: Vector = numba.carray(_pointer(address), (lo + size,))
    return array[lo:]


@_compiled
def _mix_compiled(
    out: Vector,
    w: Vector,
    addresses: npt.NDArray[np.uintp],
    coefficients: Vector,
    sums: Sums,
    in_place: bool,
    start: int,
    stop: int,
) -> None:
    before = np.empty(CHUNK if len(sums) else 0, np.float32)
    lanes = np.empty(LANES)
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        here, source = out[lo:hi], w[lo:hi]
        j = 0
        while j < len(addresses):
            if len(sums):
                for i in range(hi - lo):
                    before[i] = source[i] if j == 0 else here[i]
            together = FUSED if len(sums) == 0 and _are_plain(coefficients[j : j + FUSED]) else 1
            # Where source and out are one and the same, the compiler must see it: else it takes the slow loop.
            if j == 0 and not in_place:
                _step(here, source, addresses[j:], coefficients[j:], lo, together)
            else:
                _step(here, here, addresses[j:], coefficients[j:], lo, together)
            if len(sums):
                _sum_chunk(here, before, lanes, sums[j], lo // CHUNK)
            j += together


@_compiled
def _are_plain(coefficients: Vector) -> bool:
    """Are there enough terms to take them together, all of the usual kind: something of w, something of x_new?"""
    if len(coefficients) < FUSED:
        return False
    for j in range(FUSED):
        if coefficients[j, 0] == 0 or coefficients[j, 1] == 0 or coefficients[j, 2] != 0:
            return False
    return True


@_inlined
def _step(
    out: Vector, source: Vector, addresses: npt.NDArray[np.uintp], coefficients: Vector, lo: int, together: int
) -> None:
    """Mix the first term, or so many at once, into a chunk that begins at `lo`."""
    if together == FUSED:
        _combine_four(out, source, addresses, coefficients, lo)
    else:
        x_new = _vector_at(addresses[0, 0], lo, len(out))
        x_tau = _vector_at(addresses[0, 1], lo, len(out)) if coefficients[0, 2] != 0 else x_new
        _combine(out, source, x_new, x_tau, coefficients[0, 0], coefficients[0, 1], coefficients[0, 2])


@_inlined
def _combine_four(out: Vector, source: Vector, addresses: npt.NDArray[np.uintp], coefficients: Vector, lo: int) -> None:
    """Four plain terms in one loop: w stays in a register, and every product and sum is rounded as one by one."""
    x_1 = _vector_at(addresses[0, 0], lo, len(out))
    x_2 = _vector_at(addresses[1, 0], lo, len(out))
    x_3 = _vector_at(addresses[2, 0], lo, len(out))
    x_4 = _vector_at(addresses[3, 0], lo, len(out))
    keep_1, keep_2, keep_3, keep_4 = coefficients[0, 0], coefficients[1, 0], coefficients[2, 0], coefficients[3, 0]
    new_1, new_2, new_3, new_4 = coefficients[0, 1], coefficients[1, 1], coefficients[2, 1], coefficients[3, 1]
    for i in range(len(out)):
        value = keep_1 * source[i] + new_1 * x_1[i]
        value = keep_2 * value + new_2 * x_2[i]
        value = keep_3 * value + new_3 * x_3[i]
        out[i] = keep_4 * value + new_4 * x_4[i]


@_inlined
def _combine(  # noqa: C901 (each case is one loop)
    out: Vector, source: Vector, x_new: Vector, x_tau: Vector, keep: np.float32, new: np.float32, base: np.float32
) -> None:
    if keep != 0 and new != 0:
        for i in range(len(out)):
            out[i] = keep * source[i] + new * x_new[i]
    elif keep != 0:
        for i in range(len(out)):
            out[i] = keep * source[i]
    elif new != 0:
        for i in range(len(out)):
            out[i] = new * x_new[i]
    elif base != 0:
        for i in range(len(out)):
            out[i] = base * x_tau[i]
    else:
        for i in range(len(out)):
            out[i] = 0
    if base != 0 and (keep != 0 or new != 0):
        for i in range(len(out)):
            out[i] = out[i] + base * x_tau[i]


@_compiled
def _measure_compiled(x: Vector, reference: Vector, sums: Sums, start: int, stop: int) -> None:
    lanes = np.empty(LANES)
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        _sum_chunk(x[lo:hi], reference[lo:hi], lanes, sums, lo // CHUNK)


@_compiled
def _sum_chunk(x: Vector, reference: Vector, lanes: Sums, sums: Sums, chunk: int) -> None:
    lanes[:] = 0.0
    for lo in range(0, len(x), LANES):
        for i in range(min(LANES, len(x) - lo)):
            value = np.float64(x[lo + i])
            lanes[i] += value * value
    sums[0, chunk] = _total(lanes)
    lanes[:] = 0.0
    for lo in range(0, len(x), LANES):
        for i in range(min(LANES, len(x) - lo)):
            apart = np.float64(x[lo + i]) - np.float64(reference[lo + i])
            lanes[i] += apart * apart
    sums[1, chunk] = _total(lanes)


@_compiled
def _total(lanes: Sums) -> float:
    total = 0.0
    for lane in lanes:
        total += lane
    return total
