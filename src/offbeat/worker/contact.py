"""Owns a worker's patience with its server: it is called until it answers, joined again when it forgot, and left.

Rules kept here:
- A server that is away is waited for, without end; what it refuses for good is raised.
- A worker that joins again says which task it holds, so that its lease stays.
- Whoever leaves does not wait for long: the server finds out by itself.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from offbeat.core.layout import Layout, Model
from offbeat.errors import OffbeatError
from offbeat.worker.answers import Refused, Unreachable
from offbeat.worker.backoff import Backoff
from offbeat.worker.download import Patience
from offbeat.worker.heartbeat import Line
from offbeat.worker.interrupts import Interrupts
from offbeat.worker.messages import Acknowledgement, Answer, Joined, Lease
from offbeat.worker.outbox import Finished
from offbeat.worker.trouble import Say, Trouble

LEAVE_S, AWAY_S = 2.0, 1.0
"""How long handing back and saying goodbye may take; and how long where the server did not answer a moment ago."""
REJOINS_MAX = 20
"""Times that a worker joins again without having done anything in between."""

T = TypeVar("T")


class Server(Protocol):
    """What a worker needs of `Calls`."""

    @property
    def session(self) -> str: ...
    def beside(self) -> Line: ...
    def join(self, holding: int | None = None) -> Joined: ...
    def rejoin(self, stale: str, holding: int | None = None) -> Joined: ...
    def ask(self) -> Answer: ...
    def pull(self, lease: Lease, layout: Layout, patience: Patience) -> Model: ...
    def push(self, finished: Finished, *, resume: bool = False) -> Acknowledgement: ...
    def hand_back(self, task: int) -> None: ...
    def leave(self) -> None: ...
    def hurry(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class Contact:
    """Speaks to the server for the main thread."""

    def __init__(self, server: Server, interrupts: Interrupts, backoff: Callable[[], Backoff], say: Say) -> None:
        self.server, self.interrupts, self._say = server, interrupts, say
        self.trouble = Trouble(backoff(), interrupts.wait, say)
        self.task: int | None = None
        """The task that is leased to this worker, as far as it knows."""
        self._pauses = backoff()
        self._rejoins = self._paused = 0

    def answered(self, call: Callable[[], T]) -> T:
        """Call until the server answers."""
        while True:
            stale = self.server.session
            try:
                with self.interrupts.allowed():
                    answer = call()
            except Refused as refused:
                if refused.error == "unknown_session":
                    self._join_again(stale)
                elif refused.for_good or not (refused.temporary or self._stranger(refused)):
                    raise
                else:
                    self.trouble.after(refused)
            except Unreachable as error:
                self.trouble.after(error)
            else:
                self.trouble.over()
                return answer

    def _stranger(self, refused: Refused) -> bool:
        """Does something speak for a server that we know, such as a proxy while the server is restarted?"""
        return bool(self.server.session) and not refused.error

    def _join_again(self, stale: str) -> None:
        self._rejoins += 1
        if self._rejoins > REJOINS_MAX:
            raise OffbeatError("the server forgets this worker time and again; give each its own --name, or token")
        self.pause()
        self.answered(lambda: self.server.rejoin(stale, self.task))
        self._say("joined again: the server did not know this worker any more, or another one has its name")

    def pause(self, *, free: int = 0) -> None:
        """Wait a little, longer each time, until something was done; so many times it costs nothing."""
        self._paused += 1
        if self._paused > free:
            self.interrupts.wait(self._pauses.next())

    def progress(self) -> None:
        """Something was done."""
        self._rejoins = self._paused = 0
        self._pauses.reset()

    def hand_back(self) -> None:
        """The task that is leased will not be done."""
        task = self.task
        if task is not None:
            with suppress(Refused):  # then it is not ours any more
                self.answered(lambda: self.server.hand_back(task))
        self.task = None

    def goodbye(self, *, handing_back: bool = False) -> None:
        """Leave, if that is quick."""
        if not self.server.session:
            return
        self.server.hurry(AWAY_S if self.trouble.away else LEAVE_S)
        with suppress(OffbeatError):
            if handing_back and self.task is not None:
                self.server.hand_back(self.task)
            self.server.leave()
