"""Owns what must be alike in all models of a run but does not travel: the base, told by digests.

Rules kept here:
- The base is the layout (names, shapes and dtypes of what travels, carried buffers included) and the frozen arrays with
  all their bits. The values of what travels are no part of it: every worker gets them from the server.
- An array's digest is over its dtype, its shape and its bytes, so two bases are compared array by array.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from offbeat.core.layout import Array, Layout

ARRAY_LETTERS = 16


class ModelBase(NamedTuple):
    digest: str
    """Of all of it."""
    frozen: dict[str, str]
    """The digest of every frozen array, by name."""


def base_of(layout: Layout, frozen: Mapping[str, Array]) -> ModelBase:
    """The base of a model; reads every frozen array once."""
    arrays = {name: _array_digest(np.asarray(frozen[name])) for name in sorted(frozen)}
    return ModelBase(digest_of_base(layout.fingerprint, arrays), arrays)


def digest_of_base(layout: str, arrays: Mapping[str, str]) -> str:
    """The digest of a base from the layout's fingerprint and the digests of the frozen arrays."""
    lines = [layout, *(f"{arrays[name]} {name}" for name in sorted(arrays))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first frozen array, by name, that two bases do not share, in words; empty where all are alike.

    >>> difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    "the frozen array 'b' holds other values than the server's"
    """
    for name in sorted({*ours, *theirs}):
        if name not in theirs:
            return f"the frozen array {name!r} is missing from the worker's model"
        if name not in ours:
            return f"the frozen array {name!r} is not part of the server's model"
        if ours[name] != theirs[name]:
            return f"the frozen array {name!r} holds other values than the server's"
    return ""


def _array_digest(array: Array) -> str:
    digest = hashlib.sha256(f"{array.dtype.str} {list(array.shape)} ".encode())
    whole = np.ascontiguousarray(array)
    digest.update(whole.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:ARRAY_LETTERS]
