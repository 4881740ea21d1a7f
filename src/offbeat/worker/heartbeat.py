"""Owns the heartbeat: a thread that tells the server, over a connection of its own, that a task is still being done.

Rules kept here:
- It beats only while a task is held, and never stops the training because of trouble with the network.
- A task whose lease was released is trained on: a late update is still judged. For one that was revoked, the worker is
  interrupted: its update would be refused.
- A server that does not know the session any more (it was restarted) is joined again, holding the task.
"""

import signal
import threading
from collections.abc import Callable
from time import monotonic
from typing import Self

from offbeat.errors import OffbeatError
from offbeat.worker.api_answers import RequestRefused, Unreachable
from offbeat.worker.api_client import ApiClient, OtherRun
from offbeat.worker.interrupts import STOP

SHORTEST_S = 0.05
END_S = 1.0
"""How long the end of the thread is waited for."""


class Heartbeat:
    def __init__(self, client: ApiClient, revoked: Callable[[int], None]) -> None:
        """`revoked` is told, on the heartbeat's thread, of a task whose update would be refused."""
        self._client, self._revoked = client, revoked
        self._changed = threading.Condition()
        self._task: int | None = None
        self._since: float | None = None
        """When that task was held first, or beaten for last; None before the first."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._client.http.abort()
        self._thread.join(END_S)

    def hold(self, task: int | None) -> None:
        """Beat for this task from now on; for None, not at all."""
        with self._changed:
            first, self._task, self._since = self._since is None, task, monotonic()
            if first:  # later the thread looks by itself, soon enough: to wake it costs more than its heartbeats do
                self._changed.notify()

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # they are for the main thread, which waits somewhere
        try:
            while (task := self._due()) is not None:
                self._beat(task)
        finally:
            self._client.http.close()

    def _due(self) -> int | None:
        """The task that was held for one interval; None at the end."""
        with self._changed:
            while not self._closed:
                if self._since is None:
                    self._changed.wait()
                    continue
                every_s = max(SHORTEST_S, self._client.joined.heartbeat_s)
                left_s = every_s if self._task is None else self._since + every_s - monotonic()
                if left_s <= 0:
                    self._since = monotonic()
                    return self._task
                self._changed.wait(left_s)
        return None

    def _beat(self, task: int) -> None:
        session = self._client.joined.session
        try:
            self._client.heartbeat(task)
        except RequestRefused as refused:
            if refused.error == "unknown_session":
                self._join_again(task, session)
            elif refused.status in (403, 404, 410):
                self._let_go(task, revoked=refused.error == "revoked")
        except OffbeatError:
            pass  # the next beat may get through

    def _join_again(self, task: int, session: str) -> None:
        try:
            self._client.rejoin(session, holding=task)
        except OtherRun:
            self._let_go(task, revoked=True)
        except (RequestRefused, Unreachable):
            pass  # the worker itself finds out when it pushes

    def _let_go(self, task: int, *, revoked: bool) -> None:
        with self._changed:
            if self._task == task:
                self._task = None
        if revoked:
            self._revoked(task)
