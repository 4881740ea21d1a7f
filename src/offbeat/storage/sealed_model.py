"""Owns models on disk whose file says whether it is whole: a checksum of the rest is in its metadata.

Rules kept here:
- Any safetensors reader can read them, and the body is the flat vector: they can be mapped.
- A damaged one is refused. One without a checksum, of an earlier version, is taken as it is.
- The checksum is as fast as memory: a server makes one for every version that it writes. Every single bit counts; it is
  no protection from a person who wants to deceive.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from offbeat.core.layout import Layout, Model
from offbeat.storage.disk import Bytes
from offbeat.wire import BadPayload, body_of, header_of, mapped_with_metadata

CHECKSUM = "checksum"
WORD = 8
WORDS = 1 << 15
"""Words of 64 bits that are summed before they are put in their place."""
MODULUS, ODD = 1 << 64, 0x9E3779B97F4A7C15


def sealed_parts(model: Model, metadata: Mapping[str, str]) -> list[Bytes]:
    """The bytes of a model's file."""
    found = _checksum(header_of(model.layout, metadata), body_of(model))
    return [header_of(model.layout, {**metadata, CHECKSUM: found}), *body_of(model)]


def mapped_whole(path: Path, layout: Layout) -> Model:
    """The model in a file, as `mapped` gives it; refused where it is not what was written."""
    model, said = mapped_with_metadata(path, layout)
    wanted = said.get(CHECKSUM)
    metadata = {name: value for name, value in said.items() if name not in (CHECKSUM, "layout")}
    if wanted is not None and _checksum(header_of(layout, metadata), body_of(model)) != wanted:
        raise BadPayload(f"{path} does not hold what was written")
    return model


def _checksum(header: bytes, body: Iterable[memoryview]) -> str:
    """A polynomial, modulo 2**64, over sums of 64-bit words: its point is odd, so that a change of one bit shows."""
    found = zlib.crc32(header)
    for part in body:
        whole = len(part) - len(part) % WORD
        words = np.frombuffer(part, np.dtype("<u8"), whole // WORD)
        for start in range(0, len(words), WORDS):
            found = (found * ODD + int(np.add.reduce(words[start : start + WORDS]))) % MODULUS
        found = (found * ODD + int.from_bytes(part[whole:], "little")) % MODULUS
    return f"{found:016x}"
