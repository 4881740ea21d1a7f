"""Owns the versions of a served run that are kept though newer ones are there: the best, and what reached the target.

    kept/T.safetensors         on the disk before the evaluation of version T is in the ledger
    kept/T.mean.safetensors    likewise the averaged model of that moment, where there is one
    best.safetensors           the best one, under a name that does not change

Rules kept here:
- The ledger says which versions are wanted, so a restart finds the right files: those are there before it says so.
- A version that is not wanted any more is removed after the ledger has said so. What a crash leaves over is removed at
  the next start.
"""

import logging
import os
from collections.abc import Set
from pathlib import Path

from offbeat.core.layout import Layout, Model
from offbeat.storage.disk import Disk
from offbeat.storage.run_folder import BEST
from offbeat.storage.sealed_model import mapped_whole, sealed_parts

KEPT = "kept"
MEAN_ENDING = ".mean.safetensors"
log = logging.getLogger("offbeat.server")


class KeptVersions:
    """Called on the thread that evaluates; `of` on any."""

    def __init__(self, folder: Path, layout: Layout, disk: Disk) -> None:
        self.folder, self.path, self.layout, self.disk = folder, folder / KEPT, layout, disk

    def keep(self, t: int, model: Model, mean: Model | None = None) -> None:
        """Bring a version to the disk, and the averaged model with it."""
        self.disk.make_folder(self.path)
        if mean is not None:
            self.disk.write_whole(self._mean_file(t), sealed_parts(mean, {"t": str(t)}))
        self.disk.write_whole(self._file(t), sealed_parts(model, {"t": str(t)}))

    def of(self, t: int) -> Model | None:
        """A version that is kept, mapped; None where it is not, or cannot be read."""
        return self._mapped(self._file(t), t)

    def mean_of(self, t: int) -> Model | None:
        """Likewise the averaged model that was kept with a version."""
        return self._mapped(self._mean_file(t), t)

    def _mapped(self, file: Path, t: int) -> Model | None:
        try:
            return mapped_whole(file, self.layout)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if file.exists():
                log.warning("version %s, which was kept, is damaged: %s; restore it from a copy", t, error)
            return None

    def settle(self, wanted: Set[int], best: int | None) -> None:
        """The ledger says that these are wanted: give the best its name, and remove the others."""
        if best is not None and self._file(best).is_file():
            self._name_best(self._file(best))
        for file in self.path.glob("*.safetensors*") if self.path.is_dir() else ():
            if file.name not in {name for t in wanted for name in (self._file(t).name, self._mean_file(t).name)}:
                self.disk.remove(file)

    def _name_best(self, file: Path) -> None:
        named = self.folder / BEST
        if named.exists() and named.samefile(file):
            return
        link = self.folder / f"{BEST}.link"
        link.unlink(missing_ok=True)
        try:
            os.link(file, link)
        except OSError:  # a file system without links
            self.disk.write_whole(named, [file.read_bytes()])
            return
        self.disk.replace(link, named)
        self.disk.sync_folder(self.folder)

    def _file(self, t: int) -> Path:
        return self.path / f"{t}.safetensors"

    def _mean_file(self, t: int) -> Path:
        return self.path / f"{t}{MEAN_ENDING}"
