"""Owns the wait of workers for tasks: the driver's thread decides who gets one, the event loop holds the connections.

Rules kept here:
- Everything runs on the event loop, except `deliver`, which the driver calls on its thread.
- A worker waits in one place: of two requests under one name the older is told that it was superseded.
- A lease is given to an open connection, or handed back.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from offbeat.errors import OffbeatError
from offbeat.protocol.messages import Lease, LeaseReturned, RequestEnded, SendTask, TaskRequested, TellFinished
from offbeat.server.descriptors import stuck_refusal
from offbeat.server.driver import Driver, Happened, Stuck, WorkerCommand
from offbeat.server.refusals import Refusal

MIXING_S = 0.05
"""How long a worker that asks waits for a version that is being mixed: small models take a thousandth of that."""
RETRY_AFTER_S = 5.0
T = TypeVar("T")


class Superseded:
    """A newer request of the same worker waits now."""


News = WorkerCommand | Superseded | None
"""What a worker that waits may hear; None is nothing yet."""


async def answered(ask: Callable[[], "Future[T]"]) -> T:
    """Await the driver's answer on the event loop; while the disk is full, that is a refusal."""
    try:
        future = ask()
        await done(future)
        return future.result()
    except Stuck as error:
        raise stuck_refusal(error) from error


def done(future: "Future[Any]") -> "asyncio.Future[None]":
    """To be awaited until a future of another thread is done; whoever is cancelled meanwhile does not cancel it."""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    future.add_done_callback(lambda _: call_on(loop, _wake, waiter))
    return waiter


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or for this long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """From another thread: call this on the event loop, unless that has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


class LongPoll:
    def __init__(self, loop: asyncio.AbstractEventLoop, driver: Driver) -> None:
        self.stopping = False
        self._loop, self._driver = loop, driver
        self._waiting: dict[int, asyncio.Future[News]] = {}
        self._newer = asyncio.Event()
        """Set when the next version is there."""

    def deliver(self, worker: int, command: WorkerCommand) -> None:
        """On the driver's thread: let the worker hear this, if it waits."""
        call_on(self._loop, self._hear, worker, command)

    # --- on the event loop -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, worker: int, patience_s: float) -> News:
        """Wait for a task; a wait that is cancelled (the connection was closed) leaves nothing behind."""
        if self.stopping:
            raise Refusal("stopping", "the server is being stopped", retry_after_s=2)
        await self._freshest()
        self._hear(worker, Superseded())
        future = self._waiting[worker] = self._loop.create_future()
        try:
            await self._tell(lambda at: TaskRequested(at, worker))
            if not future.done():  # a lease that was there comes before the answer
                await asyncio.wait([future], timeout=patience_s)
            if not future.done():
                await self._tell(lambda at: RequestEnded(at, worker))  # a lease of just before comes before this answer
            news = future.result() if future.done() else None
        except BaseException:
            # Told at once, so that it comes before whatever this worker asks next.
            with suppress(OffbeatError):
                ended = self._driver.tell(lambda at: RequestEnded(at, worker), must=True)
                ended.add_done_callback(lambda _: call_on(self._loop, self._ended, worker, future))
            raise
        self._forget(worker, future)
        return news

    def hand_back(self, lease: Lease) -> None:
        """The connection was closed before the worker heard of the lease."""
        with suppress(OffbeatError):  # the server has failed or stopped: after a restart the worker gets it again
            self._driver.tell(lambda at: LeaseReturned(at, lease.worker, lease.task), must=True)

    def published(self) -> None:
        self._newer.set()
        self._newer = asyncio.Event()

    def finish(self) -> None:
        """The run is over, and every worker that waits hears it."""
        for worker in list(self._waiting):
            self._hear(worker, TellFinished(worker))

    def stop(self) -> None:
        self.stopping = True
        for worker in list(self._waiting):
            self._hear(worker, None)

    async def _tell(self, happened: Happened) -> None:
        await answered(lambda: self._driver.tell(happened))

    async def _freshest(self) -> None:
        """Where an update is being mixed, wait for it a moment: a lease given then starts from what comes out."""
        if self._driver.coordinator.queued:
            await wait_for(self._newer, MIXING_S)

    def _hear(self, worker: int, news: News) -> None:
        future = self._waiting.get(worker)
        if future is not None and not future.done():
            future.set_result(news)

    def _forget(self, worker: int, future: "asyncio.Future[News]") -> None:
        if self._waiting.get(worker) is future:
            del self._waiting[worker]

    def _ended(self, worker: int, future: "asyncio.Future[News]") -> None:
        """The driver knows that this wait has ended: a lease that it gave just before is handed back."""
        self._forget(worker, future)
        news = future.result() if future.done() else None
        if isinstance(news, SendTask):
            self.hand_back(news.lease)
