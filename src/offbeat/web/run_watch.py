"""Owns how browsers hear that a run has new rows: one look for all listeners, and none where there is no listener.

Rules kept here:
- Listeners are told after the new rows were folded, so a request that follows sees them.
- A new listener is told at once where the run stands, unless that is what it heard last: nothing is missed in between.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from aiohttp import web

from offbeat.errors import OffbeatError
from offbeat.web.run_reader import REFRESH_S
from offbeat.web.shown import Shown

KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
"""When a browser that lost the connection tries again."""
POLL_S = 0.5
LISTENERS_MAX = 200

log = logging.getLogger("offbeat.web")
Committed = Callable[[], asyncio.Event]
"""An event that is set when the next rows are committed, and replaced then."""


class RunWatch:
    """Notices that a run has new rows, while anyone listens."""

    def __init__(self, shown: Shown, committed: Committed | None) -> None:
        """Without `committed`, the ledger's file is looked at now and then."""
        self.shown, self._committed = shown, committed
        self.where = (-1, 0)
        """The newest row, and t."""
        self.stopping = False
        self.listeners = 0
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def newer(self, than: int, patience_s: float) -> tuple[int, int] | None:
        """Where the run is, once it is elsewhere; None if that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.where[0] in (than, -1) and not self.stopping:
                    await self._moved.wait()
                return self.where
        return None

    def begin(self) -> None:
        """One more listener."""
        self.listeners += 1
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._live())

    def end(self) -> None:
        """One listener fewer; the last one ends the watching."""
        self.listeners -= 1
        if not self.listeners and self._task is not None:
            self._task.cancel()
            self._task, self.where = None, (-1, 0)

    def stop(self) -> None:
        """The server stops: listeners are sent away."""
        self.stopping = True
        self._moved.set()

    async def ended(self) -> None:
        """Wait until the watching has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _live(self) -> None:
        while True:
            committed = self._committed() if self._committed else None
            before, looked_at = self.shown.reading.changed(), monotonic()
            try:
                where = await self.shown.off_loop(self._look)
            except OffbeatError as error:  # it may be there again later
                log.warning("the page cannot read the run's ledger now and will try again: %s", error)
            else:
                self._say(where)
            if committed is not None:
                await committed.wait()
            while committed is None and self.shown.reading.changed() == before:
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(max(0.0, looked_at + REFRESH_S - monotonic()))

    def _look(self) -> tuple[int, int]:
        reading = self.shown.reading
        with reading.lock:
            return reading.refresh(least_s=0.0), reading.fold.t

    def _say(self, where: tuple[int, int]) -> None:
        if where != self.where:
            self.where = where
            self._moved.set()
            self._moved = asyncio.Event()


async def follow(request: web.Request, watch: RunWatch, may_go_on: Callable[[], bool]) -> web.StreamResponse:
    """Tell that the run has moved, until the listener goes, or may no longer listen."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    watch.begin()
    try:
        await response.prepare(request)
        with suppress(ConnectionError):  # the listener has gone
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            await _tell(response, watch, _heard(request), may_go_on)
    finally:
        watch.end()
    return response


async def _tell(response: web.StreamResponse, watch: RunWatch, heard: int, may_go_on: Callable[[], bool]) -> None:
    while may_go_on():
        where = await watch.newer(heard, KEEP_ALIVE_S)
        if watch.stopping:
            return
        if where is None:
            await response.write(b": still here\n\n")
        else:
            heard = where[0]
            data = json.dumps({"sequence": heard, "t": where[1]})
            await response.write(f"id: {heard}\nevent: moved\ndata: {data}\n\n".encode())


def _heard(request: web.Request) -> int:
    text = request.headers.get("Last-Event-ID", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else -1
