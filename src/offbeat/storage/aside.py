"""Owns how a file comes to be: written aside, brought to the disk, renamed. No reader ever sees half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.errors import OffbeatError

SUFFIX = ".aside"


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends well, and is gone when it does not."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def cannot_write(path: Path, error: OSError) -> OffbeatError:
    """The one line that a user sees when a disk or a folder says no."""
    why = error.strerror or str(error)
    return OffbeatError(f"cannot write {path}: {why}; choose a folder that can be written to and has room")


def is_leftover(name: str, of: str) -> bool:
    """Was this file left by a process that died while it wrote `of`?"""
    return name.startswith(f"{of}.") and name.endswith(SUFFIX)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
