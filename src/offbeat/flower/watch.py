"""Owns real time for a run on Flower: its clock, and the pause between two looks at the Grid.

A Grid can only be asked; it never calls. So whoever uses it has to pause and ask again.
"""

import threading

from offbeat.server.clock import Clock


class Watch:
    """The run's clock, and waiting by it."""

    def __init__(self, begun_at: float) -> None:
        self._clock, self._never = Clock(begun_at), threading.Event()

    def now(self) -> float:
        """Seconds of the run; they never go back."""
        return self._clock.now()

    def wait(self, seconds: float) -> None:
        """Pause."""
        self._never.wait(seconds)
