"""Owns one connection to the server: bytes out, bytes in, all before a deadline.

Rules kept here:
- Nothing waits without a limit, also not for a server that sends one byte now and then: a deadline stands for the
  whole of what is under way, not for its next byte.
- There is one buffer for what comes in, so no byte is lost between an interim answer and the final one.
- Whoever sends listens, too: a server that answers before it has read everything is heard at once.
"""

import io
import select
import ssl
from contextlib import suppress
from http.client import BadStatusLine, HTTPConnection, HTTPResponse, HTTPSConnection, LineTooLong, parse_headers
from socket import SHUT_RDWR, socket
from time import monotonic
from typing import Any, Self, cast

Bytes = bytes | bytearray | memoryview

BUFFER = 1 << 16
LINE_MAX = 1 << 16
INTERIM_MAX = 16
"""Interim answers before the final one."""
NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
READ, WRITE = select.POLLIN, select.POLLOUT


class Link:
    """A connection, with TLS or without."""

    def __init__(self, sock: socket, until: float) -> None:
        self.until = until
        """When what is under way must be done, by the monotonic clock."""
        self._sock = sock
        self._raw = _Raw(self, sock)
        self._file = io.BufferedReader(self._raw, BUFFER)
        self._line = b""
        """The first line of the final answer, once it was looked at."""

    @classmethod
    def open(cls, host: str, port: int, context: ssl.SSLContext | None, until: float) -> Self:
        """Connect; each address that the host's name has gets what was left of the time at the beginning."""
        connection = (
            HTTPConnection(host, port, timeout=left(until))
            if context is None
            else HTTPSConnection(host, port, timeout=left(until), context=context)
        )
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return cls(connection.sock, until)

    def close(self) -> None:
        """Hang up; twice does no harm."""
        self._sock.close()

    def abort(self) -> None:
        """From another thread: whoever waits here learns that the connection is gone."""
        with suppress(OSError):
            self._sock.shutdown(SHUT_RDWR)

    # --- out ---------------------------------------------------------------------------------------------------------

    def send(self, data: Bytes) -> bool:
        """Send this; False as soon as the other side has something to say, or has hung up."""
        view = memoryview(data)
        while len(view):
            ready = self._ready(READ | WRITE, self.until)
            if not ready:
                raise TimeoutError("it takes too long to take what is sent")
            if ready & ~WRITE and self.heard():
                return False
            try:
                view = view[self._sent(view) :]
            except ConnectionError:  # what it said before it hung up may still be there: whoever reads finds out
                return False
        return True

    def _sent(self, view: memoryview) -> int:
        self._sock.setblocking(False)
        try:
            return self._sock.send(view)
        except NOT_YET:
            return 0

    def _ready(self, events: int, until: float) -> int:
        """Which of these can be done without waiting, or that the connection is broken; 0 when the time is over."""
        poll = select.poll()
        poll.register(self._sock, events)
        found = poll.poll(max(0.0, 1000 * (until - monotonic())))
        return found[0][1] if found else 0

    # --- in ----------------------------------------------------------------------------------------------------------

    def heard(self, until: float = 0.0) -> bool:
        """Has the other side said something or hung up? Waits until then; what it said stays to be read."""
        while not (self._something() or self._raw.ended):
            if not self._ready(READ, until):  # with TLS, what can be read need not be meant for us: look again
                return False
        return True

    def hung_up(self) -> bool:
        """Has the other side hung up, with nothing left to read?"""
        return not self._something() and self._raw.ended

    def _something(self) -> bool:
        self._raw.patient = False
        try:
            return bool(self._line or self._file.peek(1))
        finally:
            self._raw.patient = True

    def interim(self) -> bool:
        """Read what came: True was an interim answer, else the final one begins, which `answer` reads."""
        self._line = self._line or self._file.readline(LINE_MAX + 1)
        if len(self._line) > LINE_MAX:
            raise LineTooLong("status line")
        _, _, status = self._line.partition(b" ")
        if not (self._line.startswith(b"HTTP/1.") and status[:1] == b"1"):
            return False
        self._line = b""
        parse_headers(self._file)
        return True

    def answer(self, method: str) -> HTTPResponse:
        """The final answer, up to its body."""
        for _ in range(INTERIM_MAX):
            if not self.interim():
                response = HTTPResponse(cast(Any, self), method=method)
                response.begin()
                return response
        raise BadStatusLine(f"more than {INTERIM_MAX} interim answers")

    def makefile(self, _mode: str) -> Any:
        """What an answer reads from."""
        first, self._line = self._line, b""
        return _Incoming(first, self._file)


class _Raw(io.RawIOBase):
    """What comes in, as it comes."""

    def __init__(self, link: Link, sock: socket) -> None:
        self.link, self.sock = link, sock
        self.patient, self.ended = True, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.sock.settimeout(left(self.link.until) if self.patient else 0.0)
        try:
            count = self.sock.recv_into(buffer)
        except NOT_YET:
            return None
        self.ended = count == 0
        return count


class _Incoming:
    """The buffer as one answer sees it: it begins with the line that was looked at, and closing it closes nothing."""

    def __init__(self, first: bytes, file: "io.BufferedReader[_Raw]") -> None:
        self._first, self._file = first, file
        self.read, self.readinto = file.read, file.readinto

    def readline(self, limit: int = -1) -> bytes:
        line, self._first = self._first, b""
        return line or self._file.readline(limit)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def left(until: float) -> float:
    """Seconds until then; once it has passed, that it takes too long."""
    seconds = until - monotonic()
    if seconds <= 0:
        raise TimeoutError("it takes too long to answer")
    return seconds
