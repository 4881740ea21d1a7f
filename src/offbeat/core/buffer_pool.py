"""Owns memory for vectors that is used again: fresh memory costs as much as the mixing that fills it.

Rule kept here: a buffer is used again when the last view of it is gone, and not before. So nobody gives one back, and a
vector never changes under a reader.
"""

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from offbeat.core.layout import ALIGNMENT, Vector

SPARE_MAX = 1
"""Free buffers that are kept."""


class BufferPool:
    """Aligned vectors of one size."""

    def __init__(self, size: int, spare_max: int = SPARE_MAX) -> None:
        self.size = size
        self._spare: deque[npt.NDArray[np.uint8]] = deque(maxlen=spare_max)

    def take(self) -> Vector:
        """A buffer with arbitrary contents; it comes back by itself."""
        try:
            raw = self._spare.pop()  # one call, as is `append`: a buffer may come back on any thread at any moment
        except IndexError:
            raw = np.empty(4 * self.size + ALIGNMENT, np.uint8)
        begin = -raw.ctypes.data % ALIGNMENT
        # A memoryview between them makes this array, and not `raw`, what every view of it keeps alive.
        vector = np.frombuffer(raw.data[begin : begin + 4 * self.size], np.float32)
        weakref.finalize(vector, self._spare.append, raw).atexit = False
        return vector
