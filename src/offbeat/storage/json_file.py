"""Owns JSON on disk: settings.json and summary.json.

Rules kept here:
- Any JSON reader can read it: numbers that JSON has no word for are the strings "nan", "inf" and "-inf".
- What cannot be written is refused by its name, before any file is touched.
"""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from offbeat.errors import InvalidValue
from offbeat.storage.disk import aside


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
    text = json.dumps(plain(value, path.stem), indent=2, allow_nan=False) + "\n"
    with aside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidValue(f"cannot read {path}: {error}; it must be a JSON object as Offbeat wrote it") from error
    if not isinstance(value, dict):
        raise InvalidValue(f"{path} holds {type(value).__name__}; it must be a JSON object as Offbeat wrote it")
    return value
