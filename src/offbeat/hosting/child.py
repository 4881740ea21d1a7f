"""Owns child processes: how one is started, spoken to, found dead and ended. The server, the processes executor and
comparisons all start theirs here.

Rules kept here:
- A child is a fresh interpreter, never a fork: torch's threads do not survive a fork. Of the parent's program it
  imports only the function that it runs.
- It starts with one thread, and with a malloc that keeps large blocks instead of handing them back to the system after
  every tensor; on an LSTM that saves a hundred thousand page faults per gradient.
- Ctrl-C and SIGTERM are blocked in it until its function has said what they do: Ctrl-C is for the parent.
- This file is also the program that a child runs, so it imports the standard library only: where Offbeat lies is among
  the first things that the parent sends.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from time import monotonic
from typing import Any

END_S = 5.0
"""What a child that is told to end has time for, before it is killed."""
LOOK_S = 0.5
"""How often a silent child is looked at: a process that it started may hold the connection open when it is dead."""
SIGNALS = {signal.SIGINT, signal.SIGTERM}
STANDARD_ERROR = 2
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
CHILD_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    **dict.fromkeys(THREADS, "1"),
}

importing_script = False
"""Is this a child that imports its parent's script? Then it would start children that do the same, and so on."""


class ChildDied(Exception):
    """The child is gone, or did not answer in time; it must not be asked again."""


class Child:
    """One process that runs `function(connection to the parent, *arguments)`, from its start to its end."""

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        threads: int = 1,
        apart: bool = False,
        folder: Path | None = None,
    ) -> None:
        """`apart` from the terminal: its standard output goes to standard error, and a Ctrl-C does not reach it."""
        if importing_script:
            raise RuntimeError('in a script of your own, put the call under `if __name__ == "__main__":`')
        self.line, theirs = Pipe()
        with theirs, signals_blocked():
            self.process = subprocess.Popen(  # noqa: S603 (this interpreter, this file)
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR if apart else None,
                cwd=folder,
                env={**os.environ, **CHILD_ENVIRONMENT, **dict.fromkeys(THREADS, str(threads))},
                process_group=0 if apart else None,
            )
        with suppress(OSError):  # that a child is dead already is noticed when it is read from
            self.line.send([path or str(Path.cwd()) for path in sys.path])
            self.line.send((function, arguments))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def receive(self, patience_s: float = inf) -> Any:
        """What the child sends next; EOFError where it is dead, TimeoutError where it takes longer than this."""
        until = monotonic() + patience_s
        while not self.line.poll(LOOK_S):
            if not self.alive and not self.line.poll(0):
                raise EOFError
            if monotonic() > until:
                raise TimeoutError
        return self.line.recv()

    def ask(self, verb: str, *arguments: Any, patience_s: float = inf) -> Any:
        """The answer of a child that answers one request after the other."""
        try:
            self.line.send((verb, arguments))
            return self.receive(patience_s)
        except TimeoutError:
            why = f"took more than {patience_s:g} s to {verb}; if it needs that long, allow it more"
            raise ChildDied(why) from None
        except (OSError, EOFError) as error:
            raise ChildDied(f"{self.fate()} when asked to {verb}") from error

    def fate(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        status = self.process.returncode
        if status is None:
            return "no longer answered"
        if status >= 0:
            return f"ended with exit status {status}"
        hint = ", perhaps for want of memory," if status == -signal.SIGKILL else ""
        return f"was killed by {_name(-status)}{hint}"

    def end(self) -> None:
        """Tell it to end, and kill it if it does not; from any thread."""
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def signals_blocked() -> Iterator[None]:
    """In this thread, and in the processes that it starts meanwhile until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def listen_to_signals(on_terminate: Callable[..., None] | None = None) -> None:
    """In a child: Ctrl-C is left to the parent, which ends its children in order; SIGTERM calls this, or ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_terminate or signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def main() -> None:
    """In a child: take the function from the parent and run it."""
    parent: Connection[Any, Any] = Connection(int(sys.argv[1]))
    try:
        sys.path[:] = parent.recv()
        function, arguments = parent.recv()
    except (EOFError, OSError):  # the parent is dead
        return
    function(parent, *arguments)


if __name__ == "__main__":
    main()
