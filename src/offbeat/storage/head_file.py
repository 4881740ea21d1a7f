"""Owns the file that says how far a ledger had come: its newest row, the head of its chain, the newest task.

Rules kept here:
- It is written after every commit and never waited for: a killed process leaves the newest one, a power cut an older
  one or none, and it never names a row that was not on the disk before it.
- So a ledger that ends before the row named here has lost rows. A file that cannot be read says nothing.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.storage.disk import Disk

HEAD = "ledger.head"
SIZE = 256
"""Bytes of the file, always: it is overwritten in one piece."""


class LedgerHead(NamedTuple):
    row: int
    head: bytes
    tasks: int
    """The newest task that was given out."""


class HeadFile:
    def __init__(self, folder: Path, disk: Disk) -> None:
        self.path, self.disk = folder / HEAD, disk
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)

    def note(self, row: int, head: bytes, tasks: int) -> None:
        facts = json.dumps({"row": row, "head": head.hex(), "tasks": tasks})
        text = f"{zlib.crc32(facts.encode()):08x} {facts}"
        os.pwrite(self._descriptor, f"{text:<{SIZE - 1}}\n".encode(), 0)
        self.disk.wrote(self.path)

    def close(self) -> None:
        os.close(self._descriptor)


def read_head(folder: Path) -> LedgerHead | None:
    """What the file says; None where there is none, or where it is damaged."""
    try:
        check, _, text = (folder / HEAD).read_text("ascii").strip().partition(" ")
        if int(check, 16) != zlib.crc32(text.encode()):
            return None
        facts: dict[str, Any] = json.loads(text)
        return LedgerHead(int(facts["row"]), bytes.fromhex(facts["head"]), int(facts["tasks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
