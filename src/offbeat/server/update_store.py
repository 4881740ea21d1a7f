"""Owns the updates on disk: uploads under way, and those that are whole, which are the redo log of the run.

Rules kept here:
- An upload grows in `TASK.part`, which is not durable. When it is whole and right it is brought to the disk and gets
  the name `TASK.safetensors`; only then may it be decided on.
- A whole update stays until no checkpoint needs it any more.
- The bytes that lie here are counted, and bounded.
"""

import threading
from collections.abc import Callable, Collection
from math import isnan
from pathlib import Path
from time import perf_counter

import numpy as np

from offbeat.core.layout import Layout, Model, Vector
from offbeat.digests import SHA256, Hasher, digest_of_file, holds
from offbeat.errors import OffbeatError
from offbeat.storage.disk import Bytes, Disk, Output
from offbeat.wire import BadPayload, ExpectedHeader, Header, HeaderReader, carried_of, check_fit, is_flat, mapped

PART, WHOLE = ".part", ".safetensors"
NO_LIMIT = 1 << 62
CACHED = 128 << 10
"""Bytes that are hashed, looked at and written in one go: they stay in the processor's cache meanwhile.

Not more, though it would save calls: with 1 MB at a time, writing took up to ten times as long on a virtual machine,
probably for the large pages of the system's cache, whose memory its host had taken back.
"""
FLOAT_BYTES = 4


class DiskFull(OffbeatError):
    """There is no room for more updates; workers are told to come back."""


class Upload:
    """One update on its way in; everything here blocks, so it runs off the event loop.

    Its file is made by the first `write`. Each byte is hashed, looked at and written while it is in the cache, so that
    nothing reads the update again before it is mixed.
    """

    def __init__(
        self, folder: "UpdateStore", task: int, size: int, hasher: Hasher, output: Output | None = None
    ) -> None:
        """With an `output`, the upload goes on where that stands."""
        self.folder, self.task, self.size = folder, task, size
        self.at = 0 if output is None else folder.offset(task)
        self.largest: float | None = None
        """The largest |x| of the flat vector, once all of it was looked at; NaN where one is in it."""
        self._output, self._hasher = output, hasher
        self._reader: HeaderReader | None = HeaderReader(folder.expected) if self.at == 0 else None
        self._header: Header | None = None
        """Where the body is the flat vector, and everything was looked at so far."""
        folder.note_sending(task, sending=True)

    def write(self, *parts: Bytes) -> None:
        """Append; bytes beyond the announced size, and a header that is not the model's, are refused at once."""
        output = self._created()
        for part in [memoryview(given) for given in parts]:
            if self.at + len(part) > self.size:
                raise BadPayload(f"the update has more than the {self.size} bytes that were announced")
            if self._reader is not None:
                self._read_header(self._reader, part)
            for start in range(0, len(part), CACHED):
                data = part[start : start + CACHED]
                self._hasher.update(data)
                if self._header is not None:
                    self._look(self._header, data)
                output.write(data)
                self.at += len(data)

    def _created(self) -> Output:
        if self._output is None:
            try:
                self._output = self.folder.created(self.task)
            except OSError:
                self.folder.discard(self.task)
                raise
        return self._output

    def _read_header(self, reader: HeaderReader, part: memoryview) -> None:
        """Read the header from the first bytes; it keeps what it is given, so it gets no more than it needs."""
        expected = len(self.folder.expected.bytes)
        for some in (part[:expected], part[expected:]):
            header = reader.feed(some)
            if header is not None:
                check_fit(header, self.folder.layout)
                self._reader = None
                is_whole = is_flat(header, self.folder.layout) and header.size == self.size
                if self.folder.look is not None and self.at == 0 and is_whole:
                    self._header, self.largest = header, 0.0
                return

    def _look(self, header: Header, data: memoryview) -> None:
        """Look at the floats in what comes next; where one is cut in two, the update is looked at again later."""
        begin = max(header.length, self.at)
        end = min(header.length + FLOAT_BYTES * self.folder.layout.size, self.at + len(data))
        if begin >= end or self.folder.look is None or self.largest is None:
            return
        if (begin - header.length) % FLOAT_BYTES or (end - begin) % FLOAT_BYTES:
            self._header = self.largest = None
            return
        found = self.folder.look(np.frombuffer(data[begin - self.at : end - self.at], np.float32))
        self.largest = found if isnan(found) or found > self.largest else self.largest

    def close(self) -> None:
        """Leave it; what has come can be appended to, unless its room is needed."""
        if self._output is not None:
            self._output.close()
        self.folder.note_sending(self.task, sending=False)

    def abandon(self) -> None:
        """Leave it, and forget what has come."""
        self.close()
        self.folder.discard(self.task)

    def finish(self, digest: str, whole: memoryview | None = None) -> None:
        """All is there: check it, bring it to the disk, give it its name.

        `whole` is the update in memory, where it is there in one piece: it is mixed from there.
        """
        if self.at != self.size:
            raise BadPayload(f"the update has {self.at} bytes of the {self.size} that were announced")
        if self._hasher.text() != digest:
            self.abandon()
            raise WrongDigest("the digest is not that of the bytes that arrived; send the update again from its start")
        begun = perf_counter()
        self._created().sync()
        self.close()
        self.folder.settle(self.task)
        self.folder.on_synced(perf_counter() - begun)
        if whole is not None and self._header is not None:
            self.folder.remember(self.task, self._header, whole)


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
        self.look: Callable[[Vector], float] | None = None
        """The largest |x| of some floats; without it, updates are not looked at while they come."""
        self._fresh: dict[int, Model] = {}
        """Updates that are still in memory, as they were received."""
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

    def begin(self, task: int, size: int, kind: str = SHA256) -> Upload:
        """A new upload, with a digest of this kind; one of this task that was under way is forgotten."""
        self._reserve(task, size)
        return Upload(self, task, size, Hasher(kind))

    def created(self, task: int) -> Output:
        return self.disk.create(self._part(task))

    def resume(self, task: int, size: int, offset: int, kind: str = SHA256) -> Upload:
        there = self.offset(task)
        if offset != there:
            raise WrongOffset(there)
        self._reserve(task, size)
        hasher = Hasher(kind)
        with self._part(task).open("rb") as file:
            while data := file.read(1 << 20):
                hasher.update(data)
        return Upload(self, task, size, hasher, self.disk.extend(self._part(task), offset))

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
            if idle:
                self._fresh.pop(task, None)

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

    def is_whole(self, task: int) -> bool:
        """Did the whole update come, and is it not removed? Asks memory alone."""
        return task in self._sizes

    def tasks(self) -> set[int]:
        with self._lock:
            return set(self._sizes)

    def remove(self, tasks: set[int]) -> None:
        """Remove updates. That they are gone need not be durable: a restart would remove them again."""
        for task in tasks:
            self.disk.remove(self.whole(task))
            with self._lock:
                self._fresh.pop(task, None)
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

    def remember(self, task: int, header: Header, whole: memoryview) -> None:
        """Keep an update that is on the disk in memory, too, until it is mixed."""
        vector = np.frombuffer(whole, np.float32, self.layout.size, header.length)
        model = Model(self.layout, vector, carried_of(header, whole, self.layout)).freeze()
        with self._lock:
            self._fresh[task] = model

    def forget(self, task: int) -> None:
        """Let go of an update in memory; on the disk it stays."""
        with self._lock:
            self._fresh.pop(task, None)

    def taken(self, task: int) -> Model:
        """An update that is to be mixed now: from memory where it is still there, which then is free."""
        with self._lock:
            fresh = self._fresh.pop(task, None)
        return fresh if fresh is not None else mapped(self.whole(task), self.layout)

    def mapped(self, task: int) -> Model:
        """An update as a model, mapped where its body is the flat vector, which takes no memory of ours."""
        fresh = self._fresh.get(task)
        return fresh if fresh is not None else mapped(self.whole(task), self.layout)

    def holds(self, task: int, digests: Collection[str]) -> bool:
        """Are the bytes on the disk those that one of these digests is of?"""
        try:
            return any(holds(self.whole(task), digest) for digest in dict.fromkeys(digests) if digest)
        except OSError as error:
            raise BadPayload(f"it cannot be read: {error.strerror}") from error

    def digest(self, task: int, kind: str = SHA256) -> str:
        try:
            return digest_of_file(self.whole(task), kind)
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
