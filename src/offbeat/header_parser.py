"""Owns the reading of a safetensors header that somebody else wrote: in small steps, and every size is bounded.

Rules kept here:
- A header is read entry by entry. What one entry takes is bounded, so the interpreter is held for a moment at a time,
  however long the header is; a reader on another thread lets the others run in between.
- Bytes, arrays, dimensions, names and numbers have limits. Where the layout is known they follow from it.
- Whatever is wrong is one `BadPayload` that says what. Nothing is ever executed.
"""

import json
import re
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from time import sleep
from typing import Any, NamedTuple

import numpy as np

from offbeat.errors import InvalidValue, LayoutMismatch

HEADER_MAX = 16 << 20
"""Bytes of a header; a layout of ten thousand arrays needs one of these megabytes."""
HEADER_FACTOR, HEADER_SLACK = 2, 64 << 10
"""A header of a known layout may be this many times as long as ours, and this many bytes longer."""
DIMENSIONS_MAX = 32
NAME_MAX = 4096
"""Bytes of a name as JSON, unless the layout has a longer one; likewise of a text in the metadata."""
ENTRY_MAX = 4096
"""Bytes that describe one array: 32 dimensions of 19 digits take less than a thousand."""
METADATA_MAX = HEADER_SLACK
METADATA_ENTRIES_MAX = 1024
ENTRIES_AT_ONCE = 64
"""Entries that are read in one step; they take less than a millisecond."""
PLACES_AT_ONCE = 2048
WHOLE_BITS = 63
METADATA = "__metadata__"
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
_ITEM_BYTES = {dtype: np.dtype(dtype).itemsize for dtype in DTYPES.values()}
_BLANK = rb"[ \t\n\r]{0,4096}+"
_TEXT = rb'"(?:[^"\\]++|\\.)*+"'
_OPEN = re.compile(_BLANK + rb"\{" + _BLANK)
_NAME = re.compile(b"(" + _TEXT + b")" + _BLANK + b":" + _BLANK, re.DOTALL)
_STRING = re.compile(_TEXT, re.DOTALL)
_NEXT = re.compile(_BLANK + rb"([,}])" + _BLANK)
_OTHER = b'["-0123456789tfn'
"""What JSON begins with where it is no object."""


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


@dataclass(frozen=True, slots=True)
class HeaderLimits:
    header_max: int = HEADER_MAX
    name_max: int = NAME_MAX
    names: Collection[str] | None = None
    """The arrays that there may be; None where any may."""

    @classmethod
    def of(cls, names: Collection[str], own_bytes: int) -> "HeaderLimits":
        """Relative to the header that we write ourselves: others order it differently and have other metadata."""
        longest = max((len(json.dumps(name)) for name in names), default=0)
        return cls(HEADER_FACTOR * own_bytes + HEADER_SLACK, max(NAME_MAX, longest), names)


Steps = Generator[None, None, Header]


def parse_header(text: bytes, length: int, limits: HeaderLimits) -> Header:
    """The header that this JSON says; the other threads may run between two steps."""
    steps = header_steps(text, length, limits)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            header: Header = done.value
            return header
        sleep(0)  # gives the interpreter away; without it a thread keeps it for five milliseconds


def header_steps(text: bytes, length: int, limits: HeaderLimits) -> Steps:
    """Reads a header a few entries at a time; the last step gives it."""
    reader, tensors, metadata = _EntryReader(text), dict[str, Tensor](), dict[str, str]()
    count, more = 0, reader.opened("the header")
    seen: set[str] = set()
    while more:
        name = reader.name(limits.name_max)
        if name in seen:
            raise BadPayload("the header is not JSON: a name stands twice in it")
        seen.add(name)
        if name == METADATA:
            metadata = yield from _metadata_steps(reader)
        else:
            tensors[name] = _tensor(name, reader.entry(name))
            _refuse_more(tensors, limits.names)
        more = reader.more()
        count += 1
        if count % ENTRIES_AT_ONCE == 0:
            yield
    reader.ended()
    yield
    order = yield from _order_steps(tensors.values())
    return Header(tuple(order), metadata, length)


def _order_steps(tensors: Collection[Tensor]) -> Generator[None, None, list[Tensor]]:
    """The arrays in the order of the body, which they must cover without gap or overlap."""
    filled, empty = dict[int, Tensor](), dict[int, list[Tensor]]()
    for number, tensor in enumerate(tensors, 1):
        if tensor.begin == tensor.end:
            empty.setdefault(tensor.begin, []).append(tensor)
        elif filled.setdefault(tensor.begin, tensor) is not tensor:
            raise _misplaced(tensor, filled[tensor.begin].end)
        if number % PLACES_AT_ONCE == 0:
            yield
    order, at, following = empty.pop(0, []), 0, filled.pop(0, None)
    while following is not None:
        order.append(following)
        at = following.end
        order += empty.pop(at, ())
        following = filled.pop(at, None)
        if len(order) % PLACES_AT_ONCE == 0:
            yield
    for tensor in (*filled.values(), *(one for some in empty.values() for one in some)):
        raise _misplaced(tensor, at)
    return order


def _misplaced(tensor: Tensor, at: int) -> BadPayload:
    where = f"{tensor.name!r:.100} begins at byte {tensor.begin} of the body, not at {at}"
    return BadPayload(f"{where}: gap or overlap")


def _refuse_more(tensors: Mapping[str, Tensor], names: Collection[str] | None) -> None:
    if names is not None and len(tensors) > len(names):
        strange = next(name for name in tensors if name not in names)
        raise LayoutMismatch(f"{strange!r:.100} is not part of the model, which has {len(names)} arrays")


def _metadata_steps(reader: "_EntryReader") -> Generator[None, None, dict[str, str]]:
    found: dict[str, str] = {}
    end, more = reader.at + METADATA_MAX, reader.opened(METADATA)
    while more:
        name = reader.name(NAME_MAX)
        if name in found:
            raise BadPayload("the header is not JSON: a name stands twice in it")
        found[name] = reader.text()
        more = reader.more()
        if len(found) > METADATA_ENTRIES_MAX or reader.at > end:
            raise BadPayload(f"{METADATA} has more than {METADATA_ENTRIES_MAX} entries or {METADATA_MAX} bytes")
        if len(found) % ENTRIES_AT_ONCE == 0:
            yield
    return found


class _EntryReader:
    """Takes JSON apart: objects whose every entry is short."""

    def __init__(self, text: bytes) -> None:
        self.at = 0
        self._text = text

    def opened(self, what: str) -> bool:
        """Go into an object; is there an entry?"""
        found = _OPEN.match(self._text, self.at)
        if found is None:
            if what == METADATA:
                raise BadPayload(f"{METADATA} must be an object of texts")
            other = self._text[self.at : self.at + 1]
            raise BadPayload(f"{what} is not a JSON object" if other and other in _OTHER else self._wrong())
        self.at = found.end()
        if self._text[self.at : self.at + 1] == b"}":
            self.at += 1
            return False
        return True

    def name(self, longest: int) -> str:
        found = _NAME.match(self._text, self.at, self.at + longest + 2)
        if found is None:
            raise BadPayload(self._wrong(f"a name of at most {longest} bytes, in quotes"))
        self.at = found.end()
        return self._decoded(found[1])

    def text(self) -> str:
        found = _STRING.match(self._text, self.at, self.at + METADATA_MAX)
        if found is None:
            raise BadPayload(f"{METADATA} must be an object of texts")
        self.at = found.end()
        return self._decoded(found[0])

    def entry(self, name: str) -> Any:
        """What is said of one array."""
        part = self._text[self.at : self.at + ENTRY_MAX].decode("latin-1")  # all that counts in it is ASCII
        try:
            value, used = _DECODER.raw_decode(part)
        except (ValueError, RecursionError) as error:
            if len(part) == ENTRY_MAX:
                raise BadPayload(f"{name!r:.100} is not described by JSON of at most {ENTRY_MAX} bytes") from None
            raise BadPayload(f"the header is not JSON: {str(error)[:200]}") from None
        self.at += used
        return value

    def more(self) -> bool:
        found = _NEXT.match(self._text, self.at)
        if found is None:
            raise BadPayload(self._wrong("a comma or a closing bracket"))
        self.at = found.end()
        return found[1] == b","

    def ended(self) -> None:
        if len(self._text) - self.at > HEADER_SLACK or self._text[self.at :].strip(b" \t\n\r"):
            raise BadPayload(self._wrong(f"nothing more, but for {HEADER_SLACK} blanks,"))

    def _decoded(self, quoted: bytes) -> str:
        try:
            return str(json.loads(quoted.decode("utf-8")))
        except ValueError as error:
            raise BadPayload(f"the header is not JSON: {str(error)[:200]}") from None

    def _wrong(self, expected: str = "an object") -> str:
        return f"the header is not JSON: at byte {self.at} {expected} is expected"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs; refused where a name stands twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in it")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=once)


def _tensor(name: str, entry: Any) -> Tensor:
    try:
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise BadPayload(f"{name!r:.100} needs dtype ({', '.join(DTYPES)}), shape and two data_offsets") from None
    if not isinstance(shape, list) or len(shape) > DIMENSIONS_MAX:
        raise BadPayload(f"{name!r:.100} needs a shape, which is a list of at most {DIMENSIONS_MAX} whole numbers")
    if not all(_whole(number) for number in (*shape, begin, end)):
        raise BadPayload(f"{name!r:.100} has a shape or data_offsets that are no whole numbers >= 0 of 63 bits")
    if end - begin != bytes_of(shape, _ITEM_BYTES[dtype]):
        raise BadPayload(f"{name!r:.100} has {end - begin} bytes but its shape {shape!r:.100} of {dtype} needs others")
    return Tensor(name, dtype, tuple(shape), begin, end)


def bytes_of(shape: list[int], item_bytes: int) -> int | None:
    """Bytes of an array; None where they do not fit 63 bits, which is found before large numbers are multiplied.

    >>> bytes_of([2, 3], 4), bytes_of([2**62, 2**62], 4), bytes_of([2**62, 2**62, 0], 4)
    (24, None, 0)
    """
    size = 0 if 0 in shape else item_bytes
    for number in shape:
        size *= number
        if size >> WHOLE_BITS:
            return None
    return size


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << WHOLE_BITS
