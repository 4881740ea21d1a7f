"""Owns what is known about the devices' speed: seconds per local iteration, from lease to arrival."""

from math import inf
from typing import Any

from offbeat.protocol.messages import Lease


class Speeds:
    """The newest speed of every device, and the fastest ever seen."""

    def __init__(self) -> None:
        self.fastest = inf
        self._seconds: dict[int, float] = {}

    def learn(self, lease: Lease, at: float, gradients: int) -> None:
        """An update arrived; a task that took no time, or did nothing, tells nothing."""
        if gradients and at > lease.granted_at:
            seconds = (at - lease.granted_at) / gradients
            self._seconds[lease.device] = seconds
            self.fastest = min(self.fastest, seconds)

    def of(self, device: int) -> float | None:
        """Seconds per local iteration, once known."""
        return self._seconds.get(device)

    def state(self) -> list[Any]:
        """Everything, as plain numbers."""
        return [None if self.fastest == inf else self.fastest, list(self._seconds.items())]

    def restore(self, state: list[Any]) -> None:
        fastest, seconds = state
        self.fastest, self._seconds = inf if fastest is None else fastest, dict(seconds)
