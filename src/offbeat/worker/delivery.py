"""Owns the way of an update from the training to the server's disk.

Rules kept here:
- It is on the worker's disk before the first byte of it is sent, and leaves it only when the server has acknowledged it
  or said that it never will.
- An update that is on the disk at the start is pushed first; one of another run is dropped, and the log says so.
- What a training brought for its device is committed when the answer says `applied`, the first time or again, and is
  dropped with the update otherwise.
- An update that is refused because of the worker that sends it stays: with another token it may be pushed yet.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from offbeat.core.layout import Model
from offbeat.digests import SHA256
from offbeat.errors import OffbeatError
from offbeat.task import DeviceState, Trained
from offbeat.worker.api_answers import Acknowledgement, Joined, LeasedTask, RequestRefused
from offbeat.worker.journal import Journal
from offbeat.worker.outbox import Finished, Outbox, OutboxFull
from offbeat.worker.retrying import RetryingClient, Say

APPLIED = "applied"
T = TypeVar("T")


class Delivery:
    def __init__(self, outbox: Outbox, journal: Journal, server: RetryingClient, say: Say) -> None:
        self._outbox, self._journal, self._server, self._say = outbox, journal, server, say
        self.unsent: Finished | None = None
        """The update that the server has not acknowledged."""
        self.folder = outbox.path

    def held(self) -> int | None:
        """The task whose finished update lies on the disk."""
        self.unsent = self._outbox.held()
        self._tell_damages()
        return None if self.unsent is None else self.unsent.task

    def _tell_damages(self) -> None:
        while self._outbox.damages:
            self._say(self._outbox.damages.pop(0))

    def push_held(self, joined: Joined) -> None:
        """Push the update that was on the disk when the worker joined."""
        held = self.unsent
        if held is not None and held.run == joined.run:
            self.push(held, resume=True)
        elif held is not None:
            self._say(f"dropped the update of task {held.task}: it is of run {held.run}, the server has {joined.run}")
            self._outbox.drop(held)
        self.unsent = None

    def keep(
        self,
        run: str,
        lease: LeasedTask,
        model: Model,
        trained: Trained,
        spent: tuple[float, float],
        state: DeviceState | None,
    ) -> Finished:
        """Bring it to the disk, with a digest of the kind that the server takes.

        `spent` are the seconds of the download and of the training; `state` is what the training brought.
        """
        facts = (trained, *spent, self._server.client.digest_kind)
        self.unsent = self._written(
            lambda: self._outbox.keep(run, lease.task, model, *facts, device=lease.device, state=state)
        )
        return self.unsent

    def state_of(self, run: str, device: int) -> DeviceState:
        """What the device keeps from the updates that were applied."""
        state = self._outbox.state_of(run, device)
        self._tell_damages()
        return state

    def push(self, finished: Finished, *, resume: bool = False) -> None:
        """Push until the server has it, or says that it never will."""
        first = iter([resume])
        push, self.unsent = self._server.client.push, finished
        try:
            answer = self._server.answered(lambda: push(self._sendable(finished), resume=next(first, True)))
        except RequestRefused as refused:
            if refused.for_good:
                raise
            self._settled(finished, refused.error or str(refused.status), f"refused: {refused.message}")
        else:
            self._settled(finished, answer.outcome, _words(answer), answer.head)

    def push_quickly(self, seconds: float) -> None:
        """One try to push what is finished, before the worker stops."""
        client, finished = self._server.client, self.unsent
        if finished is None or not client.session or self._server.outages.away:
            return
        client.http.hurry(seconds)
        with suppress(OffbeatError):
            answer = client.push(self._sendable(finished), resume=True)
            self._settled(finished, answer.outcome, _words(answer), answer.head)

    def _sendable(self, finished: Finished) -> Finished:
        """The update with a digest that the server takes: it may be of an earlier version than the one before it."""
        current = self.unsent or finished
        if not self._server.client.takes(current.digest):
            current = self.unsent = self._outbox.redigested(current, SHA256)
        return current

    def _settled(self, finished: Finished, outcome: str, words: str, head: str = "") -> None:
        finished = self.unsent or finished
        self._say(f"pushed {finished.task}: {words}")
        self._written(lambda: self._journal.note(finished.run, finished.task, finished.digest, outcome, head))
        if outcome == APPLIED:
            self._written(lambda: self._outbox.commit(finished))
        self._outbox.drop(finished)
        self.unsent = self._server.task = None
        self._server.progress()

    def _written(self, write: Callable[[], T]) -> T:
        """Write; where there is no room, wait for it."""
        while True:
            try:
                written = write()
            except OutboxFull as error:
                self._server.outages.wait(error)
            else:
                self._server.outages.over()
                return written


def _words(answer: Acknowledgement) -> str:
    alpha_t = "" if answer.alpha_t is None else f", alpha_t {answer.alpha_t:.2g}"
    again = ", as was acknowledged before" if answer.repeated else ""
    return f"mixed as epoch {answer.t}, staleness {answer.staleness}{alpha_t}{again}"
