"""Owns when a served run has a checkpoint, and what the checkpoints make superfluous.

Rules kept here:
- A checkpoint is taken between two turns of the driver and written on a thread of its own.
- Updates, versions and chatter stay until the second-newest checkpoint can be redone without them.
- No checkpoint is taken between a group's decision and its publication: that it will be published is in none.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from offbeat.core.layout import Vector
from offbeat.core.vectors import Standing, Vectors
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Decision, Lease, TimePassed
from offbeat.protocol.snapshot import snapshot
from offbeat.server.open_troubles import CHECKPOINTS, OpenTroubles
from offbeat.server.served_fold import ServedFold
from offbeat.server.settings import ServerSettings
from offbeat.server.update_store import UpdateStore
from offbeat.server.version_store import VersionStore
from offbeat.storage.checkpoints import NO_CACHES, Checkpoint, Checkpoints
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision

if TYPE_CHECKING:
    from offbeat.server.driver import Driver

EVENTS_MAX = 50_000
"""Events after which there is a checkpoint without new versions: a restart goes through all that came after one."""
ROOM = 8
"""There is a checkpoint whenever the updates since the last fill this part of their room: two later, they can go."""

log = logging.getLogger("offbeat.server")


class Checkpointer:
    """Takes checkpoints of one run; the driver calls `turned` on its thread."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        coordinator: Coordinator,
        ledger: Ledger,
        updates: UpdateStore,
        versions: VersionStore,
        fold: ServedFold,
        vectors: Vectors,
        limits: ServerSettings,
        troubles: OpenTroubles,
    ) -> None:
        self.stood = vectors.standing
        """The vectors after the last pass of the mixer that the coordinator knows of."""
        self._caches = dict(vectors.caches)
        """Likewise those that the rule keeps for devices."""
        self._moved: deque[tuple[int, Vector, Vector]] = deque()
        self._checkpoints, self._coordinator, self._ledger, self._fold = checkpoints, coordinator, ledger, fold
        self._updates, self._versions, self._limits, self._troubles = updates, versions, limits, troubles
        self._t = self._events = self._bytes = 0
        """Where the run stood at the last checkpoint."""
        self._mark = -1
        self._writing, self._stopping = threading.Event(), threading.Event()
        self._writer: threading.Thread | None = None

    # --- on the driver's thread --------------------------------------------------------------------------------------

    def mixed(self, standing: Standing, caches: Mapping[int, Vector]) -> None:
        """The coordinator knows of a pass of the mixer, after which the vectors stand like this."""
        self.stood = standing
        self._caches.update(caches)

    def cache_moved(self, cache: int, before: Vector, after: Vector) -> None:
        """A cache lies on the disk now. Called on the writer's thread."""
        self._moved.append((cache, before, after))

    def turned(self, driver: "Driver") -> None:
        """All that happened so far is in the ledger, and has taken effect: take a checkpoint if one is due."""
        if not self._due(driver.events) or self._writing.is_set() or self._between_versions():
            return
        if self._ledger.mark() == self._mark:  # another checkpoint of the same moment would not be another one
            driver.tell(TimePassed, must=True)
            return
        self._writing.set()
        self._updates.short = False
        self._t, self._events, self._bytes = self._coordinator.t, driver.events, self._updates.bytes()
        checkpoint = self._taken()
        self._mark = checkpoint.mark
        leased = {lease.tau for lease in (*self._coordinator.leases.values(), *self._may_return())}
        self._writer = threading.Thread(
            target=self._write, args=(driver, checkpoint, leased), name="checkpoint", daemon=True
        )
        self._writer.start()

    def _may_return(self) -> list[Lease]:
        """Silent leases that may be opened again: the newest, so that what is kept for them is bounded."""
        c = self._coordinator
        silent = [lease for lease in c.silent.values() if c.dispatcher.may_return(lease, c.at)]
        return silent[-c.plan.in_flight_max :]

    def _due(self, events: int) -> bool:
        """After `every` versions, many events (a fleet may only ask), or where updates need the room of others."""
        published = self._coordinator.t - self._t
        crowded = self._updates.bytes() - self._bytes >= self._updates.bytes_max // ROOM and published > 0
        return (
            published >= self._limits.checkpoint_every
            or events - self._events >= EVENTS_MAX
            or crowded
            or self._updates.short
        )

    def _between_versions(self) -> bool:
        c = self._coordinator
        return bool(c.scheduler.group) and c.t != c.t_decided

    def _taken(self) -> Checkpoint:
        while self._moved:
            cache, before, after = self._moved.popleft()
            if self._caches.get(cache) is before:
                self._caches[cache] = after
        return checkpoint_of(self._coordinator, self._ledger, self._fold, self.stood, dict(self._caches))

    # --- on the writer's thread --------------------------------------------------------------------------------------

    def _write(self, driver: "Driver", checkpoint: Checkpoint, leased: set[int]) -> None:
        try:
            self._checkpoints.write(checkpoint)
            self._troubles.over(CHECKPOINTS)
            oldest = self._checkpoints.prune()
            if oldest is not None:
                self._prune(oldest, checkpoint.state["t"], leased)
                while driver.ask(lambda _: self._ledger.forget_chatter(oldest)).result():
                    pass
        except Exception as error:  # the checkpoint before it is still good
            if not self._stopping.is_set():
                self._note_failure(error)
        finally:
            self._writing.clear()

    def _note_failure(self, error: Exception) -> None:
        what = f"a checkpoint could not be written; the next one will be tried: {error}"
        self._troubles.note(CHECKPOINTS, what)
        if not isinstance(error, OSError):  # no fault of the disk
            log.warning("this is why the checkpoint could not be written:", exc_info=error)

    def _prune(self, oldest: int, t: int, leased: set[int]) -> None:
        """Remove the updates and versions that the second-newest checkpoint does not need to be redone from.

        `t` and `leased` were taken with the newest checkpoint: later leases start from x_t, or from newer versions.
        """
        state = read_json(self._checkpoints.path / f"{oldest}.json")["state"]
        self._versions.note_pins()
        with Ledger.open(self._ledger.path, read_only=True) as ledger:  # what was judged before has its row here
            waiting = ledger.latest_applied(state["applied"] - state["mixed"], state["sequence"])
            since = [d for d in map(as_decision, ledger.rows("decided", after=oldest)) if d.mix is not None]
            if self._limits.keep_updates == "needed":
                needed = {d.lease.task for d in (*waiting, *since)}
                there = applied_of(ledger, self._updates.tasks() - needed)
                self._updates.remove({d.lease.task for d in there if d.sequence <= state["sequence"]})
        self._bytes = min(self._bytes, self._updates.bytes())
        self._versions.prune({*leased, *(d.lease.tau for d in (*waiting, *since))}, t)

    # --- when the driver has stopped ---------------------------------------------------------------------------------

    def hurry(self) -> None:
        """The server stops: a checkpoint that fails from now on is not worth a warning."""
        self._stopping.set()

    def close(self, *, failed: bool) -> None:
        """Wait for the writer and, unless the run has failed, keep a last checkpoint."""
        if self._writer is not None:
            self._writer.join()
        if failed or self._between_versions():
            return
        with suppress(OSError):  # without it, a restart redoes a little more
            self._checkpoints.write(self._taken())
            self._checkpoints.prune()


def checkpoint_of(
    c: Coordinator, ledger: Ledger, fold: ServedFold, stood: Standing, caches: Mapping[int, Vector] = NO_CACHES
) -> Checkpoint:
    """The checkpoint of a run whose ledger, once it is flushed, has all that the coordinator knows."""
    mark = ledger.mark()
    return Checkpoint(mark, snapshot(c, answers=False), stood, ledger.head.hex(), fold.state(), caches)


def applied_of(ledger: Ledger, tasks: Iterable[int]) -> list[Decision]:
    found = (as_decision(row) for task in tasks for row in ledger.rows("decided", task=task))
    return [decision for decision in found if decision.mix is not None]
