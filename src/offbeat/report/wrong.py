"""Owns the part of a report that says what went wrong, and what that means."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from offbeat.protocol.messages import Outcome
from offbeat.report import words
from offbeat.report.facts import RunFacts
from offbeat.report.page import NOTHING, Html, joined, paragraph, stranger, table, tag, text, value

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


class Row(NamedTuple):
    """A kind of trouble."""

    key: str
    name: str
    many: int
    meaning: str


def wrong_section(facts: RunFacts, trouble: str | None = None) -> Html:
    """All of it; a sentence where there is nothing."""
    rows = list(_rows(facts))
    is_well = facts.state == "finished" and not trouble and all(row.key in HARMLESS for row in rows)
    said = paragraph(text("Nothing went wrong.")) if is_well else NOTHING
    lines = [(text(row.name), text(row.meaning), value(row.many)) for row in rows]
    shown = table("troubles", ("what", "what it means", "how many"), lines, words=2)
    parts = [said, *_state(facts), *_trouble(trouble), shown if lines else NOTHING]
    return joined((*parts, _quarantines(facts), _lost(facts), _bad(facts)))


def count_wrong(facts: RunFacts) -> int:
    """How many things went wrong in a run, the harmless ones left out."""
    return sum(row.many for row in _rows(facts) if row.key not in HARMLESS)


def _rows(facts: RunFacts) -> Iterator[Row]:
    """Only what happened."""
    found, outcomes = facts.troubles, facts.fold.rejected()
    yield from _counted("refused", REFUSED, outcomes)
    if found.bad:
        yield Row("bad", "Unreadable updates", found.bad.total(), "Garbage, a wrong shape, or damaged on the way.")
    if found.quarantines:
        yield Row("quarantines", "Quarantines", found.quarantines, "Workers with too many bad updates in a row.")
    if found.losses:
        yield Row("lost", "Lost updates", found.losses, "Acknowledged, then found damaged, and dropped.")
    yield from _counted("pushes", ANSWERED, facts.fold.kinds)
    yield from _counted("leases", RELEASED, found.released)
    for name, gap in found.gaps.items():
        meaning = f"Evaluations that were not a finite number; the first is of epoch {words.whole(gap.first_t)}."
        yield Row(f"gap-{name}", f"Not a number: {name}", gap.evaluations, meaning)


def _counted(of: str, meanings: Mapping[str, str], counts: Mapping[str, int]) -> Iterator[Row]:
    for kind, meaning in meanings.items():
        if counts.get(kind):
            yield Row(f"{of}-{kind}", f"{of.capitalize()}: {kind.replace('_', ' ')}", counts[kind], meaning)


def _state(facts: RunFacts) -> Iterator[Html]:
    if facts.state == "interrupted":
        said = f"The run was interrupted at epoch {words.whole(facts.t)}; the command that began it goes on from there."
        yield paragraph(text(said), kind="alarm")
    if facts.state == "running":
        yield paragraph(text(f"The run is under way; this is how it stood at epoch {words.whole(facts.t)}."))
    if facts.state != "finished" and facts.in_flight:
        yield paragraph(text(f"{words.many(facts.in_flight, 'task')} in flight."))


def _trouble(trouble: str | None) -> Iterator[Html]:
    if trouble:
        yield paragraph(tag("strong", text("Trouble: ")), text(trouble), kind="alarm")


# --- lists -----------------------------------------------------------------------------------------------------------


def _quarantines(facts: RunFacts) -> Html:
    listed = facts.troubles.quarantined
    if not listed:
        return NOTHING
    rows = [
        (
            value(one.worker),
            stranger(facts.name_of(one.worker)),
            text(one.why),
            value(one.at, words.duration(one.at)),
            text("no") if one.readmitted_at is None else value(one.readmitted_at, words.duration(one.readmitted_at)),
        )
        for one in listed
    ]
    headings = ("worker", "name", "why", f"at ({facts.clock})", "readmitted")
    return _listed("Quarantines", table("quarantines", headings, rows, words=3), facts.troubles.quarantines - len(rows))


def _lost(facts: RunFacts) -> Html:
    listed = facts.troubles.lost
    if not listed:
        return NOTHING
    rows = [(value(one.task), value(one.decision), value(one.at, words.duration(one.at))) for one in listed]
    headings = ("task", "decision", f"dropped at ({facts.clock})")
    return _listed("Lost updates", table("lost", headings, rows, words=0), facts.troubles.losses - len(rows))


def _bad(facts: RunFacts) -> Html:
    reasons = facts.troubles.bad.most_common()
    if not reasons:
        return NOTHING
    rows = [(text(why), value(count)) for why, count in reasons[:REASONS_SHOWN]]
    shown = table("unreadable", ("why", "how many"), rows)
    return _listed("Unreadable updates", shown, len(reasons) - len(rows))


def _listed(heading: str, shown: Html, more: int) -> Html:
    rest = paragraph(text(f"And {words.whole(more)} more."), kind="soft") if more > 0 else NOTHING
    return joined((tag("h3", text(heading)), shown, rest))
