"""Owns the heartbeat: a thread that tells the server, over a connection of its own, that a task is still being done.

Rules kept here:
- It beats only while a task is held, and never stops the training because of trouble with the network.
- A lease that was released is let go without a word, for a late update is still judged. One that was revoked is told
  on, for its update would be refused.
- A server that does not know the session any more (it was restarted) is joined again, holding the task.
"""

import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, Self

from offbeat.errors import OffbeatError
from offbeat.worker.answers import Refused, Unreachable
from offbeat.worker.calls import OtherRun
from offbeat.worker.interrupts import STOP
from offbeat.worker.messages import Joined

SHORTEST_S = 0.05
END_S = 1.0
"""How long the end of the thread is waited for."""

Progress = Callable[[], float | None]


class Line(Protocol):
    """What the heartbeat needs of `Calls`."""

    @property
    def joined(self) -> Joined: ...
    def heartbeat(self, task: int, progress: float | None = None) -> None: ...
    def rejoin(self, stale: str, holding: int | None = None) -> Joined: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class Heartbeat:
    """Beats for one worker, one task at a time."""

    def __init__(self, line: Line, revoked: Callable[[int], None]) -> None:
        """`revoked` is told, on the heartbeat's thread, of a task whose update would be refused."""
        self._line, self._revoked = line, revoked
        self._changed = threading.Condition()
        self._task: int | None = None
        self._progress: Progress | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._line.abort()
        self._thread.join(END_S)

    def hold(self, task: int, progress: Progress | None = None) -> None:
        """Beat for this task from now on."""
        with self._changed:
            self._task, self._progress = task, progress
            self._changed.notify()

    def rest(self) -> None:
        """There is no task."""
        with self._changed:
            self._task = None
            self._changed.notify()

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # they are for the main thread, which waits somewhere
        try:
            while (task := self._due()) is not None:
                self._beat(task)
        finally:
            self._line.close()

    def _due(self) -> int | None:
        """The task that was held for one interval; None at the end."""
        with self._changed:
            while not self._closed:
                self._changed.wait_for(lambda: self._closed or self._task is not None)
                task = self._task
                if not self._changed.wait_for(partial(self._over, task), self._every_s()):
                    return task
        return None

    def _over(self, task: int | None) -> bool:
        return self._closed or self._task != task

    def _every_s(self) -> float | None:
        return max(SHORTEST_S, self._line.joined.heartbeat_s) if self._task is not None else None

    def _beat(self, task: int) -> None:
        session = self._line.joined.session
        try:
            progress = None if self._progress is None else self._progress()
            self._line.heartbeat(task, progress)
        except Refused as refused:
            self._answered_no(task, refused, session)
        except OffbeatError:
            pass  # the next beat may get through

    def _answered_no(self, task: int, refused: Refused, session: str) -> None:
        if refused.error == "unknown_session":
            self._join_again(task, session)
        elif refused.status in (403, 404, 410):
            self._let_go(task)
            if refused.error == "revoked":
                self._revoked(task)

    def _join_again(self, task: int, session: str) -> None:
        try:
            self._line.rejoin(session, holding=task)
        except OtherRun:
            self._let_go(task)
            self._revoked(task)
        except (Refused, Unreachable):
            pass  # the worker itself finds out when it pushes

    def _let_go(self, task: int) -> None:
        with self._changed:
            if self._task == task:
                self._task = None
