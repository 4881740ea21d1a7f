"""Owns HTTP as a worker speaks it: requests, answers, and what is done about a connection that is gone.

Rules kept here:
- One connection, kept open. One that the server closed while nobody used it is opened again without a word.
- Whatever goes wrong is one of two: `Refused`, the server said no, or `Unreachable`, there was no answer to believe.
- A file is sent piece by piece, after the server said that it wants it; what it says meanwhile ends the sending.
- When a request is given up half-way, for whatever reason, its connection is closed: nobody reads another's answer.
"""

import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.client import HTTPException, HTTPMessage, HTTPResponse
from math import inf
from time import monotonic
from typing import Any, BinaryIO, NamedTuple

from offbeat.errors import OffbeatError
from offbeat.worker.answers import Refused, Unreachable, object_of, reason, refusal, shown
from offbeat.worker.link import Link
from offbeat.worker.settings import Address, Timeouts

PIECE = 1 << 20
JSON_MAX = 1 << 20
"""Bytes of an answer that is not a model."""
BYTES = "application/octet-stream"

Headers = Mapping[str, str]
NONE: Headers = {}


class Incoming(NamedTuple):
    """The beginning of a large answer."""

    status: int
    headers: HTTPMessage
    readinto: Callable[[memoryview], int]
    """Reads some bytes of it, at least one; `Unreachable` where it breaks off."""


class Http:
    """Speaks to one server, one request at a time."""

    def __init__(
        self,
        address: Address,
        headers: Headers = NONE,
        context: ssl.SSLContext | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (a frozen value)
    ) -> None:
        """`headers` go with every request."""
        self.address, self.headers, self.context, self.timeouts = address, headers, context, timeouts
        self._end = inf
        self._link: Link | None = None
        self._answer: HTTPResponse | None = None

    def another(self) -> "Http":
        """The same with a connection of its own, for another thread."""
        return Http(self.address, self.headers, self.context, self.timeouts)

    def hurry(self, seconds: float) -> None:
        """From now on, nothing takes longer than until then."""
        self._end = monotonic() + seconds

    def close(self) -> None:
        """Hang up; the next request connects again."""
        link, self._link, self._answer = self._link, None, None
        if link is not None:
            link.close()

    def abort(self) -> None:
        """From another thread: end what is under way, and whatever would come after it."""
        self.hurry(0.0)
        link = self._link
        if link is not None:
            link.abort()

    # --- requests ----------------------------------------------------------------------------------------------------

    def call(
        self, method: str, path: str, body: Any = None, headers: Headers = NONE, *, wait_s: float = 0.0
    ) -> dict[str, Any]:
        """JSON there and back; `wait_s` is how long the server may take to think. Empty where it answers nothing."""
        data = b"" if body is None else json.dumps(body, allow_nan=False).encode()
        typed = {} if body is None else {"Content-Type": "application/json"}
        with self._guarded():
            return self._judged(self._asked(method, path, {**typed, **headers}, data, wait_s))

    def put(self, path: str, file: BinaryIO, size: int, headers: Headers = NONE) -> dict[str, Any]:
        """Send the next `size` bytes of a file, if the server wants them."""
        about = {"Content-Type": BYTES, "Content-Length": str(size)}
        if size:
            about["Expect"] = "100-continue"
        with self._guarded():
            link = self._begun(self._head("PUT", path, {**about, **headers}), self.timeouts.continue_s)
            wanted = not link.heard() or link.interim()
            whole = wanted and self._streamed(link, file, size)
            link.until = self._until(self.timeouts.answer_s)
            answer = self._answer = link.answer("PUT")
            try:
                return self._judged(answer)
            finally:
                if not whole:  # what is sent next would be taken for the rest
                    self.close()

    def open(self, path: str, headers: Headers = NONE) -> Incoming:
        """Ask for something large, which is then read piece by piece."""
        with self._guarded():
            answer = self._asked("GET", path, headers, b"", 0.0)
            if answer.status not in (200, 206):
                self._judged(answer)
                raise Unreachable(f"{self.address} answered {answer.status}, which nobody asked for")
            return Incoming(answer.status, answer.headers, partial(self._received, answer))

    # --- one exchange ------------------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Refused:
            raise
        except (OSError, HTTPException, UnicodeError) as error:
            self.close()
            raise Unreachable(f"no answer from {self.address}: {reason(error)}") from error
        except BaseException:  # somebody interrupts: half an answer may be on its way
            self.close()
            raise

    def _until(self, seconds: float) -> float:
        return min(monotonic() + seconds, self._end)

    def _asked(self, method: str, path: str, headers: Headers, data: bytes, wait_s: float) -> HTTPResponse:
        sized = {"Content-Length": str(len(data))} if data or method != "GET" else {}
        wait_s += self.timeouts.answer_s
        link = self._begun(self._head(method, path, {**headers, **sized}) + data, wait_s)
        if not link.heard():
            raise TimeoutError(f"it says nothing for {wait_s:g} s")
        self._answer = link.answer(method)
        return self._answer

    def _begun(self, head: bytes, wait_s: float) -> Link:
        """Send this and wait until the server says something, at most so long; then it has `answer_s` to go on."""
        while True:
            fresh, link = self._connected()
            try:
                if not self._stale(fresh, link, head, wait_s):
                    link.until = self._until(self.timeouts.answer_s)
                    return link
            except ConnectionError:
                if fresh:
                    raise
            self.close()

    def _stale(self, fresh: bool, link: Link, head: bytes, wait_s: float) -> bool:
        """Was this connection given up by the server before it was used again?"""
        if not fresh and link.heard():  # nobody asked it anything: it hung up, or says that it will
            return True
        link.until = self._until(self.timeouts.answer_s)
        link.send(head)
        link.heard(self._until(wait_s))
        if link.hung_up() and fresh:
            raise ConnectionResetError("it hung up")
        return link.hung_up()

    def _connected(self) -> tuple[bool, Link]:
        if self._answer is not None and (self._answer.will_close or not self._answer.isclosed()):
            self.close()
        fresh = self._link is None
        if self._link is None:
            until = self._until(self.timeouts.connect_s)
            self._link = Link.open(self.address.host, self.address.port, self.context, until)
        return fresh, self._link

    def _head(self, method: str, path: str, headers: Headers) -> bytes:
        fields = {"Host": self.address.netloc, "Accept-Encoding": "identity", **self.headers, **headers}
        lines = [f"{method} {self.address.prefix}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items())]
        if any(not line.isprintable() for line in lines):
            raise UnicodeError("a header holds what no header can hold")
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _streamed(self, link: Link, file: BinaryIO, size: int) -> bool:
        """Send the file; False where the server said something before all was sent."""
        piece = memoryview(bytearray(min(PIECE, size)))
        while size:
            count = file.readinto(piece[:size])  # type: ignore[attr-defined]
            if not count:
                raise OffbeatError(f"{getattr(file, 'name', 'the file')} is shorter than it was; remove it")
            link.until = self._until(self.timeouts.piece_s)
            if not link.send(piece[:count]):
                return False
            size -= count
        return True

    # --- answers -----------------------------------------------------------------------------------------------------

    def _received(self, answer: HTTPResponse, view: memoryview) -> int:
        with self._guarded():
            if self._link is None or answer is not self._answer:
                raise ConnectionResetError("another request was made meanwhile")
            self._link.until = self._until(self.timeouts.piece_s)
            count = answer.readinto(view[:PIECE])
            if not count:
                raise ConnectionResetError("it breaks off")
            return count

    def _judged(self, answer: HTTPResponse) -> dict[str, Any]:
        text = answer.read(JSON_MAX + 1)
        if len(text) > JSON_MAX or (answer.length or 0) > 0:
            raise ConnectionResetError("it breaks off in the middle of an answer, or never ends it")
        if not 200 <= answer.status < 300:
            raise refusal(answer.status, answer.headers, text)
        body = {} if answer.status == 204 else object_of(text)
        if body is None:
            raise Unreachable(f"{self.address} answers, but not as an Offbeat server does: {shown(text) or 'nothing'}")
        return body
