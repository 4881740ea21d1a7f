"""Owns the lock of a run folder: one process writes a run, and it is known which.

Rules kept here:
- The kernel holds the lock, so it ends with the process, however that ends.
- The lock's file goes when the lock does; a process that then holds a file that is gone tries again.
- Looking whether a lock is held takes it shared for an instant, and that never makes a writer fail.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from offbeat.errors import InvalidValue

PID_DIGITS_MAX = 20
TRIES_MAX = 100_000
"""Tries to take a lock that others are looking at: looking takes microseconds."""


class Lock:
    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def take(cls, path: Path) -> Self:
        """Take it now or be refused with the number of the process that has it."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _exclusive(descriptor, path)
                if _is(descriptor, path):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                    return cls(path, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        os.close(self._descriptor)


def is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _flocked(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _exclusive(descriptor: int, path: Path) -> None:
    """Refused by a writer at once; by those who only look, when they look for very long."""
    for _ in range(TRIES_MAX):
        if _flocked(descriptor, fcntl.LOCK_EX):
            return
        if not _flocked(descriptor, fcntl.LOCK_SH):
            break
    pid = os.pread(descriptor, PID_DIGITS_MAX, 0).decode(errors="replace")
    who = f"process {pid}" if pid else "another process"
    raise InvalidValue(f"{path.parent} is being written by {who}; wait for it, or use another folder")


def _flocked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
