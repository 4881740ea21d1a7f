"""Owns real time for a run on Flower: its clock, and the pause between two looks at the Grid, which cannot call."""

import threading

from offbeat.server.driver import Clock


class PollingClock:
    """The run's clock, and the pause."""

    def __init__(self, begun_at: float) -> None:
        self._clock, self._never = Clock(begun_at), threading.Event()

    def now(self) -> float:
        """Seconds of the run; they never go back."""
        return self._clock.now()

    def wait(self, seconds: float) -> None:
        self._never.wait(seconds)
