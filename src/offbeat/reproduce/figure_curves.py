"""Owns one curve of a figure: its settings, their hash, and its results as a file that can be committed.

Rules kept here:
- A curve is identified by the hash of everything that determines it, so results of other settings are never its own.
- Results are kept seed by seed: an interrupted reproduction keeps the runs that it has finished.
"""

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.settings import Settings
from offbeat.sim.curve import CurvePoint
from offbeat.storage.disk import aside
from offbeat.storage.json_file import read_json, write_json

RECIPE = 1
"""Raised when settings or tasks change their meaning: every result before it is out of date."""
FOLDER = "curves"
HASH_LETTERS = 10


@dataclass(frozen=True)
class FigureCurve:
    """One line of a figure."""

    label: str
    task: str
    values: Mapping[str, Any] = field(hash=False)
    seeds: tuple[int, ...]

    def settings(self, seed: int) -> Settings:
        return Settings.of({**self.values, "seed": seed})

    @property
    def hash(self) -> str:
        """Of everything that determines its results except the seed."""
        plain = Settings().as_dict()
        chosen = {name: value for name, value in self.settings(0).as_dict().items() if value != plain[name]}
        text = json.dumps({"recipe": RECIPE, "task": self.task, "settings": chosen}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]

    @property
    def name(self) -> str:
        """The name of its files: the task, the method and the hash."""
        settings = self.settings(0)
        words = [self.task, settings.rule]
        if settings.rule == "fedasync":
            words += [settings.staleness_fn, f"alpha{settings.alpha:g}", settings.device_model]
        return "-".join("".join(c if c.isalnum() or c == "." else "" for c in word) for word in [*words, self.hash])


class CurveResults:
    """Results of curves in a folder: a CSV file of points for each, and a JSON file of its settings and runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER

    def points(self, curve: FigureCurve) -> dict[int, list[CurvePoint]]:
        """The points of every seed that has been run."""
        path = self._path(curve, "csv")
        if not path.exists():
            return {}
        found: dict[int, list[CurvePoint]] = {}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                seed, t, gradients = (int(row.pop(name)) for name in ("seed", "t", "gradients"))
                at = float(row.pop("virtual_s"))
                found.setdefault(seed, []).append(CurvePoint(t, at, gradients, 0, _floats(row)))
        return found

    def facts(self, curve: FigureCurve) -> dict[str, Any]:
        """The curve's settings, and facts about the run of every seed."""
        path = self._path(curve, "json")
        return read_json(path) if path.exists() else {}

    def add(self, curve: FigureCurve, seed: int, points: Sequence[CurvePoint], facts: Mapping[str, Any]) -> None:
        """Keep the run of one seed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there = self.points(curve) | {seed: list(points)}
        runs = self.facts(curve).get("runs", {}) | {str(seed): dict(facts)}
        settings = {name: value for name, value in curve.settings(0).as_dict().items() if name != "seed"}
        about = {"label": curve.label, "task": curve.task, "hash": curve.hash, "settings": settings, "runs": runs}
        names = list(points[-1].metrics)
        with aside(self._path(curve, "csv")) as temporary, temporary.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["seed", "t", "gradients", "virtual_s", *names])
            for number, curve_points in sorted(there.items()):
                for point in curve_points:
                    values = (f"{point.metrics[name]:.6g}" for name in names)
                    writer.writerow([number, point.t, point.gradients, f"{point.at:.6g}", *values])
        write_json(self._path(curve, "json"), about)

    def _path(self, curve: FigureCurve, ending: str) -> Path:
        return self.folder / f"{curve.name}.{ending}"


def _floats(row: Mapping[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items()}
