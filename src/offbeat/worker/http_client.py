"""Owns HTTP as workers and commands speak it: requests, answers, and what is done about a connection that is gone.

Rules kept here:
- One connection, kept open. One that the server closed while it was not used is opened again without a word.
- Every failure is a `RequestRefused`, the server said no, or `Unreachable`, there was no answer to believe.
- A file is sent piece by piece, after the server said that it wants it; an answer meanwhile ends the sending.
- When a request is given up half-way, for whatever reason, its connection is closed: no request reads another's answer.
"""

import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from time import monotonic
from typing import Any, BinaryIO

import h11

from offbeat.errors import OffbeatError
from offbeat.worker.api_answers import RequestRefused, Unreachable, object_of, reason, refusal, shown
from offbeat.worker.connection import LINE_END, Connection
from offbeat.worker.other_scheme import OF_PROXIES, WORD, is_other_scheme, wrong_scheme
from offbeat.worker.settings import Address, Timeouts

PIECE = 1 << 20
JSON_MAX = 1 << 20
"""Bytes of an answer that is not a model."""
BYTES = "application/octet-stream"
OF_HTTP = frozenset({"Host", "Content-Length", "Expect"})
"""The headers that decide how a request is sent."""

Headers = Mapping[str, str]
NONE: Headers = {}


class HttpClient:
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
        self._connection: Connection | None = None
        self._answered = False
        """Was there ever an answer? Then a server that hangs up does so for another reason than http."""

    def another(self) -> "HttpClient":
        """The same with a connection of its own, for another thread."""
        return HttpClient(self.address, self.headers, self.context, self.timeouts)

    def hurry(self, seconds: float) -> None:
        """From now on, nothing takes longer than until then."""
        self._end = monotonic() + seconds

    def close(self) -> None:
        """Hang up; the next request connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """From another thread: end what is under way, and whatever would come after it."""
        self.hurry(0.0)
        connection = self._connection
        if connection is not None:
            connection.abort()

    # --- requests ----------------------------------------------------------------------------------------------------

    def call(
        self, method: str, path: str, body: Any = None, headers: Headers = NONE, *, wait_s: float = 0.0
    ) -> dict[str, Any]:
        """JSON there and back; `wait_s` is how long the server may take to think. Empty where it answers nothing."""
        data = b"" if body is None else json.dumps(body, allow_nan=False).encode()
        typed = {} if body is None else {"Content-Type": "application/json"}
        with self._guarded():
            return self._judged(*self._asked(method, path, {**typed, **headers}, data, wait_s))

    def put(self, path: str, file: BinaryIO, size: int, headers: Headers = NONE) -> dict[str, Any]:
        """Send the next `size` bytes of a file, if the server wants them."""
        about = {"Content-Type": BYTES, "Content-Length": str(size)}
        if size:
            about["Expect"] = "100-continue"
        with self._guarded():
            connection = self._begun("PUT", path, {**about, **headers}, None, self.timeouts.continue_s)
            if not connection.answered(0.0):
                self._stream(connection, file, size)
            return self._judged(connection, self._response(connection, self.timeouts.answer_s))

    def open(self, path: str, headers: Headers = NONE) -> tuple[int, Headers]:
        """Ask for something large, to be read with `readinto`; its status, and headers by names in small letters."""
        with self._guarded():
            connection, response = self._asked("GET", path, headers, b"", 0.0)
            status = response.status_code
            if status not in (200, 206):
                self._judged(connection, response)
                raise Unreachable(f"{self.address} answered {status}, which this request does not expect")
            return status, _headers_of(response)

    def readinto(self, view: memoryview) -> int:
        """Read the next bytes of what was opened, 0 at its end; `Unreachable` where it breaks off."""
        with self._guarded():
            if self._connection is None:
                raise ConnectionResetError("it was closed meanwhile")
            return self._connection.fill(view[:PIECE], self._until(self.timeouts.piece_s))

    # --- one exchange ------------------------------------------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except RequestRefused:
            raise
        except (OSError, h11.ProtocolError, UnicodeError) as error:
            self.close()
            if self._is_other_scheme(error):
                raise wrong_scheme(self.address) from error
            raise Unreachable(f"{self.address} does not answer: {reason(error)}") from error
        except BaseException:  # an interrupt, say: half an answer may be on its way
            self.close()
            raise

    def _is_other_scheme(self, error: BaseException) -> bool:
        may_be = self.address.tls or not self._answered
        return may_be and is_other_scheme(self.address, error, self._until(self.timeouts.connect_s))

    def _until(self, seconds: float) -> float:
        return min(monotonic() + seconds, self._end)

    def _asked(
        self, method: str, path: str, headers: Headers, data: bytes, wait_s: float
    ) -> tuple[Connection, h11.Response]:
        sized = {"Content-Length": str(len(data))} if data or method != "GET" else {}
        wait_s += self.timeouts.answer_s
        connection = self._begun(method, path, {**headers, **sized}, data, wait_s)
        return connection, self._response(connection, wait_s)

    def _begun(self, method: str, path: str, headers: Headers, body: bytes | None, wait_s: float) -> Connection:
        """Send a request and wait, at most so long, until the server says something."""
        fields = {"Host": self.address.netloc, "Accept-Encoding": "identity", **self.headers, **headers}
        known = [(name, value) for name, value in fields.items() if name in OF_HTTP]
        request = h11.Request(method=method, target=self.address.prefix + path, headers=known)
        more = b"".join(_line(name, value) for name, value in fields.items() if name not in OF_HTTP)
        while True:
            fresh, connection = self._connected()
            try:
                connection.begin(request, self._until(self.timeouts.answer_s), body, more)
                connection.heard(self._until(wait_s))
            except ConnectionError:
                if fresh:
                    raise
                self.close()  # the server gave up this connection before it was used again
            else:
                return connection

    def _connected(self) -> tuple[bool, Connection]:
        if self._connection is not None and self._connection.reusable():
            return False, self._connection
        self.close()
        until = self._until(self.timeouts.connect_s)
        self._connection = Connection.open(self.address.host, self.address.port, self.context, until)
        return True, self._connection

    def _stream(self, connection: Connection, file: BinaryIO, size: int) -> None:
        """Send the file, unless the server answers before all is sent."""
        try:
            if all(self._pieces_sent(connection, file, size)):
                connection.end(size)
        except EOFError:
            raise OffbeatError(f"{getattr(file, 'name', 'the file')} is shorter than it was; remove it") from None

    def _pieces_sent(self, connection: Connection, file: BinaryIO, size: int) -> Iterator[bool]:
        """Send the next bytes of a file, each piece in its time; False where the server takes no more."""
        begin, at = file.tell(), 0
        straight = connection.sends_files and _descriptor_of(file) is not None
        piece = memoryview(bytearray(0 if straight else min(PIECE, size)))
        while at < size:
            count, until = min(PIECE, size - at), self._until(self.timeouts.piece_s)
            if straight:
                yield connection.send_file(file.fileno(), begin + at, count, until)
            else:
                count = file.readinto(piece[:count])  # type: ignore[attr-defined]
                if not count:
                    raise EOFError
                yield connection.send(piece[:count], until)
            at += count

    # --- answers -----------------------------------------------------------------------------------------------------

    def _response(self, connection: Connection, seconds: float) -> h11.Response:
        connection.answered(self._until(seconds))
        if connection.response is None:
            raise TimeoutError(f"it takes too long to answer (more than {seconds:g} s)")
        self._answered = True
        return connection.response

    def _judged(self, connection: Connection, response: h11.Response) -> dict[str, Any]:
        text, status = connection.read(JSON_MAX, self._until(self.timeouts.answer_s)), response.status_code
        if not 200 <= status < 300:
            refused = refusal(status, _headers_of(response), text)
            if refused.error == WORD or any(words in text for words in OF_PROXIES):
                raise wrong_scheme(self.address) from refused
            raise refused
        body = {} if status == 204 else object_of(text)
        if body is None:
            raise Unreachable(f"{self.address} answers, but not as an Offbeat server does: {shown(text) or 'nothing'}")
        return body


def _line(name: str, value: str) -> bytes:
    """A line of a request's head; what could end the line, or the head, is refused."""
    text = f"{name}: {value}"
    if not (text.isascii() and text.isprintable()):
        raise h11.LocalProtocolError(f"the header {name!r:.60} has signs that no header may have")
    return text.encode("ascii") + LINE_END


def _descriptor_of(file: BinaryIO) -> int | None:
    """Of a file of the system; others have none."""
    try:
        return file.fileno()
    except OSError:
        return None


def _headers_of(response: h11.Response) -> Headers:
    return {name.decode("ascii"): value.decode("latin-1") for name, value in response.headers}
