"""Owns uploads under way: which connection writes which task's update, and how its body comes to the disk.

Rules kept here:
- A cut upload can be appended to; a newer request for the same task closes the older one's connection.
- Bodies are written and hashed off the event loop, in large pieces.
- A stalled upload holds its connection and its partial file, and nothing else; one that crawls is cut.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestPayloadError

from offbeat.errors import InvalidValue
from offbeat.server.context import ServerContext
from offbeat.server.descriptors import RETRY_S, is_known, refusal_of
from offbeat.server.refusals import Refusal
from offbeat.server.settings import ServerSettings
from offbeat.server.update_store import DiskFull, UpdateStore, Upload, WrongDigest, WrongOffset

PIECE = 1 << 20
PARTS_MAX = 256
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
    pace: "UploadPace | None" = None
    """How fast its body comes, once it does."""
    cut: bool = False
    """It has lost its place to another one."""

    def abort(self) -> None:
        if self.request is not None and self.request.transport is not None:
            self.request.transport.abort()

    def give_way(self) -> None:
        """Another upload gets its place: the worker is told to come back, and goes on where it was."""
        self.cut = True
        if self.request is not None:
            self.request.content.set_exception(PlaceLost())


class PlaceLost(Exception):
    """An upload has lost its place to another one."""


class UploadPace:
    """Whether a body comes fast enough: `rate_min` bytes per second, on average over every `window_s` of waiting.

    Only the time for which the server waits for bytes counts, and not that for which it writes them.
    """

    def __init__(self, window_s: float, rate_min: int) -> None:
        self._window_s, self._rate_min = window_s, rate_min
        self._waited_s, self._bytes = 0.0, 0
        self._since: float | None = None

    async def next(self, content: StreamReader) -> bytes:
        """The next bytes; `TimeoutError` where none come for a window, or too few."""
        self._since = monotonic()
        try:
            async with asyncio.timeout(self._window_s):
                data: bytes = await content.readany()
        finally:
            self._waited_s, self._since = self.waited_s, None
        self._bytes += len(data)
        if self._waited_s >= self._window_s:
            if self.is_slow:
                raise TimeoutError
            self._waited_s, self._bytes = 0.0, 0
        return data

    @property
    def waited_s(self) -> float:
        return self._waited_s + (0.0 if self._since is None else monotonic() - self._since)

    @property
    def is_slow(self) -> bool:
        return self._bytes < self._rate_min * self.waited_s


class Uploads:
    """The uploads that are under way, one per task.

    Where all places are taken, a newcomer gets that of a client which has more than its share, else that of an upload
    which hardly moves. So no client can keep the others waiting, by many uploads or by slow ones.
    """

    def __init__(self, limits: ServerSettings) -> None:
        self._limits, self._most = limits, limits.uploads_max
        self._each = max(1, int(limits.uploads_max * limits.uploads_share))
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
    def coming(self, task: int) -> Iterator["UploadPace"]:
        """While the body of this upload comes: at what pace."""
        slot = self._of[task]
        slot.pace = UploadPace(self._limits.stall_s, self._limits.upload_rate_min)
        try:
            yield slot.pace
        finally:
            slot.pace = None

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


async def receive(request: web.Request, context: ServerContext, head: Head) -> None:
    """Write what comes; the whole update is on the disk when this returns."""
    upload = await _opened(context, head)
    try:
        await say_continue(request)
        with request.app[UPLOADS].coming(head.task) as pace:
            await _written(request, context, upload, pace)
        await context.off_loop(upload.finish, head.digest)
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


async def _opened(context: ServerContext, head: Head) -> Upload:
    updates = context.run.updates
    try:
        if head.offset:
            return await context.off_loop(updates.resume, head.task, head.size, head.offset)
        return await context.off_loop(updates.begin, head.task, head.size)
    except WrongOffset as error:
        raise Refusal("wrong_offset", str(error), offset=error.offset) from error
    except DiskFull as error:
        raise Refusal("disk_full", str(error), retry_after_s=RETRY_S) from error
    except OSError as error:
        raise refusal_of("write", error) from error


async def say_continue(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _written(request: web.Request, context: ServerContext, upload: Upload, pace: UploadPace) -> None:
    """Write what comes, in large pieces; what came before a cut is written too, so that it need not come again."""
    waiting, size = list[bytes](), 0
    try:
        while not request.content.at_eof():
            data = await pace.next(request.content)
            context.metrics.received(len(data))
            waiting.append(data)
            size += len(data)
            if len(waiting) >= PARTS_MAX:  # they come in crumbs
                waiting = [b"".join(waiting)]
            if size >= PIECE:
                piece, waiting, size = waiting, [], 0
                await context.off_loop(upload.write, *piece)
    except (TimeoutError, asyncio.CancelledError, ConnectionError, RequestPayloadError, PlaceLost) as error:
        with suppress(InvalidValue, OSError):
            await context.off_loop(upload.write, *waiting)
        raise _cut(error, context) from None
    if waiting:
        await context.off_loop(upload.write, *waiting)


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
