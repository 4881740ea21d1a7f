"""Owns the shape of a model: named arrays on one side, one flat float32 vector on the other.

Rules kept here:
- The vector is contiguous and starts on a 64-byte boundary; named arrays are views of it, never copies.
- Parameters come first, float buffers (BatchNorm's statistics) after them: both travel and mix.
- Buffers that are not floats (BatchNorm's counter) are carried beside the vector and follow the newest update.
- Tied parameters occupy one slice, under the name that came first. Frozen ones are not part of the layout.
- An update that does not fit is refused by the name of what does not fit, before anything is changed.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from offbeat.errors import InvalidValue, LayoutMismatch

Array = npt.NDArray[Any]
Vector = npt.NDArray[np.float32]

ALIGNMENT = 64
NO_ARRAYS: Mapping[str, Array] = {}


class Slot(NamedTuple):
    """Where one named array sits in the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)


class Carried(NamedTuple):
    """A buffer that is not made of floats and does not mix."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Layout:
    """Names, shapes and places of everything that travels between server and workers."""

    slots: tuple[Slot, ...]
    carried: tuple[Carried, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs of (name, name that came first)."""
    parameter_size: int = 0
    """How many leading elements of the vector are trained; float buffers make up the rest."""

    @classmethod
    def of(cls, arrays: Mapping[str, Array], *, buffers: Collection[str] = (), frozen: Collection[str] = ()) -> Self:
        """The layout of these arrays; `buffers` are not trained, `frozen` neither travel nor mix."""
        for name in (*buffers, *frozen):
            if name not in arrays:
                raise InvalidValue(f"{name!r} is called a buffer or frozen but is not among the arrays {_some(arrays)}")
        kept = {name: np.asarray(array) for name, array in arrays.items() if name not in frozen}
        tied = _tied(kept)
        own = {name: array for name, array in kept.items() if name not in tied}
        parameters = {name: _float32(name, array) for name, array in own.items() if name not in buffers}
        mixed_buffers = {n: _float32(n, a) for n, a in own.items() if n in buffers and a.dtype.kind in "fc"}
        carried = tuple(
            Carried(n, a.shape, a.dtype.str) for n, a in own.items() if n in buffers and n not in mixed_buffers
        )
        slots, offset = [], 0
        for name, array in (parameters | mixed_buffers).items():
            slots.append(Slot(name, array.shape, offset))
            offset += array.size
        parameter_size = sum(array.size for array in parameters.values())
        if parameter_size == 0:
            raise InvalidValue("the model is empty: it has no parameter that is trained, so there is nothing to learn")
        return cls(tuple(slots), carried, tuple(tied.items()), parameter_size)

    @cached_property
    def size(self) -> int:
        return self.slots[-1].offset + self.slots[-1].size

    @cached_property
    def carried_names(self) -> frozenset[str]:
        return frozenset(carried.name for carried in self.carried)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names, shapes and dtypes: equal layouts, equal fingerprints."""
        facts = [self.slots, self.carried, self.tied, self.parameter_size]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @cached_property
    def places(self) -> dict[str, Slot]:
        """Every name that lives in the vector, tied ones included."""
        own = {slot.name: slot for slot in self.slots}
        return own | {name: own[first] for name, first in self.tied}

    def pack(self, arrays: Mapping[str, Array]) -> "Model":
        """A model of this layout that holds a copy of these arrays; refused, by name, if they do not fit."""
        self._refuse_strangers(arrays)
        model = Model(self, aligned(self.size), {c.name: np.empty(c.shape, c.dtype) for c in self.carried})
        for name, view in model.items():
            if name in arrays:
                _same(name, view, np.asarray(arrays[name]))
        for name, first in self.tied:
            if name in arrays and not np.array_equal(arrays[name], arrays[first], equal_nan=True):
                raise LayoutMismatch(f"{name!r} is tied to {first!r} in this model but holds other values here")
        for name in (*(slot.name for slot in self.slots), *model.carried):
            model[name][...] = arrays[name]
        return model

    def _refuse_strangers(self, arrays: Mapping[str, Array]) -> None:
        needed = [slot.name for slot in self.slots] + [carried.name for carried in self.carried]
        missing = [name for name in needed if name not in arrays]
        known = {*needed, *self.places}
        extra = [name for name in arrays if name not in known]
        if missing:
            raise LayoutMismatch(f"{_some(missing)} missing from the update; the model has {_some(needed)}")
        if extra:
            raise LayoutMismatch(f"{_some(extra)} not part of the model, which has {_some(needed)}")


class Model(Mapping[str, Array]):
    """One model: a flat vector, what is carried beside it, and all of it by name as views."""

    __slots__ = ("carried", "frozen", "layout", "vector")

    def __init__(self, layout: Layout, vector: Vector, carried: Mapping[str, Array] | None = None) -> None:
        if vector.shape != (layout.size,) or vector.dtype != np.float32 or not vector.flags.c_contiguous:
            raise LayoutMismatch(
                f"the vector is {vector.dtype}{list(vector.shape)}; this layout has contiguous float32[{layout.size}]"
            )
        self.layout, self.vector, self.carried = layout, vector, dict(carried or {})
        self.frozen: Mapping[str, Array] = NO_ARRAYS
        """What `Model.of` was told is frozen, in a model that a task has just made: it neither travels nor mixes."""
        if self.carried.keys() != layout.carried_names:
            raise LayoutMismatch(f"carried buffers are {_some(self.carried)}; the layout has {_some(layout.carried)}")

    @classmethod
    def of(cls, arrays: Mapping[str, Array], *, buffers: Collection[str] = (), frozen: Collection[str] = ()) -> "Model":
        """A model, and its layout, made from named arrays (which are copied)."""
        layout = Layout.of(arrays, buffers=buffers, frozen=frozen)
        model = layout.pack({name: array for name, array in arrays.items() if name not in frozen})
        model.frozen = {name: arrays[name] for name in frozen}
        return model

    def __getitem__(self, name: str) -> Array:
        if name in self.carried:
            return self.carried[name]
        slot = self.layout.places[name]
        return self.vector[slot.offset : slot.offset + slot.size].reshape(slot.shape)

    def __iter__(self) -> Iterator[str]:
        yield from self.layout.places
        yield from self.carried

    def __len__(self) -> int:
        return len(self.layout.places) + len(self.carried)

    def copy(self) -> "Model":
        """A writable model of its own with the same contents."""
        return Model(
            self.layout, aligned_copy(self.vector), {name: array.copy() for name, array in self.carried.items()}
        )

    def freeze(self) -> Self:
        """This model, from now on read-only: published versions never change."""
        self.vector.setflags(write=False)
        for array in self.carried.values():
            array.setflags(write=False)
        return self


def layout_to(layout: Layout) -> dict[str, Any]:
    names = ("slots", "carried", "tied", "parameter_size")
    return {name: getattr(layout, name) for name in names}


def layout_from(values: Mapping[str, Any]) -> Layout:
    try:
        slots = tuple(Slot(name, tuple(shape), offset) for name, shape, offset in values["slots"])
        carried = tuple(Carried(name, tuple(shape), dtype) for name, shape, dtype in values["carried"])
        tied = tuple((name, first) for name, first in values["tied"])
        return Layout(slots, carried, tied, values["parameter_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"this is no layout: {error}") from error


def aligned(size: int) -> Vector:
    """An uninitialised float32 vector that starts on a 64-byte boundary."""
    raw = np.empty(size + ALIGNMENT // 4, np.float32)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT // 4
    return raw[start : start + size]


def aligned_copy(vector: Vector) -> Vector:
    copy = aligned(len(vector))
    copy[:] = vector
    return copy


def _float32(name: str, array: Array) -> Array:
    if array.dtype != np.float32:
        raise InvalidValue(
            f"{name!r} is {array.dtype}: what is trained or mixed must be float32; "
            "convert it, freeze it, or name a buffer of whole numbers among `buffers`"
        )
    return array


def _same(name: str, ours: Array, theirs: Array) -> None:
    if theirs.shape != ours.shape:
        raise LayoutMismatch(f"{name!r} has shape {list(theirs.shape)} but the model's is {list(ours.shape)}")
    if theirs.dtype != ours.dtype:
        raise LayoutMismatch(f"{name!r} is {theirs.dtype} but the model's is {ours.dtype}")


def _tied(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Names of arrays that are the very same memory as an earlier one, with the earlier name."""
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    for name, array in arrays.items():
        facts = array.__array_interface__
        key = (facts["data"][0], array.shape, array.strides, facts["typestr"]) if array.size else name
        if first.setdefault(key, name) != name:
            tied[name] = first[key]
    _refuse_overlap({name: array for name, array in arrays.items() if name not in tied and array.size})
    return tied


def _refuse_overlap(arrays: Mapping[str, Array]) -> None:
    """Sweep over memory: only arrays whose bounds overlap are compared exactly."""
    bounds = {name: np.lib.array_utils.byte_bounds(array) for name, array in arrays.items()}
    open_: list[str] = []
    for name in sorted(arrays, key=lambda name: bounds[name]):
        open_ = [other for other in open_ if bounds[other][1] > bounds[name][0]]
        for other in open_:
            if np.shares_memory(arrays[name], arrays[other]):
                raise InvalidValue(f"{other!r} and {name!r} overlap in memory but are not the same; give each its own")
        open_.append(name)


def _some(names: Collection[Any]) -> str:
    shown = [str(name) for name in names][:5]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def same_layout(ours: Layout, theirs: Layout) -> Layout:
    """Their layout, which must equal ours; a caller that keeps it compares the next one by identity."""
    if theirs is not ours and theirs != ours:
        raise LayoutMismatch("this model has another layout than the task's module; was it made by another task?")
    return theirs
