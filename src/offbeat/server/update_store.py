"""Owns the updates on disk: uploads under way, and those that are whole, which are the redo log of the run.

Rules kept here:
- An upload grows in `TASK.part`, which is not durable. When it is whole and right it is brought to the disk and gets
  the name `TASK.safetensors`; only then may it be decided on.
- A whole update stays until no checkpoint needs it any more.
- The bytes that lie here are counted, and bounded.
"""

import hashlib
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from time import perf_counter

from offbeat.core.layout import Layout, Model
from offbeat.errors import OffbeatError
from offbeat.storage.disk import Bytes, Disk, Output, file_digest
from offbeat.wire import BadPayload, ExpectedHeader, HeaderReader, check_fit, mapped

PART, WHOLE = ".part", ".safetensors"
NO_LIMIT = 1 << 62


class DiskFull(OffbeatError):
    """There is no room for more updates; workers are told to come back."""


class Upload:
    """One update on its way in; everything here blocks, so it runs off the event loop."""

    def __init__(
        self, folder: "UpdateStore", task: int, size: int, output: Output, digest: "hashlib._Hash", at: int
    ) -> None:
        self.folder, self.task, self.size = folder, task, size
        self.at = at
        self._output, self._digest = output, digest
        self._head: HeaderReader | None = HeaderReader(folder.expected) if at == 0 else None
        folder.note_sending(task, sending=True)

    def write(self, *parts: Bytes) -> None:
        """Append; bytes beyond the announced size, and a header that is not the model's, are refused at once."""
        for data in parts:
            if self.at + len(data) > self.size:
                raise BadPayload(f"the update has more than the {self.size} bytes that were announced")
            if self._head is not None and (header := self._head.feed(data)) is not None:
                check_fit(header, self.folder.layout)
                self._head = None
            self._output.write(data)
            self._digest.update(data)
            self.at += len(data)

    def close(self) -> None:
        """Leave it; what has come can be appended to, unless its room is needed."""
        self._output.close()
        self.folder.note_sending(self.task, sending=False)

    def abandon(self) -> None:
        """Leave it, and forget what has come."""
        self.close()
        self.folder.discard(self.task)

    def finish(self, digest: str) -> None:
        """All is there: check it, bring it to the disk, give it its name."""
        if self.at != self.size:
            raise BadPayload(f"the update has {self.at} bytes of the {self.size} that were announced")
        if self._digest.hexdigest() != digest:
            self.abandon()
            raise WrongDigest("the digest is not that of the bytes that arrived; send the update again from its start")
        begun = perf_counter()
        self._output.sync()
        self.close()
        self.folder.settle(self.task)
        self.folder.on_synced(perf_counter() - begun)


class WrongDigest(BadPayload):
    """What arrived is not what was sent: no fault of the worker, and the upload starts over."""


class UpdateStore:
    def __init__(
        self,
        folder: Path,
        layout: Layout,
        disk: Disk,
        *,
        bytes_max: int = NO_LIMIT,
        on_synced: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        """`on_synced` hears how long it took to bring an update to the disk."""
        self.path, self.layout, self.disk, self.bytes_max = folder, layout, disk, bytes_max
        self.expected = ExpectedHeader.of(layout)
        self.size = self.expected.header.size
        self.size_max = self.size + self.expected.limits.header_max - len(self.expected.bytes)
        """Bytes of one update; other writers may need a longer header than we do."""
        disk.make_folder(folder)
        self.on_synced = on_synced
        self._lock = threading.Lock()
        self._sizes = {int(f.stem): f.stat().st_size for f in folder.glob(f"*{WHOLE}") if f.stem.isdecimal()}
        self._coming: dict[int, int] = {}
        """What uploads under way, or cut off, will take."""
        self._bytes = sum(self._sizes.values())
        """The sum of both, kept up to date by `_note`."""
        self._open: set[int] = set()
        """Those that a connection is sending now."""
        self.short = False
        """Was an upload refused for want of room since the last checkpoint?"""
        self._idle: set[int] = set()
        """Whole updates that met a full queue, and may or may not be pushed again."""

    # --- coming in ---------------------------------------------------------------------------------------------------

    def offset(self, task: int) -> int:
        part = self._part(task)
        return part.stat().st_size if part.exists() else 0

    def begin(self, task: int, size: int) -> Upload:
        """A new upload; one of this task that was under way is forgotten."""
        self._reserve(task, size)
        try:
            output = self.disk.create(self._part(task))
        except OSError:
            self.discard(task)
            raise
        return Upload(self, task, size, output, hashlib.sha256(), 0)

    def resume(self, task: int, size: int, offset: int) -> Upload:
        there = self.offset(task)
        if offset != there:
            raise WrongOffset(there)
        self._reserve(task, size)
        digest = hashlib.sha256()
        with self._part(task).open("rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
        return Upload(self, task, size, self.disk.extend(self._part(task), offset), digest, offset)

    def discard(self, task: int) -> None:
        self.disk.remove(self._part(task))
        with self._lock:
            self._note(self._coming, task, 0)

    def note_sending(self, task: int, *, sending: bool) -> None:
        """Does a connection send this one from now on, or none?"""
        with self._lock:
            (self._open.add if sending else self._open.discard)(task)

    def set_aside(self, task: int, *, idle: bool) -> None:
        """A whole update that met a full queue may be forgotten if its room is needed; not while it is judged."""
        with self._lock:
            (self._idle.add if idle else self._idle.discard)(task)

    def settle(self, task: int) -> None:
        """An upload is whole: its name is on the disk when this returns."""
        self.disk.replace(self._part(task), self.whole(task))
        self.disk.sync_folder(self.path)
        with self._lock:
            self._note(self._coming, task, 0)
            self._note(self._sizes, task, self.whole(task).stat().st_size)

    # --- being there -------------------------------------------------------------------------------------------------

    def whole(self, task: int) -> Path:
        """Where the whole update of a task lies, or will lie."""
        return self.path / f"{task}{WHOLE}"

    def has(self, task: int) -> bool:
        return self.whole(task).exists()

    def tasks(self) -> set[int]:
        with self._lock:
            return set(self._sizes)

    def remove(self, tasks: set[int]) -> None:
        """Remove updates. That they are gone need not be durable: a restart would remove them again."""
        for task in tasks:
            self.disk.remove(self.whole(task))
            with self._lock:
                self._note(self._sizes, task, 0)

    def tidy(self, decided: Collection[int]) -> None:
        """After a restart: remove what was not decided on, whole or not; it will be pushed again."""
        for file in self.path.glob(f"*{PART}"):
            self.disk.remove(file)
        self.remove(self.tasks().difference(decided))

    def bytes(self) -> int:
        """What all of it takes, uploads under way with the size that they announced."""
        with self._lock:
            return self._bytes

    def mapped(self, task: int) -> Model:
        """An update as a model, mapped where its body is the flat vector, which takes no memory of ours."""
        return mapped(self.whole(task), self.layout)

    def digest(self, task: int) -> str:
        try:
            return file_digest(self.whole(task))
        except OSError as error:
            raise BadPayload(f"it cannot be read: {error.strerror}") from error

    def _part(self, task: int) -> Path:
        return self.path / f"{task}{PART}"

    def _reserve(self, task: int, size: int) -> None:
        with self._lock:
            if self._taken(task) + size > self.bytes_max:
                self._make_room(task)
            if self._taken(task) + size > self.bytes_max:
                self.short = True
                raise DiskFull(f"updates may take {self.bytes_max} bytes on the server's disk, and they are used up")
            self._note(self._coming, task, size)

    def _taken(self, task: int) -> int:
        """By all but the upload of this task."""
        return self._bytes - self._coming.get(task, 0)

    def _note(self, sizes: dict[int, int], task: int, size: int) -> None:
        """A task takes this much from now on; 0 is nothing. The lock is held."""
        self._bytes += size - sizes.pop(task, 0)
        if size:
            sizes[task] = size

    def _make_room(self, task: int) -> None:
        """Forget what is neither being sent nor decided on: it can be pushed again."""
        for cut in [other for other in self._coming if other != task and other not in self._open]:
            self.disk.remove(self._part(cut))
            self._note(self._coming, cut, 0)
        for other in self._idle - {task}:
            self.disk.remove(self.whole(other))
            self._note(self._sizes, other, 0)
        self._idle &= {task}


class WrongOffset(BadPayload):
    """An append must begin where the upload stands."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the upload stands at byte {offset}; append from there")
        self.offset = offset
