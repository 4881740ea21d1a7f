"""Owns the way from a run's folder to trackers: finished, interrupted or under way, here or in another process.

Rules kept here:
- It only reads the folder: no training loop and no server knows of trackers.
- After a failure everything is read again from the beginning, and what a tracker has is skipped.
- A tracker that fails neither stops a run nor keeps the others from hearing of it.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from offbeat.errors import OffbeatError
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import LEDGER, SETTINGS, RunFolder
from offbeat.trackers.sink import ProgressReader, Report, RunDescription, Sink, sink_of

EVERY_S = 5.0
"""How often a follower looks for new rows."""
CLOSE_S = 60.0
"""How long the end of a run waits for trackers that do not answer."""

log = logging.getLogger("offbeat.trackers")


class Follower:
    """Tells trackers of one run, as far as it has come."""

    def __init__(self, folder: Path, sinks: Sequence[Sink]) -> None:
        self.folder = folder
        self._feeds = [_Feed(sink) for sink in sinks]

    def catch_up(self) -> bool:
        """Tell what is new; True once the run is finished and every tracker knows all of it."""
        run = RunFolder.open(self.folder)
        summary = run.summary  # before the rows: where it is there, they all are
        if not (self.folder / LEDGER).is_file():
            return False  # a run that is about to begin
        failures = [error for feed in self._feeds if (error := self._fed(feed, run, summary)) is not None]
        if failures:
            raise failures[0]
        return summary is not None

    def close(self) -> None:
        """Leave; the run may go on, and another follower with it."""
        for feed in self._feeds:
            with suppress(Exception):  # what could not be told before cannot be told now
                feed.sink.close()

    def _fed(self, feed: "_Feed", run: RunFolder, summary: dict[str, Any] | None) -> OffbeatError | None:
        try:
            feed.tell(run, summary)
        except Exception as error:  # a tracker's own, of any kind
            feed.reset()
            failure = OffbeatError(f"{type(feed.sink).__name__} was not told of {self.folder}: {error}")
            failure.__cause__ = error
            return failure
        return None


class _Feed:
    """One tracker, and how far it has been told."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.reset()

    def reset(self) -> None:
        """It is not known what has arrived: begin again."""
        self._reading = ProgressReader()
        self._skip: int | None = None
        self._ended = False

    def tell(self, run: RunFolder, summary: dict[str, Any] | None) -> None:
        if self._ended:
            return
        with run.ledger() as ledger:
            if went_back(ledger, self._reading.after):
                self.reset()
            if self._skip is None:
                self._skip = self.sink.begin(description_of(run))
            self._say(self._reading.news(ledger))
        if summary is not None:
            self._say(self._reading.rest())
        self.sink.flush()
        if summary is not None:
            self.sink.end(summary)
            self._ended = True

    def _say(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if self._skip:
                self._skip -= 1
            else:
                self.sink.tell(report)


def went_back(ledger: Ledger, after: int) -> bool:
    """Has a simulation gone back to its checkpoint, before this row? One of before there was a chain does not tell."""
    return ledger.newest() < after or next(ledger.rows("truncated", after=after, limit=1), None) is not None


def description_of(run: RunFolder) -> RunDescription:
    """Which run is in a folder: its settings are written once, when it begins."""
    written = (run.path / SETTINGS).stat()
    path = run.path.resolve()
    return RunDescription(path.name, f"{path}@{written.st_mtime_ns}", written.st_mtime, run.settings)


def follow(folder: Path, sinks: Sequence[Sink], *, live: bool = False, every_s: float = EVERY_S) -> bool:
    """Tell trackers of a run as far as it has come, or `live` until it is finished or interrupted.

    True where it is finished.
    """
    with closing(Follower(folder, sinks)) as follower:
        while live and not follower.catch_up() and RunFolder.open(folder).state == "running":
            time.sleep(every_s)
        return follower.catch_up()  # what came before its end was seen


class Following:
    """Follows a run on a thread of its own while it is run or served; what goes wrong is a warning."""

    def __init__(self, folder: Path, specs: Sequence[str], every_s: float = EVERY_S) -> None:
        """A tracker that does not exist, or whose package is missing, is refused here."""
        self._follower = Follower(folder, [sink_of(spec) for spec in specs])
        self._every_s, self._stop = every_s, threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._live, name="trackers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("a tracker does not answer; send it the rest later with `offbeat track`")

    def _live(self) -> None:
        finished = self._caught_up()
        while not finished:
            stopping = self._stop.wait(self._every_s)
            finished = self._caught_up() or stopping  # what came since is told before the end
        self._follower.close()

    def _caught_up(self) -> bool:
        try:
            finished, said = self._follower.catch_up(), ""
        except Exception as error:
            finished, said = False, str(error)
        if said and said != self._said:  # once, not every few seconds
            log.warning("%s", said)
        self._said = said
        return finished
