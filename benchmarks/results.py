"""Owns the results of a run: a figure for every bar, notes beside them, and what was left out.

Rules kept here:
- Every bar of the parts that were run has its key in the result; one without a figure has the reason.
- `as_json` holds plain values only.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from benchmarks.bars import BARS, PARTS, PEERS, Bar
from benchmarks.turns import Turns

DIGITS = 4


class Figure(NamedTuple):
    """The figure of a bar; None where it was not measured."""

    value: float | None = None
    reference: float | None = None
    ratio: float | None = None
    why_not: str | None = None

    def met(self, bar: Bar) -> bool | None:
        """Is the bar reached? None where it was not measured."""
        return None if self.ratio is None else bar.met(self.ratio)


class Note(NamedTuple):
    """A figure without a bar."""

    name: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None


class Results:
    """Filled by the benchmarks, one after the other."""

    def __init__(self, parts: Iterable[str] = PARTS) -> None:
        self.parts = tuple(parts)
        self.figures = {bar.key: Figure() for part in self.parts for bar in PARTS[part]}
        self.notes: list[Note] = []
        self.skipped: list[str] = []

    def put(self, key: str, value: float, reference: float | None = None, ratio: float | None = None) -> None:
        """Set the figure of a bar; without a reference it is compared with the bar itself."""
        bar = BARS[key]
        reference = bar.bar if reference is None else reference
        self.figures[key] = Figure(value, reference, bar.ratio(value, reference) if ratio is None else ratio)

    def put_turns(self, key: str, turns: Turns, ours: str, other: str) -> None:
        """Set the figure of a bar, from contestants that took turns."""
        self.put(key, turns.median(ours), turns.median(other), turns.ratio(ours, other))

    def note(self, name: str, value: float, unit: str, reference: float | None = None) -> None:
        """Add a figure that has no bar."""
        self.notes.append(Note(name, value, unit, reference, None if not reference else value / reference))

    def note_turns(self, name: str, unit: str, turns: Turns, ours: str, other: str) -> None:
        """Add a figure that has no bar, from contestants that took turns."""
        self.notes.append(Note(name, turns.median(ours), unit, turns.median(other), turns.ratio(ours, other)))

    def skip(self, why: str, *keys: str) -> None:
        """Record what is left out and why, and the bars that have no figure because of it."""
        self.skipped.append(why)
        for key in keys:
            self.figures[key] = Figure(why_not=why)

    def give_up(self, part: str, why: str) -> None:
        """Record why a part failed; bars that it has measured keep their figures."""
        self.skip(why, *(bar.key for bar in PARTS.get(part, ()) if self.figures[bar.key] == Figure()))

    def close(self, part: str) -> None:
        """End a part: bars without a figure were not asked for, and get the reason."""
        for bar in PARTS[part]:
            if self.figures[bar.key] == Figure():
                why = "a peer, and --peers was not given" if bar.reference in PEERS else "not measured at this size"
                self.figures[bar.key] = Figure(why_not=why)

    def as_json(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        """One key per bar, then `notes`, `skipped` and `machine`."""
        figures = {key: _plain(figure, BARS[key]) for key, figure in self.figures.items()}
        notes = {note.name: _rounded(note._asdict(), leave_out="name") for note in self.notes}
        return {**figures, "notes": notes, "skipped": self.skipped, "machine": dict(machine)}


def _plain(figure: Figure, bar: Bar) -> dict[str, Any]:
    facts = _rounded(figure._asdict(), leave_out="why_not")
    why = {"why_not": figure.why_not} if figure.why_not else {}
    return facts | {"bar": bar.bar, "kind": bar.kind, "met": figure.met(bar), "unit": bar.unit, **why}


def _rounded(facts: Mapping[str, Any], leave_out: str) -> dict[str, Any]:
    return {name: _round(value) for name, value in facts.items() if name != leave_out}


def _round(value: Any) -> Any:
    """Rounded to four significant digits.

    >>> _round(1234.567), _round(0.00123456)
    (1235.0, 0.001235)
    """
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
