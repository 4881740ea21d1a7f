"""Owns what is read of the ledger to count it: of every kind of row just the columns that count, many at a time.

A row has 25 columns and most of them are empty: to read the whole of every row would take three times as long.
"""

from collections.abc import Callable
from typing import NamedTuple

from offbeat.web.fleet import ASKS, FLEET, Rows
from offbeat.web.tally import Tally


class Feed(NamedTuple):
    """Rows of some kinds, and who counts them."""

    kinds: tuple[str, ...]
    columns: str
    take: Callable[[Tally, Rows], None]
    group: str = ""
    """Where only the latest of each is wanted."""

    @property
    def query(self) -> str:
        """SQL for the rows after one and up to another."""
        kinds = ", ".join(f"'{kind}'" for kind in self.kinds)
        order = f"GROUP BY {self.group}" if self.group else "ORDER BY sequence"
        return f"SELECT {self.columns} FROM events WHERE kind IN ({kinds}) AND sequence > ? AND sequence <= ? {order}"  # noqa: S608 (text of this file)


FEEDS = (
    Feed(FLEET, "sequence, at, kind, worker, device, detail", lambda tally, rows: tally.fleet.take(rows)),
    Feed(("leased",), "sequence, at, task, worker, device", Tally.take_leased),
    Feed(("released",), "at, task, worker, granted_at", Tally.take_released),
    Feed(("published",), "at, t", Tally.take_published),
    Feed(
        ("decided",),
        "sequence, at, task, worker, granted_at, t, staleness, outcome, keep, new, publish, gradients, decision",
        Tally.take_decided,
    ),
    Feed(("mixed",), "decision", Tally.take_mixed),
    Feed(("heartbeat",), "task, max(at)", Tally.take_heartbeats, "task"),
    Feed(ASKS, "kind, worker, max(sequence), max(at)", lambda tally, rows: tally.fleet.take_asks(rows), "kind, worker"),
    Feed(("repeated",), "sequence", Tally.take_repeated),
    Feed(("evaluated",), "t, detail", Tally.take_evaluated),
    Feed(("finished",), "detail", Tally.take_finished),
)
"""In the order in which they are told."""
