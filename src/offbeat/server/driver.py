"""Owns the driver of a served run: one thread that feeds the coordinator, keeps the ledger, and carries out commands.

A turn of the thread takes everything that waits, lets the coordinator handle it, commits once, and only then carries
the commands out: `MixUpdate` goes to the mixer, `SendTask` to the worker that waits for it, and so on, all in `_do`.

Rules kept here:
- What happens is an event with the run's time; all events go through the coordinator in one order.
- Nobody is told anything before the ledger has it on the disk. One commit covers all that waited meanwhile.
- The thread never mixes, hashes or writes a model: every worker would wait for it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, assert_never

from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.protocol import messages
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Command, Event
from offbeat.server.checkpointing import Checkpointer
from offbeat.server.mixer import Mixed, Mixer
from offbeat.server.open_troubles import LEDGER, OpenTroubles
from offbeat.storage.ledger import Ledger

WAIT_MAX_S = 3600.0
STUCK_RETRY_S = 1.0
"""How often the ledger is tried again while the disk is full."""
BATCH_MAX = 256
"""Items that one commit covers at most."""

Happened = Callable[[float], Event]
"""Makes an event of the time at which it happened."""
WorkerCommand = messages.SendTask | messages.TellFinished | messages.TellQuarantined
"""The commands that a worker hears."""


class Stuck(OffbeatError):
    """The ledger cannot be written now: nothing can be decided, and nobody is told anything until it can."""


class PublishedVersion(NamedTuple):
    t: int
    x: Model
    mean: Model | None
    """The averaged model up to it, where there is one."""


class Outside(Protocol):
    """Where commands lead out of the run. Called on the driver's thread, after the commit; must not block."""

    def deliver(self, worker: int, command: WorkerCommand) -> None: ...
    def evaluate(self, version: PublishedVersion) -> None: ...
    def published(self, t: int) -> None: ...
    def over(self, reason: str) -> None: ...


class Clock:
    """Seconds of the run: they go on from where it stood, stand still while no server runs, and never go back."""

    def __init__(self, begun_at: float = 0.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic, self._offset = monotonic, begun_at - monotonic()
        self._latest = begun_at

    def now(self) -> float:
        self._latest = max(self._latest, self._monotonic() + self._offset)
        return self._latest


@dataclass(slots=True)
class Told:
    """Something that happened, and the future of the commands that follow from it."""

    happened: Happened
    answer: "Future[list[Command]]"
    must: bool = False
    """While the ledger cannot be written, this waits instead of being refused."""


@dataclass(slots=True)
class Asked:
    """A question about the coordinator, and the future of its answer."""

    question: Callable[[Coordinator], Any]
    answer: "Future[Any]"
    found: Any = None
    error: Exception | None = None


Item = Told | Asked | Mixed | BaseException | None
"""What the thread is given; an exception is the failure of another thread, None is the end."""


class Driver:
    """Feeds the coordinator on a thread of its own; every public method may be called on any thread."""

    def __init__(
        self,
        coordinator: Coordinator,
        ledger: Ledger,
        mixer: Mixer,
        checkpointer: Checkpointer,
        outside: Outside,
        troubles: OpenTroubles,
    ) -> None:
        self.coordinator, self.ledger, self.clock = coordinator, ledger, Clock(coordinator.at)
        self.failure: BaseException | None = None
        """Why the run cannot go on, if so."""
        self.trouble: str | None = None
        """Why nothing can be decided at the moment, if so."""
        self.events = 0
        self.newest = PublishedVersion(coordinator.t, mixer.x, mixer.vectors.mean)
        """The newest that the ledger knows of."""
        self._mixer, self._checkpointer, self._outside = mixer, checkpointer, outside
        self._troubles = troubles
        self._stop, self._ended = threading.Event(), threading.Event()
        self._putting = threading.Lock()
        """Held while something is put, so that nothing is put behind the end."""
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._late: list[Item] = []
        """Came while the ledger could not be written, and waits for the next turn."""
        self._current: Sequence[Item] = ()
        self._wake = coordinator.woken_at
        self._thread = threading.Thread(target=self._live, name="driver", daemon=True)

    # --- from other threads ------------------------------------------------------------------------------------------

    def tell(self, happened: Happened, *, must: bool = False) -> "Future[list[Command]]":
        """Say what happened; the coordinator's commands come once they are on the disk.

        While the ledger cannot be written this is refused (`Stuck`), unless the event `must` be known once it can.
        """
        told = Told(happened, Future(), must)
        self._put(told, must=must)
        return told.answer

    def ask(self, question: Callable[[Coordinator], Any]) -> "Future[Any]":
        """Look at the coordinator between two events; answered once all that it shows is on the disk."""
        asked = Asked(question, Future())
        self._put(asked)
        return asked.answer

    def mixed(self, mixed: Mixed) -> None:
        self._queue.put(mixed)

    def fail(self, error: BaseException) -> None:
        """A part that the run cannot do without has failed."""
        self._queue.put(error)

    def start(self) -> None:
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

    def _put(self, item: Item, *, must: bool = False) -> None:
        with self._putting:
            if self.failure is not None:
                raise OffbeatError(f"the server failed: {self.failure}") from self.failure
            if self._ended.is_set():
                raise OffbeatError("the server has stopped")
            if self.trouble is not None and not must:
                raise Stuck(self.trouble)
            self._queue.put(item)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.failure = error
            self._refuse_all(error)
            self._outside.over(f"the server failed: {error}")
        finally:
            with self._putting:
                self._ended.set()
            self._current = ()
            self._refuse_all(OffbeatError("the server has stopped"))

    def _turn(self) -> bool:
        """Handle what waits, commit once, then let it take effect. False when it is time to end."""
        batch = self._current = self._batch()
        handled = [(item, self._handled(item)) for item in batch]
        if self.clock.now() >= self._wake:
            self._wake = inf
            handled.append((None, self._handle(messages.TimePassed(self.clock.now()))))
        self._commit()
        for item, commands in handled:
            self._take_effect(item, commands)
        self._checkpointer.turned(self)
        return None not in batch

    def _batch(self) -> Sequence[Item]:
        """Wait for something, or for the moment that the coordinator asked for; then take all that is there."""
        patience = min(max(0.0, self._wake - self.clock.now()), WAIT_MAX_S)
        batch, self._late = self._late, []
        with suppress(Empty):
            if not batch:
                batch.append(self._queue.get(timeout=patience))
            while len(batch) < BATCH_MAX:
                batch.append(self._queue.get_nowait())
        return batch

    def _handled(self, item: Item) -> list[Command]:
        match item:
            case Told():
                return self._handle(item.happened(self.clock.now()))
            case Mixed():
                return self._handle_pass(item)
            case Asked():
                try:
                    item.found = item.question(self.coordinator)
                except Exception as error:  # for the one who asked
                    item.error = error
            case BaseException():
                raise item
        return []

    def _handle_pass(self, mixed: Mixed) -> list[Command]:
        """Publication first: the tasks that the mixing makes room for then start from the new version."""
        at = self.clock.now()
        events: list[Event] = [] if mixed.t is None else [messages.VersionPublished(at, mixed.t)]
        events += [messages.UpdateMixed(at, sequence) for sequence in mixed.sequences]
        return [command for event in events for command in self._handle(event)]

    def _handle(self, event: Event) -> list[Command]:
        commands = self.coordinator.handle(event)
        self.ledger.record(event, commands)
        self.events += 1
        for command in commands:
            if isinstance(command, messages.WakeAt):
                self._wake = min(self._wake, command.at)
        return commands

    def _commit(self) -> None:
        """Commit; where the disk is full, keep what waits and try until there is room, or until the server stops."""
        while True:
            try:
                self.ledger.flush()
            except OffbeatError as error:
                self.trouble = str(error)
                self._troubles.note(LEDGER, f"nothing can be decided: {error}; make room on the disk")
                self._refuse_current(Stuck(self.trouble))
                self._refuse_queued(Stuck(self.trouble))
                if self._stop.wait(STUCK_RETRY_S):
                    raise
            else:
                self.trouble = None
                self._troubles.over(LEDGER)
                return

    # --- after the commit --------------------------------------------------------------------------------------------

    def _take_effect(self, item: Item, commands: list[Command]) -> None:
        if isinstance(item, Mixed):
            self._checkpointer.mixed(item.standing, item.caches)
            if item.t is not None:
                self.newest = PublishedVersion(item.t, item.standing.x, item.standing.mean)
                self._outside.published(item.t)
        for command in commands:
            self._do(command)
        with suppress(InvalidStateError):  # the one who waited has gone away
            if isinstance(item, Told):
                item.answer.set_result(commands)
            elif isinstance(item, Asked):
                item.answer.set_exception(item.error) if item.error else item.answer.set_result(item.found)

    def _do(self, command: Command) -> None:
        """The one place that says what the coordinator's commands do."""
        match command:
            case messages.MixUpdate() | messages.PublishVersion():
                self._mixer.put(command)
            case messages.SendTask():
                self._outside.deliver(command.lease.worker, command)
            case messages.TellFinished() | messages.TellQuarantined():
                self._outside.deliver(command.worker, command)
            case messages.EvaluateModel():
                self._outside.evaluate(self.newest)
            case messages.Finish():
                self._outside.over(command.reason)
            case messages.AnswerPush():
                pass  # the push that waits for this reads it from the commands that it is answered with
            case messages.ReleaseTask() | messages.EndSilence():
                pass  # the worker learns of it with its next heartbeat
            case messages.Quarantine() | messages.WakeAt():
                pass  # the first is for the ledger alone, the second was noted when it was handled
            case _:
                assert_never(command)

    # --- refusing ----------------------------------------------------------------------------------------------------

    def _refuse_current(self, error: BaseException) -> None:
        """The decisions of this turn are made but cannot be written yet: those who wait for them must ask again."""
        for item in self._current:
            if isinstance(item, Told | Asked) and not item.answer.done():
                item.answer.set_exception(error)

    def _refuse_queued(self, error: BaseException) -> None:
        """Refuse what was not handled yet; what must be known, and what was mixed, waits on."""
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
        self._refuse_current(error)
        self._refuse_queued(error)
        for item in self._late:
            if isinstance(item, Told) and not item.answer.done():
                item.answer.set_exception(error)
