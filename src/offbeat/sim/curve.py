"""Owns what a run leaves as tables beside its ledger: its curve and whose data count, as CSV."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CURVE = "metrics.csv"
CONTRIBUTION = "contribution.csv"


class Point(NamedTuple):
    """One version on a run's curve: what it was when it was published, and what its evaluation showed."""

    t: int
    at: float
    gradients: int
    bytes: int
    """Sent over the network until then, both ways."""
    metrics: Mapping[str, float]


def write_curve(path: Path, points: list[Point]) -> None:
    """The curve of a run as CSV."""
    names = list(points[-1].metrics) if points else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["t", "at", "gradients", "bytes", *names])
        for point in points:
            writer.writerow([*point[:4], *(point.metrics.get(name, "") for name in names)])


def read_curve(path: Path) -> list[Point]:
    """The curve of a run, as `write_curve` left it."""
    with path.open(newline="") as file:
        return [
            Point(
                int(row.pop("t")),
                float(row.pop("at")),
                int(row.pop("gradients")),
                int(row.pop("bytes")),
                {name: float(value) for name, value in row.items() if value},
            )
            for row in csv.DictReader(file)
        ]


def write_contribution(path: Path, contribution: Mapping[int, tuple[float, float]]) -> None:
    """Whose data count, as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["device", "mass", "surviving"])
        writer.writerows((device, *both) for device, both in contribution.items())
