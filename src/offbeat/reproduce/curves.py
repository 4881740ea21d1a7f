"""Owns one curve of a figure: its settings, their hash, and its results as a file that can be committed.

Rules kept here:
- A curve is known by the hash of all that determines it. A result of other settings is never taken for it.
- Results are kept seed by seed, so what an interrupted reproduction has finished stays finished.
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
from offbeat.storage.aside import aside
from offbeat.storage.json_file import read_json, write_json

RECIPE = 1
"""Changes with the meaning of settings or tasks, and makes all results before it out of date."""
FOLDER = "curves"
HASH_LETTERS = 10


@dataclass(frozen=True)
class Curve:
    """One line of a figure."""

    label: str
    task: str
    values: Mapping[str, Any] = field(hash=False)
    seeds: tuple[int, ...]

    def settings(self, seed: int) -> Settings:
        """The settings of its run with this seed."""
        return Settings.of({**self.values, "seed": seed})

    @property
    def hash(self) -> str:
        """Of all that determines its results, but for the seed."""
        plain = Settings().as_dict()
        chosen = {name: value for name, value in self.settings(0).as_dict().items() if value != plain[name]}
        text = json.dumps({"recipe": RECIPE, "task": self.task, "settings": chosen}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]

    @property
    def name(self) -> str:
        """What its files are called: its task, its method, and the hash."""
        settings = self.settings(0)
        words = [self.task, settings.rule]
        if settings.rule == "fedasync":
            words += [settings.staleness_fn, f"alpha{settings.alpha:g}", settings.device_model]
        return "-".join("".join(c if c.isalnum() or c == "." else "" for c in word) for word in [*words, self.hash])


class Results:
    """The results of curves in a folder: a CSV file each, and what they came from beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER

    def points(self, curve: Curve) -> dict[int, list[CurvePoint]]:
        """The points of every seed that is there."""
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

    def facts(self, curve: Curve) -> dict[str, Any]:
        """Where the results came from."""
        path = self._path(curve, "json")
        return read_json(path) if path.exists() else {}

    def add(self, curve: Curve, seed: int, points: Sequence[CurvePoint], facts: Mapping[str, Any]) -> None:
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

    def _path(self, curve: Curve, ending: str) -> Path:
        return self.folder / f"{curve.name}.{ending}"


def _floats(row: Mapping[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items()}
