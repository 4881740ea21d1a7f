"""Owns uploads under way: which connection writes which task's update, and how its body comes to the disk.

Rules kept here:
- A cut upload can be appended to; a newer request for the same task closes the older one's connection.
- Bodies are hashed, looked at and written off the event loop, in large pieces.
- A stalled upload holds its connection and its partial file, and nothing else; one that crawls is cut.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from offbeat.digests import kind_of
from offbeat.errors import InvalidValue
from offbeat.server.body_receiver import BodyReceiver
from offbeat.server.context import ServerContext
from offbeat.server.descriptors import RETRY_S, is_known, refusal_of
from offbeat.server.refusals import Refusal
from offbeat.server.settings import ServerSettings
from offbeat.server.update_store import DiskFull, UpdateStore, Upload, WrongDigest, WrongOffset
from offbeat.server.upload_pace import UploadPace

GRACE_S = 5.0
"""How long an upload may crawl while others want its place."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a push says about itself."""

    task: int
    worker: int
    digest: str
    size: int
    offset: int
    samples: int
    gradients: int
    metrics: dict[str, float]
    download_s: float
    train_s: float


@dataclass(slots=True)
class UploadSlot:
    """The right to write one task's upload, which one connection has at a time."""

    identity: str = ""
    request: web.Request | None = None
    """The newest that wants it."""
    worker: int = -1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0
    """How many requests have it or wait for it."""
    body: BodyReceiver | None = None
    """Where its body comes to, once it does."""
    pace: UploadPace | None = None
    """How fast it comes."""
    cut: bool = False
    """It has lost its place to another one."""

    def abort(self) -> None:
        if self.request is not None and self.request.transport is not None:
            self.request.transport.abort()

    def give_way(self) -> None:
        """Another upload gets its place: the worker is told to come back, and goes on where it was."""
        self.cut = True
        if self.body is not None:
            self.body.fail(PlaceLost())
        elif self.request is not None:
            self.request.content.set_exception(PlaceLost())


class PlaceLost(Exception):
    """An upload has lost its place to another one."""


class Uploads:
    """The uploads that are under way, one per task.

    Where all places are taken, a newcomer gets that of a client which has more than its share, else that of an upload
    which hardly moves. So no client can keep the others waiting, by many uploads or by slow ones.
    """

    def __init__(self, limits: ServerSettings, in_flight_max: int) -> None:
        self._limits, self._most = limits, limits.uploads_at_once(in_flight_max)
        self._each = max(1, int(self._most * limits.uploads_share))
        self._grace_s = min(GRACE_S, limits.stall_s)
        self._of: dict[int, UploadSlot] = {}
        self.whole: dict[int, str] = {}
        """Digests of updates that are there whole and met a full queue: their body need not come again."""

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, task: int) -> bool:
        return task in self._of

    def has(self, head: Head, updates: UpdateStore) -> bool:
        """Is this very update there already?"""
        return head.offset == 0 and self.whole.get(head.task) == head.digest and updates.has(head.task)

    def has_place(self, task: int, identity: str) -> bool:
        """Is there a place, or one that another upload can be made to leave?"""
        taken = [slot for slot in self._of.values() if not slot.cut]
        own = self._of.get(task)
        if len(taken) < self._most or (own is not None and not own.cut):
            return True
        cut = self._of_the_greedy(taken, identity) or next((s for s in taken if self._crawls(s)), None)
        if cut is not None:
            cut.give_way()
        return cut is not None

    def _of_the_greedy(self, taken: list[UploadSlot], identity: str) -> UploadSlot | None:
        """The newest upload of the client with the most, where that is more than its share and the newcomer's."""
        count = Counter(slot.identity for slot in taken)
        most, many = count.most_common(1)[0]
        if many <= self._each or count[identity] + 1 >= many:
            return None
        return next(slot for slot in reversed(taken) if slot.identity == most)

    def _crawls(self, slot: UploadSlot) -> bool:
        return slot.pace is not None and slot.pace.waited_s >= self._grace_s and slot.pace.is_slow

    async def take(self, task: int, worker: int, identity: str, request: web.Request) -> None:
        """Get the right to write this task's upload; an older upload of this task, or of this worker, is cut off."""
        for other in self._of.values():
            if other.worker == worker:
                other.abort()
        slot = self._of.setdefault(task, UploadSlot())
        slot.abort()
        slot.worker, slot.identity, slot.request, slot.cut = worker, identity, request, False
        slot.wanted += 1
        try:
            await slot.lock.acquire()
        except BaseException:
            self._less(task, slot)
            raise

    @contextmanager
    def coming(self, task: int, body: BodyReceiver) -> Iterator[UploadPace]:
        """While the body of this upload comes: at what pace."""
        slot = self._of[task]
        slot.body, slot.pace = body, UploadPace(body, self._limits.stall_s, self._limits.upload_rate_min)
        try:
            yield slot.pace
        finally:
            slot.body = slot.pace = None

    def leave(self, task: int) -> None:
        slot = self._of[task]
        slot.lock.release()
        self._less(task, slot)

    def _less(self, task: int, slot: UploadSlot) -> None:
        slot.wanted -= 1
        if not slot.wanted:
            del self._of[task]


UPLOADS = web.AppKey("uploads", Uploads)


# --- the body --------------------------------------------------------------------------------------------------------

T = TypeVar("T")


async def receive(request: web.Request, context: ServerContext, head: Head, then: Callable[[Upload], T]) -> T:
    """Write what comes; when the whole update is on the disk, the result of `then`, which the same thread calls."""
    upload = await _opened(context, head)
    body = BodyReceiver(
        head.size - head.offset,
        context.upload_memory,
        begins=head.offset == 0,
        on_received=context.metrics.received,
    )

    def finished(rest: memoryview) -> T:
        upload.write(rest)
        upload.finish(head.digest, body.whole)
        return then(upload)

    try:
        body.begin(request)
        await say_continue(request)
        with request.app[UPLOADS].coming(head.task, body) as pace:
            rest = await _written(context, upload, body, pace)
        return await context.off_loop(finished, rest)
    except (asyncio.CancelledError, ConnectionError, Refusal, RequestPayloadError):
        await context.off_loop(upload.close)
        raise
    except OSError as error:
        await context.off_loop(upload.abandon)
        if not is_known(error):
            raise
        raise refusal_of("keep the update", error) from error
    except WrongDigest as error:
        raise Refusal("digest", str(error)) from error
    except InvalidValue:
        await context.off_loop(upload.abandon)
        raise
    finally:
        body.end()


async def _opened(context: ServerContext, head: Head) -> Upload:
    updates, kind = context.run.updates, kind_of(head.digest)
    try:
        if head.offset:
            return await context.off_loop(updates.resume, head.task, head.size, head.offset, kind)
        return updates.begin(head.task, head.size, kind)
    except WrongOffset as error:
        raise Refusal("wrong_offset", str(error), offset=error.offset) from error
    except DiskFull as error:
        await context.ask(lambda _: None)  # a turn of the driver, in which it sees that a checkpoint would make room
        raise Refusal("disk_full", str(error), retry_after_s=RETRY_S) from error
    except OSError as error:
        raise refusal_of("write", error) from error


async def say_continue(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _written(context: ServerContext, upload: Upload, body: BodyReceiver, pace: UploadPace) -> memoryview:
    """Write what comes, in large pieces, up to the last, which is returned.

    What came before a cut is written too, so that it need not come again.
    """
    try:
        while not body.complete:
            await pace.wait()
            if not body.complete:
                await _write(context, upload, body)
    except (TimeoutError, asyncio.CancelledError, ConnectionError, RequestPayloadError, PlaceLost) as error:
        body.fail(error)
        with suppress(InvalidValue, OSError):
            await _write(context, upload, body)
        raise _cut(error, context) from None
    return body.take()


async def _write(context: ServerContext, upload: Upload, body: BodyReceiver) -> None:
    data = body.take()
    if len(data):
        await context.off_loop(upload.write, data)


def _cut(error: BaseException, context: ServerContext) -> BaseException:
    """What the worker is told of an upload that was cut."""
    limits = context.limits
    match error:
        case TimeoutError():
            few = f"nothing, or less than {limits.upload_rate_min} bytes per second, came for {limits.stall_s:g} s"
            return Refusal("stalled", few)
        case PlaceLost():
            message = "others want to upload too, and this upload was slow or one of many from one client"
            return Refusal("not_now", message, retry_after_s=context.settings.retry_after_s)
    return error
