"""Owns what a server knows of its run's past: totals, how alpha_t is distributed, and who has joined.

Rules kept here:
- It is folded from the ledger's rows: those that were there when the server started, then each as it is committed.
- Its state is part of every checkpoint, so a start reads the rows after the checkpoint and no others. It is plain JSON
  that does not grow with the updates or versions of a run; it holds a line for every worker that ever joined.
- Where a checkpoint has no such state (one of an earlier version), or where rows were lost, the whole ledger is read.
- Rows are taken on one thread at a time; those who look hold the `lock`.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from offbeat.protocol.messages import WorkerJoined
from offbeat.server.buckets import Buckets
from offbeat.server.sessions import WorkerSessions
from offbeat.storage.fold import FEEDS, KEEP, Rows, RunFold, Taker
from offbeat.storage.ledger import Ledger
from offbeat.storage.row_shapes import NewRow

ALPHA_T = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Upper bounds of the buckets."""
NEW = FEEDS["decided"].columns.index("new")
TOLD_ROWS = 200_000
"""A ledger with more rows than this takes seconds to read, so the log says that it is read."""

log = logging.getLogger("offbeat.server")


class ServedFold:
    def __init__(self) -> None:
        self.lock = Lock()
        self.run = RunFold(self)
        self.alpha_t = Buckets(ALPHA_T)
        self.workers = WorkerSessions()
        """As the ledger has them; those that answer requests are another object, on the event loop."""
        self._begun = False

    def begin(self, ledger: Ledger, mark: int = 0, state: Mapping[str, Any] | None = None) -> None:
        """Go on from the state at a mark of the ledger; without one, from the first row."""
        if state is not None:
            self.run.restore(state["run"])
            self.alpha_t.restore(state["alpha_t"])
            self.workers.restore(state["workers"])
        after, newest = 0 if state is None else mark, ledger.newest()
        if newest - after > TOLD_ROWS:
            log.info("counting %s rows of the ledger, once: the next start finds the totals in a checkpoint", newest)
        self.run.read(ledger.select, after, newest)
        self._begun = True

    def written(self, rows: Sequence[NewRow], last: int, _seconds: float) -> None:
        """The ledger's hook. What is committed before `begin` is read there."""
        if self._begun:
            with self.lock:
                self.run.take(rows, last)

    def state(self) -> dict[str, Any]:
        """For a checkpoint: all of it, after the newest row that was committed."""
        return {"run": self.run.state(), "alpha_t": self.alpha_t.state(), "workers": self.workers.state()}

    # --- a part of the fold ------------------------------------------------------------------------------------------

    def takers(self) -> Mapping[str, Taker]:
        return {"workers": self._workers, "decided": self._decided}

    def _workers(self, rows: Rows) -> None:
        for _, at, kind, worker, device, detail, samples in rows:
            if kind == "joined":
                self.workers.take(WorkerJoined(at, worker, device, **json.loads(detail)))
            elif kind == "declared":
                self.workers.declared(worker, samples, json.loads(detail)["base"])
            elif kind == "left":
                self.workers.left(worker)

    def _decided(self, rows: Rows) -> None:
        for row in rows:
            if row[KEEP] is not None:
                self.alpha_t.add(row[NEW])
