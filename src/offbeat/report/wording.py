"""Owns how numbers and strangers' words are said to people."""

from datetime import datetime
from math import isfinite, isnan, log10

UNKNOWN = "-"
SHOWN_MAX = 120
"""Letters of a stranger's text that are shown."""
UNITS = (("s", 1.0, 600.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0), ("days", 86_400.0, float("inf")))
"""Of an axis: its name, its seconds, and up to how many seconds it is used."""


def clean(value: object, shown_max: int = SHOWN_MAX) -> str:
    """Text that is safe to lay out: one line, nothing invisible, not too long.

    >>> clean("a\\u202eb\\x00c\\nd")
    'a�b�c d'
    """
    first = str(value)[: shown_max + 1]
    text = "".join(" " if letter.isspace() else letter if letter.isprintable() else "\ufffd" for letter in first)
    return text if len(text) <= shown_max else text[: shown_max - 1] + "…"


def whole(value: float | None) -> str:
    """A count; a mean of counts has one digit more.

    >>> whole(1234567), whole(2.5), whole(None)
    ('1,234,567', '2.5', '-')
    """
    if value is None:
        return UNKNOWN
    return number(value) if not isfinite(value) or value != int(value) else f"{int(value):,}"


def number(value: float | None) -> str:
    """Four digits that count, without powers of ten where they can be spared.

    >>> [number(value) for value in (0.966612, 12345.678, 0.5, 1.25e-7, float("nan"), float("-inf"))]
    ['0.9666', '12,345.7', '0.5', '1.25e-07', 'not a number', '-infinity']
    """
    if value is None:
        return UNKNOWN
    if not isfinite(value):
        return "not a number" if isnan(value) else "infinity" if value > 0 else "-infinity"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    digits = 4 if abs(value) < 1 else max(1, 3 - int(log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") or "0"


def duration(seconds: float | None) -> str:
    """Seconds in the two units that matter.

    >>> [duration(seconds) for seconds in (0.0123, 59.96, 125.0, 7200.0, 100_000.0)]
    ['0.0123 s', '1 min 0 s', '2 min 5 s', '2 h 0 min', '1 d 4 h']
    """
    if seconds is None or not isfinite(seconds):
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    for large, small, inner, least in (("min", "s", 1, 3600), ("h", "min", 60, 86_400), ("d", "h", 3600, 0)):
        units = round(seconds / inner)
        if not least or units * inner < least:
            per = 24 if large == "d" else 60
            return f"{units // per} {large} {units % per} {small}"
    raise AssertionError


def size(count: float | None) -> str:
    """Bytes.

    >>> size(999), size(1_234_567), size(5.1e9)
    ('999 B', '1.23 MB', '5.1 GB')
    """
    if count is None:
        return UNKNOWN
    for unit, factor in (("B", 1.0), ("KB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if count < 999.5 * factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e12:,.3g} TB"


def share(part: float) -> str:
    """A part of one, in hundredths.

    >>> share(0.1234), share(0.00004), share(1.0), share(0.0)
    ('12.3 %', '0.004 %', '100 %', '0 %')
    """
    return f"{100 * part:.3g} %" if not part or abs(part) >= 1e-6 else "< 0.0001 %"


def time_axis(seconds: float) -> tuple[str, float]:
    """The unit of an axis that is so long, and its seconds.

    >>> time_axis(300.0), time_axis(9000.0)
    (('s', 1.0), ('h', 3600.0))
    """
    return next((name, unit) for name, unit, most in UNITS if seconds <= most or most == float("inf"))


def moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} {at.tzname() or ''}".strip()


def many(count: int, noun: str) -> str:
    """A count and its noun.

    >>> many(1, "update"), many(2000, "update")
    ('1 update', '2,000 updates')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
