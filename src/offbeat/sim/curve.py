"""Owns a simulated run's curve, and what it leaves as tables beside its ledger: the curve and whose data count."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from offbeat.protocol.messages import (
    Command,
    Decision,
    Evaluated,
    EvaluateModel,
    Event,
    MixUpdate,
    SendTask,
    UpdateArrived,
)
from offbeat.storage.fold import RunFold, folded_rows
from offbeat.storage.row_shapes import NewRow
from offbeat.storage.rows import RowMaker
from offbeat.storage.version_fold import VersionFold

CURVE = "metrics.csv"
CONTRIBUTION = "contribution.csv"
TABLES = (CURVE, CONTRIBUTION)
FOLDED_ROWS = 100
"""Rows that wait at most: one at a time costs more, and thousands keep the garbage collector busy."""


class CurvePoint(NamedTuple):
    """One version on a run's curve: what it was when it was published, and what its evaluation showed."""

    t: int
    at: float
    gradients: int
    bytes: int
    """Sent over the network until then, both ways."""
    metrics: Mapping[str, float]


class CurveRecorder:
    """Folds the rows of a run as they are made, and notes where its curve is measured."""

    def __init__(self, model_bytes: int, *, keep_decisions: bool) -> None:
        self.model_bytes = model_bytes
        self.rows: RowMaker = folded_rows
        """Gives the rows of an event and its commands; a ledger's `record`, where the run has one."""
        self.decisions: list[Decision] | None = [] if keep_decisions else None
        """Every applied decision, where they are kept."""
        self._versions = VersionFold()
        self._fold = RunFold(self._versions)
        self._waiting: list[NewRow] = []
        self.sent = self.arrived = 0
        """Models."""
        self._evaluating: dict[int, tuple[float, int]] = {}
        """When the evaluation of a version was ordered, and how many models had travelled until then."""
        self._measured: list[tuple[int, float, int, Mapping[str, float]]] = []

    @property
    def fold(self) -> RunFold:
        self._fold.take(self._waiting)
        self._waiting = []
        return self._fold

    @property
    def points(self) -> list[CurvePoint]:
        self.fold  # noqa: B018 (folds what waits)
        gradients_in, size = self._versions.gradients_in, self.model_bytes
        return [CurvePoint(t, at, gradients_in(t), size * n, metrics) for t, at, n, metrics in self._measured]

    def record(self, event: Event, commands: list[Command]) -> None:
        """Take note of one event and what it led to."""
        rows, what = self.rows(event, commands), type(event)
        if rows:
            self._waiting += rows
            if len(self._waiting) >= FOLDED_ROWS:
                self.fold  # noqa: B018 (folds what waits)
        if what is UpdateArrived:
            self.arrived += 1
        elif isinstance(event, Evaluated):
            at, travelled = self._evaluating.pop(event.t, (event.at, self.sent + self.arrived))
            self._measured.append((event.t, at, travelled, event.metrics))
        for command in commands:
            order = type(command)
            if order is SendTask:
                self.sent += 1
            elif isinstance(command, EvaluateModel):
                self._evaluating[command.t] = (event.at, self.sent + self.arrived)
            elif isinstance(command, MixUpdate) and self.decisions is not None:
                self.decisions.append(command.decision)


def write_curve(path: Path, points: list[CurvePoint]) -> None:
    names = list(points[-1].metrics) if points else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["t", "at", "gradients", "bytes", *names])
        for point in points:
            writer.writerow([*point[:4], *(point.metrics.get(name, "") for name in names)])


def read_curve(path: Path) -> list[CurvePoint]:
    """The curve of a run, as `write_curve` left it."""
    with path.open(newline="") as file:
        return [
            CurvePoint(
                int(row.pop("t")),
                float(row.pop("at")),
                int(row.pop("gradients")),
                int(row.pop("bytes")),
                {name: float(value) for name, value in row.items() if value},
            )
            for row in csv.DictReader(file)
        ]


def write_contribution(path: Path, contribution: Mapping[int, tuple[float, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["device", "mass", "surviving"])
        writer.writerows((device, *both) for device, both in contribution.items())
