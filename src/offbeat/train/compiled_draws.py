"""Owns the batches of many trainings, drawn in one compiled loop: the very samples that numpy's generators draw.

To make a generator takes numpy as long as to train a small model. What `Work.rng` makes is a `SeedSequence` that seeds
a PCG64; both are a few lines of integer arithmetic, which numpy promises not to change.

Rules kept here:
- The same bits as `Solver.draw` with `stream(work)`: held against numpy's before it is used, and not used where it
  differs.
- Only what is drawn in small numbers: H batches from a few hundred samples. All else is drawn one by one, by numpy.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from offbeat.core.compiled import compiled
from offbeat.task import Work
from offbeat.train.samples import Batches, Drawing, draw_one_by_one
from offbeat.train.solver import SEED_WORDS, SORTED_MAX, SORTED_SAMPLES_MAX, Solver

Whole = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
WORD_MAX = 2**32
POOL = 4
INIT_A, MULT_A = np.uint32(0x43B0D7E5), np.uint32(0x931E8875)
INIT_B, MULT_B = np.uint32(0x8B51F9DD), np.uint32(0x58F38DED)
MIX_LEFT, MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
SHIFT = np.uint32(16)
HIGH, LOW = np.uint64(2549297995355413924), np.uint64(4865540595714422341)
"""PCG64's multiplier."""
HALF, ONE = np.uint64(0xFFFFFFFF), np.uint64(1)
TAKEN = 2.0
"""More than any number that is drawn."""
SEED, DEVICE, NUMBER, ROWS, SAMPLES, SIZE = range(6)
"""Columns of a table of drawings."""
PROBES = (Work(0), Work(7, 3, 11), Work(2**32 - 1, 12_345, 2**32 - 1))


def draw_many(trainings: Sequence[Drawing]) -> list[Batches]:
    """The batches of every training, as `draw_one_by_one` draws them."""
    if not agrees():
        return draw_one_by_one(trainings)
    quick = [_is_quick(*training) for training in trainings]
    found = iter(_drawn([training for training, is_quick in zip(trainings, quick, strict=True) if is_quick]))
    return [
        next(found) if is_quick else draw_one_by_one([training])[0]
        for training, is_quick in zip(trainings, quick, strict=True)
    ]


@cache
def agrees() -> bool:
    """Are the drawn samples numpy's?"""
    solver, samples = Solver(batch_size=3, local_iterations=2), 40
    for work in PROBES:
        training = (work, solver, samples)
        if not all(map(np.array_equal, _drawn([training])[0], draw_one_by_one([training])[0])):
            return False
    return True


def _is_quick(work: Work, solver: Solver, samples: int) -> bool:
    rows = solver.local_iterations
    small = rows is not None and samples <= SORTED_SAMPLES_MAX and rows * samples <= SORTED_MAX
    return small and work.device < WORD_MAX and work.number < WORD_MAX and work.seed < WORD_MAX


def _drawn(trainings: Sequence[Drawing]) -> list[Batches]:
    if not trainings:
        return []
    table = np.array(
        [(w.seed, w.device, w.number, s.local_iterations, n, min(s.batch_size, n)) for w, s, n in trainings], np.int64
    )
    ends = np.cumsum(table[:, ROWS] * table[:, SIZE])
    indices = np.empty(ends[-1], np.int64)
    _draw(table, indices)
    parts = zip(np.split(indices, ends[:-1]), table[:, ROWS].tolist(), table[:, SIZE].tolist(), strict=True)
    return [(part.reshape(rows, size), np.full(rows, size)) for part, rows, size in parts]


# --- compiled --------------------------------------------------------------------------------------------------------


@compiled
def _draw(table: Whole, indices: Whole) -> None:
    at, pool, state = 0, np.empty(POOL, np.uint32), np.empty(4, np.uint64)
    for number in range(len(table)):
        _seeded(state, pool, table[number])
        for _ in range(SEED_WORDS):
            _step(state)
        samples, size = table[number, SAMPLES], table[number, SIZE]
        values = np.empty(samples, np.float64)
        for _ in range(table[number, ROWS]):
            for place in range(samples):
                _step(state)
                mixed, turn = state[0] ^ state[1], state[0] >> np.uint64(58)
                word = (mixed >> turn) | (mixed << (np.uint64(64) - turn & np.uint64(63)))
                values[place] = np.float64(word >> np.uint64(11)) * (1.0 / 9007199254740992.0)
            for _ in range(size):  # the smallest ones, in order: the beginning of what sorting would give
                least = np.argmin(values)
                values[least] = TAKEN
                indices[at] = least
                at += 1


@compiled
def _seeded(state: npt.NDArray[np.uint64], pool: Words, drawing: Whole) -> None:
    """PCG64's state (high, low, increment high, low) as `SeedSequence(seed, spawn_key=(device, number))` makes it."""
    entropy = np.zeros(POOL + 2, np.uint32)
    entropy[0] = np.uint32(drawing[SEED])
    entropy[POOL], entropy[POOL + 1] = np.uint32(drawing[DEVICE]), np.uint32(drawing[NUMBER])
    factor = INIT_A
    for place in range(POOL):
        pool[place], factor = _hashed(entropy[place], factor)
    for source in range(POOL):
        for place in range(POOL):
            if source != place:
                value, factor = _hashed(pool[source], factor)
                pool[place] = _blended(pool[place], value)
    for source in range(POOL, len(entropy)):
        for place in range(POOL):
            value, factor = _hashed(entropy[source], factor)
            pool[place] = _blended(pool[place], value)
    words = np.empty(8, np.uint32)
    factor = INIT_B
    for place in range(len(words)):
        value = np.uint32(pool[place % POOL] ^ factor)
        factor = np.uint32(factor * MULT_B)
        value = np.uint32(value * factor)
        words[place] = np.uint32(value ^ (value >> SHIFT))
    seed_high, seed_low = _joined(words[0], words[1]), _joined(words[2], words[3])
    high, low = _joined(words[4], words[5]), _joined(words[6], words[7])
    state[2], state[3] = (high << ONE) | (low >> np.uint64(63)), (low << ONE) | ONE
    state[0], state[1] = np.uint64(0), np.uint64(0)
    _step(state)
    _add(state, seed_high, seed_low)
    _step(state)


@compiled
def _hashed(value: np.uint32, factor: np.uint32) -> tuple[np.uint32, np.uint32]:
    mixed = np.uint32(value ^ factor)
    grown = np.uint32(factor * MULT_A)
    mixed = np.uint32(mixed * grown)
    return np.uint32(mixed ^ (mixed >> SHIFT)), grown


@compiled
def _blended(left: np.uint32, right: np.uint32) -> np.uint32:
    value = np.uint32(np.uint32(MIX_LEFT * left) - np.uint32(MIX_RIGHT * right))
    return np.uint32(value ^ (value >> SHIFT))


@compiled
def _joined(low: np.uint32, high: np.uint32) -> np.uint64:
    return np.uint64(low) | (np.uint64(high) << np.uint64(32))


@compiled
def _add(state: npt.NDArray[np.uint64], high: np.uint64, low: np.uint64) -> None:
    state[1] += low
    state[0] += high + (ONE if state[1] < low else np.uint64(0))


@compiled
def _step(state: npt.NDArray[np.uint64]) -> None:
    """The next state: 128 bits times the multiplier, plus the increment."""
    high, low = state[0], state[1]
    low_0, low_1, times_0, times_1 = low & HALF, low >> np.uint64(32), LOW & HALF, LOW >> np.uint64(32)
    first, second, third = low_0 * times_0, low_1 * times_0, low_0 * times_1
    carry = (first >> np.uint64(32)) + (second & HALF) + (third & HALF)
    upper = low_1 * times_1 + (second >> np.uint64(32)) + (third >> np.uint64(32)) + (carry >> np.uint64(32))
    state[0], state[1] = upper + high * LOW + low * HIGH, low * LOW
    _add(state, state[2], state[3])
