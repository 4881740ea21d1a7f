"""Owns uploads under way: which connection writes which task's update, and how its body comes to the disk.

Rules kept here:
- A cut upload can be appended to; a newer request for the same task closes the older one's connection.
- Bodies are written and hashed off the event loop, in large pieces.
- A stalled upload holds its connection and its partial file, and nothing else.
"""

import asyncio
import errno
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from offbeat.errors import InvalidValue
from offbeat.server.context import ServerContext
from offbeat.server.refusals import Refusal
from offbeat.server.update_store import DiskFull, UpdateStore, Upload, WrongDigest, WrongOffset

PIECE = 1 << 20
PARTS_MAX = 256
PIECE_STALLS = 10
"""A piece may take this many times stall_s: else one byte now and then would hold a place."""
DISK_FULL_RETRY_S = 5.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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

    transport: asyncio.Transport | None = None
    """Of the newest request that wants it."""
    worker: int = -1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0
    """How many requests have it or wait for it."""


class Uploads:
    """The uploads that are under way, one per task."""

    def __init__(self) -> None:
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

    async def take(self, task: int, worker: int, transport: asyncio.Transport | None) -> None:
        """Get the right to write this task's upload; an older upload of this task, or of this worker, is cut off."""
        for other in self._of.values():
            if other.worker == worker and other.transport is not None:
                other.transport.abort()
        slot = self._of.setdefault(task, UploadSlot())
        slot.worker = worker
        if slot.transport is not None:
            slot.transport.abort()
        slot.transport = transport
        slot.wanted += 1
        try:
            await slot.lock.acquire()
        except BaseException:
            self._less(task, slot)
            raise

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
        await _written(request, context, upload)
        await context.off_loop(upload.finish, head.digest)
    except (asyncio.CancelledError, ConnectionError, Refusal, RequestPayloadError):
        await context.off_loop(upload.close)
        raise
    except OSError as error:
        await context.off_loop(upload.abandon)
        if error.errno not in FULL:
            raise
        raise _no_room(f"the server cannot keep the update: {error.strerror}") from error
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
        raise _no_room(str(error)) from error
    except OSError as error:
        raise _no_room(f"the server cannot write: {error.strerror}") from error


def _no_room(message: str) -> Refusal:
    return Refusal("disk_full", message, retry_after_s=DISK_FULL_RETRY_S)


async def say_continue(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _written(request: web.Request, context: ServerContext, upload: Upload) -> None:
    """Write what comes, in large pieces; what came before a cut is written too, so that it need not come again."""
    waiting, size, stall_s = list[bytes](), 0, context.limits.stall_s
    until = monotonic() + PIECE_STALLS * stall_s
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(min(stall_s, until - monotonic())):
                data = await request.content.readany()
            context.metrics.received(len(data))
            waiting.append(data)
            size += len(data)
            if len(waiting) >= PARTS_MAX:  # they come in crumbs
                waiting = [b"".join(waiting)]
            if size >= PIECE:
                piece, waiting, size = waiting, [], 0
                await context.off_loop(upload.write, *piece)
                until = monotonic() + PIECE_STALLS * stall_s
    except (TimeoutError, asyncio.CancelledError, ConnectionError, RequestPayloadError) as error:
        with suppress(InvalidValue, OSError):
            await context.off_loop(upload.write, *waiting)
        if isinstance(error, TimeoutError):
            raise Refusal("stalled", f"nothing, or too little, came for {stall_s:g} s") from None
        raise
    if waiting:
        await context.off_loop(upload.write, *waiting)
