"""Owns the rows of the ledger as those who follow a run hear them: read once for all listeners, a page at a time.

Rules kept here:
- Nothing stays open between two pages, and one page is read at a time: listeners cost no descriptors but their own.
- Listeners who stand at the same row share the page, read and put into words once.
- Chatter and the digests of session secrets stay here.
"""

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.server.refusals import answer
from offbeat.storage.json_file import number
from offbeat.storage.ledger import CHATTER, Ledger
from offbeat.storage.rows import Row

ROWS_AT_ONCE = 500
PAGES_KEPT = 8


class EventPage(NamedTuple):
    last: int
    """The row up to which it was read."""
    events: tuple[bytes, ...]
    more: bool
    """Were there rows at all? Else there is nothing new."""


class EventFeed:
    def __init__(self, ledger: Path) -> None:
        self._path, self._lock = ledger, threading.Lock()
        self._newest: tuple[object, int] | None = None
        self._pages: OrderedDict[tuple[int, object], EventPage] = OrderedDict()

    def newest(self, moment: object) -> int:
        """The newest row at a moment, or one that came after it."""
        with self._lock:
            if self._newest is None or self._newest[0] is not moment:
                with Ledger.open(self._path, read_only=True) as ledger:
                    self._newest = (moment, ledger.newest())
            return self._newest[1]

    def page(self, after: int, moment: object) -> EventPage:
        """The next events after a row; `moment` stands for what is committed, and is another object after a commit."""
        with self._lock:
            found = self._pages.get((after, moment))
            if found is None:
                found = self._pages[after, moment] = self._read(after)
                while len(self._pages) > PAGES_KEPT:
                    self._pages.popitem(last=False)
            return found

    def _read(self, after: int) -> EventPage:
        with Ledger.open(self._path, read_only=True) as ledger:
            rows = list(ledger.rows(after=after, limit=ROWS_AT_ONCE))
        events = tuple(_event(row) for row in rows if row.kind not in CHATTER)
        return EventPage(rows[-1].sequence if rows else after, events, bool(rows))


def _event(row: Row) -> bytes:
    facts: dict[str, Any] = {n: value for n, value in row._asdict().items() if value is not None and n != "sequence"}
    facts = {name: number(value) if isinstance(value, float) else value for name, value in facts.items()}
    if row.kind == "joined" and row.detail:  # the digest of a secret stays here
        facts["detail"] = json.dumps({"name": json.loads(row.detail).get("name")})
    return f"id: {row.sequence}\nevent: {row.kind}\ndata: {answer(facts).text}\n\n".encode()
