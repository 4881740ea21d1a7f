"""Owns models on the wire: valid safetensors bytes whose body is the flat vector itself.

Rules kept here:
- The header is written once per layout. Its length is such that the vector begins on a 64-byte boundary of the file.
- Any safetensors file with the right arrays is taken, in whatever order another writer has put them.
- A reader believes nothing: sizes are bounded before anything is kept, offsets must cover the body without gap or
  overlap, and whatever is wrong is one `BadPayload` that says what. Nothing is ever executed.
"""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.core.layout import ALIGNMENT, Array, Layout, Model, Vector, aligned
from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.header_parser import (
    DTYPES,
    METADATA,
    BadPayload,
    Header,
    HeaderLimits,
    Tensor,
    once,
    parse_header,
)

__all__ = [
    "DTYPES",
    "LENGTH_BYTES",
    "UNLOADED_MIN",
    "BadPayload",
    "ExpectedHeader",
    "Header",
    "HeaderReader",
    "Tensor",
    "body_of",
    "carried_of",
    "check_fit",
    "header_of",
    "is_flat",
    "mapped",
    "mapped_with_metadata",
    "once",
    "read_header",
    "tensors_of",
    "unload",
    "unpack",
]
LENGTH_BYTES = 8
FLOAT_BYTES = 4
EXPECTED_MAX = 8
"""Layouts whose header is remembered."""
UNLOADED_MIN = 32 << 20
"""Smaller files may stay in memory while they are used."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ExpectedHeader:
    """What the header of a layout's models is: ours byte for byte, or another one within the limits."""

    bytes: bytes
    header: Header
    tensors: Mapping[str, Tensor]
    """By name."""
    limits: HeaderLimits

    @classmethod
    def of(cls, layout: Layout) -> "ExpectedHeader":
        """Made once for a layout, of which a process has one or two."""
        found = _EXPECTED.get(layout.fingerprint)
        if found is None:
            own, tensors = header_of(layout), tensors_of(layout)
            by_name = {tensor.name: tensor for tensor in tensors}
            header = Header(tensors, {"layout": layout.fingerprint}, len(own))
            found = cls(own, header, by_name, HeaderLimits.of(by_name.keys(), len(own)))
            while len(_EXPECTED) >= EXPECTED_MAX:
                _EXPECTED.pop(next(iter(_EXPECTED)), None)
            _EXPECTED[layout.fingerprint] = found
        return found


_EXPECTED: dict[str, ExpectedHeader] = {}
"""By the fingerprint of their layout."""


def header_of(layout: Layout, metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of every model of this layout."""
    entries: dict[str, Any] = {METADATA: {"layout": layout.fingerprint, **(metadata or {})}}
    for tensor in tensors_of(layout):
        name = _NAMES.get(tensor.dtype)
        if name is None:
            raise InvalidValue(
                f"{tensor.name!r} is {tensor.dtype}, which safetensors has no word for; use {', '.join(DTYPES)}"
            )
        entries[tensor.name] = {"dtype": name, "shape": tensor.shape, "data_offsets": (tensor.begin, tensor.end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def tensors_of(layout: Layout) -> tuple[Tensor, ...]:
    """The arrays of a layout in the order of the flat vector, then those that are carried beside it."""
    found, at = [], 0
    for slot in layout.slots:
        found.append(Tensor(slot.name, "<f4", slot.shape, at, at + 4 * slot.size))
        at = found[-1].end
    for carried in layout.carried:
        size = prod(carried.shape) * np.dtype(carried.dtype).itemsize
        found.append(Tensor(carried.name, np.dtype(carried.dtype).str, carried.shape, at, at + size))
        at += size
    return tuple(found)


def body_of(model: Model) -> Iterator[memoryview]:
    """The bytes after the header, without a copy of the vector."""
    yield model.vector.data.cast("B")
    for carried in model.layout.carried:
        yield np.ascontiguousarray(model.carried[carried.name]).reshape(-1).data.cast("B")


class HeaderReader:
    """Reads a header from bytes as they come; what is left over belongs to the body."""

    def __init__(self, expected: ExpectedHeader | None = None, *, header_max: int | None = None) -> None:
        """With what is `expected` of a layout, the limits follow from that, and our own header needs no parsing."""
        self._expected, self._limits = expected, expected.limits if expected else HeaderLimits()
        self.header_max = header_max or self._limits.header_max
        self._bytes = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Header | None:
        """Take some bytes; the header, once all of it is there."""
        self._bytes += data
        if len(self._bytes) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._bytes[:LENGTH_BYTES], "little")
        if not 2 <= length <= self.header_max:
            raise BadPayload(
                f"the header claims {length} bytes but must have 2..{self.header_max}: no safetensors file"
            )
        end = LENGTH_BYTES + length
        if len(self._bytes) < end:
            return None
        if self._expected is not None and self._bytes.startswith(self._expected.bytes):
            return self._expected.header
        return parse_header(bytes(self._bytes[LENGTH_BYTES:end]), end, self._limits)


def read_header(data: bytes | memoryview, expected: ExpectedHeader | None = None) -> Header:
    """The header at the beginning of these bytes, which must be there whole."""
    length, reader = int.from_bytes(data[:LENGTH_BYTES], "little"), HeaderReader(expected)
    header = reader.feed(data[: LENGTH_BYTES + min(length, reader.header_max)])  # it copies: not the body
    if header is None:
        raise BadPayload(f"the file ends after {len(data)} bytes, within its header")
    return header


def unpack(data: bytes | memoryview, layout: Layout) -> Model:
    """The model that these bytes hold; refused, by name, where it does not fit. The vector is copied once."""
    view = memoryview(data).cast("B")
    header = read_header(view, ExpectedHeader.of(layout))
    if len(view) != header.size:
        raise BadPayload(f"the file has {len(view)} bytes but its header describes {header.size}")
    check_fit(header, layout)
    vector, there = aligned(layout.size), {tensor.name: tensor for tensor in header.tensors}
    out, body = vector.data.cast("B"), view[header.length :]
    for tensor in ExpectedHeader.of(layout).header.tensors[: len(layout.slots)]:
        out[tensor.begin : tensor.end] = body[there[tensor.name].begin : there[tensor.name].end]
    return Model(layout, vector, carried_of(header, view, layout))


def carried_of(header: Header, data: memoryview, layout: Layout) -> dict[str, Array]:
    """Copies of the arrays that are carried beside the vector."""
    there, body = {tensor.name: tensor for tensor in header.tensors}, data[header.length :]
    carried: dict[str, Array] = {}
    for tensor in ExpectedHeader.of(layout).header.tensors[len(layout.slots) :]:
        found = there[tensor.name]
        carried[tensor.name] = np.frombuffer(body[found.begin : found.end], tensor.dtype).reshape(tensor.shape).copy()
    return carried


def is_flat(header: Header, layout: Layout) -> bool:
    """Is the body the flat vector, in the order of `body_of`? Then it can be mapped instead of copied."""
    return header.tensors == ExpectedHeader.of(layout).header.tensors and header.length % FLOAT_BYTES == 0


def check_fit(header: Header, layout: Layout) -> None:
    """Refuse a file that is not of this layout, by the name of what does not fit."""
    expected = ExpectedHeader.of(layout)
    if header is expected.header:
        return
    ours, theirs = expected.tensors, {t.name: t for t in header.tensors}
    for name in ours:
        if name not in theirs:
            raise LayoutMismatch(f"{name!r} is missing from the update; the model has it")
    for name in theirs:
        if name not in ours:
            raise LayoutMismatch(f"{name!r} is not part of the model")
    for name, tensor in theirs.items():
        if tensor.shape != ours[name].shape:
            raise LayoutMismatch(f"{name!r} has shape {list(tensor.shape)} but the model's is {list(ours[name].shape)}")
        if tensor.dtype != ours[name].dtype:
            raise LayoutMismatch(f"{name!r} is {tensor.dtype} but the model's is {ours[name].dtype}")


def mapped(path: Path, layout: Layout) -> Model:
    """The model in a file, read-only; mapped where the body is the flat vector, which takes no memory of ours."""
    return mapped_with_metadata(path, layout)[0]


def mapped_with_metadata(path: Path, layout: Layout) -> tuple[Model, Mapping[str, str]]:
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped when its last user is gone
    except (FileNotFoundError, ValueError) as error:
        raise BadPayload(f"{path} is missing or empty: {error}") from error
    whole = memoryview(view)
    header = read_header(whole, ExpectedHeader.of(layout))
    if not is_flat(header, layout) or len(whole) != header.size:
        return unpack(whole, layout).freeze(), header.metadata
    vector = np.frombuffer(whole, np.float32, layout.size, header.length)
    return Model(layout, vector, carried_of(header, whole, layout)).freeze(), header.metadata


def unload(vectors: Iterable[Vector], at_least: int = UNLOADED_MIN) -> None:
    """Give back the memory that reading large mapped vectors took; later reads take them from the file again."""
    for vector in vectors:
        source = getattr(vector.base, "obj", None)
        if isinstance(source, mmap.mmap) and len(source) >= at_least:
            source.madvise(mmap.MADV_DONTNEED)
