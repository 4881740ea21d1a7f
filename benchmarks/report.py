"""Owns how results are shown: as text, as Markdown tables, and compared with recorded ratios."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.bars import BARS, Bar
from benchmarks.results import Figure, Note, Results

GROSS = 0.5
"""A ratio below this share of the recorded one is a gross regression; a smaller loss may be a busy machine."""
MARKS = {True: "met", False: "not met", None: "not measured"}
HEADINGS = ("what", "here", "held against", "there", "ratio", "bar", "")


def words(results: Results, machine: Mapping[str, Any]) -> str:
    """The bars, then all other figures, as lines of text."""
    rows = list(_rows(results))
    widths = [max(len(row[column]) for row in [HEADINGS, *rows]) for column in range(len(HEADINGS))]
    lines = [_line(row, widths) for row in [HEADINGS, *rows]]
    notes = [f"{note.name}: {_note(note)}" for note in results.notes]
    return "\n".join([*lines, "", *notes, "", *(f"Left out: {why}" for why in results.skipped), about(machine)])


def markdown(results: Results, machine: Mapping[str, Any]) -> str:
    """The same as a piece of a Markdown page."""
    head = [_cells((*HEADINGS[:-1], "reached")), _cells(["---"] * len(HEADINGS))]
    rows = [_cells(row) for row in _rows(results)]
    beside = [_cells(("beside the bars", "here", "there", "ratio")), _cells(["---"] * 4)]
    notes = [_cells((note.name, *_parts(note))) for note in results.notes]
    left_out = [f"- Left out: {why}." for why in results.skipped]
    return "\n".join([about(machine), "", *head, *rows, "", *beside, *notes, "", *left_out]).rstrip() + "\n"


def about(machine: Mapping[str, Any]) -> str:
    """The machine and the moment in one sentence."""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['date']}, commit {machine['commit'] or 'unknown'}, {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, {machine['system']}, Python {machine['python']}, {packages}; "
        f"load {machine['load_at_start']} at the start, {machine['load_at_end']} at the end, "
        f"{machine['seconds']} s in all."
    )


def regressions(found: Mapping[str, Any], recorded: Mapping[str, float]) -> list[str]:
    """A line for every ratio below half of the recorded one; a figure that was not measured is no regression.

    >>> regressions({"a": {"ratio": 0.4}, "b": {"ratio": 0.6}, "c": {"ratio": None}}, {"a": 1.0, "b": 1.0, "c": 1.0})
    ['a: the ratio is 0.4, less than half of the recorded 1']
    """
    now = {key: found[key]["ratio"] for key in recorded if key in found}
    return [
        f"{key}: the ratio is {ratio:.3g}, less than half of the recorded {recorded[key]:.3g}"
        for key, ratio in now.items()
        if ratio is not None and ratio < GROSS * recorded[key]
    ]


def ratios(found: Mapping[str, Any]) -> dict[str, float]:
    """The ratios that are worth recording: those that are comparable on a busier machine."""
    steady = [key for key, bar in BARS.items() if bar.steady and key in found]
    return {key: found[key]["ratio"] for key in steady if found[key]["ratio"] is not None}


def number(value: float | None) -> str:
    """A number in three digits, or a whole one with thousands separators.

    >>> number(12345.6), number(0.01234), number(None)
    ('12,346', '0.0123', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _rows(results: Results) -> Iterator[tuple[str, ...]]:
    for key, figure in results.figures.items():
        yield _row(BARS[key], figure)


def _row(bar: Bar, figure: Figure) -> tuple[str, ...]:
    there = "" if bar.kind != "ratio" else number(figure.reference)
    against = bar.reference if bar.kind == "ratio" else ""
    ratio = number(figure.ratio) if bar.kind == "ratio" else ""
    return bar.what, f"{number(figure.value)} {bar.unit}", against, there, ratio, bar.asked, MARKS[figure.met(bar)]


def _parts(note: Note) -> tuple[str, str, str]:
    if note.reference is None:
        return f"{number(note.value)} {note.unit}", "", ""
    return f"{number(note.value)} {note.unit}", number(note.reference), number(note.ratio)


def _note(note: Note) -> str:
    here, there, ratio = _parts(note)
    return here if not there else f"{here} (against {there}: {ratio})"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _cells(row: Any) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |"
