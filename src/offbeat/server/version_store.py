"""Owns the versions that can be read: the newest and a few before it in memory, and, where a rule uses x_tau, on disk.

Rules kept here:
- A version never changes, and its readers keep it alive. A quarter of the room holds the newest versions for later
  readers; the rest is for older versions that are still being read.
  Where too many are being read at once, the readers of the oldest are cut off: they ask again and get the newest.
- A version that a rule will need again is on the disk before a worker can be leased it, and stays until no open lease
  and no update since the second-newest checkpoint starts from it. One that an update is being judged against stays
  until that decision is on the disk, where the next pruning finds it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.core.layout import Layout, Model
from offbeat.errors import InvalidValue
from offbeat.storage.disk import Disk
from offbeat.storage.sealed_model import mapped_whole, sealed_parts
from offbeat.wire import header_of

KEPT_MAX = 64
"""Versions that can be pulled, where there is room: the newest, and those before it that were just leased.

More where more may be leased at a time: a thousand workers that ask together pull one after the other.
"""
KEPT_MIN = 2
"""Where there is room for a third: a worker that was leased a version just before the next one can still read it."""
KEPT_PART = 4
BYTES_MAX = 1 << 30
ALIVE_MIN = 2


class VersionGone(InvalidValue):
    """A version is not there any more, or cannot be read."""


class VersionStore:
    """The versions of one run; `on_disk` where the rule needs them again."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        disk: Disk,
        *,
        on_disk: bool,
        bytes_max: int = BYTES_MAX,
        leased_max: int = 0,
    ) -> None:
        """`leased_max` workers may be on their way to pull one, each another version."""
        self.path, self.layout, self.disk, self.on_disk = folder, layout, disk, on_disk
        self.header = header_of(layout)
        """Of a version on the wire."""
        self._alive_max = max(ALIVE_MIN, bytes_max // (4 * layout.size))
        room = max(self._alive_max // KEPT_PART, min(KEPT_MIN, self._alive_max - 1))
        self._kept_max = min(max(KEPT_MAX, leased_max), room)
        self._lock = threading.Lock()
        self._kept: dict[int, Model] = {}
        self._read: dict[int, tuple[Model, list[Callable[[], None]]]] = {}
        """Versions that are being read, and how each reader is cut off."""
        self._pins_lock = threading.Lock()
        self._pinned: Counter[int] = Counter()
        self._spared: set[int] = set()
        """All that were pinned since pruning last began."""
        if on_disk:
            disk.make_folder(folder)

    def add(self, t: int, x: Model) -> None:
        if self.on_disk and not self.file(t).exists():
            self.disk.write_whole(self.file(t), sealed_parts(x, {"t": str(t)}))
        with self._lock:
            self._kept[t] = x
            while len(self._kept) > self._kept_max:
                del self._kept[min(self._kept)]

    def pull(self, t: int) -> Model | None:
        """A version to read; None where it is gone."""
        with self._lock:
            return self._found(t)

    @contextmanager
    def reading(self, t: int, cut_off: Callable[[], None]) -> Iterator[Model | None]:
        """A version to read within the block, which others can read meanwhile; None where it is gone.

        `cut_off` ends the reading where too many versions are read at once.
        """
        with self._lock:
            model = self._found(t)
            if model is not None:
                self._read.setdefault(t, (model, []))[1].append(cut_off)
        try:
            yield model
        finally:
            with self._lock:
                if model is not None:
                    self._read[t][1].remove(cut_off)
                    if not self._read[t][1]:
                        del self._read[t]

    def cut_off_oldest(self) -> None:
        with self._lock:
            alive = sorted({*self._kept, *self._read})
            crowding = [t for t in alive[: -self._alive_max] if t in self._read and t not in self._kept]
            cut_off = [reader for t in crowding for reader in self._read[t][1]]
        for cut in cut_off:
            cut()

    def _found(self, t: int) -> Model | None:
        return self._kept.get(t) or (self._read[t][0] if t in self._read else None)

    @contextmanager
    def pinned(self, tau: int) -> Iterator[None]:
        """While an update that started from this version is being judged, it stays if it is there."""
        with self._pins_lock:
            self._pinned[tau] += 1
            self._spared.add(tau)
        try:
            yield
        finally:
            with self._pins_lock:
                self._pinned[tau] -= 1
                if not self._pinned[tau]:
                    del self._pinned[tau]

    def note_pins(self) -> None:
        """Pruning begins: what is pinned from now on stays, whether or not the pruning knows of its decision."""
        with self._pins_lock:
            self._spared = set(self._pinned)

    def lasts(self, tau: int) -> bool:
        """Will this version, while it is pinned, be there for a redo? In memory it may still be when it is pruned."""
        return self.on_disk and self.file(tau).exists()

    def bytes(self) -> int:
        found = 0
        for file in self.path.glob("*.safetensors") if self.on_disk else ():
            with suppress(FileNotFoundError):  # a checkpoint has made it superfluous just now
                found += file.stat().st_size
        return found

    def of(self, tau: int) -> Model:
        """The version that an update started from, for a rule that uses it."""
        kept = self.pull(tau)
        if kept is not None:
            return kept
        try:
            return mapped_whole(self.file(tau), self.layout)
        except (OSError, ValueError) as error:
            raise VersionGone(f"version {tau}, {self.file(tau)}, is missing or damaged: {error}") from error

    def prune(self, needed: set[int], newest: int) -> None:
        """Remove from the disk what is older than `newest`, not needed, and not pinned since `note_pins`."""
        for file in self.path.glob("*.safetensors") if self.on_disk else ():
            if file.stem.isdecimal() and int(file.stem) < newest and int(file.stem) not in needed:
                with self._pins_lock:
                    if int(file.stem) not in self._spared:
                        self.disk.remove(file)

    def file(self, t: int) -> Path:
        """Where a version lies, if it is on the disk."""
        return self.path / f"{t}.safetensors"
