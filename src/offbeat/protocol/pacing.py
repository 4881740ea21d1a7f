"""Owns what new leases wait for: under the policy `pace` an open lease, under a synchronous rule a group of tasks.

Rules kept here:
- `pace`: new leases wait while an open one could otherwise become staler than the bound, but not for ever.
- Groups: a group is given up waiting for at its deadline.
"""

from math import inf
from typing import Any

from offbeat.protocol.leases import LeaseBook
from offbeat.protocol.messages import Lease
from offbeat.protocol.plan import Plan


class Pace:
    """Which open lease holds new ones back, and since when; under the other policies nothing is held back."""

    def __init__(self, plan: Plan, book: LeaseBook) -> None:
        self.held_back: tuple[int, float] | None = None
        """The task that new leases wait for, and the moment since when they wait."""
        self._bound = plan.staleness_max if plan.staleness_policy == "pace" else None
        self._wait_s, self._book = plan.pace_wait_s, book

    def admits(self, at: float, t: int, queued: int) -> bool:
        """Would every lease stay within the bound with one more of them, whatever the order of arrival?"""
        if self._bound is None:
            return True
        oldest = self._book.oldest()
        if oldest is None:
            return queued <= self._bound
        if (t - oldest.tau) + (len(self._book.open) - 1) + queued + 1 <= self._bound:
            self.held_back = None
            return True
        if self.held_back is None or self.held_back[0] != oldest.task:
            self.held_back = (oldest.task, at)
        return False

    def admits_again(self, silent: Lease, t: int, queued: int) -> bool:
        """Would every lease stay within the bound with this silent one among them again?"""
        oldest = self._book.oldest()
        tau = silent.tau if oldest is None else min(silent.tau, oldest.tau)
        return self._bound is None or (t - tau) + len(self._book.open) + queued <= self._bound

    def gives_up_at(self) -> float:
        """When the lease that holds others back has done so for too long; infinity where none does."""
        return self.held_back[1] + self._wait_s if self.held_back else inf

    def overdue(self, at: float) -> Lease | None:
        return self._book.open[self.held_back[0]] if self.held_back and at >= self.gives_up_at() else None

    def closed(self, lease: Lease) -> None:
        if self.held_back and self.held_back[0] == lease.task:
            self.held_back = None

    def breaks_promise(self, late: Lease, t_decided: int, bound: float) -> bool:
        """Would a late push take the place that an open lease was promised?"""
        oldest = self._book.oldest()
        if self._bound is None or oldest is None or late.task in self._book.open:
            return False
        return (t_decided + 1 - oldest.tau) + (len(self._book.open) - 1) > bound


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
        self.arrived += 1
        self.devices.add(device)

    def over(self) -> None:
        """Its version is decided on; the next task begins another."""
        self._begun, self.arrived, self.due = False, 0, inf
        self.devices.clear()

    def state(self) -> list[Any]:
        return [sorted(self.devices), self.arrived, None if self.due == inf else self.due, self._begun]

    def restore(self, state: list[Any]) -> None:
        devices, self.arrived, due, self._begun = state
        self.devices, self.due = set(devices), inf if due is None else due
