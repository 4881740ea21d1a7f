"""Owns the part of a report that says whose data count: what of every device's updates is in the newest version."""

from offbeat.report import words
from offbeat.report.facts import RunFacts
from offbeat.report.page import Html, bar, joined, paragraph, stranger, table, text, value
from offbeat.storage.device_fold import DevicePart

PARTS_MAX = 30


def contributions(facts: RunFacts) -> Html:
    """The largest parts one by one, and the rest as one."""
    parts = facts.devices.parts()
    if not sum(part.share for part in parts):
        return paragraph(text("No update is in the model."))
    first, rest = parts[:PARTS_MAX], parts[PARTS_MAX:]
    widest = max(part.share for part in parts)
    rows = [_part(facts, part, widest) for part in first]
    if rest:
        rows.append(_rest(rest, widest))
    headings = ("device", "", "part", "updates", "sum of weights")
    said = "A device's part is what of its updates is still in the newest version: older ones fade as newer ones come."
    half = f"Half of it comes from {_half(parts)} of {words.many(len(parts), 'device')}."
    return joined((paragraph(text(f"{said} {half}")), table("parts", headings, rows, words=2)))


def _part(facts: RunFacts, part: DevicePart, widest: float) -> list[Html]:
    """A device by its number, and by the worker that joined last for it, if that has a name."""
    worker = facts.troubles.workers_of.get(part.device)
    name = "" if worker is None else facts.name_of(worker)
    who = joined((value(part.device), text(" "), stranger(name))) if name else value(part.device)
    return [who, bar(part.share / widest), *_numbers(part)]


def _rest(rest: list[DevicePart], widest: float) -> list[Html]:
    """All others as one; the bar is what one of them has on average, to compare with those above."""
    total = DevicePart(-1, sum(p.updates for p in rest), sum(p.mass for p in rest), sum(p.share for p in rest))
    drawn = bar(total.share / len(rest) / widest, "rest")
    return [text(f"{words.many(len(rest), 'other')} (bar: mean)"), drawn, *_numbers(total)]


def _numbers(part: DevicePart) -> tuple[Html, Html, Html]:
    return value(part.share, words.share(part.share)), value(part.updates), value(part.mass, words.number(part.mass))


def _half(parts: list[DevicePart]) -> int:
    """How many of the largest parts make half of all."""
    total, seen = sum(part.share for part in parts), 0.0
    for count, part in enumerate(parts, 1):
        seen += part.share
        if seen >= total / 2:
            return count
    return len(parts)
