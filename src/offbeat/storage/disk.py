"""Owns how files come to the disk: written aside, brought to the disk, renamed. No reader ever sees half of one.

Rules kept here:
- A file's contents are on the disk after `sync`, its name (new, changed or gone) after `sync_folder`.
- What a served run must keep over a power cut is written through `Disk`, one small seam, so that a test can cut the
  power after each of its operations; nothing here decides what that is.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from offbeat.errors import OffbeatError

SUFFIX = ".aside"
Bytes = bytes | bytearray | memoryview


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` when the block ends well, and is gone when it does not."""
    temporary = _aside_of(path)
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


def _aside_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}{SUFFIX}")


class Output:
    """A file that is written from some place on."""

    def __init__(self, disk: "Disk", path: Path, descriptor: int) -> None:
        self.disk, self.path = disk, path
        self._descriptor = descriptor

    def write(self, data: Bytes) -> None:
        view = memoryview(data)
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        self.disk.wrote(self.path)

    def sync(self) -> None:
        os.fsync(self._descriptor)
        self.disk.synced(self.path)

    def close(self) -> None:
        """A second time does nothing."""
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Disk:
    """The real disk; the methods in the past tense say what was done, for a subclass that watches."""

    def create(self, path: Path) -> Output:
        """A new, empty file, in place of one that may be there."""
        output = Output(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        self.wrote(path)
        return output

    def extend(self, path: Path, size: int) -> Output:
        """A file that is there, from this place on; what stood behind it is cut off."""
        descriptor = os.open(path, os.O_WRONLY)
        os.ftruncate(descriptor, size)
        os.lseek(descriptor, size, os.SEEK_SET)
        self.wrote(path)
        return Output(self, path, descriptor)

    def replace(self, old: Path, new: Path) -> None:
        """Give a file another name; one that had it is gone."""
        old.replace(new)
        self.renamed(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is gone already is no error."""
        path.unlink(missing_ok=True)
        self.removed(path)

    def make_folder(self, path: Path) -> None:
        """A folder whose name is on the disk; one that is there stays."""
        if not path.is_dir():
            path.mkdir()
            self.sync_folder(path.parent)

    def sync_folder(self, path: Path) -> None:
        sync(path)
        self.synced_folder(path)

    def write_whole(self, path: Path, parts: Iterable[Bytes]) -> None:
        """A file that is there whole, or not at all, whenever the power goes."""
        self.write_unnamed(path, parts)
        self.sync_folder(path.parent)

    def write_unnamed(self, path: Path, parts: Iterable[Bytes]) -> None:
        """The same, but its name need not be on the disk yet: the next sync of its folder brings it there."""
        temporary = _aside_of(path)
        try:
            with self.create(temporary) as output:
                for part in parts:
                    output.write(part)
                output.sync()
            self.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                self.remove(temporary)
            raise

    # --- for a subclass that watches --------------------------------------------------------------------------------

    def wrote(self, path: Path) -> None:
        """The contents of a file changed, in memory."""

    def synced(self, path: Path) -> None:
        """The contents of a file are on the disk."""

    def renamed(self, old: Path, new: Path) -> None:
        """A name changed, in memory."""

    def removed(self, path: Path) -> None:
        """A name is gone, in memory."""

    def synced_folder(self, path: Path) -> None:
        """The names in a folder are on the disk."""

    def committed(self, path: Path) -> None:
        """A database brought a transaction to the disk; it sees to that itself."""
