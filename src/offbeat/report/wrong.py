"""Owns the part of a report that says what went wrong, and what that means."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from offbeat.protocol.messages import Outcome
from offbeat.report import wording
from offbeat.report.facts import RunFacts

REFUSED: dict[str, str] = {
    Outcome.TOO_STALE: "Too stale, or its lease was revoked, or its x_tau was gone.",
    Outcome.NOT_FINITE: "It held NaN or infinity.",
    Outcome.TOO_LARGE: "Its step ||x_new - x_tau|| was larger than the gate accepts.",
    Outcome.QUARANTINED: "Its worker was in quarantine.",
    Outcome.FINISHED: "It arrived after the end; nothing is wrong with it.",
    Outcome.UNKNOWN_TASK: "Its task is not known.",
    Outcome.NOT_YOURS: "Its task was leased to another worker.",
    Outcome.BUSY: "The queue was full.",
}
"""Why an update was not applied."""
ANSWERED = {
    "busy": "Pushes that met a full queue and were told to come back.",
    "unknown": "Pushes for tasks that are not known.",
    "not_yours": "Pushes for tasks of another worker.",
    "repeated": "Pushes that came again and got their first answer again; nothing is wrong with them.",
}
RELEASED = {
    "expired": "Leases without a sign of life until their deadline.",
    "revoked": "Leases taken back: their group went on, they held others up, or their worker was quarantined.",
    "given up": "Leases that ended because their worker left, was lost or handed them back.",
}
HARMLESS = ("refused-finished", "pushes-repeated")
"""Told, but no reason to worry."""
REASONS_SHOWN = 10


class Mishap(NamedTuple):
    """A kind of trouble, how often it happened, and what it means."""

    key: str
    name: str
    many: int
    meaning: str


def wrong_section(facts: RunFacts, trouble: str | None = None) -> dict[str, Any]:
    """Everything that went wrong; `trouble` is what a server says that its folder does not."""
    found = list(_troubles(facts))
    return {
        "wrong": found,
        "trouble": trouble,
        "is_well": facts.state == "finished" and not trouble and all(one.key in HARMLESS for one in found),
        "bad": facts.troubles.bad.most_common(REASONS_SHOWN),
    }


def count_wrong(facts: RunFacts) -> int:
    """How many things went wrong in a run, the harmless ones left out."""
    return sum(one.many for one in _troubles(facts) if one.key not in HARMLESS)


def _troubles(facts: RunFacts) -> Iterator[Mishap]:
    """What happened, kind by kind."""
    found, outcomes = facts.troubles, facts.fold.rejected()
    yield from _counted("refused", REFUSED, outcomes)
    if found.bad:
        yield Mishap("bad", "Unreadable updates", found.bad.total(), "Garbage, a wrong shape, or damaged on the way.")
    if found.quarantines:
        yield Mishap("quarantines", "Quarantines", found.quarantines, "Workers with too many bad updates in a row.")
    if found.losses:
        yield Mishap("lost", "Lost updates", found.losses, "Acknowledged, then found damaged, and dropped.")
    yield from _counted("pushes", ANSWERED, facts.fold.kinds)
    yield from _counted("leases", RELEASED, found.released)
    for name, gap in found.gaps.items():
        meaning = f"Evaluations that were not a finite number; the first is of epoch {wording.whole(gap.first_t)}."
        yield Mishap(f"gap-{name}", f"Not a number: {name}", gap.evaluations, meaning)


def _counted(of: str, meanings: Mapping[str, str], counts: Mapping[str, int]) -> Iterator[Mishap]:
    for kind, meaning in meanings.items():
        if counts.get(kind):
            yield Mishap(f"{of}-{kind}", f"{of.capitalize()}: {kind.replace('_', ' ')}", counts[kind], meaning)
