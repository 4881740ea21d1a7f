"""Owns what all JSON twins share: how a query is read, what JSON can say, and how long series are made short.

A query that asks for something wrong is refused, with what is allowed.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, TypeVar

from offbeat.errors import InvalidValue
from offbeat.storage.rows import metrics_in

T = TypeVar("T")
Query = Mapping[str, str]
DIGITS_MAX = 15
NUMBER_MAX = 10**DIGITS_MAX - 1
SHOWN_MAX = 40


def whole(query: Query, name: str, least: int, most: int, default: int) -> int:
    """A whole number.

    >>> whole({"page": "3"}, "page", 1, 10, 1), whole({}, "page", 1, 10, 1)
    (3, 1)
    """
    text = query.get(name, "")
    if not text:
        return default
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX else least - 1
    if not least <= number <= most:
        raise InvalidValue(f"{name} is {text[:SHOWN_MAX]!r} but must be a whole number in {least}..{most}")
    return number


def choice(query: Query, name: str, allowed: tuple[str, ...], default: str) -> str:
    text = query.get(name, "")
    if text and text not in allowed:
        raise InvalidValue(f"{name} is {text[:SHOWN_MAX]!r}; use {', '.join(allowed)}")
    return text or default


def said(value: Any) -> Any:
    """What JSON has no word for is null, on whatever level; the storage's "nan" and "inf" are numbers again.

    >>> said({"loss": "nan", "deadline": float("inf"), "name": "inf-7", "t": 3})
    {'loss': None, 'deadline': None, 'name': 'inf-7', 't': 3}
    """
    if isinstance(value, dict):
        return {name: said(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [said(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return None if value in ("nan", "inf", "-inf") else value


def metrics_of(detail: str) -> dict[str, float | None]:
    """The metrics in the `detail` of an evaluation."""
    return dict(said(metrics_in(detail)))


def thinned(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, evenly spread, the first and the last included.

    >>> thinned(range(11), 3), thinned("ab", 3)
    ([0, 5, 10], ['a', 'b'])
    """
    last = len(items) - 1
    if last < most or most < 2:
        return list(items[:most])
    return [items[(number * last) // (most - 1)] for number in range(most)]
