"""Owns the log of events: a line of JSON for every row of the ledger as it is committed, under the ledger's own names.

Rules kept here:
- A line is about a row that is on the disk; `sequence` is the row's own, so that gaps can be seen and looked up.
- The run never waits for the log: up to a limit, lines wait for a thread of their own. A line that finds no room, or
  cannot be written, is counted, and the count is a line.
- Chatter and the digests of session secrets are left out.
"""

import json
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from offbeat.errors import InvalidValue
from offbeat.storage.json_file import number
from offbeat.storage.ledger import CHATTER
from offbeat.storage.row_shapes import NewRow

WAITING_MAX = 50_000
"""Rows that wait to be written; about a hundred bytes each."""
CLOSE_S = 5.0
"""How long `close` waits for a reader of the log that is slow."""
STDERR = "-"
DROPPED = "log_dropped"
"""The kind of the line that says how many are missing."""

PendingRow = tuple[int, float, NewRow]
"""A row that is in the ledger and not yet in the log: its sequence number, the time of its commit, and the row."""

log = logging.getLogger("offbeat.server")


class EventLog:
    """Writes what the ledger has committed; `written` is the ledger's hook."""

    def __init__(self, descriptor: int, *, run: str = "", waiting_max: int = WAITING_MAX) -> None:
        """`run` is in every line; the descriptor is closed in the end."""
        self._descriptor, self._run, self._waiting_max = descriptor, run, waiting_max
        self._changed = threading.Condition()
        """Guards all below."""
        self._waiting: deque[PendingRow] = deque()
        self._dropped = 0
        self._closing = False
        self._torn = self._failing = False
        """Did the last line end before its end, and could the last one not be written? The thread's own."""
        self._thread = threading.Thread(target=self._live, name="event log", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, where: str, *, run: str = "") -> Self:
        """A log that is appended to a file, or - for standard error."""
        if where == STDERR:
            return cls(os.dup(sys.stderr.fileno()), run=run)
        try:
            descriptor = os.open(Path(where), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        except OSError as error:
            raise InvalidValue(
                f"events cannot be logged to {where}: {error.strerror}; give a file, or - for stderr"
            ) from error
        return cls(descriptor, run=run)

    def written(self, rows: Sequence[NewRow], last: int, _seconds: float = 0.0) -> None:
        """These rows were committed, the last of them under this sequence number. Never blocks."""
        first, logged_at = last - len(rows) + 1, datetime.now(UTC).timestamp()
        told = [(sequence, logged_at, row) for sequence, row in enumerate(rows, first) if row.kind not in CHATTER]
        with self._changed:
            kept = told[: max(0, self._waiting_max - len(self._waiting))]
            self._waiting.extend(kept)
            self._dropped += len(told) - len(kept)
            self._changed.notify_all()

    def close(self) -> None:
        """Write what waits and end; a reader that does not read is waited for `CLOSE_S` only."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    # --- the thread --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        more = True
        while more:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                rows, dropped, more = self._waiting, self._dropped, not self._closing
                self._waiting, self._dropped = deque(), 0
            self._write(rows, dropped)

    def _write(self, rows: deque[PendingRow], dropped: int) -> None:
        lines = [_line_of(row, self._run) for row in rows]
        if dropped:
            lines.append(_line({"run": self._run, "kind": DROPPED, "count": dropped}, datetime.now(UTC).timestamp()))
        left = self._not_written("".join(lines).encode())
        if left:  # the line that counts is the last one, so it is among them
            with self._changed:
                self._dropped += left.count(b"\n") + (dropped - 1 if dropped else 0)

    def _not_written(self, data: bytes) -> bytes:
        """Write; what could not be written is left. It begins anew on a line of its own."""
        if data and self._torn:
            data = b"\n" + data
        try:
            while data:
                size = os.write(self._descriptor, data)
                self._torn = not data[:size].endswith(b"\n")
                data = data[size:]
        except OSError as error:
            if not self._failing:  # once, not with every row
                log.warning("events cannot be logged now: %s", error.strerror)
        self._failing = bool(data)
        return data.removeprefix(b"\n")


# --- lines -----------------------------------------------------------------------------------------------------------


def _line_of(waiting: PendingRow, run: str) -> str:
    sequence, logged_at, row = waiting
    facts = {name: _plain(name, value) for name, value in row.facts().items() if value is not None}
    return _line({"run": run, "sequence": sequence, "kind": row.kind, **facts}, logged_at)


def _line(facts: dict[str, Any], logged_at: float) -> str:
    shown = datetime.fromtimestamp(logged_at, UTC).isoformat(timespec="milliseconds")
    named = {name: value for name, value in facts.items() if value != ""}
    return json.dumps({"logged_at": shown, **named}, allow_nan=False) + "\n"


def _plain(name: str, value: Any) -> Any:
    if name == "detail":
        return {key: inner for key, inner in json.loads(value).items() if key != "session"}
    return number(value) if isinstance(value, float) else value
