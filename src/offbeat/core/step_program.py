"""Owns elementwise steps over named vectors, planned once for their outline and done in one pass over memory.

Rules kept here:
- In float32, every operation rounded by itself, the terms of a sum from left to right; a coefficient is rounded once.
  So the number of threads and the size of a block change nothing, and machine code gives the bits of numpy.
- Vectors are not changed: the last value of a name goes to a buffer of its own, and what lies between stays in
  registers. So others may hold what was there before.
- A plan holds neither numbers nor vectors: the updates of a run share a few plans, and the machine code of each.
- A vector that is 0 is not read, and a slot that ends as 0 is not written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from offbeat.core.layout import Vector
from offbeat.core.rules.interface import (
    BASE,
    NEW,
    SCRATCH,
    VECTORS,
    Elementwise,
    Larger,
    Move,
    OnParameters,
    Product,
    Root,
    VectorStep,
)
from offbeat.errors import InvalidValue

BLOCK = 8192
"""Elements that numpy does one operation for before the next: a dozen blocks fit into a core's cache."""
PLANS_MAX = 256
MOVE, PRODUCT, LARGER, ROOT = range(4)
ROUNDS_TO_0 = 2.0**-150
"""The largest number that is 0 in float32."""
Operand = str | int | None
"""A vector by its name, the result of an operation by its number, or 0."""


class Outline(NamedTuple):
    """A step without its numbers."""

    kind: int
    into: str
    reads: tuple[str, ...]
    numbers: int
    """How many it takes."""
    on_parameters: bool


class OrderOutline(NamedTuple):
    """The steps of one order; `names` are those that mean a vector of its own: what it says, what the plan says."""

    steps: tuple[Outline, ...]
    names: tuple[tuple[str, str], ...] = ()


class Operation(NamedTuple):
    kind: int
    operands: tuple[Operand, ...]
    numbers: int
    """The place of its first number among those of the program."""


class Part(NamedTuple):
    """What is done to some of the elements: operations, and which results are written."""

    operations: tuple[Operation, ...]
    results: tuple[Operand, ...]


@dataclass(eq=False)
class PassPlan:
    """What to do with which vectors, for all programs of one outline."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    cleared: tuple[str, ...]
    """Slots that are 0 afterwards; they are not written."""
    on_parameters: Part
    everywhere: Part
    """The same for what is not trained: without the steps for parameters alone."""
    elements: int = 0
    """That it was done for so far: machine code is made when it is worth it."""


@dataclass(frozen=True, slots=True)
class StepProgram:
    """A plan with its vectors and numbers; the first `trained` of `size` elements are parameters."""

    plan: PassPlan
    inputs: Sequence[Vector]
    outputs: Sequence[Vector]
    numbers: Sequence[float]
    size: int
    trained: int

    def parts(self) -> Iterator[tuple[Part, int, int]]:
        """What is done, and from where to where."""
        yield self.plan.on_parameters, 0, self.trained
        if self.trained < self.size:
            yield self.plan.everywhere, self.trained, self.size

    def refuse_unfit(self) -> None:
        for vector in (*self.inputs, *self.outputs):
            if vector.shape != (self.size,) or vector.dtype != np.float32 or not vector.flags.c_contiguous:
                raise InvalidValue(
                    f"a vector is {vector.dtype}{list(vector.shape)}; here all are contiguous float32[{self.size}]"
                )
        if not all(vector.flags.writeable for vector in self.outputs):
            raise InvalidValue("what is written to is read-only, as published versions are")


# --- outlines --------------------------------------------------------------------------------------------------------


def outlined(steps: Sequence[VectorStep]) -> tuple[tuple[Outline, ...], list[float]]:
    """Steps without their numbers, and the numbers; terms with a coefficient of 0 are left out.

    >>> outlined([Move("m", (("m", 0.9), ("g", 0.0)))])
    ((Outline(kind=0, into='m', reads=('m',), numbers=1, on_parameters=False),), [0.9])
    """
    numbers: list[float] = []
    found: list[Outline] = []
    for step in steps:
        if isinstance(step, OnParameters):
            found += [_outline(one, numbers, on_parameters=True) for one in step.steps]
        else:
            found.append(_outline(step, numbers, on_parameters=False))
    return tuple(found), numbers


def _outline(step: Elementwise, numbers: list[float], *, on_parameters: bool) -> Outline:
    match step:
        case Move(into, terms):
            counting = [term for term in terms if not abs(term[1]) <= ROUNDS_TO_0]
            numbers += [number for _, number in counting]
            return Outline(MOVE, into, tuple([name for name, _ in counting]), len(counting), on_parameters)
        case Product():
            kept = not abs(step.keep) <= ROUNDS_TO_0
            numbers += [step.share, step.keep] if kept else [step.share]
            reads = (step.left, step.right, step.into) if kept else (step.left, step.right)
            return Outline(PRODUCT, step.into, reads, 1 + kept, on_parameters)
        case Larger():
            return Outline(LARGER, step.into, (step.into, step.of), 0, on_parameters)
        case Root():
            numbers += [step.step, step.eps]
            return Outline(ROOT, step.into, (step.over, step.under), 2, on_parameters)


# --- plans -----------------------------------------------------------------------------------------------------------


@lru_cache(PLANS_MAX)
def planned(orders: tuple[OrderOutline, ...], present: frozenset[str], *, has_buffers: bool) -> PassPlan:
    """The plan of some orders, one after the other; of the vectors, those in `present` are there, others are 0."""
    drafts = [_drafted(orders, present, on_parameters=True)]
    if has_buffers:
        drafts.append(_drafted(orders, present, on_parameters=False))
    named = [names.get(step.into, step.into) for steps, pairs in orders for names in (dict(pairs),) for step in steps]
    written = [name for name in dict.fromkeys(named) if not name.startswith(SCRATCH)]
    cleared = tuple(name for name in written if _is_slot(name) and all(draft.read(name) is None for draft in drafts))
    writes = tuple(name for name in written if name not in cleared)
    parts = [draft.part(writes) for draft in drafts]
    return PassPlan(_read_by(parts), writes, cleared, parts[0], parts[-1])


class _Draft:
    """A part that is being written down: the operations so far, and what every name means now."""

    def __init__(self, present: frozenset[str]) -> None:
        self._operations: list[Operation] = []
        self._present, self._now = present, dict[str, Operand]()

    def read(self, name: str) -> Operand:
        if name in self._now:
            return self._now[name]
        if name in self._present:
            return name
        if name.startswith(SCRATCH) or name.partition(" ")[0] in (NEW, BASE):
            raise InvalidValue(f"there is no vector {name!r}")
        return None

    def add(self, step: Outline, names: Mapping[str, str], number: int) -> None:
        operands = tuple(self.read(names.get(name, name)) for name in step.reads)
        made: Operand = None
        if operands:
            made = len(self._operations)
            self._operations.append(Operation(step.kind, operands, number))
        self._now[names.get(step.into, step.into)] = made

    def forget_scratch(self) -> None:
        self._now = {name: value for name, value in self._now.items() if not name.startswith(SCRATCH)}

    def part(self, writes: tuple[str, ...]) -> Part:
        """The operations that count for what is written, numbered anew."""
        results = [self.read(name) for name in writes]
        needed = set(results)
        for number in reversed(range(len(self._operations))):
            if number in needed:
                needed.update(self._operations[number].operands)
        kept = [number for number in range(len(self._operations)) if number in needed]
        anew: dict[Operand, Operand] = {number: place for place, number in enumerate(kept)}
        operations = [self._operations[number] for number in kept]
        renumbered = [one._replace(operands=tuple(anew.get(each, each) for each in one.operands)) for one in operations]
        return Part(tuple(renumbered), tuple(anew.get(each, each) for each in results))


def _drafted(orders: Sequence[OrderOutline], present: frozenset[str], *, on_parameters: bool) -> _Draft:
    draft, number = _Draft(present), 0
    for steps, pairs in orders:
        names = dict(pairs)
        for step in steps:
            if on_parameters or not step.on_parameters:
                draft.add(step, names, number)
            number += step.numbers
        draft.forget_scratch()
    return draft


def _is_slot(name: str) -> bool:
    return name.isidentifier() and name not in VECTORS


def _read_by(parts: Sequence[Part]) -> tuple[str, ...]:
    read: list[Operand] = []
    for part in parts:
        read += [each for one in part.operations for each in one.operands]
        read += part.results
    return tuple(dict.fromkeys(each for each in read if isinstance(each, str)))


# --- numpy -----------------------------------------------------------------------------------------------------------


def run_numpy(program: StepProgram, part: Part, start: int, stop: int) -> None:
    """Do a part of a program in numpy, a block at a time."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        numbers = list(np.array(program.numbers, np.float32))
        for lo in range(start, stop, BLOCK):
            _run_block(program, part, numbers, slice(lo, min(lo + BLOCK, stop)))


def _run_block(program: StepProgram, part: Part, numbers: list[np.float32], here: slice) -> None:
    values: dict[Operand, Vector] = {None: np.zeros(here.stop - here.start, np.float32)}
    values |= {name: vector[here] for name, vector in zip(program.plan.reads, program.inputs, strict=True)}
    for place, (kind, operands, number) in enumerate(part.operations):
        values[place] = _found(kind, [values[each] for each in operands], numbers[number:])
    for result, vector in zip(part.results, program.outputs, strict=True):
        vector[here] = values[result]


def _found(kind: int, operands: list[Vector], numbers: list[np.float32]) -> Vector:
    if kind == MOVE:
        total: Vector = operands[0] * numbers[0]
        for vector, number in zip(operands[1:], numbers[1:], strict=False):
            total += vector * number
        return total
    if kind == PRODUCT:
        made: Vector = (operands[0] * operands[1]) * numbers[0]
        return operands[2] * numbers[1] + made if len(operands) > 2 else made
    if kind == LARGER:
        return np.where(operands[0] > operands[1], operands[0], operands[1])
    divisor = np.sqrt(operands[1]) + numbers[1]
    found = np.zeros_like(divisor)
    np.divide(operands[0] * numbers[0], divisor, out=found, where=divisor != 0)
    return found
