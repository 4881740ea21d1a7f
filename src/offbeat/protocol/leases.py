"""Owns the book of leases: who has which task, until when, and which were released and may still be pushed.

A lease is open, silent or released. A silent one has lost its place, because its worker was not heard of, and may be
opened again. The book keeps indexes consistent and decides nothing; that is the coordinator's.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from offbeat.protocol.messages import Lease

SLACK = 256
"""Deadlines of closed leases that the heap may hold before it is built anew."""


class LeaseBook:
    """Open leases by task, worker and device, their deadlines, the silent ones, and the latest released ones."""

    def __init__(self, released_kept: int) -> None:
        self.open: dict[int, Lease] = {}
        """In the order in which they were granted, so that the first has the oldest tau."""
        self.silent: dict[int, Lease] = {}
        """In the order in which they became silent; a worker has at most one, and no open lease then."""
        self.released: OrderedDict[int, tuple[Lease, bool]] = OrderedDict()
        """Released leases, and whether they were revoked: then a late push is refused whatever its staleness."""
        self.deadlines: list[tuple[float, int]] = []
        self.tasks = 0
        """Tasks granted so far; the newest one has this number."""
        self.tasks_of: dict[int, int] = {}
        """Tasks that every device was given so far."""
        self._released_kept = released_kept
        self._task_of: dict[int, int] = {}
        """Of the open or silent lease of every worker that has one."""
        self._open_on: dict[int, int] = {}

    def grant(
        self,
        worker: int,
        device: int,
        tau: int,
        at: float,
        deadline: float,
        local_iterations: int | None = None,
        gamma: float | None = None,
    ) -> Lease:
        number = self.tasks_of.get(device, 0)
        self.tasks, self.tasks_of[device] = self.tasks + 1, number + 1
        lease = Lease(self.tasks, worker, device, number, tau, at, deadline, local_iterations, gamma)
        self._enter(lease)
        return lease

    def _enter(self, lease: Lease) -> None:
        self.open[lease.task] = lease
        self._task_of[lease.worker] = lease.task
        self._open_on[lease.device] = self._open_on.get(lease.device, 0) + 1
        heapq.heappush(self.deadlines, (lease.deadline, lease.task))

    def of_worker(self, worker: int) -> Lease | None:
        return self.open.get(self._task_of.get(worker, 0))

    def silent_of(self, worker: int) -> Lease | None:
        return self.silent.get(self._task_of.get(worker, 0))

    def open_on(self, device: int) -> int:
        return self._open_on.get(device, 0)

    def oldest(self) -> Lease | None:
        """The open lease that started from the oldest version."""
        return next(iter(self.open.values()), None)

    def find(self, task: int) -> tuple[Lease | None, bool]:
        """The lease under which a push of this task is judged, open or released, and whether it was revoked."""
        lease = self.open.get(task) or self.silent.get(task)
        return (lease, False) if lease else self.released.get(task, (None, False))

    def close(self, lease: Lease) -> None:
        """The task is over: answered, expired, revoked or handed back."""
        self.released.pop(lease.task, None)
        if self.silent.pop(lease.task, None) or self._left_open(lease):
            del self._task_of[lease.worker]

    def _left_open(self, lease: Lease) -> bool:
        if self.open.pop(lease.task, None) is None:
            return False
        self._open_on[lease.device] -= 1
        if not self._open_on[lease.device]:
            del self._open_on[lease.device]
        return True

    def release(self, lease: Lease, *, revoked: bool) -> None:
        """Close a lease, but remember it for a late push."""
        self.close(lease)
        self.released[lease.task] = (lease, revoked)
        if len(self.released) > self._released_kept:
            self.released.popitem(last=False)

    def silence(self, lease: Lease) -> None:
        """Take the place of an open lease away, and keep the lease for its worker."""
        self._left_open(lease)
        self.silent[lease.task] = lease

    def reopen(self, lease: Lease, deadline: float) -> Lease:
        """A silent lease has a place again, among the open ones where it was: they are in the order of their grant."""
        del self.silent[lease.task]
        again = replace(lease, deadline=deadline)
        self._enter(again)
        for task in [task for task in self.open if task > lease.task]:
            self.open[task] = self.open.pop(task)
        return again

    def extend(self, task: int, deadline: float) -> None:
        lease = self.open.get(task)
        if lease:
            self.open[task] = replace(lease, deadline=deadline)
            if deadline < lease.deadline:  # the heap would hear of it too late
                heapq.heappush(self.deadlines, (deadline, task))

    def expired(self, at: float) -> list[Lease]:
        """Open leases whose deadline has passed, the earliest first, whatever heartbeats came on the way."""
        passed = {}
        while self.next_deadline() <= at:
            _, task = heapq.heappop(self.deadlines)
            passed[task] = self.open[task]
        return sorted(passed.values(), key=lambda lease: (lease.deadline, lease.task))

    def next_deadline(self) -> float:
        """When the next open lease runs out, whatever heartbeats came on the way; infinity where none is open.

        It is a function of the open leases alone: a restored book answers alike.
        """
        deadlines = self.deadlines
        if len(deadlines) > 2 * len(self.open) + SLACK:
            self.deadlines = deadlines = sorted((lease.deadline, task) for task, lease in self.open.items())
        while deadlines:
            due, task = deadlines[0]
            lease = self.open.get(task)
            if lease is None:
                heapq.heappop(deadlines)
            elif lease.deadline == due:
                return due
            elif lease.deadline > due:  # a heartbeat has moved it
                heapq.heapreplace(deadlines, (lease.deadline, task))
            else:
                heapq.heappop(deadlines)
        return inf

    def state(self, plain: Callable[[Lease], Any]) -> dict[str, Any]:
        return {
            "open": [plain(lease) for lease in self.open.values()],
            "silent": [plain(lease) for lease in self.silent.values()],
            "released": [[plain(lease), revoked] for lease, revoked in self.released.values()],
        }

    def restore(self, state: dict[str, Any], lease_of: Callable[[Any], Lease]) -> None:
        for values in state["open"]:
            self._enter(lease_of(values))
        for lease in map(lease_of, state.get("silent", ())):  # missing in states of before there were silent leases
            self.silent[lease.task], self._task_of[lease.worker] = lease, lease.task
        for values, revoked in state["released"]:
            lease = lease_of(values)
            self.released[lease.task] = (lease, revoked)
