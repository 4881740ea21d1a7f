"""Owns the run's own clock: seconds of the run, which stand still while no server runs and never go back."""

import time
from collections.abc import Callable


class Clock:
    """Goes on from where the run stood."""

    def __init__(self, begun_at: float = 0.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._offset = monotonic, begun_at - monotonic()
        self._latest = begun_at

    def now(self) -> float:
        """Never earlier than before."""
        self._latest = max(self._latest, self._monotonic() + self._offset)
        return self._latest
