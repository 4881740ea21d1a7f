"""Owns the buffers that versions live in: one that is not read any more is used again instead of made anew.

A buffer is free when the last view of it is gone; pulls, the mixer and an evaluation hold views. So a version
can never change under a reader, and memory follows what is really read.
"""

import threading
import weakref

import numpy as np
import numpy.typing as npt

from offbeat.core.layout import ALIGNMENT, Vector

SPARE_MAX = 1
"""Free buffers that are kept."""


class BufferPool:
    """Buffers of one size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.out = 0
        """Buffers that are in use."""
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.RLock()  # a buffer may come back, by the garbage collector, while one is taken

    def take(self) -> Vector:
        """A buffer with arbitrary contents; it comes back by itself."""
        with self._lock:
            raw = self._spare.pop() if self._spare else np.empty(4 * self.size + ALIGNMENT, np.uint8)
            self.out += 1
        begin = -raw.ctypes.data % ALIGNMENT
        # A memoryview between them makes this array, and not `raw`, what every view of it keeps alive.
        vector = np.frombuffer(raw.data[begin : begin + 4 * self.size], np.float32)
        weakref.finalize(vector, self._back, raw).atexit = False
        return vector

    def _back(self, raw: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            self.out -= 1
            if len(self._spare) < SPARE_MAX:
                self._spare.append(raw)
