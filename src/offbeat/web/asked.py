"""Owns the reading of a query: what is asked for wrongly is refused, with what is allowed."""

from collections.abc import Mapping

from offbeat.errors import InvalidValue

Query = Mapping[str, str]
DIGITS_MAX = 15
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
    """One of the allowed words."""
    text = query.get(name, "")
    if text and text not in allowed:
        raise InvalidValue(f"{name} is {text[:SHOWN_MAX]!r}; use {', '.join(allowed)}")
    return text or default
