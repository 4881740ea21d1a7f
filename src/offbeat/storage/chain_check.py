"""Owns the check of a ledger's rows: is each of them there, and the one that was written?

Rules kept here:
- Lasting rows have their chain. They are read a page at a time, so a ledger of any length is checked in little memory.
- Chatter has a checksum per commit, and is bounded by the checkpoints.
"""

import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from offbeat.storage.chain import GENESIS, linked, stored_bytes
from offbeat.storage.ledger import NO_ROW, PAGE_ROWS, Ledger

_ROWS = "SELECT * FROM events WHERE sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?"
_CHATTER = "SELECT * FROM chatter WHERE sequence > ? ORDER BY sequence"
_CHECKS = "SELECT last, crc FROM chatter_checks WHERE last > ? ORDER BY last"
_BEFORE = """
SELECT coalesce(max(last), 0) FROM (
    SELECT max(last) AS last FROM commits WHERE last < ? UNION ALL SELECT max(last) FROM chatter_checks WHERE last < ?
)"""
PAGES_TOLD_MAX = 3
"""Complaints of SQLite that are told; one damaged page leads to many."""
_DAMAGED = (struct.error, AttributeError, KeyError, TypeError, UnicodeError, OverflowError)
"""What values of another type than they were written with lead to."""
_COMMITS = "SELECT last, head FROM commits WHERE last > ? AND last <= ? ORDER BY last LIMIT ?"


@dataclass(frozen=True, slots=True)
class ChainBreak:
    """The rows of the first commit that does not hold."""

    first: int
    last: int
    why: str

    def __str__(self) -> str:
        return f"rows {self.first} to {self.last}: {self.why}"


@dataclass(frozen=True, slots=True)
class ChainCheck:
    rows: int
    """Lasting rows that were looked at, up to the break if there is one."""
    decisions: int
    head: bytes
    broken: ChainBreak | None = None


def check_chain(ledger: Ledger, after: int = 0, until: int = NO_ROW) -> ChainCheck:
    """Check the commits after one row of a chained ledger, and up to another."""
    before, head, rows = after, ledger.head_at(after) if after else GENESIS, _Rows(ledger, after, until)
    for last, recorded in _pages(ledger, _COMMITS, after, until):
        try:
            found = linked(head, map(stored_bytes, rows.up_to(last)))
        except _DAMAGED as error:
            return rows.seen(head, ChainBreak(before + 1, last, f"one of them cannot be read: {error}"))
        if found != bytes(recorded):
            return rows.seen(head, ChainBreak(before + 1, last, "they are not those that were written"))
        before, head = last, found
    left = next(rows.up_to(until), None)
    if left is not None:
        return rows.seen(head, ChainBreak(before + 1, left[0], "no commit of the chain covers them"))
    return rows.seen(head, None)


def check_chatter(ledger: Ledger, after: int = 0) -> ChainBreak | None:
    """The first commit after this row whose chatter is not what was written, if there is one."""
    if not ledger.chained:
        return None
    with ledger.at_one_moment():
        rows, checks = deque(ledger.select(_CHATTER, (after,))), ledger.select(_CHECKS, (after,))
    for last, recorded in checks:
        crc = None
        try:
            while rows and rows[0][0] <= last:
                crc = zlib.crc32(stored_bytes(rows.popleft()), crc or 0)
        except _DAMAGED as error:
            return _of_commit(ledger, last, f"one of them, which a restart needs, cannot be read: {error}")
        if crc != recorded:
            return _of_commit(ledger, last, "those that a restart needs are not those that were written")
    return _of_commit(ledger, rows[-1][0], "no checksum covers them") if rows else None


def _of_commit(ledger: Ledger, last: int, why: str) -> ChainBreak:
    return ChainBreak(int(ledger.select(_BEFORE, (last, last))[0][0]) + 1, last, why)


def damaged_pages(ledger: Ledger) -> list[str]:
    """What SQLite finds wrong with the file itself: its pages, its indexes, and values that no column may have."""
    found = [str(said) for (said,) in ledger.select(f"PRAGMA integrity_check({PAGES_TOLD_MAX})")]
    return [] if found == ["ok"] else found


class _Rows:
    """Rows in order, taken in pieces, and counted."""

    def __init__(self, ledger: Ledger, after: int, until: int) -> None:
        self._rows = _pages(ledger, _ROWS, after, until)
        self._next: tuple[Any, ...] | None = next(self._rows, None)
        self._count = self._decisions = 0

    def up_to(self, last: int) -> Iterator[tuple[Any, ...]]:
        while self._next is not None and self._next[0] <= last:
            self._count += 1
            self._decisions += self._next[2] == "decided"
            yield self._next
            self._next = next(self._rows, None)

    def seen(self, head: bytes, broken: ChainBreak | None) -> ChainCheck:
        return ChainCheck(self._count, self._decisions, head, broken)


def _pages(ledger: Ledger, query: str, after: int, until: int) -> Iterator[tuple[Any, ...]]:
    while True:
        page = ledger.select(query, (after, until, PAGE_ROWS))
        yield from page
        if len(page) < PAGE_ROWS:
            return
        after = page[-1][0]
