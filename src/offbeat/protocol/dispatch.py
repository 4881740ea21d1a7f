"""Owns who is given a task, and when: the scheduler's settings at work on the workers that wait.

Rules kept here:
- As many tasks are in flight as the plan allows, and no device has more of them than it may.
- Groups: the next tasks start when the version of the group before them is published.
- Under `pace` new leases wait rather than let an open one become too stale.
- What it does is told as commands; what has been published and queued is told to it.
"""

from collections.abc import Callable, Container, Sequence
from math import inf

from offbeat.protocol.contribution import Contribution
from offbeat.protocol.idle import Idle
from offbeat.protocol.leases import LeaseBook
from offbeat.protocol.messages import Command, Evaluated, Lease, ReleaseTask, SendTask
from offbeat.protocol.pacing import Group, Pace
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler, Speeds

Available = Callable[[int, float], bool]
"""Can this waiting worker take a task at this moment? A pure function."""


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
        if self.trigger_due > at and len(self.idle):
            due = min(due, self.trigger_due)
        if self.pace.held_back and len(self.idle):
            due = min(due, max(self.pace.gives_up_at(), self.trigger_due))
        return due

    def trigger(
        self, at: float, t: int, t_decided: int, queued: int, evaluations: Sequence[Evaluated]
    ) -> list[Command]:
        """Give tasks to waiting workers while there is room for more."""
        waiting, held_back = len(self.idle), False
        if at < self.trigger_due or not waiting:
            return []
        commands: list[Command] = []
        while waiting and self._room(t, t_decided):
            held_back = not self._paced(at, t, queued, commands)
            worker = None if held_back else self.idle.pick(lambda worker: self._can_take(worker, at), self._mass)
            if worker is None:
                break
            waiting -= 1
            commands.append(SendTask(self._grant(worker, at, t, evaluations)))
        if waiting and not held_back:
            self.pace.held_back = None  # workers wait for something else; a moment without waiting ones does not count
            if self._room(t, t_decided):
                self.retry_due = min(self.retry_due, at + self.plan.retry_after_s)
        if self.scheduler.trigger_every_s:
            self.trigger_due = at + self.scheduler.trigger_every_s
        return commands

    def _room(self, t: int, t_decided: int) -> bool:
        if not self.scheduler.group:
            return len(self.book.open) < self.plan.in_flight_max
        return t == t_decided and len(self.book.open) + self.group.arrived < self.scheduler.quota

    def _paced(self, at: float, t: int, queued: int, commands: list[Command]) -> bool:
        """Under `pace`: may one more lease be granted? One that has held others back for too long is revoked."""
        while not self.pace.admits(at, t, queued):
            overdue = self.pace.overdue(at)
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

    def _grant(self, worker: int, at: float, t: int, evaluations: Sequence[Evaluated]) -> Lease:
        device = self.device(worker)
        if self.scheduler.group:
            self.group.granted(at)
        gamma = self.scheduler.gamma(t, evaluations) if self.scheduler.gamma else None
        iterations = self.scheduler.local_iterations(self.speeds.of(device), self.speeds.fastest)
        return self.book.grant(worker, device, t, at, at + self.plan.lease_s, iterations, gamma)
