"""Owns backup.json, which says that a folder is a backup, and of what; and how the backup becomes a run of its own.

Rules kept here:
- A backup that is started goes on as another run: it gets an id of its own, and its ledger a `forked` row that names
  the run, the row and the head that it goes on from. So the run that was backed up may go on as well, and nobody takes
  one for the other.
- The new id is on the disk before anything is done under it, the `forked` row before the marker goes. After a crash in
  between, the same steps come out the same.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.errors import InvalidValue
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json, sealed
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import forked_row

MARKER = "backup.json"


@dataclass(frozen=True, slots=True)
class BackupMarker:
    run: str
    """The run that was backed up; empty where it has no id, as a simulated one."""
    row: int
    """The row of its ledger that the backup goes on from."""
    head: str
    """The head of its ledger's chain at that row."""
    at: str
    """When, ISO 8601, UTC."""
    files: int = 0
    """How many files the backup has, this one included."""
    fork: str = ""
    """The id of the run that it becomes; empty before its first start."""


def read_marker(folder: Path) -> BackupMarker | None:
    """None where the folder is no backup, or one that was started."""
    if not (folder / MARKER).is_file():
        return None
    facts = read_json(folder / MARKER)
    try:
        return BackupMarker(
            str(facts["run"]),
            int(facts["row"]),
            str(facts["head"]),
            str(facts["at"]),
            int(facts["files"]),
            str(facts["fork"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"{folder / MARKER} is damaged ({error!r}); restore the folder from its backup") from error


def write_marker(folder: Path, marker: BackupMarker, disk: Disk) -> None:
    disk.write_whole(folder / MARKER, [sealed(json.dumps(asdict(marker), indent=2))])


def named_fork(folder: Path, run: str, disk: Disk) -> BackupMarker | None:
    """The marker of a backup that is being started, with the id of its fork on the disk; None where it is none.

    `run` is the id that the folder's other files have.
    """
    marker = read_marker(folder)
    if marker is None:
        return None
    if run not in (marker.run, marker.fork):
        raise InvalidValue(
            f"{folder / MARKER} is of run {marker.run}, and the folder of run {run}; restore the folder from its backup"
        )
    if not marker.fork:
        marker = replace(marker, fork=secrets.token_hex(8))
        write_marker(folder, marker, disk)
    return marker


def is_recorded(marker: BackupMarker, ledger: Ledger) -> bool:
    """Has the ledger the row of this fork? Refused where the ledger is not the one that was backed up."""
    if ledger.chained and ledger.head_at(marker.row).hex() != marker.head:
        raise InvalidValue(
            f"{ledger.path} had another head at row {marker.row} when it was backed up; "
            "restore the folder from its backup"
        )
    return any(forked["fork"] == marker.fork for forked in forks_in(ledger))


def forks_in(ledger: Ledger) -> list[dict[str, Any]]:
    """What the `forked` rows say, in their order."""
    return [json.loads(row.detail or "{}") for row in ledger.rows("forked")]


def forget_marker(folder: Path, disk: Disk) -> None:
    """The fork has its id and its row: from now on the folder is that of any run."""
    disk.remove(folder / MARKER)
    disk.sync_folder(folder)


def fork_without_id(folder: Path, ledger: Ledger, at: float, keep: Callable[[], None]) -> None:
    """Fork a backup of a run that has no id, since no worker asks for it: a simulated one, say.

    It goes back to its checkpoint when it goes on, so `keep` makes one that has the row.
    """
    marker = named_fork(folder, "", Disk())
    if marker is None:
        return
    if not is_recorded(marker, ledger):
        ledger.add(forked_row(at, marker.fork, marker.run, marker.row, marker.head))
    keep()
    forget_marker(folder, Disk())
