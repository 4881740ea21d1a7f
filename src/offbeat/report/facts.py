"""Owns what the folder of a run tells: its settings, and its ledger summed up while it is read.

Rules kept here:
- Storage in, facts out: simulated and served runs, finished, interrupted or under way, are read alike, and no server
  is asked.
- The ledger is read a page at a time and never held. While another process writes it, everything is read up to one
  and the same row.
- What the ledger says is counted from the ledger; the summary adds what only it knows.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import gt
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Outcome
from offbeat.report.contributions import DeviceFold
from offbeat.report.run_curve import RunCurve
from offbeat.report.troubles import Troubles
from offbeat.storage.fold import FEEDS, Rows, RunFold, Taker
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import metrics_in
from offbeat.storage.run_folder import LEDGER, SETTINGS, RunFolder, State
from offbeat.storage.version_fold import VersionFold

ABOUT = "run.json"
"""Of a served run: what its task said about itself."""
LOST = "SELECT decision FROM events WHERE kind = 'lost' AND sequence <= ?"
TASK = FEEDS["decided"].columns.index("task")


@dataclass(frozen=True, slots=True)
class RunFacts:
    folder: Path
    settings: Mapping[str, Any]
    state: State
    summary: Mapping[str, Any]
    """Empty until the run is finished."""
    at: float
    """Seconds on the run's own clock."""
    tasks: "TaskMarks"
    device_count: int | None
    """As set, or as the task has it."""
    fold: RunFold
    devices: DeviceFold
    curve: RunCurve
    troubles: Troubles

    @property
    def t(self) -> int:
        return self.fold.t

    @property
    def reason(self) -> str:
        """Why it ended; empty where it has not."""
        return str(self.summary.get("ended") or self.fold.ended or "")

    @property
    def aim(self) -> int | None:
        """After how many epochs it ends, where that is set."""
        epochs = self.summary.get("epochs") or (self.fold.ends or self.settings).get("epochs")
        return epochs if isinstance(epochs, int) else None

    @property
    def refused(self) -> int:
        """Updates that were decided on and not applied; those after the end are among them."""
        return self.fold.refused.total()

    def staleness_refused(self) -> Counter[int]:
        """How many refused updates had it; those after the end are left out."""
        found: Counter[int] = Counter()
        for (outcome, staleness), count in self.fold.refused.items():
            if outcome != Outcome.FINISHED:
                found[staleness] += count
        return found

    @property
    def is_served(self) -> bool:
        """Was it served to real workers, on a real clock?"""
        return bool(self.settings.get("served"))

    @property
    def clock(self) -> str:
        return "run time" if self.is_served else "virtual time"

    @property
    def is_grouped(self) -> bool:
        """Do updates of a group share one version?"""
        return str(self.settings.get("rule", "")).startswith("fedavg")


class ReportedRun(NamedTuple):
    label: str
    """The name of its method."""
    settings: Mapping[str, Any]
    curve: RunCurve
    results: Mapping[str, float | None]
    """Counts by name; what is not known is left out."""
    state: str = "finished"
    wrong: int | None = None
    """How many things went wrong; None where that is not known."""
    name: str = ""
    """Where it is."""


class Unreadable(NamedTuple):
    name: str
    why: str


class TaskMarks:
    """Which tasks were leased and which are over, a byte each; a lease may have been sent more than once."""

    def __init__(self) -> None:
        self._leased, self._over = bytearray(1), bytearray(1)

    @property
    def leased(self) -> int:
        return sum(self._leased)

    @property
    def in_flight(self) -> int:
        """Leases that nothing has been heard of since."""
        over = self._over.ljust(len(self._leased), b"\0")
        return sum(map(gt, self._leased, over))

    def takers(self) -> Mapping[str, Taker]:
        return {
            "leased": lambda rows: _mark(self._leased, [row[2] for row in rows]),
            "released": self._released,
            "decided": lambda rows: _mark(self._over, [row[TASK] for row in rows]),
        }

    def _released(self, rows: Rows) -> None:
        """The lease of a worker that was silent may be open again."""
        for _, task, *_, detail, kind in rows:
            _mark(self._over, [task], over=kind == "released" or not json.loads(detail)["resumed"])


def _mark(marks: bytearray, tasks: list[int], *, over: bool = True) -> None:
    marks.extend(bytes(max(0, max(tasks) + 1 - len(marks))))
    for task in tasks:
        marks[task] = over


def read_run(path: Path) -> RunFacts:
    folder = RunFolder.open(path)
    state, summary = folder.state, folder.summary or {}
    with folder.ledger() as ledger:
        until = ledger.newest()
        lost = frozenset(decision for (decision,) in ledger.select(LOST, (until,)))
        devices, tasks, troubles, versions = DeviceFold(lost), TaskMarks(), Troubles(), VersionFold()
        fold = RunFold(devices, tasks, troubles, versions)
        fold.read(ledger.select, 0, until)
        return RunFacts(
            path,
            folder.settings,
            state,
            summary,
            at=float(summary.get("virtual_s", _moment_of(ledger, until))),
            tasks=tasks,
            device_count=_devices(path, folder.settings),
            fold=fold,
            devices=devices,
            curve=_curve(versions, troubles),
            troubles=troubles,
        )


def _moment_of(ledger: Ledger, sequence: int) -> float:
    return max((row.at for row in ledger.rows(after=sequence - 1, limit=1)), default=0.0)


def _curve(versions: VersionFold, troubles: Troubles) -> RunCurve:
    """A version is drawn where it was published: its evaluation may have taken a while."""
    curve = RunCurve()
    for evaluation in versions.evaluations:
        metrics = metrics_in(evaluation.detail)
        at = versions.mixed_at(evaluation.t)
        curve.add(evaluation.t, evaluation.at if at is None else at, versions.gradients_in(evaluation.t), metrics)
        troubles.evaluated(evaluation.t, metrics)
    return curve


def runs_under(folder: Path) -> list[Path]:
    """The folders of runs in a folder, itself included; nothing is looked for inside a run."""
    if not folder.is_dir():
        raise InvalidValue(f"there is no folder {folder}; give the --dir of a run or of a comparison")
    found = []
    for place, inside, files in os.walk(folder):
        inside.sort()
        if SETTINGS in files and LEDGER in files:
            found.append(Path(place))
            inside.clear()
    return found


def _devices(path: Path, settings: Mapping[str, Any]) -> int | None:
    """As set, or what the task of a served run has."""
    found = settings.get("devices")
    if found is None and (path / ABOUT).is_file():
        about = read_json(path / ABOUT).get("about", {})
        found = about.get("devices") or about.get("made_for")
    return found if isinstance(found, int) else None
