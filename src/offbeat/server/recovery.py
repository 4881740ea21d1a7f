"""Owns the way back after a crash: the newest good checkpoint, and everything that the ledger says happened since.

Rules kept here:
- Decisions are redone with the coefficients that were recorded; nothing about them is computed anew.
- The coordinator is led through the recorded events, so leases, queue, scheduler and random choices are as they were.
- An acknowledged update whose file is damaged is data loss: the run does not start until an operator decides about it.
- Only what came after the checkpoint is read, and the decisions before it whose answers are still remembered.
"""

import logging
from collections import deque
from collections.abc import Callable

from offbeat.errors import InvalidValue, InvariantBroken, OffbeatError
from offbeat.method import Method
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    Command,
    Decision,
    Event,
    LossAccepted,
    MixUpdate,
    PublishVersion,
    UpdateMixed,
    VersionPublished,
)
from offbeat.server.continuity import LedgerLoss, LedgerLost, loss_of
from offbeat.server.mixer import Mixer, MixOrder, published_by, without_update
from offbeat.server.served_fold import ServedFold
from offbeat.server.update_store import UpdateStore
from offbeat.storage.checkpoints import Checkpoint, Checkpoints
from offbeat.storage.head_file import LedgerHead
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_arrival, as_decision, as_event
from offbeat.wire import BadPayload

log = logging.getLogger("offbeat.server")


class UpdateLost(OffbeatError):
    """An acknowledged update cannot be redone."""

    def __init__(self, decision: Decision, path: object, why: str) -> None:
        self.decision = decision
        super().__init__(
            f"the update of task {decision.lease.task} (worker {decision.lease.worker}), mixed as epoch {decision.t}, "
            f"is damaged: {path}: {why}. Restore this file from a copy and start again, or start with --drop-damaged "
            "to go on without it"
        )


def recover(
    checkpoints: Checkpoints,
    ledger: Ledger,
    updates: UpdateStore,
    method: Method,
    mixer_of: Callable[[Checkpoint], Mixer],
    fold: ServedFold,
    *,
    told: LedgerHead | None = None,
    drop_damaged: bool = False,
    accept_loss: bool = False,
) -> "Redo":
    """Redo the run from the newest checkpoint that is whole; `told` is how far the ledger had come, if known."""
    checkpoint, marks = checkpoints.newest(), checkpoints.marks()
    if checkpoint.mark != marks[0]:
        log.warning("checkpoint %s is damaged; the run goes on from the one at %s", marks[0], checkpoint.mark)
    loss = loss_of(ledger, checkpoint, told)
    if loss is not None:
        if not accept_loss:
            raise LedgerLost(ledger, loss)
        ledger.truncate_after(loss.holds)
    fold.begin(ledger, checkpoint.mark, checkpoint.totals if loss is None else None)
    decided = ledger.latest_decisions(method.plan.answers_kept, checkpoint.mark)
    coordinator = method.restored(checkpoint.state, decided)
    redo = Redo(coordinator, mixer_of(checkpoint), updates, ledger, checkpoint.mark, drop_damaged=drop_damaged)
    redo.run()
    if loss is not None:
        redo.accept(loss)
    checkpoints.remove_after(checkpoint.mark)
    return redo


class Redo:
    """Leads a coordinator and a mixer through the rows after a mark of the ledger."""

    def __init__(
        self,
        coordinator: Coordinator,
        mixer: Mixer,
        updates: UpdateStore,
        ledger: Ledger,
        mark: int,
        *,
        drop_damaged: bool,
    ) -> None:
        self.coordinator, self.mixer, self.updates, self.ledger, self.mark = coordinator, mixer, updates, ledger, mark
        self._drop_damaged = drop_damaged
        self.lost: list[Decision] = []
        """Acknowledged updates that were dropped just now, because they are damaged."""
        unmixed = ledger.latest_applied(coordinator.queued, coordinator.judge.decisions)
        self.waiting: deque[MixOrder] = deque(map(MixUpdate, unmixed))
        """Decided on and not mixed yet."""
        self._recorded = {d.sequence: d for d in map(as_decision, ledger.rows("decided", after=mark))}
        # one that was dropped before the mark is in the checkpoint, as far as it can be
        self._dropped = {row.decision for row in ledger.rows("lost", after=mark)}

    def run(self) -> None:
        for row in self.ledger.rows(after=self.mark):
            event = as_event(row)
            if event is not None:
                self._redo(event)

    def accept(self, loss: LedgerLoss) -> None:
        """Go on without what is missing: no number of a row or a task is used twice. The next flush records it."""
        c, dropped = self.coordinator, 0
        if loss.holds < self.mark:  # the decisions that the checkpoint's queue consists of may be among what is missing
            dropped = c.queued
            self.waiting.clear()
        self.ledger.go_on_after(loss.row)
        event = LossAccepted(c.at, max({loss.tasks, *self.updates.tasks()}), dropped, loss.what)
        self.ledger.record(event, c.handle(event))

    def _redo(self, event: Event) -> None:
        if isinstance(event, VersionPublished):
            while any(published_by(order) == event.t for order in self.waiting):
                self._mix_next()
        elif isinstance(event, UpdateMixed):
            while self.waiting and _sequence(self.waiting[0]) <= event.sequence:
                self._mix_next()
        for command in self.coordinator.handle(event):
            self._note(command)

    def _note(self, command: Command) -> None:
        if isinstance(command, MixUpdate):
            decision = self._recorded.get(command.decision.sequence)
            if decision is None or decision.mix is None or decision.lease.task != command.decision.lease.task:
                raise InvariantBroken(f"the ledger does not hold decision {command.decision.sequence}: {command}")
            self.waiting.append(MixUpdate(decision))
        elif isinstance(command, PublishVersion):
            self.waiting.append(command)

    def _mix_next(self) -> None:
        order = self.waiting.popleft()
        if isinstance(order, MixUpdate) and order.decision.sequence in self._dropped:
            self._publish_without(order)
            return
        try:
            self._check(order)
            self.mixer.apply([order])
        except InvalidValue as error:
            if not isinstance(order, MixUpdate):
                raise
            if not self._drop_damaged:
                raise UpdateLost(order.decision, self.updates.whole(order.decision.lease.task), str(error)) from error
            self.lost.append(order.decision)
            self._publish_without(order)

    def _check(self, order: MixOrder) -> None:
        """Are these the bytes that were acknowledged?"""
        if isinstance(order, MixUpdate):
            task = order.decision.lease.task
            wanted = [arrival.digest for arrival in map(as_arrival, self.ledger.rows("arrived", task=task))]
            if not self.updates.holds(task, wanted):
                raise BadPayload("its contents are not those that were acknowledged")

    def _publish_without(self, order: MixUpdate) -> None:
        if published_by(order) is not None:
            self.mixer.apply([without_update(order.decision)])


def _sequence(order: MixOrder) -> int:
    return order.decision.sequence if isinstance(order, MixUpdate) else -1
