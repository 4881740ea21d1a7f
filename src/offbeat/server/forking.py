"""Owns the first start of a backup: it becomes a run of its own, and no worker of the original takes it for that.

Rules kept here:
- All workers have left: their sessions end, so each must join again and hears the new id; what it holds of the original
  is dropped by it. Their leases are released. Numbers of tasks that the original gave out meanwhile may be given out
  again, but under another id.
- The `forked` row is the last that is written of this, then the new id, and then the marker goes. After a crash in
  between it is all done again, and comes out the same.
"""

import json
import logging
from pathlib import Path

from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Event, ServerRestarted, WorkerLeft
from offbeat.server.served_fold import ServedFold
from offbeat.storage.backup_marker import BackupMarker, forget_marker, is_recorded
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json, sealed
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import forked_row

RUN = "run.json"
log = logging.getLogger("offbeat.server")


def settle_fork(
    folder: Path, fork: BackupMarker, coordinator: Coordinator, ledger: Ledger, fold: ServedFold, disk: Disk
) -> None:
    """Make a run, which was recovered and not started yet, that of its fork."""
    log.warning("a backup of run %s, up to row %s, goes on as run %s", fork.run, fork.row, fork.fork)
    if not is_recorded(fork, ledger):
        _dismiss_all(coordinator, ledger, fold)
        ledger.add(forked_row(coordinator.at, fork.fork, fork.run, fork.row, fork.head))
        ledger.flush()
    facts = read_json(folder / RUN)
    disk.write_whole(folder / RUN, [sealed(json.dumps({**facts, "run": fork.fork}, indent=2))])
    forget_marker(folder, disk)


def _dismiss_all(c: Coordinator, ledger: Ledger, fold: ServedFold) -> None:
    there = {session.worker for session in fold.workers.all() if session.digest}
    there |= {lease.worker for lease in (*c.leases.values(), *c.silent.values())}
    happened: list[Event] = [ServerRestarted(c.at)]  # first, so that nobody who waits is given what the others leave
    happened += [WorkerLeft(c.at, worker) for worker in sorted(there)]
    for event in happened:
        ledger.record(event, c.handle(event))
