"""Owns the processes of a comparison: each runs a share, tells how far it is, and ends when nobody listens.

Rules kept here:
- A child has one line to its parent. When that is closed, because the parent wants to stop or is dead, the child stops
  at its next safe moment and leaves checkpoints.
- Ctrl-C and SIGTERM reach the whole group: a child leaves Ctrl-C to its parent, and stops in order at SIGTERM.
- A child that dies takes its own runs with it, and no others.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

from offbeat.sim.processes import CHILD_ENVIRONMENT, environment
from offbeat.sim.run import Stop
from offbeat.sim.share import Failure, Tell, run_share
from offbeat.sim.spec import Entry
from offbeat.storage.run_folder import SUMMARY

PROGRESS_EVERY_S = 0.5
LISTEN_S = 0.1
"""How long a parent listens before it looks whether it should stop."""
SIGNALS = {signal.SIGINT, signal.SIGTERM}


def run_shares(
    task_spec: str, shares: Sequence[Sequence[Entry]], tell: Tell, *, pictures: bool = False
) -> list[Failure]:
    """Run every share in a process of its own, and return what failed; `tell` is as in `run_share`."""
    with _children(shares) as children:
        for child in children:
            child.send((task_spec, child.share, pictures))
        speaking = [*children]
        while speaking:
            news = wait([child.line for child in speaking], LISTEN_S)
            speaking = [child for child in speaking if child.line not in news or not child.hear()]
            tell(sum(child.far for child in children))
        return [failure for child in children for failure in child.failures]


@contextmanager
def _children(shares: Sequence[Sequence[Entry]]) -> Iterator[list["Child"]]:
    """They are gone when this is left."""
    children: list[Child] = []
    try:
        resource_tracker.ensure_running()  # it lets the signals through when it is started
        with _signals_held(), environment(CHILD_ENVIRONMENT):
            for share in shares:
                children.append(Child(share))  # noqa: PERF401 (those that were started must be known if one is not)
        yield children
    finally:
        _end(children)


def _end(children: Sequence["Child"]) -> None:
    """Hang up and wait for them; whoever interrupts the waiting wants it at once."""
    try:
        for child in children:
            child.line.close()
        for child in children:
            child.process.join()
    except BaseException:
        with _signals_held():
            for child in children:
                child.process.kill()
            for child in children:
                child.process.join()
        raise


@contextmanager
def _signals_held() -> Iterator[None]:
    """Processes that are started here are deaf to Ctrl-C and SIGTERM until they say what they do then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A process that runs a share, as its parent sees it."""

    def __init__(self, share: Sequence[Entry]) -> None:
        context = get_context("spawn")
        self.share, self.far = share, 0.0
        self.failures: list[Failure] = []
        self.line, theirs = context.Pipe()
        self.process = context.Process(target=_live, args=(theirs,))
        self.process.start()
        theirs.close()

    def send(self, what: Any) -> None:
        """Say something; that nobody listens is noticed when the child is heard."""
        with suppress(OSError):
            self.line.send(what)

    def hear(self) -> bool:
        """Take one piece of news. Has the child ended?"""
        try:
            news = self.line.recv()
        except (EOFError, OSError):
            news = self._orphaned()
        match news:
            case float():
                self.far = news
                return False
            case None:  # somebody sent SIGTERM to this child alone
                raise Stop
        self.failures, self.far = news, len(self.share)
        return True

    def _orphaned(self) -> list[Failure]:
        """The runs that a dead child leaves unfinished."""
        self.process.join()
        code = self.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        why = (
            f"its process died ({how}), perhaps for want of memory: try fewer --processes; "
            'in a script of your own, put the call under `if __name__ == "__main__":`'
        )
        return [Failure(run.method, run.seed, why) for run in self.share if not (run.folder / SUMMARY).exists()]


def _live(parent: Connection) -> None:
    """In a child: run a share."""
    asked: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    told = 0.0

    def tell(far: float) -> None:
        nonlocal told
        if asked or parent.poll():  # the parent says nothing more: there is something to read when it hangs up
            raise Stop
        if time.monotonic() - told > PROGRESS_EVERY_S:
            told = time.monotonic()
            _send(parent, float(far))

    try:
        task_spec, share, pictures = parent.recv()
    except (EOFError, OSError):
        return
    try:
        failures: list[Failure] | None = run_share(task_spec, share, tell, pictures=pictures, alone=False)
    except Stop:
        failures = None
    _send(parent, failures)


def _send(parent: Connection, news: Any) -> None:
    with suppress(OSError):  # the parent has hung up; that is noticed the next time
        parent.send(news)
