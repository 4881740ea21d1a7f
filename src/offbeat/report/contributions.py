"""Owns the part of a report that says whose data count: what of every device's updates is in the newest version."""

from typing import Any, NamedTuple

from offbeat.report.facts import RunFacts
from offbeat.storage.device_fold import DevicePart

PARTS_MAX = 30


class ShownPart(NamedTuple):
    """A line of the table: a device, or all others as one."""

    device: int
    name: str
    """Of the worker that joined last for it."""
    width: float
    """Of its bar, where the largest part is 1; the bar of the others is what one of them has on average."""
    share: float
    updates: int
    mass: float
    others: int = 0


def contributions(facts: RunFacts) -> dict[str, Any]:
    """The largest parts one by one, and the rest as one."""
    parts = facts.devices.parts()
    if not sum(part.share for part in parts):
        return {"parts": []}
    first, rest, widest = parts[:PARTS_MAX], parts[PARTS_MAX:], max(part.share for part in parts)
    lines = [_line(facts, part, widest) for part in first]
    if rest:
        share, updates, mass = (
            sum(column) for column in zip(*((p.share, p.updates, p.mass) for p in rest), strict=True)
        )
        lines.append(ShownPart(-1, "", share / len(rest) / widest, share, int(updates), mass, len(rest)))
    return {"parts": lines, "half": _half(parts), "part_count": len(parts)}


def _line(facts: RunFacts, part: DevicePart, widest: float) -> ShownPart:
    worker = facts.troubles.workers_of.get(part.device)
    name = "" if worker is None else facts.name_of(worker)
    return ShownPart(part.device, name, part.share / widest, part.share, part.updates, part.mass)


def _half(parts: list[DevicePart]) -> int:
    """How many of the largest parts make half of all."""
    total, seen = sum(part.share for part in parts), 0.0
    for count, part in enumerate(parts, 1):
        seen += part.share
        if seen >= total / 2:
            return count
    return len(parts)
