"""Owns a worker's journal: the updates that the server decided on, one line of JSON each.

Rules kept here:
- A line that was noted is on the disk. Half a line, which a power cut leaves, is cut off when the journal is opened.
- One worker per journal. A file that is no journal is refused, not cut.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path

from offbeat.errors import InvalidValue
from offbeat.storage.disk import Disk
from offbeat.storage.lock import Lock
from offbeat.worker.outbox import writing

HALF_MAX = 1 << 16
"""Bytes at the end of a journal in which its last whole line must end."""
LINE = b'{"run": '


class Journal:
    """The updates that the server decided on, one line of JSON each; for one worker. Without a path, nothing."""

    def __init__(self, path: Path | None, disk: Disk | None = None) -> None:
        """Half a line at the end, which a power cut leaves, is cut off."""
        self.path, self.disk = path, disk or Disk()
        self._held = ExitStack()
        if path is None:
            return
        with writing(path), ExitStack() as held:
            held.callback(Lock.take(path.with_name(f"{path.name}.lock")).release)
            if not path.exists():
                self.disk.create(path).close()
                self.disk.sync_folder(path.parent)
            self._size = _whole_lines(path)
            with self.disk.extend(path, self._size) as output:
                output.sync()
            self._held = held.pop_all()

    def note(self, run: str, task: int, digest: str, outcome: str, head: str = "") -> None:
        """Add a line: when this returns it is on the disk. `head` is that of the server's ledger, where it told it."""
        if self.path is None:
            return
        facts = {"run": run, "task": task, "digest": digest, "outcome": outcome} | ({"head": head} if head else {})
        line = json.dumps(facts).encode() + b"\n"
        with writing(self.path), self.disk.extend(self.path, self._size) as output:  # cuts off what failed before
            output.write(line)
            output.sync()
        self._size += len(line)

    def close(self) -> None:
        self._held.close()


def _whole_lines(path: Path) -> int:
    """How many bytes of a journal are whole lines; a file that is no journal is refused, not cut."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - HALF_MAX))
        end = file.read()
    half = end[end.rfind(b"\n") + 1 :]
    begun = half.rstrip(b"\0")[: len(LINE)]  # some file systems leave zeros where contents did not reach the disk
    if not LINE.startswith(begun):
        raise InvalidValue(f"{path} does not end as a journal does; give the path of a journal, or of a new file")
    return size - len(half)
