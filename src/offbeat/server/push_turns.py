"""Owns the order of pushes where a rule reads what mixing changes: one is looked at when all before it are mixed.

Other rules decide on an update from what it is and from whole numbers. Their pushes are looked at side by side, and
nothing here holds them up.
"""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from offbeat.errors import OffbeatError
from offbeat.protocol.messages import AnswerPush, Command


class PushTurns:
    def __init__(self, in_order: bool, unmixed: Iterable[int], stopping: threading.Event) -> None:
        """`unmixed` are the numbers of decisions that were made before a restart and are still to be mixed."""
        self._in_order, self._stopping = in_order, stopping
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._decided, self._mixed = max(unmixed, default=0), 0
        """The numbers of the latest decision that is to be mixed, and of the latest that is."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other push is being looked at and everything that was decided is mixed."""
        if not self._in_order:
            yield
            return
        with self._turn:
            with self._changed:
                self._changed.wait_for(lambda: self._mixed >= self._decided or self._stopping.is_set())
            if self._stopping.is_set():
                raise OffbeatError("the server has stopped")
            yield

    def decided(self, answer: "Future[list[Command]]") -> None:
        """Wait for the decision on the update whose turn it is; the next one waits for its mixing."""
        if not self._in_order:
            return
        with suppress(Exception):  # the push that waits for the answer tells of it
            for command in answer.result():
                if isinstance(command, AnswerPush) and command.decision is not None and command.decision.mix:
                    self._decided = max(self._decided, command.decision.sequence)

    def mixed(self, sequences: Iterable[int]) -> None:
        """These decisions are mixed. Called on the mixer's thread."""
        with self._changed:
            self._mixed = max(self._mixed, *sequences, 0)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let go of pushes that wait."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
