"""Owns plans of steps as machine code: one loop for all steps of a part, whose values between them stay in registers.

Rules kept here:
- It is imported when there is enough to do. LLVM, which comes with numba, takes 0.1 s to load and about 0.02 s for a
  plan, so no code is kept on disk.
- The loop is written as LLVM's text, 16 elements at a time and the rest one by one. Every operation is rounded by
  itself: none is marked as fast, and LLVM fuses none that is not.
- What is too large for the caches is written past them: a line that is overwritten as a whole need not be read before.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from llvmlite import binding as llvm

from offbeat.core.layout import ALIGNMENT, Vector
from offbeat.core.step_program import LARGER, MOVE, PRODUCT, Operand, Operation, Part, PassPlan, StepProgram

WIDTH = 16
"""Elements at a time; as many bytes as vectors are aligned to."""
CODES_MAX = 128
STREAMED_MIN = 1 << 26
"""Bytes from which what is written goes past the caches."""
_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
Work = Callable[[int, int], None]

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


class MachineCode(NamedTuple):
    function: Callable[[Any, Any, int, int], None]
    engine: Any
    """Owns the memory of the code."""


def work_of(program: StepProgram, part: Part, start: int, stop: int) -> Work:
    """A function that does a part of a program from one element to another, both within `start` and `stop`."""
    places = [_address(vector) for vector in (*program.inputs, *program.outputs)]
    written = places[len(program.inputs) :]
    streamed = 4 * (stop - start) * len(places) >= STREAMED_MIN
    streamed = streamed and not any((place + 4 * start) % ALIGNMENT for place in written)
    code = machine_code(program.plan, on_parameters=part is program.plan.on_parameters, streamed=streamed)
    addresses = (ctypes.c_void_p * len(places))(*places)
    numbers = (ctypes.c_float * max(1, len(program.numbers)))(*program.numbers)
    return lambda lo, hi: code.function(addresses, numbers, lo, hi)


@lru_cache(CODES_MAX)
def machine_code(plan: PassPlan, *, on_parameters: bool, streamed: bool) -> MachineCode:
    part = plan.on_parameters if on_parameters else plan.everywhere
    module = llvm.parse_assembly("\n".join(_text(plan, part, streamed=streamed)))
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(llvm.get_host_cpu_name(), features)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    return MachineCode(_SIGNATURE(engine.get_function_address("steps")), engine)


def _address(vector: Vector) -> int:
    return int(vector.__array_interface__["data"][0])


# --- LLVM's text -----------------------------------------------------------------------------------------------------


class _Loop(NamedTuple):
    """One of the two loops: its name is the first part of the names of its values."""

    name: str
    width: int
    streamed: bool

    @property
    def type(self) -> str:
        return f"<{self.width} x float>" if self.width > 1 else "float"

    @property
    def truth(self) -> str:
        return f"<{self.width} x i1>" if self.width > 1 else "i1"

    @property
    def zero(self) -> str:
        return "zeroinitializer" if self.width > 1 else "0.0"

    @property
    def root(self) -> str:
        return f"@llvm.sqrt.v{self.width}f32" if self.width > 1 else "@llvm.sqrt.f32"

    def number(self, place: int) -> str:
        return f"%{self.name}.number{place}"


def _text(plan: PassPlan, part: Part, *, streamed: bool) -> Iterator[str]:
    wide, single = _Loop("wide", WIDTH, streamed), _Loop("single", 1, streamed=False)
    yield "define void @steps(ptr %vectors, ptr %numbers, i64 %start, i64 %stop) {\nentry:"
    for place in range(len(plan.reads) + len(plan.writes)):
        yield f"%at{place} = getelementptr ptr, ptr %vectors, i64 {place}\n%vector{place} = load ptr, ptr %at{place}"
    for place in range(max(map(_numbers_end, part.operations), default=0)):
        yield from _broadcast(place, wide, single)
    yield f"%size = sub i64 %stop, %start\n%rest = and i64 %size, {WIDTH - 1}\n%middle = sub i64 %stop, %rest"
    yield "%any = icmp slt i64 %start, %middle\nbr i1 %any, label %wide, label %between"
    yield from _loop(plan, part, wide, ("entry", "%start", "%middle", "between"))
    yield "between:\n%more = icmp slt i64 %middle, %stop\nbr i1 %more, label %single, label %end"
    yield from _loop(plan, part, single, ("between", "%middle", "%stop", "end"))
    yield "end:" + ("\nfence seq_cst" if streamed else "")  # others see what was written past the caches
    yield "ret void\n}\n!0 = !{i32 1}"
    yield from (f"declare {loop.type} {loop.root}({loop.type})" for loop in (wide, single))


def _numbers_end(operation: Operation) -> int:
    """The place behind the last number of an operation."""
    count = len(operation.operands)
    return operation.numbers + {MOVE: count, PRODUCT: count - 1, LARGER: 0}.get(operation.kind, 2)


def _broadcast(place: int, wide: _Loop, single: _Loop) -> Iterator[str]:
    """A number, and a vector of it."""
    one, many = single.number(place), wide.number(place)
    yield f"%number{place} = getelementptr float, ptr %numbers, i64 {place}\n{one} = load float, ptr %number{place}"
    yield f"%first{place} = insertelement {wide.type} poison, float {one}, i64 0"
    yield f"{many} = shufflevector {wide.type} %first{place}, {wide.type} poison, <{WIDTH} x i32> zeroinitializer"


def _loop(plan: PassPlan, part: Part, loop: _Loop, way: tuple[str, str, str, str]) -> Iterator[str]:
    """All operations for some elements; `way` says where it comes from, its first and last element, where it goes."""
    before, first, last, after = way
    name = loop.name
    yield f"{name}:\n%{name}.i = phi i64 [{first}, %{before}], [%{name}.next, %{name}]"
    read = {each for one in part.operations for each in one.operands} | {*part.results}
    values: dict[Operand, str] = {None: loop.zero}
    for place, vector in enumerate(plan.reads):
        if vector in read:
            values[vector] = f"%{name}.read{place}"
            yield _at(loop, place)
            yield f"{values[vector]} = load {loop.type}, ptr %{name}.at{place}, align 4"
    for place, operation in enumerate(part.operations):
        values[place] = f"%{name}.made{place}"
        yield from _operation(operation, [values[each] for each in operation.operands], values[place], loop)
    for place, result in enumerate(part.results, len(plan.reads)):
        past_caches = f"{4 * loop.width}, !nontemporal !0" if loop.streamed else "4"
        yield _at(loop, place)
        yield f"store {loop.type} {values[result]}, ptr %{name}.at{place}, align {past_caches}"
    yield f"%{name}.next = add i64 %{name}.i, {loop.width}\n%{name}.on = icmp slt i64 %{name}.next, {last}"
    yield f"br i1 %{name}.on, label %{name}, label %{after}"


def _at(loop: _Loop, place: int) -> str:
    return f"%{loop.name}.at{place} = getelementptr float, ptr %vector{place}, i64 %{loop.name}.i"


def _operation(operation: Operation, operands: list[str], into: str, loop: _Loop) -> Iterator[str]:
    numbers = [loop.number(operation.numbers + place) for place in range(max(2, len(operands)))]
    if operation.kind == MOVE:
        yield from _sum(operands, numbers, into, loop)
    elif operation.kind == PRODUCT:
        yield f"{into}.product = fmul {loop.type} {operands[0]}, {operands[1]}"
        if len(operands) == 2:
            yield f"{into} = fmul {loop.type} {into}.product, {numbers[0]}"
        else:
            yield f"{into}.share = fmul {loop.type} {into}.product, {numbers[0]}"
            yield f"{into}.kept = fmul {loop.type} {operands[2]}, {numbers[1]}"
            yield f"{into} = fadd {loop.type} {into}.kept, {into}.share"
    elif operation.kind == LARGER:
        yield f"{into}.is = fcmp ogt {loop.type} {operands[0]}, {operands[1]}"
        yield f"{into} = select {loop.truth} {into}.is, {loop.type} {operands[0]}, {loop.type} {operands[1]}"
    else:
        yield from _root(operands, numbers, into, loop)


def _sum(operands: list[str], numbers: list[str], into: str, loop: _Loop) -> Iterator[str]:
    """Products, added from left to right."""
    names = [f"{into}.sum{place}" for place in range(len(operands) - 1)] + [into]
    for place, operand in enumerate(operands):
        product = f"{into}.product{place}" if place else names[0]
        yield f"{product} = fmul {loop.type} {operand}, {numbers[place]}"
        if place:
            yield f"{names[place]} = fadd {loop.type} {names[place - 1]}, {product}"


def _root(operands: list[str], numbers: list[str], into: str, loop: _Loop) -> Iterator[str]:
    yield f"{into}.root = call {loop.type} {loop.root}({loop.type} {operands[1]})"
    yield f"{into}.divisor = fadd {loop.type} {into}.root, {numbers[1]}"
    yield f"{into}.over = fmul {loop.type} {operands[0]}, {numbers[0]}"
    yield f"{into}.found = fdiv {loop.type} {into}.over, {into}.divisor"
    yield f"{into}.is = fcmp une {loop.type} {into}.divisor, {loop.zero}"
    yield f"{into} = select {loop.truth} {into}.is, {loop.type} {into}.found, {loop.type} {loop.zero}"
