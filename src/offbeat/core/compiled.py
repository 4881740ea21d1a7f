"""Owns the compiled loops of the kernel: the same bits as blocked numpy, several times as fast.

Rules kept here:
- It is imported when the kernel has enough for it to do: numba takes a second to load, and seconds the first time.
- No fast-math and no fused multiply-add. Functions are serial and run without the GIL on disjoint shards, one per
  thread: the paper's several updaters. No `prange`: its threading layer aborts when two threads use it at once.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

from offbeat.core.kernel import CHUNK, LANES, MAGNITUDE, Sums
from offbeat.core.layout import Vector

FUSED = 4
"""Terms that are mixed in one loop."""
Addresses = npt.NDArray[np.uintp]
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, **options: Any) -> Function:
    made: Function = numba.njit(nogil=True, cache=True, **options)(function)
    return made


def _inlined(function: Function) -> Function:
    """Compiled as a part of its caller: what the caller knows about its vectors makes the loop faster."""
    return compiled(function, inline="always")


def _pointer_from_address(_: Any, address: Any) -> Any:
    """A compiled function that turns an address into a pointer; numba has none ready-made."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return numba.types.CPointer(numba.types.float32)(address), codegen


_pointer: Any = numba.extending.intrinsic(_pointer_from_address)


@compiled
def _vector_at(address: Any, lo: int, size: int) -> Vector:
    """Some of the float32 vector at an address: how any number of updates is passed to one compiled function."""
    array: Vector = numba.carray(_pointer(address), (lo + size,))
    return array[lo:]


@compiled
def mix(
    out: Vector, w: Vector, addresses: Addresses, coefficients: Vector, in_place: bool, start: int, stop: int
) -> None:
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        here, source = out[lo:hi], w[lo:hi]
        j = 0
        while j < len(addresses):
            together = FUSED if _are_plain(coefficients[j : j + FUSED]) else 1
            # Where source and out are one and the same, the compiler must see it: else it takes the slow loop.
            if j == 0 and not in_place:
                _step(here, source, addresses[j:], coefficients[j:], lo, together)
            else:
                _step(here, here, addresses[j:], coefficients[j:], lo, together)
            j += together


@compiled
def mix_one(out: Vector, w: Vector, x_new: Vector, x_tau: Vector, keep: float, new: float, base: float) -> None:
    """One term, out of place or in place, in one call."""
    _combine(out, w, x_new, x_tau, np.float32(keep), np.float32(new), np.float32(base))


@compiled
def _are_plain(coefficients: Vector) -> bool:
    """Are there enough terms to take them together, all of the usual kind: something of w, something of x_new?"""
    if len(coefficients) < FUSED:
        return False
    for j in range(FUSED):
        if coefficients[j, 0] == 0 or coefficients[j, 1] == 0 or coefficients[j, 2] != 0:
            return False
    return True


@_inlined
def _step(out: Vector, source: Vector, addresses: Addresses, coefficients: Vector, lo: int, together: int) -> None:
    """Mix the first term, or several at once, into a chunk that begins at `lo`."""
    if together == FUSED:
        _combine_four(out, source, addresses, coefficients, lo)
    else:
        x_new = _vector_at(addresses[0, 0], lo, len(out))
        x_tau = _vector_at(addresses[0, 1], lo, len(out)) if coefficients[0, 2] != 0 else x_new
        _combine(out, source, x_new, x_tau, coefficients[0, 0], coefficients[0, 1], coefficients[0, 2])


@_inlined
def _combine_four(out: Vector, source: Vector, addresses: Addresses, coefficients: Vector, lo: int) -> None:
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


@compiled
def largest(x: Vector, start: int, stop: int) -> np.uint32:
    """The bits of the largest |x|, which are those of NaN where there is one."""
    part = x[start:stop].view(np.uint32)
    found = np.uint32(0)
    for i in range(len(part)):
        found = max(found, np.uint32(part[i] & MAGNITUDE))  # numba would go on in 64 bits, at half the speed
    return found


@compiled
def squares(x: Vector, reference: Vector, sums: Sums, start: int, stop: int) -> np.uint32:
    """Sums the squares of the differences, chunk by chunk; returns the bits of the largest |x|."""
    lanes, found = np.empty(LANES), np.uint32(0)
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        sums[lo // CHUNK] = _chunk_square(x[lo:hi], reference[lo:hi], lanes)
        found = max(found, largest(x, lo, hi))  # the chunk is in the cache: no second pass over memory
    return found


@compiled
def products(a: Vector, a_0: Vector, b: Vector, b_0: Vector, sums: Sums, start: int, stop: int) -> None:
    """Sums the products of two differences, chunk by chunk."""
    lanes = np.empty(LANES)
    for lo in range(start, stop, CHUNK):
        hi = min(lo + CHUNK, stop)
        lanes[:] = 0.0
        for begin in range(lo, hi, LANES):
            for i in range(min(LANES, hi - begin)):
                left = np.float64(a[begin + i]) - np.float64(a_0[begin + i])
                right = np.float64(b[begin + i]) - np.float64(b_0[begin + i])
                lanes[i] += left * right
        total = 0.0
        for lane in lanes:
            total += lane
        sums[lo // CHUNK] = total


@compiled
def _chunk_square(x: Vector, reference: Vector, lanes: Sums) -> float:
    lanes[:] = 0.0
    for lo in range(0, len(x), LANES):
        for i in range(min(LANES, len(x) - lo)):
            apart = np.float64(x[lo + i]) - np.float64(reference[lo + i])
            lanes[i] += apart * apart
    total = 0.0
    for lane in lanes:
        total += lane
    return total
