"""Owns a served run: its folder, its parts, and how they start and stop; everything but the network.

    settings.json, ledger.sqlite, summary.json, x.safetensors    as in every run's folder
    layout.json                                                  the shape of the model
    ledger.head                                                  how far the ledger has come
    updates/                                                     what workers pushed: the redo log
    checkpoints/                                                 the newest two
    versions/                                                    where the rule uses x_tau
    kept/, best.safetensors                                      versions that are wanted though newer ones are there

Rules kept here:
- A push is acknowledged after its update, its decision and everything before them are on the disk.
- A restart goes on with the same x_t, leases, queue and random choices, each lease with its full time anew.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path

from offbeat.core.kernel import Updater
from offbeat.core.layout import Model, Vector, layout_from, layout_to
from offbeat.core.vectors import Standing, Vectors
from offbeat.errors import InvalidValue
from offbeat.method import Method
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    Lease,
    MixUpdate,
    Outcome,
    ServerRestarted,
    Spent,
    UpdateArrived,
)
from offbeat.protocol.snapshot import snapshot
from offbeat.server.checkpointing import ROOM, Checkpointer, applied_of
from offbeat.server.driver import Driver, Outside
from offbeat.server.forking import settle_fork
from offbeat.server.kept_versions import KeptVersions
from offbeat.server.mixer import Mixed, Mixer
from offbeat.server.open_troubles import VERSIONS, OpenTroubles
from offbeat.server.push_turns import PushTurns
from offbeat.server.recovery import Redo, recover
from offbeat.server.served_fold import ServedFold
from offbeat.server.settings import ServerSettings
from offbeat.server.update_store import NO_LIMIT, UpdateStore
from offbeat.server.version_store import VersionGone, VersionStore
from offbeat.storage.backup_marker import BackupMarker
from offbeat.storage.checkpoints import Checkpoint, Checkpoints
from offbeat.storage.disk import Disk
from offbeat.storage.head_file import HeadFile, read_head
from offbeat.storage.json_file import read_json, sealed
from offbeat.storage.ledger import Ledger, Observer
from offbeat.storage.rows import lost_row
from offbeat.wire import unload

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Observers:
    """Functions that hear what a run does, on the thread that does it; they must not block."""

    on_written: tuple[Observer, ...] = ()
    on_pass: Callable[[int, float], None] = lambda _updates, _seconds: None
    """Of the mixer: how many updates, how long it took."""
    on_synced: Callable[[float], None] = lambda _seconds: None
    """How long it took to bring an update to the disk."""


class ServedRun:
    def __init__(
        self,
        folder: Path,
        method: Method,
        limits: ServerSettings,
        outside: Outside,
        *,
        observers: Observers | None = None,
        fold: ServedFold | None = None,
        disk: Disk | None = None,
        drop_damaged: bool = False,
        accept_loss: bool = False,
        troubles: OpenTroubles | None = None,
        fork: BackupMarker | None = None,
        caches_on_disk: bool = False,
    ) -> None:
        """Go on with the run in this folder, which `begin` made; nothing moves before `start`.

        `fork` where it is a backup that goes on as a run of its own; `caches_on_disk` where the vectors that a rule
        keeps for devices leave memory as soon as a checkpoint has them.
        """
        self.disk, observers = disk or Disk(), observers or Observers()
        self.troubles = troubles or OpenTroubles()
        self.layout = layout_from(read_json(folder / "layout.json"))
        self.updates = self._update_store(folder, limits, observers)
        self.versions = VersionStore(
            folder / "versions",
            self.layout,
            self.disk,
            on_disk=method.needs_versions,
            bytes_max=limits.versions_bytes_max,
            leased_max=method.plan.in_flight_max,
        )
        self._file = folder / "ledger.sqlite"
        self.fold = fold or ServedFold()
        on_written = (self._committed, self.fold.written, *observers.on_written)
        self.ledger = Ledger.open(self._file, durable=True, observers=on_written)
        self.updater = Updater(limits.updater_threads)
        self.updater.warm()
        self.updates.look = self.updater.largest
        self._stopping = threading.Event()
        self._head_file: HeadFile | None = None
        self._fork, self._caches_on_disk = fork, caches_on_disk
        redo = partial(recover, told=read_head(folder), drop_damaged=drop_damaged, accept_loss=accept_loss)
        self._recover(folder, method, limits, outside, observers, redo)

    @staticmethod
    def begin(folder: Path, x_0: Model, method: Method, disk: Disk) -> None:
        """Make the files of a new run: x_0 is its first checkpoint."""
        disk.write_whole(folder / "layout.json", [sealed(json.dumps(layout_to(x_0.layout)))])
        with Ledger.create(folder / "ledger.sqlite", durable=True, verbose=True):
            pass
        disk.committed(folder / "ledger.sqlite")
        first = Checkpoint(0, snapshot(method.coordinator()), Standing.first(x_0))
        Checkpoints(folder / "checkpoints", x_0.layout, disk).write(first)

    def _update_store(self, folder: Path, limits: ServerSettings, observers: Observers) -> UpdateStore:
        bytes_max = NO_LIMIT if limits.keep_updates == "all" else limits.updates_bytes_max
        updates = UpdateStore(
            folder / "updates", self.layout, self.disk, bytes_max=bytes_max, on_synced=observers.on_synced
        )
        if bytes_max < ROOM * updates.size:
            raise InvalidValue(
                f"updates_bytes_max is {bytes_max}, but {ROOM} updates of this model take {ROOM * updates.size} bytes; "
                "give it more room"
            )
        return updates

    def _recover(
        self,
        folder: Path,
        method: Method,
        limits: ServerSettings,
        outside: Outside,
        observers: Observers,
        redo: Callable[..., Redo],
    ) -> None:
        def mixer_of(found: Checkpoint) -> Mixer:
            places = (self.updates.taken, self.versions.of, self._pass_done, observers.on_pass)
            vectors = Vectors(found.standing, self.updater, method.average, found.caches)
            return Mixer(vectors, *places)

        checkpoints = Checkpoints(folder / "checkpoints", self.layout, self.disk)
        found = redo(checkpoints, self.ledger, self.updates, method, mixer_of, self.fold)
        self.coordinator, self.mixer, self._waiting = found.coordinator, found.mixer, found.waiting
        self._head_file = HeadFile(folder, self.disk)
        if self._fork is not None:
            settle_fork(folder, self._fork, self.coordinator, self.ledger, self.fold, self.disk)
        self.updates.tidy({d.lease.task for d in applied_of(self.ledger, self.updates.tasks())})
        self.versions.add(self.coordinator.t, self.mixer.x)
        self.kept = KeptVersions(folder, self.layout, self.disk)
        self.kept.settle(self.coordinator.outcome.kept, self.coordinator.outcome.best_t)
        self.checkpointer = Checkpointer(
            *(checkpoints, self.coordinator, self.ledger, self.updates, self.versions, self.fold),
            *(self.mixer.vectors, limits, self.troubles),
        )
        if self._caches_on_disk:
            checkpoints.on_cache_written = self._cache_moved
        unmixed = [order.decision.sequence for order in found.waiting if isinstance(order, MixUpdate)]
        self._turns = PushTurns(self.coordinator.rule.moving, unmixed, self._stopping)
        self.driver = Driver(self.coordinator, self.ledger, self.mixer, self.checkpointer, outside, self.troubles)
        for decision in found.lost:
            self.ledger.add(lost_row(self.driver.clock.now(), decision.lease.task, decision.sequence))
        self.ledger.flush()

    def _cache_moved(self, cache: int, before: Vector, after: Vector) -> None:
        """A checkpoint has this vector: its file takes its place in memory."""
        self.checkpointer.cache_moved(cache, before, after)
        self.mixer.vectors.cache_moved(cache, before, after)

    def _committed(self, _rows: object, last: int, _seconds: float) -> None:
        """Rows are on the disk: note how far the ledger has come."""
        self.disk.committed(self._file)
        if self._head_file is not None:
            self._head_file.note(last, self.ledger.head, self.coordinator.book.tasks)

    def start(self) -> None:
        """Let time go on: no worker waits any more, and every open lease has its time anew."""
        self.mixer.start()
        self.driver.tell(ServerRestarted, must=True)
        for order in self._waiting:
            self.mixer.put(order)
        self.driver.start()

    def stop(self) -> None:
        """Finish what was begun, keep a checkpoint, and close."""
        self._turns.stop()
        self.checkpointer.hurry()
        self.mixer.stop()
        self.driver.stop()
        self.checkpointer.close(failed=self.driver.failure is not None)
        self.updater.close()
        self.ledger.close()
        if self._head_file is not None:
            self._head_file.close()

    # --- pushes ------------------------------------------------------------------------------------------------------

    def push(
        self,
        lease: Lease,
        samples: int,
        gradients: int,
        digest: str,
        spent: Spent | None = None,
        largest: float | None = None,
    ) -> "Future[list[Command]]":
        """The whole update of this lease lies on the disk: look at it here, and let the driver decide on it.

        `largest` is its largest |x|, where that was seen while it came. Blocks while it looks. The future is done when
        the decision is on the disk.
        """
        task = lease.task
        with ExitStack() as pin, self._turns.turn():
            pin.enter_context(self.versions.pinned(lease.tau))
            try:
                finite, distance, base_gone, excess = self._seen(task, lease.tau, largest)
                dots = None if base_gone else self._dots(task, lease.tau)
            except InvalidValue:
                self.updates.remove({task})
                raise
            seen = (samples, gradients, finite, distance, digest, base_gone, spent, excess, dots)
            answer = self.driver.tell(lambda at: UpdateArrived(at, lease.worker, task, *seen))
            unpin = pin.pop_all()
            answer.add_done_callback(lambda done: self._judged(task, done, unpin))
            self._turns.decided(answer)
        return answer

    def _dots(self, task: int, tau: int) -> dict[str, float] | None:
        """The inner products that the rule asks for; all updates before this one are mixed."""
        names = self.coordinator.rule.dots
        if not names:
            return None
        x_new, x_tau = self.updates.mapped(task), self.versions.of(tau)
        read = [x_new.vector, x_tau.vector]
        return self.mixer.vectors.dots(names, x_new, x_tau, between=lambda: unload(read))

    def _seen(self, task: int, tau: int, largest: float | None) -> tuple[bool, float | None, bool, float | None]:
        """Is it finite, how far from x_tau where that matters, is x_tau gone where it is needed, is a value too large?

        Read a few megabytes at a time: many large updates may come at once.
        """
        x_tau, base_gone, plan = None, False, self.coordinator.plan
        if self.versions.on_disk:
            try:
                x_tau = self.versions.of(tau).vector if self.versions.lasts(tau) else None
            except VersionGone:
                x_tau = None
            base_gone = x_tau is None
        if x_tau is None or not self.coordinator.needs_distance:
            if largest is None:
                x = self.updates.mapped(task).vector
                largest = self.updater.largest(x, between=lambda: unload([x]))
            return isfinite(largest), None, base_gone, plan.excess(largest)
        x = self.updates.mapped(task).vector
        distance, largest = self.updater.measured(x, x_tau, between=lambda: unload([x, x_tau]))
        return isfinite(distance), distance, False, plan.excess(largest)

    def _judged(self, task: int, done: "Future[list[Command]]", unpin: ExitStack) -> None:
        unpin.close()
        if done.exception() is None and answer_in(done.result()).outcome not in (Outcome.APPLIED, Outcome.BUSY):
            self.updates.remove({task})

    # --- on the mixer's thread ---------------------------------------------------------------------------------------

    def _pass_done(self, mixed: Mixed | BaseException) -> None:
        """Keep the new version, and only then let the driver know of it."""
        if isinstance(mixed, BaseException):
            self.driver.fail(mixed)
            return
        self._turns.mixed(mixed.sequences)
        if mixed.t is None or self._added(mixed.t, mixed.standing.x):
            self.driver.mixed(mixed)

    def _added(self, t: int, x: Model) -> bool:
        """Keep a version; where the disk is full, mixing waits until there is room. False where the server stops."""
        while True:
            try:
                self.versions.add(t, x)
            except OSError as error:
                what = f"version {t} cannot be written, so mixing waits; make room on the disk: {error}"
                self.troubles.note(VERSIONS, what)
                if self._stopping.wait(RETRY_S):
                    return False
            else:
                self.troubles.over(VERSIONS)
                return True

    # --- for those who look ------------------------------------------------------------------------------------------

    def disk_bytes(self) -> int:
        """What updates and versions take, uploads under way included."""
        return self.updates.bytes() + self.versions.bytes()


def answer_in(commands: list[Command]) -> AnswerPush:
    return next(command for command in commands if isinstance(command, AnswerPush))
