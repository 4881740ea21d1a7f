"""Owns who is given a task, and when: the scheduler's settings at work on the workers that wait.

Rules kept here:
- As many tasks are in flight as the plan allows, and no device has more of them than it may.
- Groups: the next tasks start when the version of the group before them is published.
- Under `pace` new leases wait rather than let an open one become too stale.
- Where the rule sets the limit of staleness, no task begins whose update would be refused; under Ringmaster, one that
  has become so is revoked.
- A silent worker's first sign of life decides: it gets its lease back if it comes in time and there is room for it;
  else its place was given away, and what it pushes is a late push.
- While the run is paused nothing is granted; a silent worker may still get its own lease back.
- What it does is told as commands; what has been published and queued is told to it.
"""

from collections.abc import Callable, Container
from math import inf

from offbeat.protocol.contribution import Contribution
from offbeat.protocol.idle import Idle
from offbeat.protocol.leases import LeaseBook
from offbeat.protocol.messages import Command, EndSilence, Evaluated, Lease, ReleaseTask, SendTask
from offbeat.protocol.pacing import Group, Pace
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Plateau, Scheduler, Speeds
from offbeat.protocol.shuffled import Shuffled
from offbeat.protocol.waits import SAME_WAIT_S, Waits

Available = Callable[[int, float], bool]
"""Can this waiting worker take a task at this moment? A pure function."""


class Dispatcher:
    """The open leases, the waiting workers, and everything that says which of them gets the next task."""

    def __init__(self, plan: Plan, scheduler: Scheduler, available: Available, seed: int) -> None:
        self.plan, self.scheduler, self.available = plan, scheduler, available
        self.book = LeaseBook(plan.released_kept)
        self.idle = (
            Shuffled(seed, self.device, self._is_at_work)
            if scheduler.choice == "shuffled"
            else Idle(scheduler.choice, seed)
        )
        self.waits = Waits()
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
        self.paused = False
        self.evaluations: list[Evaluated] = []
        """All of them, or the newest where the plan says how many are remembered."""
        self.plateau = scheduler.gamma.start if isinstance(scheduler.gamma, Plateau) else None
        """Where gamma follows a plateau: what it needs of all evaluations so far."""

    # --- workers -----------------------------------------------------------------------------------------------------

    def device(self, worker: int) -> int:
        return self.device_of.get(worker, worker % self.fleet if self.fleet else worker)

    def add_fleet(self, size: int, devices: int | None, at: float, without: Container[int]) -> None:
        """Workers 0..size-1 wait, without those that are quarantined."""
        self.fleet, self.waits.fleet_at = devices, at
        for worker in range(size):
            if worker not in without:
                self._put(worker)

    def wait(self, worker: int, at: float) -> None:
        self.waits.begin(worker, at)
        self._put(worker)

    def _put(self, worker: int) -> None:
        if isinstance(self.idle, Shuffled):
            self.idle.add(worker)
        else:
            self.idle.add(worker, self._mass(worker))

    def end_wait(self, worker: int, at: float) -> None:
        """The worker's request is over; it may ask again."""
        if worker in self.idle:
            self.waits.end(worker, at)
            self.idle.discard(worker)
            self._expect(self.device(worker), at)

    def dismiss(self, worker: int, *, revoked: bool = False) -> list[Command]:
        """The worker no longer waits, and its open or silent lease is released."""
        self.idle.discard(worker)
        self.waits.forget(worker)
        lease = self.book.of_worker(worker)
        if isinstance(self.idle, Shuffled):
            self.idle.forget(self.device(worker))
        return [self.release(lease, revoked=revoked)] if lease else self.give_away(worker, revoked=revoked)

    def _expect(self, device: int, at: float) -> None:
        """The device does not wait for a task now, and will ask for one again: its turn is kept for a while."""
        if isinstance(self.idle, Shuffled):
            self.idle.expect(device, at + SAME_WAIT_S)

    def _is_at_work(self, device: int) -> bool:
        """Will the device be free again? Not before the end of its group, where there are groups."""
        return not self.scheduler.group and self.book.open_on(device) > 0

    def _mass(self, worker: int) -> float:
        return self.contribution.mass.get(self.device(worker), 0.0)

    # --- leases ------------------------------------------------------------------------------------------------------

    def release(self, lease: Lease, *, revoked: bool = False) -> Command:
        """The lease is no longer open; a late push under it is still judged unless it was revoked."""
        self.pace.closed(lease)
        self.book.release(lease, revoked=revoked)
        return ReleaseTask(lease, revoked)

    def give_away(self, worker: int, *, revoked: bool = False) -> list[Command]:
        """The worker does not get its silent lease back."""
        lease = self.book.silent_of(worker)
        if lease is None:
            return []
        self.book.release(lease, revoked=revoked)
        return [EndSilence(lease, resumed=False)]

    def heard_again(self, worker: int, at: float, t: int, t_decided: int, queued: int) -> list[Command]:
        """The worker is there: where it was silent, it gets its lease back, or it was given away."""
        lease = self.book.silent_of(worker)
        if lease is None:
            return []
        if not self._can_resume(lease, at, t, t_decided, queued):
            return self.give_away(worker, revoked=self._is_doomed(lease.tau, t_decided))
        if isinstance(self.idle, Shuffled):
            self.idle.expect(lease.device, at)
        return [EndSilence(self.book.reopen(lease, at + self.plan.hold_s), resumed=True)]

    def may_return(self, lease: Lease, at: float) -> bool:
        """Has a silent lease had less than `lease_s` without a sign of life?"""
        return at < lease.deadline + (self.plan.lease_s - self.plan.hold_s)

    def _can_resume(self, lease: Lease, at: float, t: int, t_decided: int, queued: int) -> bool:
        return (
            self.may_return(lease, at)
            and self._room(t, t_decided)
            and self._is_free(lease.device)
            and not self._is_doomed(lease.tau, t_decided)
            and (not self.scheduler.group or lease.tau == t)
            and self.pace.admits_again(lease, t, queued)
        )

    def close(self, lease: Lease, at: float) -> None:
        self.pace.closed(lease)
        self.book.close(lease)
        self._expect(lease.device, at)

    def renew(self, at: float) -> None:
        """The server was restarted: no worker waits any more, and every open lease has its full time anew."""
        self.idle.clear()
        if isinstance(self.idle, Shuffled):
            self.idle.gather(at + SAME_WAIT_S)
        self.waits.end_all(at)
        for task in self.book.open:
            self.book.extend(task, at + self.plan.hold_s)

    def release_expired(self, at: float) -> list[Command]:
        if at >= self.retry_due:
            self.retry_due = inf
        return [self._expire(lease) for lease in self.book.expired(at)]

    def _expire(self, lease: Lease) -> Command:
        if self.plan.silent_s == inf:
            return self.release(lease)
        self.pace.closed(lease)
        self.book.silence(lease)
        return ReleaseTask(lease, revoked=False, silent=True)

    def is_too_stale(self, lease: Lease, t_decided: int) -> bool:
        """Would its update be refused?"""
        bound = 0 if self.scheduler.group else self.plan.bound()
        return t_decided - lease.tau > bound or self.pace.breaks_promise(lease, t_decided, bound)

    def revoke_useless(self, at: float, t_decided: int) -> list[Command]:
        """A version was decided on: revoke the leases of a group that is over, or all that have become too stale."""
        revoked: list[Lease] = list(self.book.open.values()) if self.scheduler.group else []
        commands: list[Command] = [self.release(lease, revoked=True) for lease in revoked]
        while self.plan.cancels and (oldest := self.book.oldest()) and self.is_too_stale(oldest, t_decided):
            commands.append(self.release(oldest, revoked=True))
            self._expect(oldest.device, at)
        return commands

    # --- triggering --------------------------------------------------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Grant nothing from now on, or go on; while nothing is granted, no lease is to blame that others wait."""
        self.paused = paused
        if paused:
            self.pace.held_back = None

    def next_due(self, at: float) -> float:
        """The next moment at which a lease runs out, a group is due, or workers may be triggered."""
        due = min(self.book.next_deadline(), self.retry_due, self.group.due)
        if self.paused or not self.idle:
            return due
        if self.trigger_due > at:
            due = min(due, self.trigger_due)
        if self.pace.held_back:
            due = min(due, max(self.pace.gives_up_at(), self.trigger_due))
        return due

    def trigger(self, at: float, t: int, t_decided: int, queued: int) -> list[Command]:
        """Give tasks to waiting workers while there is room for more."""
        waiting, held_back = len(self.idle), False
        if self.paused or at < self.trigger_due or not waiting:
            return []
        commands: list[Command] = []
        while waiting and self._room(t, t_decided):
            held_back = not self._paced(at, t, queued, commands)
            worker = None if held_back else self._pick(at)
            if worker is None:
                break
            waiting -= 1
            commands.append(SendTask(self.grant(worker, at, t), self.waits.granted(worker)))
        if waiting and not held_back:
            self.pace.held_back = None  # workers wait for something else; a moment without waiting ones does not count
            if self._room(t, t_decided):
                self.retry_due = min(self.retry_due, self._look_again_at(at))
        if self.scheduler.trigger_every_s:
            self.trigger_due = at + self.scheduler.trigger_every_s
        return commands

    def _pick(self, at: float) -> int | None:
        if isinstance(self.idle, Shuffled):
            return self.idle.pick(lambda worker: self._can_take(worker, at), at)
        return self.idle.pick(lambda worker: self._can_take(worker, at), self._mass)

    def _look_again_at(self, at: float) -> float:
        soon = at + self.plan.retry_after_s
        return self.idle.look_again_at(soon) if isinstance(self.idle, Shuffled) else soon

    def _room(self, t: int, t_decided: int) -> bool:
        if not self.scheduler.group:
            return len(self.book.open) < self.plan.in_flight_max and not self._is_doomed(t, t_decided)
        return t == t_decided and len(self.book.open) + self.group.arrived < self.scheduler.quota

    def _is_doomed(self, tau: int, t_decided: int) -> bool:
        """Would a task from this version be refused already? Then it waits for the version that is on its way."""
        return self.plan.starts_in_time and t_decided - tau > self.plan.bound()

    def _paced(self, at: float, t: int, queued: int, commands: list[Command]) -> bool:
        """Under `pace`: may one more lease be granted? One that has held others back for too long is revoked."""
        while not self.pace.admits(at, t, queued):
            overdue = self.pace.overdue(at)
            if overdue is None:
                return False
            commands.append(self.release(overdue, revoked=True))
        return True

    def _can_take(self, worker: int, at: float) -> bool:
        return self._is_free(self.device(worker)) and self.available(worker, at)

    def _is_free(self, device: int) -> bool:
        """May it have one more task?"""
        limit = 1 if self.scheduler.group else self.plan.tasks_per_device
        if limit is not None and self.book.open_on(device) >= limit:
            return False
        return not self.scheduler.group or device not in self.group.devices

    def grant(self, worker: int, at: float, t: int) -> Lease:
        """A new lease for this worker, whoever chose it."""
        device = self.device(worker)
        if self.scheduler.group:
            self.group.granted(at)
        if isinstance(self.idle, Shuffled):
            self.idle.granted(device)
        gamma = self._gamma(t)
        iterations = self.scheduler.local_iterations(self.speeds.of(device), self.speeds.fastest)
        return self.book.grant(worker, device, t, at, at + self.plan.hold_s, iterations, gamma)

    def evaluated(self, event: Evaluated) -> None:
        self.evaluations.append(event)
        if self.plan.evaluations_kept is not None:
            del self.evaluations[: -self.plan.evaluations_kept]
        if self.plateau is not None and isinstance(self.scheduler.gamma, Plateau):
            self.plateau = self.scheduler.gamma.after(self.plateau, event)

    def _gamma(self, t: int) -> float | None:
        if self.plateau is not None:
            return self.plateau.gamma
        return self.scheduler.gamma(t, self.evaluations) if self.scheduler.gamma else None
