"""Owns the versions that can be read: the newest and a few before it in memory, and, where a rule uses x_tau, on disk.

Rules kept here:
- A version never changes; whoever reads one keeps it alive by holding it. Few are kept for those who come later.
- A version that a rule will need again is on the disk before anybody can be leased it, and stays until no open lease
  and no update since the second-newest checkpoint starts from it.
"""

import threading
from pathlib import Path

from offbeat.core.layout import Layout, Model
from offbeat.errors import InvalidValue
from offbeat.storage.disk import Disk
from offbeat.wire import body_of, header_of, unpack

KEPT = 2
"""Versions that can be pulled: the newest, and the one before it for those who were just leased it."""


class Versions:
    """The versions of one run; `on_disk` where the rule needs them again."""

    def __init__(self, folder: Path, layout: Layout, disk: Disk, *, on_disk: bool) -> None:
        self.path, self.layout, self.disk, self.on_disk = folder, layout, disk, on_disk
        self._lock = threading.Lock()
        self._kept: dict[int, Model] = {}
        if on_disk:
            folder.mkdir(exist_ok=True)

    def add(self, t: int, x: Model) -> None:
        """A version that can be read from now on."""
        if self.on_disk and not self._file(t).exists():
            self.disk.write_whole(self._file(t), [header_of(self.layout), *body_of(x)])
        with self._lock:
            self._kept[t] = x
            for old in sorted(self._kept)[:-KEPT]:
                del self._kept[old]

    def pull(self, t: int) -> Model | None:
        """A version to read; None where it is gone."""
        with self._lock:
            return self._kept.get(t)

    def of(self, tau: int) -> Model:
        """The version that an update started from, for a rule that uses it."""
        kept = self.pull(tau)
        if kept is not None:
            return kept
        try:
            return unpack(self._file(tau).read_bytes(), self.layout).freeze()
        except (OSError, ValueError) as error:
            raise InvalidValue(f"version {tau}, {self._file(tau)}, is missing or damaged: {error}") from error

    def prune(self, needed: set[int], newest: int) -> None:
        """Remove from the disk what nobody will need: whatever is older than `newest` and not among these."""
        for file in self.path.glob("*.safetensors") if self.on_disk else ():
            if file.stem.isdecimal() and int(file.stem) < newest and int(file.stem) not in needed:
                self.disk.remove(file)

    def _file(self, t: int) -> Path:
        return self.path / f"{t}.safetensors"
