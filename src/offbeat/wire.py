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
from typing import Any, NamedTuple

import numpy as np

from offbeat.core.layout import ALIGNMENT, Array, Layout, Model, Vector, aligned
from offbeat.errors import InvalidValue, LayoutMismatch

LENGTH_BYTES = 8
FLOAT_BYTES = 4
HEADER_MAX = 16 << 20
"""Bytes of a header; a layout of ten thousand arrays needs one."""
METADATA = "__metadata__"
UNLOADED_MIN = 32 << 20
"""Smaller files may stay in memory while they are used."""
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
    "BOOL": "|b1",
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class BadPayload(InvalidValue):
    """The bytes are not a model, or the model has another layout."""


class Tensor(NamedTuple):
    """An array in a file: where its bytes are, counted from the beginning of the body."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    tensors: tuple[Tensor, ...]
    metadata: Mapping[str, str]
    length: int
    """Bytes before the body."""

    @property
    def size(self) -> int:
        return self.length + (self.tensors[-1].end if self.tensors else 0)


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

    def __init__(self, header_max: int = HEADER_MAX) -> None:
        self.header_max = header_max
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
        if len(self._bytes) < LENGTH_BYTES + length:
            return None
        return _parsed(bytes(self._bytes[LENGTH_BYTES : LENGTH_BYTES + length]), LENGTH_BYTES + length)


def read_header(data: bytes | memoryview, header_max: int = HEADER_MAX) -> Header:
    """The header at the beginning of these bytes, which must be there whole."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    header = HeaderReader(header_max).feed(data[: LENGTH_BYTES + min(length, header_max)])  # it copies: not the body
    if header is None:
        raise BadPayload(f"the file ends after {len(data)} bytes, within its header")
    return header


def unpack(data: bytes | memoryview, layout: Layout) -> Model:
    """The model that these bytes hold; refused, by name, where it does not fit. The vector is copied once."""
    view = memoryview(data).cast("B")
    header = read_header(view)
    if len(view) != header.size:
        raise BadPayload(f"the file has {len(view)} bytes but its header describes {header.size}")
    check_fit(header, layout)
    vector, there = aligned(layout.size), {tensor.name: tensor for tensor in header.tensors}
    out, body = vector.data.cast("B"), view[header.length :]
    for tensor in tensors_of(layout)[: len(layout.slots)]:
        out[tensor.begin : tensor.end] = body[there[tensor.name].begin : there[tensor.name].end]
    return Model(layout, vector, carried_of(header, view, layout))


def carried_of(header: Header, data: memoryview, layout: Layout) -> dict[str, Array]:
    """Copies of the arrays that are carried beside the vector."""
    there, body = {tensor.name: tensor for tensor in header.tensors}, data[header.length :]
    carried: dict[str, Array] = {}
    for tensor in tensors_of(layout)[len(layout.slots) :]:
        found = there[tensor.name]
        carried[tensor.name] = np.frombuffer(body[found.begin : found.end], tensor.dtype).reshape(tensor.shape).copy()
    return carried


def is_flat(header: Header, layout: Layout) -> bool:
    """Is the body the flat vector, in the order of `body_of`? Then it can be mapped instead of copied."""
    return header.tensors == tensors_of(layout) and header.length % FLOAT_BYTES == 0


def check_fit(header: Header, layout: Layout) -> None:
    """Refuse a file that is not of this layout, by the name of what does not fit."""
    ours, theirs = {t.name: t for t in tensors_of(layout)}, {t.name: t for t in header.tensors}
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
    try:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # unmapped when its last user is gone
    except (FileNotFoundError, ValueError) as error:
        raise BadPayload(f"{path} is missing or empty: {error}") from error
    whole = memoryview(view)
    header = read_header(whole)
    if not is_flat(header, layout) or len(whole) != header.size:
        return unpack(whole, layout).freeze()
    vector = np.frombuffer(whole, np.float32, layout.size, header.length)
    return Model(layout, vector, carried_of(header, whole, layout)).freeze()


def unload(vectors: Iterable[Vector]) -> None:
    """Give back the memory that reading large mapped vectors took; later reads take them from the file again."""
    for vector in vectors:
        source = getattr(vector.base, "obj", None)
        if isinstance(source, mmap.mmap) and len(source) >= UNLOADED_MIN:
            source.madvise(mmap.MADV_DONTNEED)


# --- reading files of unknown origin ----------------------------------------------------------------------------------


def _parsed(text: bytes, length: int) -> Header:
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadPayload(f"the header is not JSON: {str(error)[:200]}") from None
    if not isinstance(entries, dict):
        raise BadPayload("the header is not a JSON object")
    metadata = _metadata(entries.pop(METADATA, {}))
    tensors = sorted((_tensor(name, entry) for name, entry in entries.items()), key=lambda t: (t.begin, t.end))
    at = 0
    for tensor in tensors:
        if tensor.begin != at:
            raise BadPayload(f"{tensor.name!r} begins at byte {tensor.begin} of the body, not at {at}: gap or overlap")
        at = tensor.end
    return Header(tuple(tensors), metadata, length)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs; refused where a name stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in it")
    return found


def _metadata(entry: Any) -> dict[str, str]:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        raise BadPayload(f"{METADATA} must be an object of texts")
    return entry


def _tensor(name: str, entry: Any) -> Tensor:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise BadPayload(f"{name!r} needs dtype ({', '.join(DTYPES)}), shape and two data_offsets") from None
    if not isinstance(shape, list) or not all(_whole(number) for number in (*shape, begin, end)):
        raise BadPayload(f"{name!r} has a shape or data_offsets that are no whole numbers >= 0")
    if end - begin != prod(shape) * np.dtype(dtype).itemsize:
        raise BadPayload(f"{name!r} has {end - begin} bytes but its shape {shape} of {dtype} needs others")
    return Tensor(name, dtype, tuple(shape), begin, end)


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63
