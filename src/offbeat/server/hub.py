"""Owns the serial heart of the server: one thread that feeds the coordinator, keeps the ledger, and hands out answers.

Rules kept here:
- What happens is an event with the run's time; everything goes through the coordinator in one order.
- Nothing is told to anybody before the ledger has it on the disk. One commit covers all that waited meanwhile.
- The thread never mixes, hashes or writes a model: it would make everybody wait.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from offbeat.errors import OffbeatError
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    EvaluateModel,
    Event,
    Finish,
    Lease,
    MixUpdate,
    PublishVersion,
    Quarantine,
    ReleaseTask,
    SendTask,
    TellFinished,
    TellQuarantined,
    TimePassed,
    UpdateMixed,
    VersionPublished,
    WakeAt,
)
from offbeat.server.clock import Clock
from offbeat.server.mixer import Mixed, Order
from offbeat.storage.ledger import Ledger

WAIT_MAX_S = 3600.0
STUCK_RETRY_S = 1.0
"""How often the ledger is tried again while the disk is full."""
BATCH_MAX = 256
"""Events that one commit covers at most."""

Happened = Callable[[float], Event]
"""An event, once it is known when it happened."""


class Stuck(OffbeatError):
    """The ledger cannot be written now: nothing can be decided, and nobody is told anything until it can."""


class Effects(Protocol):
    """What the hub makes happen; each is called on its thread, must not block, and comes after the commit."""

    def mix(self, order: Order) -> None: ...
    def lease(self, lease: Lease) -> None: ...
    def released(self, lease: Lease) -> None: ...
    def finished_worker(self, worker: int) -> None: ...
    def quarantined_worker(self, worker: int, why: str) -> None: ...
    def evaluate(self, t: int) -> None: ...
    def published(self, mixed: Mixed) -> None: ...
    def turned(self, events: int) -> None: ...
    def over(self, reason: str) -> None: ...


@dataclass(slots=True)
class Told:
    """Something that happened, and who waits for what came of it."""

    happened: Happened
    answer: "Future[list[Command]]"
    must: bool = False
    """Must be known, if not now then once the ledger can be written again."""


@dataclass(slots=True)
class Asked:
    """A question about the coordinator, and who waits for its answer."""

    question: Callable[[Coordinator], Any]
    answer: "Future[Any]"


Item = Told | Asked | Mixed | BaseException | None
"""What the hub's thread is given; None is the end."""
Outcome = tuple[Told | Mixed | None, list[Command]]
"""What the coordinator answered, and to what."""


class Hub:
    """Feeds the coordinator."""

    def __init__(self, coordinator: Coordinator, ledger: Ledger, clock: Clock, effects: Effects) -> None:
        self.coordinator, self.ledger, self.clock, self.effects = coordinator, ledger, clock, effects
        self.failure: BaseException | None = None
        self.trouble: str | None = None
        """Why nothing can be decided at the moment, if so."""
        self._stop, self._ended = threading.Event(), threading.Event()
        self._putting = threading.Lock()
        """Held while something is put, so that nothing is put behind the end."""
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._wake = coordinator.woken_at
        self._current: Sequence[Item] = ()
        self._late: list[Item] = []
        """Came while the ledger could not be written."""
        self._thread = threading.Thread(target=self._live, name="hub", daemon=True)

    # --- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hurry(self) -> None:
        """The server is about to stop: do not wait for a disk that is full."""
        self._stop.set()

    def stop(self) -> None:
        """Handle what was told, commit, and end."""
        self._stop.set()
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def tell(self, happened: Happened, *, must: bool = False) -> "Future[list[Command]]":
        """Say what happened; the coordinator's answer comes when it is on the disk.

        While the ledger cannot be written this is refused, except for what `must` be known once it can.
        """
        told = Told(happened, Future(), must)
        self._put(told, must=must)
        return told.answer

    def _put(self, item: Item, *, must: bool = False) -> None:
        with self._putting:
            if self.failure is not None:
                raise OffbeatError(f"the server failed: {self.failure}") from self.failure
            if self._ended.is_set():
                raise OffbeatError("the server has stopped")
            if self.trouble is not None and not must:
                raise Stuck(self.trouble)
            self._queue.put(item)

    def fail(self, error: BaseException) -> None:
        """Something else that the run cannot do without has failed."""
        self._queue.put(error)

    def mixed(self, mixed: Mixed) -> None:
        """A pass of the mixer is done."""
        self._queue.put(mixed)

    def ask(self, question: Callable[[Coordinator], Any]) -> "Future[Any]":
        """Look at the coordinator between two events."""
        asked = Asked(question, Future())
        self._put(asked)
        return asked.answer

    # --- the thread --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # the run cannot go on without its heart: whoever waits is told
            self.failure = error
            self._refuse_all(error)
            self.effects.over(f"the server failed: {error}")
        finally:
            with self._putting:
                self._ended.set()
            self._current = ()
            self._refuse_all(OffbeatError("the server has stopped"))

    def _turn(self) -> bool:
        """Handle what waits, commit once, then let it take effect. False when it is time to end."""
        batch = self._current = self._batch()
        outcomes: list[Outcome] = []
        for item in batch:
            outcomes += self._handled(item)
        if self.clock.now() >= self._wake:
            self._wake = inf
            outcomes.append((None, self._handle(TimePassed(self.clock.now()))))
        self._flush()
        for cause, commands in outcomes:
            self._take_effect(cause, commands)
        self.effects.turned(len(outcomes))
        return None not in batch

    def _flush(self) -> None:
        """Commit; where the disk is full, keep what waits and try until there is room, or until the server stops."""
        while True:
            try:
                self.ledger.flush()
            except OffbeatError as error:
                self.trouble = str(error)
                self._refuse_waiting(Stuck(self.trouble))
                self._refuse_queued(Stuck(self.trouble))
                if self._stop.wait(STUCK_RETRY_S):
                    raise
            else:
                self.trouble = None
                return

    def _handled(self, item: Item) -> list[Outcome]:
        match item:
            case Told():
                return [(item, self._handle(item.happened(self.clock.now())))]
            case Mixed():
                return self._mixed_in(item)
            case Asked():
                self._asked(item)
            case BaseException():
                raise item
        return []

    def _take_effect(self, cause: Told | Mixed | None, commands: list[Command]) -> None:
        if isinstance(cause, Mixed):
            self.effects.published(cause)
        for command in commands:
            self._do(command)
        if isinstance(cause, Told):
            with suppress(InvalidStateError):  # whoever asked has gone away
                cause.answer.set_result(commands)

    def _batch(self) -> Sequence[Item]:
        patience = min(max(0.0, self._wake - self.clock.now()), WAIT_MAX_S)
        batch: list[Item] = [*self._late]
        self._late.clear()
        with suppress(Empty):
            if not batch:
                batch.append(self._queue.get(timeout=patience))
            while len(batch) < BATCH_MAX:
                batch.append(self._queue.get_nowait())
        return batch

    def _asked(self, asked: Asked) -> None:
        try:
            asked.answer.set_result(asked.question(self.coordinator))
        except Exception as error:  # whoever asked is told
            asked.answer.set_exception(error)

    def _mixed_in(self, mixed: Mixed) -> list[Outcome]:
        """Publication first: what the mixing makes room for then starts from the new version."""
        at = self.clock.now()
        events: list[Event] = [] if mixed.t is None else [VersionPublished(at, mixed.t)]
        events += [UpdateMixed(at, sequence) for sequence in mixed.sequences]
        commands = [command for event in events for command in self._handle(event)]
        return [(mixed, commands)]

    def _handle(self, event: Event) -> list[Command]:
        commands = self.coordinator.handle(event)
        self.ledger.record(event, commands)
        for command in commands:
            if isinstance(command, WakeAt):
                self._wake = min(self._wake, command.at)
        return commands

    def _do(self, command: Command) -> None:
        match command:
            case MixUpdate() | PublishVersion():
                self.effects.mix(command)
            case SendTask():
                self.effects.lease(command.lease)
            case ReleaseTask():
                self.effects.released(command.lease)
            case TellFinished():
                self.effects.finished_worker(command.worker)
            case TellQuarantined():
                self.effects.quarantined_worker(command.worker, command.why)
            case EvaluateModel():
                self.effects.evaluate(command.t)
            case Finish():
                self.effects.over(command.reason)
            case AnswerPush() | Quarantine() | WakeAt():
                pass

    def _refuse_waiting(self, error: BaseException) -> None:
        """Who waits for a decision that is made but cannot be written is told to come back; it is not unmade."""
        for item in self._current:
            if isinstance(item, Told | Asked) and not item.answer.done():
                item.answer.set_exception(error)

    def _refuse_queued(self, error: BaseException) -> None:
        """What has not been looked at can be refused; what must be known, and what was mixed, waits on."""
        kept: list[Item] = []
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Asked) or (isinstance(item, Told) and not item.must):
                    item.answer.set_exception(error)
                else:
                    kept.append(item)
        self._late.extend(kept)

    def _refuse_all(self, error: BaseException) -> None:
        self._refuse_waiting(error)
        self._refuse_queued(error)
        for item in self._late:
            if isinstance(item, Told) and not item.answer.done():
                item.answer.set_exception(error)
