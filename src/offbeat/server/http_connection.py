"""Owns what aiohttp answers where there is no request yet: the errors of the HTTP parser, as refusals of the API.

Rules kept here:
- Whatever is wrong with the first bytes, the answer is the documented JSON, and the connection is closed after it.
- TLS that comes to a port that speaks http is answered in http: every TLS client then fails at once, with the error
  that is known for this mistake ("wrong version number"). The log says it in words, now and then.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from aiohttp import StreamReader, web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from offbeat.server.refusals import Refusal
from offbeat.server.tls_words import MISTAKEN, SPEAKS_HTTP

OF_TLS = ("Received HTTPS traffic", r"b'\x16\x03")
"""How the parser's error tells of TLS: in words, or with its first bytes."""
SHOWN_MAX = 200
HEAD_TOO = {"GET": ("HEAD",)}
"""Methods that a route has without being listed: what can be read can be asked about."""
Count = Callable[[str], None]
"""Hears the word of every refusal."""


class BodyEnd(Protocol):
    """What receives a body, as far as its connection must know."""

    def fail(self, error: BaseException) -> None: ...


class HttpConnection(RequestHandler):
    """A connection on which aiohttp reads requests; the body of a push is received beside it."""

    __slots__ = ("receiver",)

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(manager, loop=loop, **options)
        self.receiver: BodyEnd | None = None
        """What receives the body of the request that is being answered, while it does."""

    @property
    def is_in_body(self) -> bool:
        """Does the next byte belong to the body of the newest request?"""
        return not self._upgraded and not self._messages and self._parser is not None

    def body_received(self, payload: StreamReader) -> None:
        """The rest of this body came past the parser: what comes next is another request, for a new parser."""
        self._parser = HttpRequestParser(
            self,
            self._loop,
            self._read_bufsize,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=self._max_msg_queue_size,
        )
        self._reading_paused = False
        payload.feed_eof()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Let the handler finish for a while, as aiohttp does; then a body that is still coming is cut."""
        if self.receiver is not None:
            self._loop.call_later(timeout or 0.0, self.receiver.fail, ConnectionAbortedError("the server stops"))
        await super().shutdown(timeout)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request; it always closes the connection."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so no other one can be given")
        refusal = _refusal(status, exc, message or "")
        if refusal.error == "wrong_scheme":
            MISTAKEN.tell("a client speaks https to this port, which speaks http; give it the address with http://")
        elif status >= 500:
            self.log_exception("Error handling request from %s", request.remote, exc_info=exc)
        if isinstance(self._manager, HttpConnections):
            self._manager.count(refusal.error)
        response = refusal.response()
        response.headers["Connection"] = "close"
        response.force_close()
        return response


def _refusal(status: int, error: BaseException | None, message: str) -> Refusal:
    if status >= 500:
        return Refusal("internal", "something went wrong in the server")
    if any(sign in message for sign in OF_TLS):
        return SPEAKS_HTTP
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = "".join(letter for letter in (lines or ["it cannot be read"])[0] if letter.isprintable())[:SHOWN_MAX]
    if isinstance(error, LineTooLong):
        return Refusal("too_long", f"the head of the request is too long: {said.partition(' when')[0]}")
    return Refusal("bad_request", f"this is no HTTP/1.1 request: {said.rstrip(':')}")


class HttpConnections(web.Server):
    """Makes them; one for each application that is served."""

    def __init__(self, made: web.Server, count: Count) -> None:
        super().__init__(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        self.count = count

    def __call__(self) -> RequestHandler:
        return HttpConnection(self, loop=self._loop, **self._kwargs)


class HttpRunner(web.AppRunner):
    """Runs an application as aiohttp does, but for these errors."""

    __slots__ = ("_count",)

    def __init__(self, app: web.Application, *, count: Count = lambda _word: None, **options: Any) -> None:
        super().__init__(app, **options)
        self._count = count

    async def _make_server(self) -> web.Server:
        return HttpConnections(await super()._make_server(), self._count)
