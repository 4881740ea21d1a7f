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
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from math import isnan, nan
from operator import gt
from pathlib import Path
from typing import Any

from offbeat.errors import InvalidValue
from offbeat.report.curves import Curve
from offbeat.report.mixing import Mixing
from offbeat.report.troubles import Troubles
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import Row, as_evaluation
from offbeat.storage.run_folder import LEDGER, SETTINGS, RunFolder, State

ABOUT = "run.json"
"""Of a served run: what its task said about itself."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a report says about a run."""

    folder: Path
    settings: Mapping[str, Any]
    state: State
    summary: Mapping[str, Any]
    """Empty until the run is finished."""
    t: int
    at: float
    """Seconds on the run's own clock."""
    reason: str
    """Why it ended; empty where it has not."""
    tasks: int
    """Leased in all."""
    in_flight: int
    """Leases that nothing has been heard of since."""
    devices: int | None
    names: Mapping[int, str]
    """What workers call themselves."""
    workers_of: Mapping[int, int]
    """The worker that joined last for a device."""
    mixing: Mixing
    curve: Curve
    troubles: Troubles

    @property
    def is_served(self) -> bool:
        """Real workers, on a real clock?"""
        return bool(self.settings.get("served"))

    @property
    def clock(self) -> str:
        """What its time is called."""
        return "run time" if self.is_served else "virtual time"

    def name_of(self, worker: int) -> str:
        """A worker's name, as a stranger gave it; empty where there is none."""
        return self.names.get(worker, "")


class Book:
    """A ledger up to one row."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.until = ledger, ledger.newest()

    def rows(self, kind: str) -> Iterator[Row]:
        """The rows of a kind, in order."""
        return takewhile(lambda row: row.sequence <= self.until, self._ledger.rows(kind))

    def ended_at(self) -> float:
        """The moment of the newest row."""
        return max((row.at for row in self._ledger.rows(after=self.until - 1, limit=1)), default=0.0)


class Tasks:
    """Which tasks were leased and which are over, a byte each; a lease may have been sent more than once."""

    def __init__(self) -> None:
        self.leased, self.over = bytearray(1), bytearray(1)

    def note(self, which: bytearray, row: Row) -> None:
        """The task of this row is among them."""
        task = row.task or 0
        if task >= len(which):
            which.extend(bytes(task + 1 - len(which)))
        which[task] = 1

    def read_leases(self, book: Book) -> None:
        """What was leased, and what of it was released."""
        for row in book.rows("leased"):
            self.note(self.leased, row)
        for row in book.rows("released"):
            self.note(self.over, row)
        self.over.extend(bytes(max(0, len(self.leased) - len(self.over))))


def read_run(path: Path) -> Facts:
    """The facts of the run in a folder."""
    folder = RunFolder.open(path)
    state, summary = folder.state, folder.summary or {}
    with folder.ledger() as ledger:
        book = Book(ledger)
        published = _published(book)
        tasks = Tasks()
        mixing = _mixing(book, len(published) - 1, tasks)
        troubles = Troubles.read(book.rows)
        names, workers_of = _workers(book)
        tasks.read_leases(book)
        return Facts(
            path,
            folder.settings,
            state,
            summary,
            t=len(published) - 1,
            at=float(summary.get("virtual_s", book.ended_at())),
            reason=str(summary.get("ended") or _reason(book)),
            tasks=sum(tasks.leased),
            in_flight=sum(map(gt, tasks.leased, tasks.over)),
            devices=_devices(path, folder.settings),
            names=names,
            workers_of=workers_of,
            mixing=mixing,
            curve=_curve(book, published, mixing, troubles),
            troubles=troubles,
        )


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


# --- pieces ----------------------------------------------------------------------------------------------------------


def _published(book: Book) -> "array[float]":
    """The moment of every version's publication, x_0's included; NaN where several were published as one."""
    moments = array("d", [0.0])
    for row in book.rows("published"):
        missing = (row.t or 0) + 1 - len(moments)
        moments.extend([nan] * (missing - 1) + [row.at] * (missing > 0))
    return moments


def _mixing(book: Book, t: int, tasks: Tasks) -> Mixing:
    mixing = Mixing(lost=frozenset(row.decision for row in book.rows("lost") if row.decision is not None))
    for row in book.rows("decided"):
        mixing.take(row)
        tasks.note(tasks.over, row)
    mixing.end(t)
    return mixing


def _curve(book: Book, published: "array[float]", mixing: Mixing, troubles: Troubles) -> Curve:
    """Where on the axes a version is, is where it was published; its evaluation may have taken a while."""
    curve = Curve()
    for event in map(as_evaluation, book.rows("evaluated")):
        at = published[event.t] if event.t < len(published) else nan
        gradients = mixing.gradients_at[min(event.t, len(mixing.gradients_at) - 1)]
        curve.add(event.t, event.at if isnan(at) else at, gradients, event.metrics)
        troubles.evaluated(event)
    return curve


def _workers(book: Book) -> tuple[dict[int, str], dict[int, int]]:
    names, workers_of = {}, {}
    for row in book.rows("joined"):
        if row.worker is not None and row.device is not None:
            names[row.worker] = str(json.loads(row.detail or "{}").get("name", ""))
            workers_of[row.device] = row.worker
    return names, workers_of


def _reason(book: Book) -> str:
    return next((str(json.loads(row.detail or "{}").get("reason", "")) for row in book.rows("finished")), "")


def _devices(path: Path, settings: Mapping[str, Any]) -> int | None:
    """As set, or what the task of a served run has."""
    found = settings.get("devices")
    if found is None and (path / ABOUT).is_file():
        about = read_json(path / ABOUT).get("about", {})
        found = about.get("devices") or about.get("made_for")
    return found if isinstance(found, int) else None
