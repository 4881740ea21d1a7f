"""Owns the way back after a crash: the newest good checkpoint, and everything that the ledger says happened since.

Rules kept here:
- Decisions are redone with the coefficients that were recorded; nothing about them is computed anew.
- The coordinator is led through the recorded events, so leases, queue, scheduler and random choices are as they were.
- An acknowledged update whose file is damaged is data loss: the run does not start until somebody decides about it.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from offbeat.core.rules import Rule
from offbeat.errors import InvalidValue, InvariantBroken, OffbeatError
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Command, Decision, Event, MixUpdate, PublishVersion, UpdateMixed, VersionPublished
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.protocol.snapshot import restored
from offbeat.server.checkpoints import Checkpoint, Checkpoints
from offbeat.server.mixer import Mixer, Order
from offbeat.server.updates import Updates
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_arrival, as_decision, as_event
from offbeat.wire import BadPayload


class Lost(OffbeatError):
    """An acknowledged update cannot be redone."""

    def __init__(self, decision: Decision, path: object, why: str) -> None:
        self.decision = decision
        super().__init__(
            f"the update of task {decision.lease.task} (worker {decision.lease.worker}), mixed as epoch {decision.t}, "
            f"is damaged: {path}: {why}. Restore this file from a copy and start again, or start with --drop-damaged "
            "to go on without it"
        )


class Recovered(NamedTuple):
    """A run as it stood."""

    coordinator: Coordinator
    mixer: Mixer
    waiting: list[Order]
    """Decided on and not mixed yet."""
    lost: list[Decision]
    """Acknowledged updates that were dropped just now, because they are damaged."""


class Redo:
    """Leads a run from a checkpoint through the ledger."""

    def __init__(
        self, checkpoint: Checkpoint, coordinator: Coordinator, mixer: Mixer, updates: Updates, dropped: Collection[int]
    ) -> None:
        """`dropped` are the decisions that are known to be lost."""
        self.checkpoint, self.coordinator, self.mixer, self.updates = checkpoint, coordinator, mixer, updates
        self.dropped, self.lost = set(dropped), list[Decision]()
        self.ledger: Ledger
        self._waiting: deque[Order] = deque()

    def through(self, ledger: Ledger, *, drop_damaged: bool) -> list[Order]:
        """Redo everything after the checkpoint; answers what is decided on and not mixed."""
        self.ledger = ledger
        recorded = {d.sequence: d for d in map(as_decision, ledger.rows("decided")) if d.mix is not None}
        self._waiting.extend(self._unmixed_then(recorded))
        for row in ledger.rows(after=self.checkpoint.mark):
            event = as_event(row)
            if event is not None:
                self._redo(event, recorded, drop_damaged=drop_damaged)
        return list(self._waiting)

    def _unmixed_then(self, recorded: dict[int, Decision]) -> list[Order]:
        """What was decided on and not mixed at the checkpoint: the newest applied decisions that it knew of."""
        c = self.coordinator
        known = [d for sequence, d in sorted(recorded.items()) if sequence <= c.judge.decisions]
        return [MixUpdate(decision) for decision in known[len(known) - c.queued :]]

    def _redo(self, event: Event, recorded: dict[int, Decision], *, drop_damaged: bool) -> None:
        if isinstance(event, VersionPublished):
            while self.mixer_stands_before(event.t):
                self._mix_next(drop_damaged=drop_damaged)
        elif isinstance(event, UpdateMixed):
            while self._waiting and _sequence(self._waiting[0]) <= event.sequence:
                self._mix_next(drop_damaged=drop_damaged)
        for command in self.coordinator.handle(event):
            self._note(command, recorded)

    def mixer_stands_before(self, t: int) -> bool:
        """Is the order that publishes this version still waiting?"""
        return any(_version(order) == t for order in self._waiting)

    def _note(self, command: Command, recorded: dict[int, Decision]) -> None:
        if isinstance(command, MixUpdate):
            decision = recorded.get(command.decision.sequence)
            if decision is None or decision.lease.task != command.decision.lease.task:
                raise InvariantBroken(f"the ledger does not hold decision {command.decision.sequence}: {command}")
            self._waiting.append(MixUpdate(decision))
        elif isinstance(command, PublishVersion):
            self._waiting.append(command)

    def _mix_next(self, *, drop_damaged: bool) -> None:
        order = self._waiting.popleft()
        if isinstance(order, MixUpdate) and order.decision.sequence in self.dropped:
            self._publish_without(order)
            return
        try:
            self._check(order)
            self.mixer.apply([order])
        except InvalidValue as error:
            if not isinstance(order, MixUpdate):
                raise
            if not drop_damaged:
                raise Lost(order.decision, self.updates.whole(order.decision.lease.task), str(error)) from error
            self.lost.append(order.decision)
            self._publish_without(order)

    def _check(self, order: Order) -> None:
        """Are these the bytes that were acknowledged?"""
        if isinstance(order, MixUpdate):
            task = order.decision.lease.task
            wanted = [arrival.digest for arrival in map(as_arrival, self.ledger.rows("arrived", task=task))]
            if self.updates.digest(task) not in wanted:
                raise BadPayload("its contents are not those that were acknowledged")

    def _publish_without(self, order: MixUpdate) -> None:
        if order.decision.mix is not None and order.decision.mix.publish:
            self.mixer.apply([PublishVersion(order.decision.t)])


def recover(
    checkpoints: Checkpoints,
    ledger: Ledger,
    updates: Updates,
    rule: Rule,
    plan: Plan,
    scheduler: Scheduler,
    mixer_of: Callable[[Checkpoint], Mixer],
    *,
    seed: int,
    dropped: Collection[int] = (),
    drop_damaged: bool = False,
) -> Recovered:
    """The run as it stood when it was last on the disk, from the newest checkpoint that is whole."""
    for checkpoint in checkpoints.usable():
        decided = (as_decision(row) for row in ledger.rows("decided") if row.sequence <= checkpoint.mark)
        coordinator = restored(checkpoint.state, rule, plan, scheduler, seed=seed, decided=decided)
        mixer = mixer_of(checkpoint)
        redo = Redo(checkpoint, coordinator, mixer, updates, dropped)
        waiting = redo.through(ledger, drop_damaged=drop_damaged)
        checkpoints.remove_after(checkpoint.mark)
        return Recovered(coordinator, mixer, waiting, redo.lost)
    raise OffbeatError(f"{checkpoints.path} holds no checkpoint that can be read; restore one from a copy")


def _sequence(order: Order) -> float:
    return order.decision.sequence if isinstance(order, MixUpdate) else -1


def _version(order: Order) -> int | None:
    if isinstance(order, PublishVersion):
        return order.t
    return order.decision.t if order.decision.mix is not None and order.decision.mix.publish else None
