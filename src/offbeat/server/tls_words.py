"""Owns what is said where one side speaks http and the other https: an answer that the client can read, and a log line.

Rules kept here:
- A client that speaks http to a TLS port is answered in http, before the handshake: its first byte is no TLS record. A
  client that speaks TLS never meets this.
- Nothing else is done for it: it gets no request through, and the connection ends with the handshake's time limit, or
  when the client hangs up.
- The log has one line about it now and then, however many such clients come.
"""

import logging
import ssl
from collections.abc import Callable
from time import monotonic
from typing import Any

from offbeat.server.refusals import Refusal, raw

TLS_RECORD = 0x16
"""The first byte of every TLS connection: a handshake."""
EVERY_S = 60.0
SPEAKS_HTTPS = Refusal(
    "wrong_scheme",
    "this port speaks https, and the request came in http",
    do="Use https:// in the address; a worker also needs --ca with the ca.pem of this server.",
)
SPEAKS_HTTP = Refusal(
    "wrong_scheme",
    "this port speaks http, and TLS came",
    do="Use http:// in the address, or start the server with --access for TLS.",
)
log = logging.getLogger("offbeat.server")


class SeldomLog:
    """Logs the first of many alike, and then one line for all that came within some time."""

    def __init__(self, every_s: float = EVERY_S, now: Callable[[], float] = monotonic) -> None:
        self._every_s, self._now = every_s, now
        self._told: dict[str, tuple[float, int]] = {}

    def tell(self, line: str) -> None:
        at, unsaid = self._told.get(line, (-self._every_s, 0))
        if self._now() - at < self._every_s:
            self._told[line] = (at, unsaid + 1)
            return
        self._told[line] = (self._now(), 0)
        log.warning("%s%s", line, f" (and {unsaid} more since this was last said)" if unsaid else "")


MISTAKEN = SeldomLog()


class TlsOrWords(ssl.SSLObject):
    """The server's side of one TLS connection; tells a client that speaks http so."""

    outgoing: ssl.MemoryBIO
    incoming: ssl.MemoryBIO
    looked = False

    def do_handshake(self) -> None:
        if not self.looked and self.incoming.pending:
            self.looked = True
            first = self.incoming.read()
            self.incoming.write(first)
            if first[0] != TLS_RECORD and first[:1].isalpha():
                self._say()
        super().do_handshake()

    def _say(self) -> None:
        MISTAKEN.tell("a client speaks http to this port, which speaks https; give it the address with https://")
        self.incoming.read()  # so that no error comes of it before the answer has left
        self.outgoing.write(raw(SPEAKS_HTTPS, {"Upgrade": "TLS/1.2, HTTP/1.1"}))
        raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the client was told to use https")


class WordsContext(ssl.SSLContext):
    """TLS for a server whose handshakes are `TlsOrWords`."""

    sslobject_class = TlsOrWords

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **more: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **more)
        if isinstance(made, TlsOrWords):
            made.incoming, made.outgoing = incoming, outgoing
        return made
