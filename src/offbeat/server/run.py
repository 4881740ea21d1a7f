"""Owns a served run: its folder, its coordinator and mixer, its checkpoints; everything but the network.

    settings.json, ledger.sqlite, summary.json, x.safetensors    as in every run's folder
    layout.json                                                  the shape of the model
    updates/                                                     what workers pushed: the redo log
    checkpoints/                                                 the newest two
    versions/                                                    where the rule uses x_tau

Rules kept here:
- A push is acknowledged after its update, its decision and everything before them are on the disk.
- A restart goes on with the same x_t, leases, queue and random choices, each lease with its full time anew.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from offbeat.core.kernel import Updater
from offbeat.core.layout import Carried, Layout, Model, Slot
from offbeat.core.rules import Rule
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    HeartbeatArrived,
    Lease,
    Outcome,
    RequestEnded,
    UpdateArrived,
)
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.protocol.snapshot import snapshot
from offbeat.server.checkpoints import Checkpoint, Checkpoints
from offbeat.server.clock import Clock
from offbeat.server.hub import Hub
from offbeat.server.mixer import Mixed, Mixer, Order
from offbeat.server.recovery import recover
from offbeat.server.updates import Updates
from offbeat.server.versions import Versions
from offbeat.storage.disk import Disk
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision

CHECKPOINT_EVERY = 100
"""Versions between two checkpoints."""
UPDATES_BYTES_MAX = 20 << 30


class Desk(Protocol):
    """Who talks to workers; called on the hub's thread, must not block."""

    def lease(self, lease: Lease) -> None: ...
    def released(self, lease: Lease) -> None: ...
    def finished_worker(self, worker: int) -> None: ...
    def evaluate(self, t: int, x: Model) -> None: ...
    def over(self, reason: str) -> None: ...


class ServedRun:
    """A run on real time."""

    def __init__(
        self,
        folder: Path,
        rule: Rule,
        plan: Plan,
        scheduler: Scheduler,
        desk: Desk,
        *,
        seed: int = 0,
        disk: Disk | None = None,
        clock_of: Callable[[float], Clock] = Clock,
        threads: int = 1,
        checkpoint_every: int = CHECKPOINT_EVERY,
        updates_bytes_max: int = UPDATES_BYTES_MAX,
        drop_damaged: bool = False,
    ) -> None:
        """Go on with the run in this folder, which `begin` made."""
        self.folder, self.rule, self.desk, self.disk = folder, rule, desk, disk or Disk()
        self.layout = layout_from(json.loads((folder / "layout.json").read_bytes()))
        self.updates = Updates(folder / "updates", self.layout, self.disk, bytes_max=updates_bytes_max)
        self.versions = Versions(folder / "versions", self.layout, self.disk, on_disk=rule.needs_base)
        self.checkpoints = Checkpoints(folder / "checkpoints", self.layout, self.disk)
        self.ledger = Ledger.open(folder / "ledger.sqlite", durable=True)
        self.ledger.on_commit = lambda: self.disk.committed(self.ledger.path)
        self.updater = Updater(threads)
        self._every, self._checkpointing = checkpoint_every, threading.Event()
        self._checkpointed = 0
        self._writer: threading.Thread | None = None
        self._recover(rule, plan, scheduler, clock_of, seed=seed, drop_damaged=drop_damaged)

    @staticmethod
    def begin(folder: Path, x_0: Model, rule: Rule, plan: Plan, scheduler: Scheduler, *, seed: int, disk: Disk) -> None:
        """Make the files of a new run: x_0 is its first checkpoint."""
        disk.write_whole(folder / "layout.json", [json.dumps(layout_to(x_0.layout)).encode()])
        with Ledger.create(folder / "ledger.sqlite", durable=True, verbose=True):
            pass
        disk.committed(folder / "ledger.sqlite")
        state = snapshot(Coordinator(rule, plan, scheduler, seed=seed))
        x_0 = x_0.copy().freeze()
        Checkpoints(folder / "checkpoints", x_0.layout, disk).write(Checkpoint(0, state, x_0, x_0))

    # --- beginning ---------------------------------------------------------------------------------------------------

    def _recover(
        self,
        rule: Rule,
        plan: Plan,
        scheduler: Scheduler,
        clock_of: Callable[[float], Clock],
        *,
        seed: int,
        drop_damaged: bool,
    ) -> None:
        dropped = [row.decision for row in self.ledger.rows("lost") if row.decision is not None]
        found = recover(
            *(self.checkpoints, self.ledger, self.updates, rule, plan, scheduler, self._mixer),
            seed=seed,
            dropped=dropped,
            drop_damaged=drop_damaged,
        )
        self.coordinator, self.mixer = found.coordinator, found.mixer
        self.updates.remove_partials()
        self.versions.add(self.coordinator.t, self.mixer.x)
        self.clock = clock_of(self.coordinator.at)
        self.hub = Hub(self.coordinator, self.ledger, self.clock, self)
        for decision in found.lost:
            self.ledger.record_lost(self.clock.now(), decision.lease.task, decision.sequence)
        self._waiting = found.waiting

    def start(self) -> None:
        """Let time go on: who waited before the restart is gone, and every open lease has its time anew."""
        c = self.coordinator
        self.mixer.start()
        for order in self._waiting:
            self.mixer.put(order)
        for worker in c.idle.workers():
            self.hub.tell(lambda at, worker=worker: RequestEnded(at, worker))  # type: ignore[misc]
        for task in list(c.leases):
            self.hub.tell(lambda at, task=task: HeartbeatArrived(at, task))  # type: ignore[misc]
        self.hub.start()

    def stop(self) -> None:
        """Finish what was begun, keep a checkpoint, and close."""
        self.mixer.stop()
        self.hub.stop()
        if self._writer is not None:
            self._writer.join()
        if self.hub.failure is None:
            self._write(self._checkpoint())
        self.updater.close()
        self.ledger.close()

    def _mixer(self, checkpoint: Checkpoint) -> Mixer:
        return Mixer(checkpoint.w, checkpoint.x, self.updater, self._update, self.versions.of, self._pass_done)

    def _update(self, task: int) -> Model:
        return self.updates.mapped(task)

    # --- pushes ------------------------------------------------------------------------------------------------------

    def push(self, worker: int, task: int, samples: int, gradients: int, digest: str) -> "Future[list[Command]]":
        """A whole update lies on the disk: look at it here, let it be decided on there. Blocks while it looks."""
        update = self.updates.mapped(task)
        lease = self.hub.ask(lambda c: c.leases.get(task) or c.released.get(task, (None,))[0]).result()
        reference = None
        if self.rule.needs_distance and lease is not None:
            reference = self.versions.of(lease.tau).vector
        seen = self.updater.measure(update.vector, reference)
        distance = seen.distance if reference is not None else None
        answer = self.hub.tell(
            lambda at: UpdateArrived(at, worker, task, samples, gradients, seen.finite, distance, digest)
        )
        answer.add_done_callback(lambda done: self._forget_refused(task, done))
        return answer

    def _forget_refused(self, task: int, done: "Future[list[Command]]") -> None:
        if done.exception() is None:
            outcome = next(command.outcome for command in done.result() if isinstance(command, AnswerPush))
            if outcome not in (Outcome.APPLIED, Outcome.BUSY):
                self.updates.remove({task})

    # --- what the hub makes happen -----------------------------------------------------------------------------------

    def mix(self, order: Order) -> None:
        """Mix it when its turn comes."""
        self.mixer.put(order)

    def lease(self, lease: Lease) -> None:
        """Tell the worker."""
        self.desk.lease(lease)

    def released(self, lease: Lease) -> None:
        """The worker need not go on."""
        self.desk.released(lease)

    def finished_worker(self, worker: int) -> None:
        """There is nothing more to do for it."""
        self.desk.finished_worker(worker)

    def evaluate(self, t: int) -> None:
        """Measure a version, if it is still there."""
        x = self.versions.pull(t)
        if x is not None:
            self.desk.evaluate(t, x)

    def over(self, reason: str) -> None:
        """The run is finished."""
        self.desk.over(reason)

    def _pass_done(self, mixed: Mixed | BaseException) -> None:
        """On the mixer's thread: a version is there to be read before anybody hears of it."""
        if isinstance(mixed, BaseException):
            self.hub.fail(mixed)
            return
        if mixed.t is not None:
            self.versions.add(mixed.t, mixed.x)
        self.hub.mixed(mixed)

    def published(self, mixed: Mixed) -> None:
        """A pass is in the ledger: time for a checkpoint?"""
        c = self.coordinator
        due = c.t - self._checkpointed >= self._every
        if due and not self._checkpointing.is_set() and (not c.scheduler.group or c.t == c.t_decided):
            self._checkpointed = c.t
            self._checkpointing.set()
            checkpoint = Checkpoint(self.ledger.mark(), snapshot(c), mixed.w, mixed.x)
            self._writer = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint", daemon=True)
            self._writer.start()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self.ledger.mark(), snapshot(self.coordinator), self.mixer.w, self.mixer.x)

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            self.checkpoints.write(checkpoint)
            oldest = self.checkpoints.prune()
            if oldest is not None:
                self._prune(oldest)
        finally:
            self._checkpointing.clear()

    def _prune(self, oldest: int) -> None:
        """Remove the updates and versions that the second-newest checkpoint does not need to be redone from."""
        state = json.loads((self.checkpoints.path / f"{oldest}.json").read_bytes())["state"]
        newest, leased = self.hub.ask(lambda c: (c.t, {lease.tau for lease in c.leases.values()})).result()
        with Ledger.open(self.ledger.path, read_only=True) as ledger:  # after the leases: one pushed by now is here
            applied = [d for d in map(as_decision, ledger.rows("decided")) if d.mix is not None]
        mixed, since = applied[: state["mixed"]], applied[state["mixed"] :]
        self.updates.remove({d.lease.task for d in mixed} & self.updates.tasks())
        self.versions.prune({*leased, *(d.lease.tau for d in since)}, newest)


def layout_to(layout: Layout) -> dict[str, Any]:
    """A layout as JSON."""
    return {
        "slots": layout.slots,
        "carried": layout.carried,
        "tied": layout.tied,
        "parameter_size": layout.parameter_size,
    }


def layout_from(values: dict[str, Any]) -> Layout:
    """A layout from JSON."""
    try:
        slots = tuple(Slot(name, tuple(shape), offset) for name, shape, offset in values["slots"])
        carried = tuple(Carried(name, tuple(shape), dtype) for name, shape, dtype in values["carried"])
        tied = tuple((name, first) for name, first in values["tied"])
        return Layout(slots, carried, tied, values["parameter_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"this is no layout: {error}") from error
