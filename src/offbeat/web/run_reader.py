"""Owns the reading of one run's folder: it is looked at again at most about once a second, and only for what is new.

Rules kept here:
- Read-only, and nothing stays open: a run that ends can make its ledger one file, even while it is read.
- The first reading goes through the whole ledger, page by page; it keeps totals, and some bytes per update and version.
- One thread at a time uses a reader, and holds its `lock` meanwhile.
- A run that goes on from an older moment, or another run in the same folder, is read anew from its beginning.
"""

import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.fleet_fold import FleetFold
from offbeat.storage.fold import Rows, RunFold
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import CHATTER, Ledger
from offbeat.storage.run_folder import LEDGER, SETTINGS, SUMMARY, RunFolder, State
from offbeat.storage.version_fold import VersionFold

REFRESH_S = 1.0
"""A run is looked at again after this long at the earliest."""
ROW = "SELECT sequence, at, kind FROM everything"

Stamp = tuple[int, ...]
"""Tells a file's states apart."""


class RunReader:
    def __init__(self, folder: Path, name: str = "", trouble: Callable[[], str | None] = lambda: None) -> None:
        """`trouble` is what a server knows to be wrong that is in no file: a full disk, for instance."""
        self.folder, self.name, self.trouble = folder, name or folder.resolve().name, trouble
        self.lock = threading.RLock()
        self.closing = False
        """Nobody looks any more: a long reading ends at its next page."""
        self._looked_at = -inf
        self._forget(None)

    def _forget(self, run: tuple[Any, ...] | None) -> None:
        self._begin_fold(verbose=False)
        self.sequence, self.at = 0, 0.0
        self._newest: tuple[Any, ...] = ()
        self._run = run
        self._moved_at: float | None = None
        self._settings: dict[str, Any] | None = None
        self._summary: tuple[Stamp | None, dict[str, Any] | None] = (None, None)

    def _begin_fold(self, *, verbose: bool) -> None:
        self.fleet, self.versions = FleetFold(verbose=verbose), VersionFold()
        self.fold = RunFold(self.fleet, self.versions)

    # --- what others may ask, with the lock --------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        if self._settings is None:
            self._settings = read_json(self.folder / SETTINGS)
        return self._settings

    @property
    def ends(self) -> dict[str, Any]:
        """The settings that say when the run ends: as it began, or as it was extended."""
        return self.settings if self.fold.ends is None else self.fold.ends

    @property
    def summary(self) -> dict[str, Any] | None:
        stamp = stamp_of(self.folder / SUMMARY)
        if stamp != self._summary[0]:
            self._summary = (stamp, read_json(self.folder / SUMMARY) if stamp else None)
        return self._summary[1]

    @property
    def served(self) -> bool:
        """Was it served to real workers, or simulated?"""
        return bool(self.settings.get("served"))

    @property
    def state(self) -> State:
        """Finished, running in some process, or neither."""
        if self.fold.ended is not None:
            return "finished"
        return RunFolder(self.folder, self.settings, lock=None, resumed=False).state

    def now(self) -> float:
        """The time on the run's clock: that of a server goes on while nothing happens."""
        if not self.served or self.state != "running" or self._moved_at is None:
            return self.at
        return self.at + max(0.0, time.monotonic() - self._moved_at)

    # --- looking -----------------------------------------------------------------------------------------------------

    def refresh(self, least_s: float = REFRESH_S) -> int:
        """Fold the rows that are new, unless that was done just now; gives the newest row's number."""
        with self.lock:
            if time.monotonic() - self._looked_at >= least_s:
                self._refresh()
                self._looked_at = time.monotonic()
            return self.sequence

    def changed(self) -> tuple[Stamp | None, ...]:
        """Another value than before where the ledger may have grown: cheaper than to look into it."""
        return tuple(stamp_of(self.folder / f"{LEDGER}{ending}") for ending in ("", "-wal"))

    def _refresh(self) -> None:
        with self.ledger() as ledger:
            run = self._identity()
            ledger.select("BEGIN")  # one moment for all that is read
            newest = next(iter(ledger.select(f"{ROW} ORDER BY sequence DESC LIMIT 1")), None)
            if run != self._run or not self._goes_on(ledger, newest):
                self._forget(run)
                self._begin_fold(verbose=ledger.verbose)
            if newest is None or newest == self._newest:
                return
            try:
                self.fold.read(partial(self._page, ledger), self.sequence, newest[0])
            except BaseException:
                self._forget(None)  # half of the rows are counted: begin anew the next time
                raise
            self._moved_at = self._last_write() if self._moved_at is None else time.monotonic()
            self._newest, (self.sequence, self.at, _) = newest, newest

    def _page(self, ledger: Ledger, query: str, span: tuple[int, int]) -> Rows:
        if self.closing:
            raise OffbeatError("the page is being closed")
        return ledger.select(query, span)

    def _goes_on(self, ledger: Ledger, newest: tuple[Any, ...] | None) -> bool:
        """Is the row that was the newest still there, or one that a server forgets in time?"""
        if not self._newest:
            return True
        sequence, _, kind = self._newest
        rows = ledger.select(f"{ROW} WHERE sequence = ?", (sequence,))
        forgotten = not rows and kind in CHATTER and newest is not None and newest[0] > sequence
        return bool(rows == [self._newest] or forgotten)

    def _identity(self) -> tuple[Any, ...]:
        """Tells runs apart; a file's number may be given to another file, and settings are written once."""
        ledger = stamp_of(self.folder / LEDGER)
        return ledger and ledger[2], stamp_of(self.folder / SETTINGS)

    def _last_write(self) -> float:
        """When the newest row was written, on this process' clock, as far as the files tell."""
        stamps = [stamp[0] for stamp in self.changed() if stamp is not None]
        return time.monotonic() - max(0.0, time.time() - max(stamps, default=0) / 1e9)

    def ledger(self) -> Ledger:
        """The ledger, which is to be closed soon."""
        try:
            return Ledger.open(self.folder / LEDGER, read_only=True)
        except InvalidValue as error:
            if isinstance(error.__cause__, sqlite3.Error):  # nothing is wrong with the question, and it may pass
                raise OffbeatError(str(error)) from error
            raise


def stamp_of(path: Path) -> Stamp | None:
    """When it was written, its size and number; None where there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
