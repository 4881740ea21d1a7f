"""Owns the chain over the ledger: one digest per commit, over the commit's lasting rows and the digest before it.

Rules kept here:
- A row is hashed as canonical bytes that depend only on what SQLite gives back: its sequence number, its kind, which
  columns it has, and their values. So the bytes of a row just made and of a row read back are the same.
- Integers are 8 bytes, reals are IEEE doubles, texts have their length before them: no two rows share their bytes.
- A whole chain shows that no row in it was changed, removed, added or moved. That nothing is missing at its end shows
  the head, which is kept in other places too: checkpoints, the file `ledger.head`, acknowledgements, workers' journals.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import isnan
from operator import is_, itemgetter
from typing import Any

from offbeat.storage.row_shapes import RowShape
from offbeat.storage.rows import Row

GENESIS = bytes(32)
"""The head of a chain without commits."""
REAL = frozenset({"at", "keep", "new", "base", "gamma", "granted_at", "deadline", "distance", "asked_at"})
TEXT = frozenset({"outcome", "detail"})
MAY_BE_NAN = "distance"
COLUMNS = tuple(name for name in Row._fields if name not in ("sequence", "kind"))
_PLACE = {name: place for place, name in enumerate(COLUMNS)}
_NONES = (None,) * len(Row._fields)
_LENGTH = struct.Struct("<I")

RowPacker = Callable[[int, Sequence[Any]], bytes]
"""Makes the canonical bytes of a row from its sequence number and its values."""


def row_packer(shape: RowShape) -> RowPacker:
    """Makes the canonical bytes of rows of this shape as they are made; SQLite keeps None and NaN alike, as nothing."""
    whole = _packer(shape.kind, shape.columns)

    def partial(sequence: int, values: Sequence[Any]) -> bytes:
        there = [(name, value) for name, value in zip(shape.columns, values, strict=True) if _is_stored(value)]
        return _packer(shape.kind, tuple(name for name, _ in there))(sequence, [value for _, value in there])

    def packed(sequence: int, values: Sequence[Any]) -> bytes:
        try:
            return whole(sequence, values)
        except (struct.error, AttributeError):  # None is among them
            return partial(sequence, values)

    return partial if MAY_BE_NAN in shape.columns else packed


def _is_stored(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and isnan(value))


def stored_bytes(stored: Sequence[Any]) -> bytes:
    """The canonical bytes of a row as SQLite gives it: all columns in the order of `Row`."""
    missing = bytes(map(is_, stored, _NONES))
    return _stored_packer(stored[2], missing)(stored)


def linked(head: bytes, rows: Iterable[bytes]) -> bytes:
    """The head after a commit of these rows."""
    return hashlib.sha256(b"".join((head, *rows))).digest()


@cache
def _stored_packer(kind: str, missing: bytes) -> Callable[[Sequence[Any]], bytes]:
    """Makes the canonical bytes of stored rows that lack these columns of `Row`."""
    places = [place for place, name in enumerate(Row._fields) if name in _PLACE and not missing[place]]
    packed = _packer(kind, tuple(Row._fields[place] for place in places))
    if len(places) == 1:
        return lambda stored: packed(stored[0], (stored[places[0]],))
    pick = itemgetter(*places)
    return lambda stored: packed(stored[0], pick(stored))


@cache
def _packer(kind: str, columns: tuple[str, ...]) -> RowPacker:
    """Columns may come in any order; the bytes have them in the order of the table, numbers before texts."""
    order = sorted(range(len(columns)), key=lambda place: _PLACE[columns[place]])
    numbers = [place for place in order if columns[place] not in TEXT]
    texts = [place for place in order if columns[place] in TEXT]
    pack = struct.Struct("<q" + "".join("d" if columns[place] in REAL else "q" for place in numbers)).pack
    mask = sum(1 << _PLACE[name] for name in columns)
    prefix = kind.encode() + b"\0" + mask.to_bytes(4, "little")
    pick = itemgetter(*numbers) if len(numbers) > 1 else lambda values: tuple(values[place] for place in numbers)

    if not texts:
        return lambda sequence, values: prefix + pack(sequence, *pick(values))

    def packed(sequence: int, values: Sequence[Any]) -> bytes:
        parts = [prefix, pack(sequence, *pick(values))]
        for place in texts:
            text = values[place].encode()
            parts += (_LENGTH.pack(len(text)), text)
        return b"".join(parts)

    return packed
