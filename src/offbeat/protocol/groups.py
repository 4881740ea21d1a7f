"""Owns the synchronous group under way: who is in it, how many have arrived, and when it is given up waiting for."""

from math import inf
from typing import Any


class Group:
    """FedAvg's k tasks that start from one version; nothing happens here under an asynchronous rule."""

    def __init__(self, deadline_s: float | None) -> None:
        self.deadline_s = inf if deadline_s is None else deadline_s
        self.devices: set[int] = set()
        """Devices whose update is in it: none is asked for a second one."""
        self.arrived = 0
        self.due = inf
        self._begun = False

    def granted(self, at: float) -> None:
        """A task of this group was given out; the first one starts its clock."""
        if not self._begun:
            self._begun = True
            self.due = at + self.deadline_s

    def took(self, device: int) -> None:
        """An update of this device is in it."""
        self.arrived += 1
        self.devices.add(device)

    def over(self) -> None:
        """Its version is decided on; the next task begins another."""
        self._begun, self.arrived, self.due = False, 0, inf
        self.devices.clear()

    def state(self) -> list[Any]:
        """Everything, as plain numbers."""
        return [sorted(self.devices), self.arrived, None if self.due == inf else self.due, self._begun]

    def restore(self, state: list[Any]) -> None:
        devices, self.arrived, due, self._begun = state
        self.devices, self.due = set(devices), inf if due is None else due
