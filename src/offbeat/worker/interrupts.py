"""Owns how a worker is interrupted: told to stop by a signal, or by its heartbeat that its task was revoked.

Rules kept here:
- An interruption is raised only where it is allowed: while the worker trains, waits or speaks to the server. What it
  writes to its disk is never left half done. One that comes at another moment is raised at the next that allows it.
- It is not an `Exception`, so that a task's own `except Exception` does not swallow it.
- The second signal ends the process at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, cast

STOP = (signal.SIGINT, signal.SIGTERM)
WAKE = signal.SIGUSR1
"""With this the heartbeat's thread interrupts the main thread, whatever that is doing."""


class WorkerStopped(BaseException):
    """The worker is to stop."""


class Revoked(BaseException):
    """The task that is being trained is not wanted any more."""


class Interrupts:
    """Listens to signals while it is entered; outside the main thread only to `stop`."""

    def __init__(self) -> None:
        self.asked = False
        """Was the worker told to stop?"""
        self._open = False
        self._task: int | None = None
        self._revoked: int | None = None
        self._stopped = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handlers = {**dict.fromkeys(STOP, self._on_stop), WAKE: lambda *_: self._raise_if_due()}
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    # --- to interrupt ------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """From another thread: stop at the next moment that allows it."""
        self.asked = True
        self._stopped.set()

    def revoke(self, task: int) -> None:
        """From another thread: this task is not wanted any more."""
        self._revoked = task
        if self._before:
            signal.pthread_kill(cast(int, threading.main_thread().ident), WAKE)

    def _on_stop(self, number: int, _frame: object) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = True  # not the event: the main thread may hold its lock at this moment
        self._raise_if_due()

    # --- to be interrupted -------------------------------------------------------------------------------------------

    @contextmanager
    def allowed(self, task: int | None = None) -> Iterator[None]:
        """Here `WorkerStopped` may be raised and, while `task` is done, `Revoked`; inner blocks have the same task."""
        before = self._task, self._open
        self._task, self._open = self._task if task is None else task, True
        try:
            self._raise_if_due()
            yield
        finally:
            self._task, self._open = before[0], before[1] and not self.asked

    def wait(self, seconds: float) -> None:
        with self.allowed():
            if self._stopped.wait(seconds):
                raise WorkerStopped

    def _raise_if_due(self) -> None:
        revoked = self._task is not None and self._task == self._revoked
        if self._open and (self.asked or revoked):
            self._open = False  # once is enough: what cleans up is not interrupted again
            raise WorkerStopped if self.asked else Revoked
