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
import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from offbeat.core.kernel import Updater
from offbeat.core.layout import Carried, Layout, Model, Slot, Vector
from offbeat.core.rules import Rule
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    Decision,
    Lease,
    Outcome,
    ServerRestarted,
    Spent,
    TimePassed,
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
from offbeat.server.versions import BYTES_MAX as VERSIONS_BYTES_MAX
from offbeat.server.versions import VersionGone, Versions
from offbeat.storage.disk import Disk
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision
from offbeat.wire import unload

CHECKPOINT_EVERY = 100
"""Versions between two checkpoints."""
CHECKPOINT_ROWS = 50_000
"""Events after which there is a checkpoint without new versions: a restart goes through all that came after one."""
UPDATES_BYTES_MAX = 20 << 30
EVERYTHING = 1 << 62
ROOM = 8
"""There is a checkpoint whenever the updates since the last fill this part of their room: two later, they can go."""
RETRY_S = 1.0

log = logging.getLogger("offbeat.server")


class Desk(Protocol):
    """Who talks to workers; called on the hub's thread, must not block."""

    def lease(self, lease: Lease) -> None: ...
    def released(self, lease: Lease) -> None: ...
    def finished_worker(self, worker: int) -> None: ...
    def quarantined_worker(self, worker: int, why: str) -> None: ...
    def evaluate(self, t: int, x: Model) -> None: ...
    def published(self, t: int) -> None: ...
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
        versions_bytes_max: int = VERSIONS_BYTES_MAX,
        keep_updates: bool = False,
        drop_damaged: bool = False,
    ) -> None:
        """Go on with the run in this folder, which `begin` made."""
        self.folder, self.rule, self.desk, self.disk = folder, rule, desk, disk or Disk()
        self.layout = layout_from(json.loads((folder / "layout.json").read_bytes()))
        self.updates = Updates(
            folder / "updates", self.layout, self.disk, bytes_max=EVERYTHING if keep_updates else updates_bytes_max
        )
        if self.updates.bytes_max < ROOM * self.updates.size:
            raise InvalidValue(
                f"updates_bytes_max is {updates_bytes_max}, but {ROOM} updates of this model take "
                f"{ROOM * self.updates.size} bytes; give it more room"
            )
        self.versions = Versions(
            folder / "versions",
            self.layout,
            self.disk,
            on_disk=rule.needs_base or rule.needs_distance or plan.gate is not None,
            bytes_max=versions_bytes_max,
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", self.layout, self.disk)
        self.ledger = Ledger.open(folder / "ledger.sqlite", durable=True)
        self.ledger.on_commit = lambda: self.disk.committed(self.ledger.path)
        self.updater = Updater(threads)
        self.updater.warm()
        self.keep_updates = keep_updates
        self._every, self._checkpointing = checkpoint_every, threading.Event()
        self._checkpointed = self._rows = self._bytes = 0
        self._marked = -1
        self._stopping = threading.Event()
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
        self._stood = (self.mixer.w, self.mixer.x)
        self.updates.tidy({d.lease.task for d in decisions_of(self.ledger, self.updates.tasks())})
        self.versions.add(self.coordinator.t, self.mixer.x)
        self.clock = clock_of(self.coordinator.at)
        self.hub = Hub(self.coordinator, self.ledger, self.clock, self)
        for decision in found.lost:
            self.ledger.record_lost(self.clock.now(), decision.lease.task, decision.sequence)
        self.ledger.flush()
        self._waiting = found.waiting

    def start(self) -> None:
        """Let time go on: who waited before the restart is gone, and every open lease has its time anew."""
        self.mixer.start()
        self.hub.tell(ServerRestarted, must=True)
        for order in self._waiting:
            self.mixer.put(order)
        self.hub.start()

    def stop(self) -> None:
        """Finish what was begun, keep a checkpoint, and close."""
        self._stopping.set()
        self.mixer.stop()
        self.hub.stop()
        if self._writer is not None:
            self._writer.join()
        if self.hub.failure is None and not self._between_versions():
            with suppress(OSError):  # without it, a restart redoes a little more
                self.checkpoints.write(self._checkpoint())
                self.checkpoints.prune()
        self.updater.close()
        self.ledger.close()

    def _mixer(self, checkpoint: Checkpoint) -> Mixer:
        return Mixer(checkpoint.w, checkpoint.x, self.updater, self._update, self.versions.of, self._pass_done)

    def _update(self, task: int) -> Model:
        return self.updates.mapped(task)

    # --- pushes ------------------------------------------------------------------------------------------------------

    def push(
        self, worker: int, task: int, samples: int, gradients: int, digest: str, spent: Spent | None = None
    ) -> "Future[list[Command]]":
        """A whole update lies on the disk: look at it here, let it be decided on there. Blocks while it looks."""
        try:
            update = self.updates.mapped(task)
        except InvalidValue:
            self.updates.remove({task})
            raise
        lease = self.hub.ask(lambda c: c.book.find(task)[0]).result()
        with ExitStack() as pin:
            if lease is not None:
                pin.enter_context(self.versions.pinned(lease.tau))
            finite, distance, base_gone = self._seen(update, lease)
            answer = self.hub.tell(
                lambda at: UpdateArrived(
                    at, worker, task, samples, gradients, finite, distance, digest, base_gone, spent
                )
            )
            unpin = pin.pop_all()
        answer.add_done_callback(lambda done: self._judged(task, done, unpin))
        return answer

    def _seen(self, update: Model, lease: Lease | None) -> tuple[bool, float | None, bool]:
        """Is it finite, how far is it from x_tau where that matters, and is x_tau gone where it is needed?"""
        x = update.vector
        if lease is None or not self.versions.on_disk:
            return self._finite(x), None, False
        try:
            x_tau = self.versions.of(lease.tau).vector
        except VersionGone:
            return self._finite(x), None, True
        if not self.coordinator.needs_distance:
            return self._finite(x), None, False
        seen = self.updater.measure(x, x_tau, between=lambda: unload([x, x_tau]))
        return seen.finite, seen.distance, False

    def _finite(self, x: Vector) -> bool:
        """Read a few megabytes at a time: many large updates may come at once."""
        return self.updater.finite(x, between=lambda: unload([x]))

    def _judged(self, task: int, done: "Future[list[Command]]", unpin: ExitStack) -> None:
        unpin.close()
        self._forget_refused(task, done)

    def _forget_refused(self, task: int, done: "Future[list[Command]]") -> None:
        if done.exception() is None:
            answer = next(command for command in done.result() if isinstance(command, AnswerPush))
            if answer.outcome not in (Outcome.APPLIED, Outcome.BUSY):
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

    def quarantined_worker(self, worker: int, why: str) -> None:
        """It gets no task."""
        self.desk.quarantined_worker(worker, why)

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
        if mixed.t is not None and not self._added(mixed.t, mixed.x):
            return
        self.hub.mixed(mixed)

    def _added(self, t: int, x: Model) -> bool:
        """Keep a version; where the disk is full, mixing waits until there is room. False where the server stops."""
        while True:
            try:
                self.versions.add(t, x)
            except OSError as error:
                log.warning("version %s cannot be kept: %s", t, error)
                if self._stopping.wait(RETRY_S):
                    return False
            else:
                return True

    def published(self, mixed: Mixed) -> None:
        """A pass is in the ledger."""
        self._stood = (mixed.w, mixed.x)
        if mixed.t is not None:
            self.desk.published(mixed.t)

    def turned(self, events: int) -> None:
        """All that happened so far is in the ledger, and has taken effect: time for a checkpoint?"""
        self._rows += events
        if not self._due() or self._checkpointing.is_set() or self._between_versions():
            return
        if self.ledger.mark() == self._marked:  # another checkpoint of the same moment would not be another one
            self.hub.tell(TimePassed, must=True)
        else:
            self._checkpoint_aside()

    def _due(self) -> bool:
        """After so many versions, or events (a fleet may only ask), or where updates need the room of others."""
        c = self.coordinator
        crowded = self.updates.bytes() - self._bytes >= self.updates.bytes_max // ROOM and c.t > self._checkpointed
        many = c.t - self._checkpointed >= self._every or self._rows >= CHECKPOINT_ROWS
        return many or crowded or self.updates.short

    def _between_versions(self) -> bool:
        """Is a group decided on and not published? That it will be is in no checkpoint."""
        c = self.coordinator
        return bool(c.scheduler.group) and c.t != c.t_decided

    def _checkpoint_aside(self) -> None:
        self._checkpointing.set()
        self.updates.short = False
        self._checkpointed, self._rows, self._bytes = self.coordinator.t, 0, self.updates.bytes()
        checkpoint = self._checkpoint()
        self._marked = checkpoint.mark
        self._writer = threading.Thread(target=self._written, args=(checkpoint,), name="checkpoint", daemon=True)
        self._writer.start()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _checkpoint(self) -> Checkpoint:
        """The state, and the vectors that belong to it: those of the last pass that the coordinator knows of."""
        return Checkpoint(self.ledger.mark(), snapshot(self.coordinator, answers=False), *self._stood)

    def _written(self, checkpoint: Checkpoint) -> None:
        try:
            self._write(checkpoint)
        except Exception as error:  # the one before it is still good
            if not self._stopping.is_set():
                log.warning("a checkpoint cannot be written now: %s", error, exc_info=not isinstance(error, OSError))
        finally:
            self._checkpointing.clear()

    def _write(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.write(checkpoint)
        oldest = self.checkpoints.prune()
        if oldest is not None:
            self._prune(oldest)

    def _prune(self, oldest: int) -> None:
        """Remove the updates and versions that the second-newest checkpoint does not need to be redone from."""
        state = json.loads((self.checkpoints.path / f"{oldest}.json").read_bytes())["state"]
        newest, leased = self.hub.ask(lambda c: (c.t, {lease.tau for lease in c.leases.values()})).result()
        pinned = self.versions.pins()
        with Ledger.open(self.ledger.path, read_only=True) as ledger:  # after leases and pins: what was judged is here
            waiting = ledger.latest_applied(state["applied"] - state["mixed"], state["sequence"])
            since = [d for d in map(as_decision, ledger.rows("decided", after=oldest)) if d.mix is not None]
            if not self.keep_updates:
                needed = {d.lease.task for d in (*waiting, *since)}
                there = decisions_of(ledger, self.updates.tasks() - needed)
                self.updates.remove({d.lease.task for d in there if d.sequence <= state["sequence"]})
        self._bytes = min(self._bytes, self.updates.bytes())
        self.versions.prune({*leased, *pinned, *(d.lease.tau for d in (*waiting, *since))}, newest)
        while self.hub.ask(lambda _: self.ledger.forget_chatter(oldest)).result():
            pass

    def disk_bytes(self) -> int:
        """What updates and versions take, uploads under way included."""
        return self.updates.bytes() + self.versions.bytes()


def decisions_of(ledger: Ledger, tasks: Iterable[int]) -> list[Decision]:
    """The decisions on these tasks that were applied."""
    found = (as_decision(row) for task in tasks for row in ledger.rows("decided", task=task))
    return [decision for decision in found if decision.mix is not None]


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
