"""Owns the meeting of two worlds: the hub's thread, where things are decided, and the event loop, where workers wait.

Rules kept here:
- Everything here runs on the event loop, except the few methods that the hub calls, which only pass word on.
- A worker waits in one place: of two requests under one name the older is told that it was superseded.
- A lease is given to an open connection, or handed back.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Command, Lease, LeaseReturned, RequestEnded, TaskRequested
from offbeat.server.hub import Happened, Hub, Stuck
from offbeat.server.refusals import Refusal

MIXING_S = 0.05
"""How long a worker that asks waits for a version that is being mixed: small models take a thousandth of that."""


class Over:
    """The run is finished."""


class Superseded:
    """A newer request of the same worker waits now."""


class Quarantined(str):
    """Why the worker gets no task."""


News = Lease | Over | Superseded | Quarantined | None
"""What a worker that waits may hear; None is nothing yet."""


class Desk:
    """Where workers wait for tasks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.hub: Hub
        self.on_evaluate: Callable[[int, Model], None] = lambda _t, _x: None
        self.on_over: Callable[[str], None] = lambda _reason: None
        self.on_published: Callable[[int], None] = lambda _t: None
        self._waiting: dict[int, asyncio.Future[News]] = {}
        self._tidying: set[asyncio.Task[None]] = set()
        self.stopping = False
        self._newer = asyncio.Event()
        """Set when the next version is there."""

    # --- called by the hub, on its thread ----------------------------------------------------------------------------

    def lease(self, lease: Lease) -> None:
        """A worker was given a task."""
        self._call(self._hear, lease.worker, lease)

    def released(self, lease: Lease) -> None:
        """The worker learns of it with its next heartbeat."""

    def finished_worker(self, worker: int) -> None:
        """There is nothing more to do for it."""
        self._call(self._hear, worker, Over())

    def quarantined_worker(self, worker: int, why: str) -> None:
        """It gets no task."""
        self._call(self._hear, worker, Quarantined(why))

    def evaluate(self, t: int, x: Model) -> None:
        """Measure a version."""
        self.on_evaluate(t, x)

    def published(self, t: int) -> None:
        """A version can be read."""
        self._call(self._say_newer, t)

    def over(self, reason: str) -> None:
        """The run is finished, or has failed."""
        self._call(self._all_over, reason)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    # --- on the event loop -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting)

    async def tell(self, happened: Happened) -> list[Command]:
        """Say what happened; answered when it is on the disk."""
        commands: list[Command] = await self._answer(lambda: self.hub.tell(happened))
        return commands

    async def ask(self, question: Callable[[Coordinator], Any]) -> Any:
        """Look at the coordinator between two events."""
        return await self._answer(lambda: self.hub.ask(question))

    async def _answer(self, ask: Callable[[], "Future[Any]"]) -> Any:
        try:
            return await asyncio.shield(asyncio.wrap_future(ask()))
        except Stuck as error:
            raise Refusal("disk_full", str(error), retry_after_s=5) from error

    def _say_newer(self, t: int) -> None:
        self._newer.set()
        self._newer = asyncio.Event()
        self.on_published(t)

    async def freshest(self) -> None:
        """Where an update is being mixed, wait for it a moment: whoever asks then starts from what comes out."""
        if self.hub.coordinator.queued:
            with suppress(TimeoutError):
                async with asyncio.timeout(MIXING_S):
                    await self._newer.wait()

    async def wait(self, worker: int, patience_s: float) -> News:
        """Wait for a task; whoever is cancelled (the connection was closed) leaves nothing behind."""
        if self.stopping:
            raise Refusal("stopping", "the server is being stopped", retry_after_s=2)
        await self.freshest()
        self._hear(worker, Superseded())
        future = self._waiting[worker] = self.loop.create_future()
        try:
            await self.tell(lambda at: TaskRequested(at, worker))
            await asyncio.wait([future], timeout=patience_s)
            if not future.done():
                await self.tell(lambda at: RequestEnded(at, worker))  # a lease of just before comes before this answer
            news = future.result() if future.done() else None
        except BaseException:
            # Told at once, so that it comes before whatever this worker asks next.
            with suppress(OffbeatError):
                ended = self.hub.tell(lambda at: RequestEnded(at, worker), must=True)
                self._spawn(self._ended(worker, future, ended))
            raise
        self._forget(worker, future)
        return news

    def hand_back(self, lease: Lease) -> None:
        """The connection was closed before the lease was told."""
        self._spawn(self._returned(lease))

    async def _ended(self, worker: int, future: "asyncio.Future[News]", ended: "Future[Any]") -> None:
        try:
            await asyncio.wrap_future(ended)
        finally:
            self._forget(worker, future)
        if future.done() and isinstance(future.result(), Lease):
            await self._returned(future.result())

    def _forget(self, worker: int, future: "asyncio.Future[News]") -> None:
        if self._waiting.get(worker) is future:
            del self._waiting[worker]

    async def _returned(self, lease: Any) -> None:
        await asyncio.wrap_future(self.hub.tell(lambda at: LeaseReturned(at, lease.worker, lease.task), must=True))

    def _spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tidying.add(task)
        task.add_done_callback(self._tidied)

    def _tidied(self, task: "asyncio.Task[None]") -> None:
        self._tidying.discard(task)
        if not task.cancelled():
            task.exception()  # it is noticed where it happened: the hub has failed, or the disk is full

    def _hear(self, worker: int, news: News) -> None:
        future = self._waiting.get(worker)
        if future is not None and not future.done():
            future.set_result(news)

    def _all_over(self, reason: str) -> None:
        for worker in list(self._waiting):
            self._hear(worker, Over())
        self.on_over(reason)

    async def stop(self) -> None:
        """Nobody waits any more, and what was begun is finished."""
        self.stopping = True
        for worker in list(self._waiting):
            self._hear(worker, None)
        while self._tidying:
            await asyncio.gather(*self._tidying, return_exceptions=True)
