"""Owns the file operations that durability depends on: one small seam, so that a test can cut the power after each.

Rules kept here:
- A file's contents are on the disk after `sync`, its name (new, changed or gone) after `sync_folder`.
- What must survive a power cut is written through here; nothing here decides what that is.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

Bytes = bytes | bytearray | memoryview


class Output:
    """A file that is written from some place on."""

    def __init__(self, disk: "Disk", path: Path, descriptor: int) -> None:
        self.disk, self.path = disk, path
        self._descriptor = descriptor

    def write(self, data: Bytes) -> None:
        """Append all of this."""
        view = memoryview(data)
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        self.disk.wrote(self.path)

    def sync(self) -> None:
        """Bring the contents to the disk."""
        os.fsync(self._descriptor)
        self.disk.synced(self.path)

    def close(self) -> None:
        """A second time does nothing."""
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Disk:
    """The real disk; the methods in the past tense say what was done, for a subclass that watches."""

    def create(self, path: Path) -> Output:
        """A new, empty file, in place of one that may be there."""
        output = Output(self, path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
        self.wrote(path)
        return output

    def extend(self, path: Path, size: int) -> Output:
        """A file that is there, from this place on; what stood behind it is cut off."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
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
        """Bring names to the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.synced_folder(path)

    def write_whole(self, path: Path, parts: Iterable[Bytes]) -> None:
        """A file that is there whole, or not at all, whenever the power goes."""
        aside = path.with_name(f"{path.name}.{os.getpid()}.aside")
        try:
            with self.create(aside) as output:
                for part in parts:
                    output.write(part)
                output.sync()
            self.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                self.remove(aside)
            raise
        self.sync_folder(path.parent)

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
