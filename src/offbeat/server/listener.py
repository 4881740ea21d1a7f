"""Owns the open port: how many connections there may be, how long a new one may take to send its request, and whose
request it is.

Rules kept here:
- Of a proxy's headers about the client, only those of a proxy on this machine are believed, and only where the settings
  say that there is one: else every client could claim any address.
- Of several addresses the last counts, which that proxy added itself; those before it were told to it.
"""

import asyncio
import ssl
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

from aiohttp import web

from offbeat.errors import OffbeatError
from offbeat.server.refusals import Refusal, raw
from offbeat.server.settings import ServerSettings

SILENT = web.AppKey("silent", set)
"""New connections that have sent no request yet."""
FORWARDED_FOR = "X-Forwarded-For"
FORWARDED_PROTO = "X-Forwarded-Proto"
BACKLOG = 1024
RETRY_AFTER_S = 5.0


class TooManyConnections(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(raw(Refusal("not_now", "too many are connected", retry_after_s=RETRY_AFTER_S)))
        transport.close()


class Listener:
    def __init__(self, runner: web.AppRunner, limits: ServerSettings, tls: ssl.SSLContext | None) -> None:
        self.runner, self.limits, self.tls, self.port = runner, limits, tls, 0
        self.loop = asyncio.get_running_loop()
        self._silent: set[Any] = runner.app[SILENT]

    async def listen(self) -> asyncio.Server:
        host, port = self.limits.host, self.limits.port
        try:
            patience = self.limits.head_s if self.tls is not None else None
            server = await self.loop.create_server(
                self._newcomer, host, port, ssl=self.tls, backlog=BACKLOG, ssl_handshake_timeout=patience
            )
        except OSError as error:
            raise OffbeatError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another --port, or 0 for a free one"
            ) from error
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _newcomer(self) -> asyncio.BaseProtocol:
        server = self.runner.server
        shaking_hands = sum(1 for protocol in self._silent if protocol.transport is None) if self.tls else 0
        if server is None or len(server.connections) + shaking_hands >= self.limits.connections_max:
            return TooManyConnections()
        protocol = server()
        self._silent.add(protocol)
        self.loop.call_later(self.limits.head_s, self._check, protocol)
        return protocol

    def _check(self, protocol: Any, *, shaking_hands: bool = True) -> None:
        """Close a connection that has sent no request in time."""
        if protocol not in self._silent:
            return
        if protocol.transport is None and shaking_hands:  # TLS is not through yet, or has failed
            self.loop.call_later(self.limits.head_s, partial(self._check, protocol, shaking_hands=False))
            return
        self._silent.discard(protocol)
        protocol.force_close()


def address_of(request: web.Request, *, behind_proxy: bool) -> str:
    remote = request.remote or ""
    said = ",".join(request.headers.getall(FORWARDED_FOR, [])).rpartition(",")[2].strip()
    with suppress(ValueError):  # one of them is no address
        if behind_proxy and ip_address(remote).is_loopback and ip_address(said):
            return said
    return remote


def over_tls(request: web.Request) -> bool:
    """Does the client speak TLS, if only to a proxy? A client that lies harms only itself, so all are believed."""
    return request.secure or request.headers.get(FORWARDED_PROTO, "").lower() == "https"
