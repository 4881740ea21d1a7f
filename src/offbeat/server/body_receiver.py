"""Owns how the body of a push comes in: from the socket straight into memory that is hashed, written and mixed.

aiohttp's parser reads the head of the request. For the body the connection has another protocol, which receives into
our own memory: nothing is copied, and little is done for every part that the network brings. When the body is whole,
the connection is aiohttp's again, with a parser that has seen nothing of the body.

Rules kept here:
- No byte beyond the body is received, so what follows on the connection is the next request, and nothing else is.
- A body that does not come whole leaves aiohttp's parser in the middle of it: what comes then is never taken for a
  request, and the connection is closed after the answer.
- Memory is bounded: an update that the budget has room for is received in one piece and kept until it is mixed. For
  others there are two pieces, one that is being filled and one that is being written.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, cast
from weakref import finalize

from aiohttp import StreamReader, web

from offbeat.core.buffer_pool import BufferPool
from offbeat.server.http_connection import HttpConnection
from offbeat.server.refusals import Refusal

PIECE = 1 << 20
"""Bytes that are worth a visit of a thread that writes them."""
WHOLE_BYTES_MAX = 96 << 20
"""Memory for updates that are received in one piece, all together."""
WHOLE_MIN, WHOLE_MAX = 4, 64
"""Updates that this is for: where fewer fit, all are received in small pieces. Most would be anyway."""
SPARE_MAX, SPARE_PIECES_MAX = 8, 32
"""Free buffers that are kept."""
ALIGNED = 64
FLOAT_BYTES = 4


class UploadMemory:
    """Gives memory for uploads of one size, as long as there is room."""

    def __init__(self, size: int) -> None:
        self.size = size
        room = min(WHOLE_MAX, WHOLE_BYTES_MAX // max(1, size))
        most = room if room >= WHOLE_MIN else 0
        self._wholes = BufferPool(-(-size // FLOAT_BYTES), min(SPARE_MAX, most))
        self._pieces = BufferPool(PIECE // FLOAT_BYTES, SPARE_PIECES_MAX)
        self._places: deque[None] = deque([None] * most)
        """One for every update that may be in memory; taken and given back in one call each, on any thread."""

    def whole(self, size: int) -> memoryview | None:
        """Memory for an update in one piece; None where it has another size, or the room is used up.

        It comes back by itself when nothing refers to it any more.
        """
        if size != self.size:
            return None
        try:
            self._places.pop()
        except IndexError:
            return None
        vector = self._wholes.take()
        finalize(vector, self._places.append, None).atexit = False
        return vector.data.cast("B")[:size]

    def piece(self) -> memoryview:
        return self._pieces.take().data.cast("B")


class BodyReceiver(asyncio.BufferedProtocol):
    """Receives one body; `take` gives what came since the last time."""

    def __init__(
        self,
        size: int,
        memory: UploadMemory,
        *,
        begins: bool = True,
        on_received: Callable[[int], None] = lambda _bytes: None,
    ) -> None:
        """`size` bytes are to come; they are an update from its first byte on where it `begins` here.

        `on_received` hears how many bytes came, as they come.
        """
        self.received, self.latest = 0, monotonic()
        """How many came, and when the latest did."""
        self.whole = memory.whole(size) if begins else None
        """All of it in one piece, where there is room for that."""
        self._size, self._memory, self._on_received = size, memory, on_received
        self._view = self.whole if self.whole is not None else memory.piece()
        self._at = self._taken = 0
        """In `_view`: how far it is filled, and how much of it was taken."""
        self._connection: HttpConnection | None = None
        self._payload: StreamReader | None = None
        self._transport: asyncio.Transport | None = None
        self._held = False
        """Is reading paused until there is room?"""
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[bool] | None = None

    @property
    def complete(self) -> bool:
        return self.received == self._size

    # --- for the handler ---------------------------------------------------------------------------------------------

    def begin(self, request: web.Request) -> None:
        """Take what aiohttp has received of the body, and receive the rest in its place."""
        payload, connection = request.content, request.protocol
        error = payload.exception()
        if error is not None:
            raise error
        transport = request.transport
        if transport is None or not isinstance(connection, HttpConnection):
            raise ConnectionResetError("the connection is closed")
        transport.pause_reading()
        while data := payload.read_nowait():  # which may let the parser go on with what it has put aside
            self._put(data)
        if self.complete or payload.is_eof() or not connection.is_in_body:
            transport.resume_reading()
            if not self.complete:
                raise Refusal(
                    "bad_request", "an update comes as a plain request, with all of its body, without Upgrade"
                )
            return
        self._connection, self._payload, self._transport = connection, payload, transport
        connection.receiver = self
        transport.set_protocol(self)
        if self._room():
            transport.resume_reading()
        else:
            self._held = True

    async def wait(self, seconds: float) -> bool:
        """Wait until there is a piece to take, or all of it; False when the time is over first."""
        if self._error is not None:
            raise self._error
        if self._is_due():
            return True
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, self._wake, False)
        try:
            return await self._waiter
        finally:
            self._waiter = None
            timer.cancel()

    def take(self) -> memoryview:
        """What came since the last time, up to a boundary that suits floats, or all of it where nothing more comes."""
        end = self._at if self.complete or self._error is not None else self._at - self._at % ALIGNED
        data, self._taken = self._view[self._taken : end], end
        if self.whole is None and end == len(self._view):
            self._view, self._at, self._taken = self._memory.piece(), 0, 0
            if self._held and self._transport is not None:
                self._held = False
                self._transport.resume_reading()
        return data

    def fail(self, error: BaseException) -> None:
        """Nothing more is wanted, or will come."""
        if self._error is None and not self.complete:
            self._error = error
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)

    def end(self) -> None:
        """Give the connection back, whether or not all has come."""
        connection, transport = self._connection, self._transport
        if connection is None or transport is None:
            return
        self._connection = self._transport = None
        connection.receiver = None
        if not transport.is_closing():
            transport.set_protocol(connection)
            if self._held:
                transport.resume_reading()

    # --- for the transport -------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._view[self._at : self._at + self._size - self.received]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        self.received += nbytes
        self.latest = monotonic()
        self._on_received(nbytes)
        if self.complete and self._connection is not None and self._payload is not None:
            self._connection.body_received(self._payload)
            self.end()
        elif not self._room() and self._transport is not None:
            self._held = True
            self._transport.pause_reading()
        if self._is_due():
            self._wake(True)

    def eof_received(self) -> bool | None:
        self.fail(ConnectionResetError("the body breaks off"))
        return cast(Any, self._connection).eof_received() if self._connection is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        connection = self._connection
        self.fail(exc or ConnectionResetError("the connection was closed"))
        self.end()
        if connection is not None:
            connection.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        if self._connection is not None:
            self._connection.resume_writing()

    def _wake(self, due: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(due)

    # --- memory ------------------------------------------------------------------------------------------------------

    def _room(self) -> bool:
        return self._at < len(self._view)

    def _is_due(self) -> bool:
        return self.complete or self._at - self._taken >= PIECE or not self._room()

    def _put(self, data: bytes) -> None:
        """Some bytes that aiohttp had received; a piece grows where they are many."""
        if self.received + len(data) > self._size:
            raise Refusal("bad_request", "the body is longer than was announced")
        if self._at + len(data) > len(self._view):
            self._view = memoryview(bytearray(bytes(self._view[: self._at]) + data))
        else:
            self._view[self._at : self._at + len(data)] = data
        self._at += len(data)
        self.received += len(data)
        self._on_received(len(data))
