"""Owns the vectors of devices that a simulated run keeps on the disk: a file each, mapped, in a temporary folder."""

import tempfile
from pathlib import Path

import numpy as np

from offbeat.core.layout import Vector


class DiskCaches:
    """Takes a vector to the disk and gives it back, mapped; use it as the `kept` of a plane."""

    def __init__(self, beside: Path | None) -> None:
        """The temporary folder lies in `beside`, the run's folder, or where the system has its own."""
        self._folder = tempfile.TemporaryDirectory(prefix="caches-", dir=beside)
        self._files: dict[int, Path] = {}
        self._written = 0

    def __call__(self, cache: int, vector: Vector) -> Vector:
        self._written += 1
        path = Path(self._folder.name) / f"{cache}.{self._written}"
        vector.tofile(path)
        before = self._files.get(cache)
        if before is not None:
            before.unlink()  # what still maps it keeps it
        self._files[cache] = path
        return np.memmap(path, np.float32, mode="r").view(np.ndarray)

    def close(self) -> None:
        self._folder.cleanup()
