"""A disk that forgets everything that was not brought to it, and tells at every moment what a power cut would leave."""

import re
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from offbeat.storage.disk import Disk

Image = dict[str, bytes]
"""Files by their path below the run's folder."""


class Forgetful(Disk):
    """The real disk, beside what of it would survive."""

    def __init__(self, root: Path, *, keeps_names: bool, moment: Callable[[Image], None]) -> None:
        """`keeps_names`: names survive at once, contents do not. `moment` gets the image after every operation."""
        self.root, self.keeps_names, self.moment = root, keeps_names, moment
        self.lock = threading.RLock()
        self.operation = ""
        """The kind of the last operation: what was done, and to which kind of file."""
        self._next = 0
        self._now: dict[Path, int] = {}
        self._durable_names: dict[Path, dict[str, int]] = {}
        self._durable_contents: dict[int, bytes] = {}
        self._databases: Image = {}

    # --- what happened -----------------------------------------------------------------------------------------------

    def wrote(self, path: Path) -> None:
        with self.lock:
            if path not in self._now:
                self._next += 1
                self._now[path] = self._next
            self._passed("wrote", path)

    def synced(self, path: Path) -> None:
        with self.lock:
            self._durable_contents[self._now[path]] = path.read_bytes()
            self._passed("synced", path)

    def renamed(self, old: Path, new: Path) -> None:
        with self.lock:
            self._now[new] = self._now.pop(old)
            self._passed("renamed", new)

    def removed(self, path: Path) -> None:
        with self.lock:
            self._now.pop(path, None)
            self._passed("removed", path)

    def synced_folder(self, path: Path) -> None:
        with self.lock:
            self._durable_names[path] = {file.name: number for file, number in self._now.items() if file.parent == path}
            self._passed("synced_folder", path)

    def committed(self, path: Path) -> None:
        with self.lock:
            connection = sqlite3.connect(path)
            self._databases[str(path.relative_to(self.root))] = connection.serialize()
            connection.close()
            self._passed("committed", path)

    # --- what would be left ------------------------------------------------------------------------------------------

    def image(self) -> Image:
        """What a power cut would leave now."""
        left = dict(self._databases)
        if self.keeps_names:
            names = dict(self._now)
        else:
            names = {
                folder / name: number for folder, there in self._durable_names.items() for name, number in there.items()
            }
        for path, number in names.items():
            left[str(path.relative_to(self.root))] = self._durable_contents.get(number, b"")
        return left

    def _passed(self, done: str, path: Path) -> None:
        self.operation = f"{done} {re.sub(r'[0-9]+', '#', str(path.relative_to(self.root)))}"
        self.moment(self.image())


def restore(image: Image, folder: Path) -> None:
    """Switch the power on again."""
    for name, contents in image.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
