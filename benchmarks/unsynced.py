"""Owns a way to run a program of Offbeat's without durability: nothing is synced to the disk.

There is no such setting: an acknowledged update is on the disk. This is only here to measure what that costs.
`python -m benchmarks.unsynced MODULE ARGUMENTS` runs a module with it.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from offbeat.storage.ledger import Ledger


def without_fsync() -> None:
    """Make every fsync of this process do nothing."""
    os.fsync = _nothing
    durably = Ledger.open.__func__  # type: ignore[attr-defined]

    def opened(cls: type[Ledger], path: Path, *, durable: bool = False, read_only: bool = False, **more: Any) -> Any:  # noqa: ARG001
        return durably(cls, path, durable=False, read_only=read_only, **more)

    Ledger.open = classmethod(opened)  # type: ignore[arg-type, assignment, method-assign]


def _nothing(fd: Any) -> None:
    """Stands in for os.fsync."""


if __name__ == "__main__":
    without_fsync()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
