"""The figures in the docs are what the committed curves say, and those are of today's settings."""

import json
from pathlib import Path

import pytest

from offbeat.reproduce.figures import CurveEnd, _end
from offbeat.reproduce.target_runs import CurveResults
from offbeat.reproduce.targets import target

ROOT = Path(__file__).parents[2] / "docs"
PAGE = ROOT / "reproduction.md"
FOLDER = ROOT / "reproduction" / "laptop-text"
DONE = sorted(file.stem for file in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", DONE)
def test_the_numbers_on_the_page_come_from_the_curves(name: str) -> None:
    made, results = target(name), CurveResults(FOLDER)
    summary = json.loads((FOLDER / f"{name}.json").read_text())
    page = PAGE.read_text()
    assert f"reproduction/laptop-text/{name}.png" in page
    ends = [end for curve in made.curves if (end := _end(curve, made, results))]
    assert [end.label for end in ends] == [row["label"] for row in summary["curves"]]
    for end, row in zip(ends, summary["curves"], strict=True):
        assert end.mean == pytest.approx(row["mean"], rel=1e-6)
        assert end.spread == pytest.approx(row["spread"], rel=1e-6, abs=1e-12)
        shown = f"| {end.label} | {shown_value(end, made.metric)} |"
        assert shown in page, shown


def shown_value(end: CurveEnd, metric: str) -> str:
    """As the page writes it: percent, or perplexity; a single run has no spread."""
    factor, unit = (100, " %") if metric == "accuracy" else (1, "")
    spread = f" ± {factor * end.spread:.1f}" if end.seeds > 1 else ""
    return f"{factor * end.mean:.1f}{spread}{unit}"


@pytest.mark.parametrize("name", DONE)
def test_every_curve_has_all_its_seeds(name: str) -> None:
    for curve in target(name).curves:
        assert set(CurveResults(FOLDER).points(curve)) >= set(curve.seeds), curve.label
