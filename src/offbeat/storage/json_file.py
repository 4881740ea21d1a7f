"""Owns JSON on disk: settings.json, summary.json and the other facts of a run.

Rules kept here:
- Any JSON reader can read it: numbers that JSON has no word for are the strings "nan", "inf" and "-inf".
- What cannot be written is refused by its name, before any file is touched.
- The last member of a file is a digest of all bytes before it: a damaged file is refused, not believed. A file without
  one, of an earlier version or edited by a person who took it out, is read as it is.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from offbeat.errors import InvalidValue
from offbeat.storage.disk import aside

DIGEST = "contents_sha256"
"""The member that holds the digest of what comes before it."""
_SEAL = re.compile(rb',\s*"([^"]*)":\s*"([0-9a-f]{64})"\s*}\s*\Z')


def number(value: float) -> float | str:
    """A float as JSON can hold it; `float()` of it is the number again.

    >>> number(0.1), number(float("-inf"))
    (0.1, '-inf')
    """
    plain = float(value)
    return plain if isfinite(plain) else str(plain)


def plain(value: object, name: str = "value") -> Any:
    """What reads back after writing: tuples are lists, names are strings, numpy's numbers are Python's.

    >>> plain({"alpha": 0.6, "until_s": float("inf"), "range": (1, 2)})
    {'alpha': 0.6, 'until_s': 'inf', 'range': [1, 2]}
    """
    match value:
        case None | bool():
            return value
        case str() | PurePath():
            return str(value)
        case int():
            return int(value)
        case float():
            return number(value)
        case np.generic():
            return plain(value.item(), name)
        case Mapping():
            return {str(key): plain(inner, f"{name}.{key}") for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner, f"{name}[{index}]") for index, inner in enumerate(value)]
    raise InvalidValue(f"{name} is {value!r} and cannot be written as JSON; use numbers, text, lists and mappings")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a mapping, whole or not at all."""
    data = sealed(json.dumps(plain(value, path.stem), indent=2, allow_nan=False))
    with aside(path) as temporary:
        temporary.write_bytes(data)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file; refused where it is damaged."""
    try:
        return unsealed(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidValue(f"cannot read {path}: {error}; it must be a JSON object as Offbeat wrote it") from error


def sealed(text: str) -> bytes:
    """A JSON object as it is written: with the digest of its text as the last member.

    >>> unsealed(sealed('{"t": 7}'))
    {'t': 7}
    """
    before = text.rstrip().removesuffix("}").rstrip()
    if before.endswith("{"):
        return f"{text}\n".encode()  # it says nothing that could be damaged
    digest = hashlib.sha256(before.encode()).hexdigest()
    return f'{before},\n  "{DIGEST}": "{digest}"\n}}\n'.encode()


def unsealed(data: bytes) -> dict[str, Any]:
    """What `sealed` was given; a ValueError where that is not what was written."""
    value = json.loads(data)
    if not isinstance(value, dict):
        raise InvalidValue(f"it holds {type(value).__name__}")
    seal = _SEAL.search(data)
    if seal is not None and hashlib.sha256(data[: seal.start()]).hexdigest().encode() == seal[2]:
        value.popitem()  # also where its name was damaged
    elif DIGEST in value:
        raise InvalidValue(f"it was changed or damaged after it was written ({DIGEST} is not the digest of the rest)")
    return value
