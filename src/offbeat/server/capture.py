"""Owns which files make a backup, and that they are of one moment although the run goes on.

Rules kept here:
- Checkpoints are found first, then the ledger is held at one moment, then the updates and versions that a redo needs
  from the oldest of those checkpoints to that moment. Each is on the disk before what names it, so it is there.
- What a server may remove meanwhile is held by a second name, a link, in a folder of its own in the run's folder; where
  links cannot be made, by a copy. Nothing that writes the run waits for that.
- What was removed before it could be held is no reason to give up: newer checkpoints are there then.
- Only files that a run goes on with, or ended with: no lock, no address of a server, nothing that others put there.
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from offbeat.core.rules import uses_base
from offbeat.errors import OffbeatError
from offbeat.protocol.messages import Decision
from offbeat.server.kept_versions import KEPT, MEAN_ENDING
from offbeat.storage.backup_marker import MARKER, BackupMarker, write_marker
from offbeat.storage.checkpoints import cache_files
from offbeat.storage.disk import Disk
from offbeat.storage.head_file import HEAD, HeadFile
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.ledger_copy import LedgerSnapshot
from offbeat.storage.lock import Lock, is_held
from offbeat.storage.model_file import metadata_of
from offbeat.storage.rows import as_decision
from offbeat.storage.run_folder import (
    AVERAGE,
    BEST,
    CHECKPOINT,
    FINAL,
    LEDGER,
    NEWEST,
    PICTURE,
    SETTINGS,
    SUMMARY,
    X_0,
    RunFolder,
)

CHECKPOINTS, UPDATES, VERSIONS = "checkpoints", "updates", "versions"
FOLDERS = (CHECKPOINTS, UPDATES, VERSIONS, KEPT)
LASTING = ("run.json", "layout.json", X_0)
"""Written when a run begins, and never again."""
RESULTS = (SUMMARY, FINAL, NEWEST, BEST, AVERAGE, PICTURE, "metrics.csv", "contribution.csv")
"""Of a finished run, the summary first."""
HELD, HELD_LOCK = ".backup-", "held.lock"
BEGINNING_S = 60.0
"""A process that has just made such a folder takes its lock much sooner."""
TRIES = 8
TRIES_FOR_TWO = 4
"""With the newest two checkpoints: a backup with both is checked from the older to the newer. Then one must do."""


class Vanished(Exception):
    """A file that is needed was removed before it could be held."""


class Capture:
    """Files of a run that belong to one moment; `take` finds them, `close` lets them go. Everything here blocks."""

    def __init__(self, folder: Path, into: Path | None = None) -> None:
        """`into` is a folder for copies of what may be removed; None holds it by links in the run's own folder."""
        RunFolder.open(folder)
        self.folder, self._into = folder, into
        self.held = Path()
        self.files: dict[str, Path] = {}
        """Where each file of the backup lies now, by its name there: all but the ledger, the settings last."""
        self.marker = BackupMarker("", 0, "", "")
        self.ledger: LedgerSnapshot
        self._open = ExitStack()

    def take(self) -> None:
        """Hold a moment of the run; nothing of it is lost from now on, however long the copying takes."""
        forget_held(self.folder)
        gone = ""
        for attempt in range(TRIES):
            with ExitStack() as undo, self._explained():
                undo.callback(self.close)
                try:
                    self._try(2 if attempt < TRIES_FOR_TWO else 1)
                except Vanished as vanished:
                    gone = str(vanished)
                    continue
                undo.pop_all()
                return
        raise OffbeatError(
            f"{self.folder / gone} is missing, and was at each of {TRIES} tries; if the run goes on, try again: its "
            "server removes files faster than they can be copied. If it stands still: offbeat verify says what is wrong"
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OffbeatError:
            raise
        except OSError as error:
            why = f"cannot hold the files of {self.folder} for a backup: {error.strerror}: {error.filename}"
            raise OffbeatError(f"{why}; back up as the user whose run it is") from error
        except (KeyError, TypeError, ValueError) as error:
            raise OffbeatError(f"{self.folder} is damaged: {error}; offbeat verify says where") from error

    def close(self) -> None:
        self._open.close()
        self.files = {}

    def bytes(self) -> int:
        """What a backup takes on a disk."""
        return self.ledger.bytes + sum(path.stat().st_size for path in self.files.values())

    # --- one try -----------------------------------------------------------------------------------------------------

    def _try(self, most: int) -> None:
        self._make_place()
        summary = _identity(self.folder / SUMMARY)
        states = self._checkpoints(most)
        self._hold(CHECKPOINT)
        self._kept()
        self.ledger = LedgerSnapshot(self.folder / LEDGER)
        self._open.callback(self.ledger.close)
        if states:
            oldest = min(states)
            if not (self.folder / CHECKPOINTS / f"{oldest}.json").exists():
                raise Vanished(f"{CHECKPOINTS}/{oldest}.json")  # and with it rows that its redo needs, perhaps
            self._redo_log(oldest, states[oldest])
        self._kept()
        if summary is not None:
            for name in RESULTS:
                self._hold(name)
        if _identity(self.folder / SUMMARY) != summary:
            raise Vanished(SUMMARY)  # the run ended, or went on after its end
        for name in LASTING:
            if (self.folder / name).is_file():
                self.files[name] = self.folder / name
        self._write_facts(states)
        self.files[SETTINGS] = self.folder / SETTINGS

    def _make_place(self) -> None:
        if self._into is not None:
            self.held = self._into
            shutil.rmtree(self.held, ignore_errors=True)  # what an earlier try copied may belong to another moment
            self.held.mkdir(mode=0o700)
            return
        self.held = self.folder / f"{HELD}{secrets.token_hex(8)}"
        self.held.mkdir(mode=0o700)
        self._open.callback(shutil.rmtree, self.held, ignore_errors=True)
        self._open.callback(Lock.take(self.held / HELD_LOCK).release)

    def _checkpoints(self, most: int) -> dict[int, dict[str, Any]]:
        """Hold the newest; answers their states by their marks."""
        found = sorted((int(mark) for mark in self._names(CHECKPOINTS, ".json")), reverse=True)
        states = {}
        for mark in found[:most]:
            name = f"{CHECKPOINTS}/{mark}.json"
            self._hold(name, needed=True)
            try:
                kept = read_json(self.files[name])
                vectors, states[mark] = list(kept["vectors"]), dict(kept["state"])
                caches = cache_files(self.files[name])
            except (ValueError, KeyError, TypeError) as error:
                raise OffbeatError(f"{self.folder / name} is damaged: {error}; see offbeat verify") from error
            for vector in vectors:
                self._hold(f"{CHECKPOINTS}/{mark}.{vector}.safetensors", needed=True)
            for cache in caches:
                self._hold(f"{CHECKPOINTS}/{cache}", needed=True)
        return states

    def _redo_log(self, mark: int, state: dict[str, Any]) -> None:
        """Updates and versions that lead from a checkpoint to the moment of the ledger; then what else is there."""
        ledger = self.ledger.ledger
        for decision in _redone(ledger, mark, state):
            if (self.folder / UPDATES).is_dir():
                self._hold(f"{UPDATES}/{decision.lease.task}.safetensors", needed=True)
            if decision.mix is not None and uses_base(decision.mix) and (self.folder / VERSIONS).is_dir():
                self._hold(f"{VERSIONS}/{decision.lease.tau}.safetensors", needed=True)
        for task in self._names(UPDATES):
            if f"{UPDATES}/{task}.safetensors" not in self.files and _is_applied(ledger, int(task)):
                self._hold(f"{UPDATES}/{task}.safetensors")
        for t in self._names(VERSIONS):
            self._hold(f"{VERSIONS}/{t}.safetensors")

    def _kept(self) -> None:
        """Before the ledger is read and after: a version that it wants is there at one of the two."""
        for ending in (".safetensors", MEAN_ENDING):
            for t in self._names(KEPT, ending):
                self._hold(f"{KEPT}/{t}{ending}")
        self._hold(BEST)

    def _write_facts(self, marks: Iterable[int]) -> None:
        """What is said of the ledger must be said of the ledger as it is held."""
        ledger, row, run = self.ledger.ledger, self.ledger.row, ""
        if "run.json" in self.files:
            run = str(read_json(self.files["run.json"])["run"])
            with closing(HeadFile(self.held, Disk())) as file:
                file.note(row, ledger.head_at(row), _newest_task(ledger))
            self.files[HEAD] = self.held / HEAD
        elif CHECKPOINT in self.files:
            row = int(metadata_of(self.files[CHECKPOINT])["mark"])  # such a run goes back to it when it goes on
        else:
            row = max(marks, default=row if SUMMARY in self.files else 0)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        count = len(self.files) + len((MARKER, LEDGER, SETTINGS))
        self.marker = BackupMarker(run, row, ledger.head_at(row).hex(), now, count)
        write_marker(self.held, self.marker, Disk())
        self.files[MARKER] = self.held / MARKER

    # --- files -------------------------------------------------------------------------------------------------------

    def _hold(self, name: str, *, needed: bool = False) -> None:
        if name in self.files:
            return
        source, target = self.folder / name, self.held / name
        target.parent.mkdir(exist_ok=True)
        try:
            if self._into is not None or not _linked(source, target):
                shutil.copyfile(source, target)
        except FileNotFoundError:
            if needed:
                raise Vanished(name) from None
        else:
            self.files[name] = target

    def _names(self, folder: str, ending: str = ".safetensors") -> Iterator[str]:
        """The numbers that files in a folder of the run are called by."""
        with suppress(FileNotFoundError):
            for file in (self.folder / folder).iterdir():
                number = file.name.removesuffix(ending)
                if number.isdecimal() and file.name.endswith(ending):
                    yield number


def forget_held(folder: Path) -> None:
    """Remove what a process that died was holding for a backup."""
    for held in folder.glob(f"{HELD}*"):
        locked = held / HELD_LOCK
        if not is_held(locked) and (locked.exists() or time.time() - held.stat().st_mtime > BEGINNING_S):
            shutil.rmtree(held, ignore_errors=True)


def _linked(source: Path, target: Path) -> bool:
    """Give a file a second name; False where the system does not allow that."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _redone(ledger: Ledger, mark: int, state: dict[str, Any]) -> Iterator[Decision]:
    """The decisions that a redo from a checkpoint applies; those that were given up as lost are not."""
    lost = {row.decision for row in ledger.rows("lost")}
    waiting = ledger.latest_applied(state["applied"] - state["mixed"], state["sequence"])
    since = map(as_decision, ledger.rows("decided", after=mark))
    for decision in chain(waiting, since):
        if decision.mix is not None and decision.sequence not in lost:
            yield decision


def _is_applied(ledger: Ledger, task: int) -> bool:
    return bool(ledger.select("SELECT 1 FROM events WHERE task = ? AND kind = 'decided' AND keep IS NOT NULL", (task,)))


def _newest_task(ledger: Ledger) -> int:
    given = int(ledger.select("SELECT coalesce(max(task), 0) FROM events WHERE kind = 'leased'")[0][0])
    return max([given, *(int(json.loads(row.detail or "{}")["tasks"]) for row in ledger.rows("loss_accepted"))])


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns
