"""Owns a run that is looked at: answers worked out once for all visitors, and word to browsers that it has new rows.

Rules kept here:
- An answer is worked out off the event loop when the ledger has grown, at most about once a second, for all visitors.
- There is one look for all listeners, and none where there is no listener. They are told after the new rows were
  folded, so a request that follows sees them.
- A new listener is told at once where the run stands, unless that is what it heard last: nothing is missed in between.
"""

import asyncio
import gzip
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from aiohttp import web

from offbeat.errors import OffbeatError
from offbeat.server.slow_readers import write_within
from offbeat.web.run_reader import REFRESH_S, RunReader

THREADS = 2
ANSWERS_MAX = 50
"""Answers that are kept of one run: each view, with the filters that are in use."""
PACKED_FROM_BYTES = 4096
PACKING_LEVEL = 1
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
"""When a browser that lost the connection tries again."""
POLL_S = 0.5
LISTENERS_MAX = 200
STALL_S = 60.0
"""A listener that takes nothing for so long is cut off."""

log = logging.getLogger("offbeat.web")
Committed = Callable[[], asyncio.Event]
"""An event that is set when the next rows are committed, and replaced then."""


@dataclass(frozen=True, slots=True)
class PackedJson:
    body: bytes
    packed: bytes | None

    @classmethod
    def of(cls, value: Any) -> "PackedJson":
        body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        return cls(body, gzip.compress(body, PACKING_LEVEL, mtime=0) if len(body) >= PACKED_FROM_BYTES else None)


class RunWatch:
    """A run, as those on the event loop see it; notices that it has new rows, while anyone listens."""

    def __init__(self, reading: RunReader, pool: ThreadPoolExecutor, committed: Committed | None) -> None:
        """Without `committed`, the ledger's file is looked at now and then."""
        self.reading, self._pool, self._committed = reading, pool, committed
        self.where = (-1, 0)
        """The newest row, and t."""
        self.stopping = False
        self.listeners = 0
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._answers: OrderedDict[Hashable, tuple[tuple[int, int], PackedJson]] = OrderedDict()

    async def answer(self, key: Hashable, make: Callable[[RunReader], Any]) -> PackedJson:
        """What `make` says of the run as it is now; the same key means the same answer."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer_now, key, make)

    def _answer_now(self, key: Hashable, make: Callable[[RunReader], Any]) -> PackedJson:
        reading = self.reading
        with reading.lock:
            moment = (reading.refresh(), int(reading.now()))  # a server's clock goes on while nothing happens
            kept = self._answers.pop(key, None)
            if kept is None or kept[0] != moment:
                kept = (moment, PackedJson.of(make(reading)))
            self._answers[key] = kept
            while len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
            return kept[1]

    async def newer(self, than: int, patience_s: float) -> tuple[int, int] | None:
        """Where the run is, once it is elsewhere; None if that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.where[0] in (than, -1) and not self.stopping:
                    await self._moved.wait()
                return self.where
        return None

    def begin(self) -> None:
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
        self.stopping = True
        self._moved.set()

    async def ended(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _live(self) -> None:
        while True:
            committed = self._committed() if self._committed else None
            before, looked_at = self.reading.changed(), monotonic()
            try:
                where = await asyncio.get_running_loop().run_in_executor(self._pool, self._look)
            except OffbeatError as error:  # it may be there again later
                log.warning("the page cannot read the run's ledger now and will try again: %s", error)
            else:
                self._say(where)
            if committed is not None:
                await committed.wait()
            while committed is None and self.reading.changed() == before:
                await asyncio.sleep(POLL_S)
            await asyncio.sleep(max(0.0, looked_at + REFRESH_S - monotonic()))

    def _look(self) -> tuple[int, int]:
        with self.reading.lock:
            return self.reading.refresh(least_s=0.0), self.reading.fold.t

    def _say(self, where: tuple[int, int]) -> None:
        if where != self.where:
            self.where = where
            self._moved.set()
            self._moved = asyncio.Event()


async def follow(request: web.Request, watch: RunWatch, may_go_on: Callable[[], bool]) -> web.StreamResponse:
    """Tell that the run has moved, until the listener goes, or may no longer listen."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    if request.method == "HEAD":
        return response
    watch.begin()
    try:
        await response.prepare(request)
        with suppress(ConnectionError):  # the listener has gone
            await write_within(request, response, f"retry: {RETRY_MS}\n\n".encode(), STALL_S)
            await _tell(request, response, watch, may_go_on)
    finally:
        watch.end()
    return response


async def _tell(
    request: web.Request, response: web.StreamResponse, watch: RunWatch, may_go_on: Callable[[], bool]
) -> None:
    heard = _heard(request)
    while may_go_on():
        where = await watch.newer(heard, KEEP_ALIVE_S)
        if watch.stopping:
            return
        if where is None:
            await write_within(request, response, b": still here\n\n", STALL_S)
        else:
            heard = where[0]
            data = json.dumps({"sequence": heard, "t": where[1]})
            await write_within(request, response, f"id: {heard}\nevent: moved\ndata: {data}\n\n".encode(), STALL_S)


def _heard(request: web.Request) -> int:
    text = request.headers.get("Last-Event-ID", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else -1
