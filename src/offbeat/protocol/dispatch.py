"""Owns who is given a task, and when: the scheduler's settings at work on the workers that wait.

Rules kept here:
- As many tasks are in flight as the plan allows, and no device has more of them than it may.
- Groups: the next tasks start when the version of the group before them is published.
- Under `pace` new leases wait rather than let an open one become too stale.
- What it does is told as commands; what has been published and queued is told to it.
"""

from collections.abc import Callable, Container, Sequence
from math import inf
from typing import NamedTuple

from offbeat.protocol.contribution import Contribution
from offbeat.protocol.idle import Idle
from offbeat.protocol.leases import LeaseBook
from offbeat.protocol.messages import Command, Evaluated, Lease, ReleaseTask, SendTask
from offbeat.protocol.pacing import Group, Pace
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler, Speeds

Available = Callable[[int, float], bool]
"""Can this waiting worker take a task at this moment? A pure function."""


class Progress(NamedTuple):
    """How far the run has come when workers are triggered."""

    at: float
    t: int
    t_decided: int
    queued: int


class Dispatcher:
    """The open leases, the waiting workers, and everything that says which of them gets the next task."""

    def __init__(self, plan: Plan, scheduler: Scheduler, available: Available, seed: int) -> None:
        self.plan, self.scheduler, self.available = plan, scheduler, available
        self.book = LeaseBook(plan.released_kept)
        self.idle = Idle(scheduler.choice, seed)
        self.pace = Pace(plan, self.book)
        self.group = Group(scheduler.group_deadline_s)
        self.speeds = Speeds()
        self.contribution = Contribution()
        self.device_of: dict[int, int] = {}
        self.fleet: int | None = None
        """Of a fleet that joined at once: worker i serves device i modulo this."""
        self.trigger_due = -inf
        """Nothing is triggered before."""
        self.retry_due = inf
        """There was room and no worker was available: try again then."""

    # --- workers -----------------------------------------------------------------------------------------------------

    def device(self, worker: int) -> int:
        return self.device_of.get(worker, worker % self.fleet if self.fleet else worker)

    def add_fleet(self, size: int, devices: int | None, without: Container[int]) -> None:
        """Workers 0..size-1 wait, without those that are quarantined."""
        self.fleet = devices
        for worker in range(size):
            if worker not in without:
                self.wait(worker)

    def wait(self, worker: int) -> None:
        self.idle.add(worker, self._mass(worker))

    def dismiss(self, worker: int, *, revoked: bool = False) -> list[Command]:
        """The worker no longer waits, and its open lease is released."""
        self.idle.discard(worker)
        lease = self.book.of_worker(worker)
        return [self.release(lease, revoked=revoked)] if lease else []

    def _mass(self, worker: int) -> float:
        return self.contribution.mass.get(self.device(worker), 0.0)

    # --- leases ------------------------------------------------------------------------------------------------------

    def release(self, lease: Lease, *, revoked: bool = False) -> Command:
        """The lease is no longer open; a late push under it is still judged unless it was revoked."""
        self.pace.closed(lease)
        self.book.release(lease, revoked=revoked)
        return ReleaseTask(lease, revoked)

    def close(self, lease: Lease) -> None:
        self.pace.closed(lease)
        self.book.close(lease)

    def renew(self, at: float) -> None:
        """The server was restarted: no worker waits any more, and every open lease has its full time anew."""
        self.idle.clear()
        for task in self.book.open:
            self.book.extend(task, at + self.plan.lease_s)

    def release_expired(self, at: float) -> list[Command]:
        if at >= self.retry_due:
            self.retry_due = inf
        return [self.release(lease) for lease in self.book.expired(at)]

    # --- triggering --------------------------------------------------------------------------------------------------

    def next_due(self, at: float) -> float:
        """The next moment at which a lease runs out, a group is due, or workers may be triggered."""
        due = min(self.book.next_deadline(), self.retry_due, self.group.due)
        if not len(self.idle):
            return due
        trigger = self.trigger_due if self.trigger_due > at else inf
        return min(due, trigger, max(self.pace.gives_up_at(), self.trigger_due))

    def trigger(self, now: Progress, evaluations: Sequence[Evaluated]) -> list[Command]:
        if now.at < self.trigger_due or not len(self.idle):
            return []
        commands: list[Command] = []
        held_back = False
        while len(self.idle) and self._room(now):
            held_back = not self._paced(now, commands)
            worker = None if held_back else self.idle.pick(lambda worker: self._can_take(worker, now.at), self._mass)
            if worker is None:
                break
            commands.append(SendTask(self._grant(worker, now, evaluations)))
        if len(self.idle) and not held_back:
            self.pace.held_back = None  # workers wait for something else; a moment without waiting ones does not count
            if self._room(now):
                self.retry_due = min(self.retry_due, now.at + self.plan.retry_after_s)
        if self.scheduler.trigger_every_s:
            self.trigger_due = now.at + self.scheduler.trigger_every_s
        return commands

    def _room(self, now: Progress) -> bool:
        if not self.scheduler.group:
            return len(self.book.open) < self.plan.in_flight_max
        return now.t == now.t_decided and len(self.book.open) + self.group.arrived < self.scheduler.quota

    def _paced(self, now: Progress, commands: list[Command]) -> bool:
        """Under `pace`: may one more lease be granted? One that has held others back for too long is revoked."""
        while not self.pace.admits(now.at, now.t, now.queued):
            overdue = self.pace.overdue(now.at)
            if overdue is None:
                return False
            commands.append(self.release(overdue, revoked=True))
        return True

    def _can_take(self, worker: int, at: float) -> bool:
        device = self.device(worker)
        limit = 1 if self.scheduler.group else self.plan.tasks_per_device
        if limit is not None and self.book.open_on(device) >= limit:
            return False
        if self.scheduler.group and device in self.group.devices:
            return False
        return self.available(worker, at)

    def _grant(self, worker: int, now: Progress, evaluations: Sequence[Evaluated]) -> Lease:
        device = self.device(worker)
        if self.scheduler.group:
            self.group.granted(now.at)
        gamma = self.scheduler.gamma(now.t, evaluations) if self.scheduler.gamma else None
        iterations = self.scheduler.local_iterations(self.speeds.of(device), self.speeds.fastest)
        return self.book.grant(worker, device, now.t, now.at, now.at + self.plan.lease_s, iterations, gamma)
