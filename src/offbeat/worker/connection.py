"""Owns one connection to the server: bytes out, bytes in, all before a deadline. h11 knows the rules of HTTP/1.1.

Rules kept here:
- Nothing waits without a limit, also not for a server that sends one byte now and then: a deadline stands for the
  whole of what is under way, not for its next byte.
- The server is listened to while a body is sent: an answer that comes before its end stops the sending.
- A body whose length is known is received straight into the caller's memory; h11 sees only what came with its head.
"""

import os
import select
import ssl
from collections.abc import Callable
from contextlib import suppress
from socket import IPPROTO_TCP, SHUT_RDWR, TCP_NODELAY, create_connection, socket
from time import monotonic
from typing import Self

import h11

BUFFER, HEAD_MAX = 1 << 14, 1 << 16
INTERIM_MAX = 16
"""Interim answers (100 Continue) before the final one."""
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
READ, WRITE = select.POLLIN, select.POLLOUT
LINE_END = b"\r\n"
SENDS_FILES = hasattr(os, "sendfile")
"""Can the system send a file without it passing through this process?"""


class Connection:
    """A connection, with TLS or without; one exchange at a time, and another one if `reusable`."""

    def __init__(self, sock: socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = memoryview(bytearray(BUFFER))
        self._start()

    def _start(self) -> None:
        self.response: h11.Response | None = None
        """The head of the final answer, once it is there."""
        self._http = h11.Connection(h11.CLIENT, HEAD_MAX)
        self._interims = 0
        self._came = memoryview(b"")
        """What came of the body and was not read yet."""
        self._left: int | None = None
        """Bytes of the body that are still to come; None where only h11 can tell."""
        self._straight = False
        """Is the rest of the body received without h11?"""

    @classmethod
    def open(cls, host: str, port: int, context: ssl.SSLContext | None, until: float) -> Self:
        """Connect; each address that the host's name has gets what was left of the time at the beginning."""
        sock = create_connection((host, port), max(0.001, until - monotonic()))
        try:
            sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            return cls(sock if context is None else context.wrap_socket(sock, server_hostname=host))
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        self._sock.close()

    def abort(self) -> None:
        """From another thread: the thread that waits here learns that the connection is gone."""
        with suppress(OSError):
            self._sock.shutdown(SHUT_RDWR)

    def reusable(self) -> bool:
        """Is the last exchange complete, does the server keep the connection open, and has it said nothing since?"""
        if self._http.our_state is not h11.DONE or self._left != 0 or self._came or self._http.trailing_data[0]:
            return False
        try:
            self._receive(self._buffer, 0.0)
        except OSError as error:
            return isinstance(error, TimeoutError)
        return False

    # --- out ---------------------------------------------------------------------------------------------------------

    def begin(self, request: h11.Request, until: float, body: bytes | None, more: bytes = b"") -> None:
        """Send a request; a body that is None follows with `send`, and `end` after it.

        `more` are lines of its head that mean nothing to HTTP itself: h11 would look at each of them for long.
        """
        self._start()
        data = self._http.send(request)
        data = data[: -len(LINE_END)] + more + LINE_END
        if body is not None:
            data += self._http.send(h11.Data(data=body))
            self._http.send(h11.EndOfMessage())
        self.send(memoryview(data), until)

    def end(self, size: int) -> None:
        """Note that the body was sent whole, in this many bytes."""
        self._http.send_with_data_passthrough(h11.Data(data=range(size)))  # type: ignore[arg-type] # it only counts
        self._http.send(h11.EndOfMessage())

    def send(self, view: memoryview, until: float) -> bool:
        """Send this; False as soon as the final answer begins, or the server takes no more."""
        return self._sent(len(view), lambda at: self._sock.send(view[at:]), until)

    def send_file(self, descriptor: int, begin: int, size: int, until: float) -> bool:
        """Send a part of a file as `send` does, from the system's own memory; not with TLS, see `sends_files`."""
        socket_number = self._sock.fileno()
        return self._sent(size, lambda at: os.sendfile(socket_number, descriptor, begin + at, size - at), until)

    @property
    def sends_files(self) -> bool:
        return SENDS_FILES and not isinstance(self._sock, ssl.SSLSocket)

    def _sent(self, size: int, some: Callable[[int], int], until: float) -> bool:
        """Send with `some`, which is told how many bytes went before, and answers how many it sent."""
        at = 0
        while at < size:
            ready = self._ready(READ | WRITE, until)
            if ready & ~WRITE and self.answered(0.0):
                break
            try:
                count = some(at)
            except NOT_YET:
                continue
            except ConnectionError:  # an answer that it gave before it hung up may still be there to be read
                break
            if not count:
                raise EOFError
            at += count
        if at < size:
            self._http.send_failed()  # so that the connection is not used again
        return at == size

    # --- in ----------------------------------------------------------------------------------------------------------

    def answered(self, until: float) -> bool:
        """Wait for the final answer; False when the time is over first."""
        while self.response is None and self.heard(until):
            pass
        return self.response is not None

    def heard(self, until: float) -> bool:
        """Wait for an answer, interim or final; False when the time is over first."""
        if self.response is not None:
            return True
        while (event := self._http.next_event()) is h11.NEED_DATA:
            try:
                if not self._feed(until):
                    raise ConnectionResetError("it hung up")
            except TimeoutError:
                return False
        if isinstance(event, h11.Response):
            self.response, headers = event, dict(event.headers)
            if b"transfer-encoding" not in headers and b"content-length" in headers:
                self._left = int(headers[b"content-length"])
        self._interims += 1
        if self._interims > INTERIM_MAX:
            raise ConnectionAbortedError("it sends interim answers without end")
        return True

    def read(self, most: int, until: float) -> bytes:
        """The whole body of the answer, which must not be longer than this."""
        body, piece = b"", memoryview(bytearray(BUFFER))  # not the buffer that h11 is fed from meanwhile
        while len(body) <= most and (count := self.fill(piece, until)):
            body += piece[:count]
        if len(body) > most:
            raise ConnectionAbortedError("it never ends its answer")
        return body

    def fill(self, view: memoryview, until: float) -> int:
        """Read the body until this is full; less where the body ends or breaks off, which the next call then tells."""
        done = 0
        try:
            while done < len(view) and (count := self._some(view[done:], until)):
                done += count
        except ConnectionError:
            if not done:
                raise
        return done

    def _some(self, view: memoryview, until: float) -> int:
        """Some bytes of the body; 0 at its end."""
        while not self._came and self._left != 0:
            event = h11.NEED_DATA if self._straight else self._http.next_event()
            if event is h11.NEED_DATA and self._left is not None:
                self._straight = True
                count = self._receive(view[: self._left], until)
                if not count:
                    raise ConnectionResetError("it breaks off")
                self._left -= count
                return count
            if event is h11.NEED_DATA:
                self._feed(until)
            elif isinstance(event, h11.Data):
                self._came = memoryview(bytes(event.data))
                self._left = self._left and self._left - len(self._came)
            else:
                self._left = 0
        count = min(len(view), len(self._came))
        view[:count], self._came = self._came[:count], self._came[count:]
        return count

    # --- the socket --------------------------------------------------------------------------------------------------

    def _feed(self, until: float) -> int:
        count = self._receive(self._buffer, until)
        self._http.receive_data(bytes(self._buffer[:count]))
        return count

    def _receive(self, view: memoryview, until: float) -> int:
        """How many bytes came; 0 when the server has hung up."""
        while True:
            try:
                return self._sock.recv_into(view)
            except NOT_YET:  # with TLS, what arrives need not be meant for us: look again
                self._ready(READ, until)

    def _ready(self, events: int, until: float) -> int:
        """Wait until one of these can be done; which, or that the connection is broken."""
        poll = select.poll()
        poll.register(self._sock, events)
        found = poll.poll(max(0.0, 1000 * (until - monotonic())))
        if not found:
            raise TimeoutError("it takes too long to " + ("take what is sent" if events & WRITE else "answer"))
        return found[0][1]
