"""Owns since when workers wait for a task: leases are recorded with it, and nothing is decided by it."""

from typing import Any

SAME_WAIT_S = 5.0
"""A worker whose poll ran out asks again: within this time that is the same wait."""


class Waits:
    """When the workers that wait began to."""

    def __init__(self) -> None:
        self.fleet_at = 0.0
        """When a fleet joined that waits from then on."""
        self._since: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        """When the last request of a worker ended without a task."""

    def begin(self, worker: int, at: float) -> None:
        ended = self._ended.pop(worker, None) if self._ended else None
        if ended is not None and at - ended > SAME_WAIT_S:
            self._since[worker] = at
        else:
            self._since.setdefault(worker, at)

    def end(self, worker: int, at: float) -> None:
        """Its request is over; it may ask again."""
        self._ended[worker] = at

    def end_all(self, at: float) -> None:
        self._ended = dict.fromkeys(self._since, at) | self._ended

    def forget(self, worker: int) -> None:
        self._since.pop(worker, None)
        self._ended.pop(worker, None)

    def granted(self, worker: int) -> float:
        """It has a task now; since when it waited."""
        return self._since.pop(worker, self.fleet_at)

    def state(self) -> list[Any]:
        return [self.fleet_at, list(self._since.items()), list(self._ended.items())]

    def restore(self, state: list[Any]) -> None:
        self.fleet_at, self._since, self._ended = state[0], dict(state[1]), dict(state[2])
