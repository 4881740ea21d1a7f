"""Owns the open port: which connections are let in, how many, and whose request one is.

Rules kept here:
- A connection is counted from the moment that it is accepted, its TLS handshake included.
- Out of descriptors, the server goes on: those who connect are told so, a few at a time, and the others wait.
- Of a proxy's headers about the client, only those of a proxy on this machine are believed, and only where the settings
  say that there is one: else every client could claim any address.
- Of several addresses the last counts, which that proxy added itself; those before it were told to it.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from aiohttp import web

from offbeat.errors import OffbeatError
from offbeat.server.client_connection import ClientConnection
from offbeat.server.descriptors import DO, NO_DESCRIPTORS, no_descriptors
from offbeat.server.places import Identity, Places, identity_of_address
from offbeat.server.refusals import Refusal, raw
from offbeat.server.settings import ServerSettings

FORWARDED_FOR = "X-Forwarded-For"
FORWARDED_PROTO = "X-Forwarded-Proto"
BACKLOG = 1024
NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
AT_ONCE = 2
"""Connections that are accepted before other work has its turn."""
REFUSED_AT_ONCE = 16
REQUEST_MAX = 1 << 16
PAUSE_S = 0.5
"""How long nothing is accepted where descriptors have run out."""
REFUSING_MAX = 64
"""Connections that are being told that there is no place; further ones are closed without a word."""

log = logging.getLogger("offbeat.server")


class RefusedConnection(asyncio.Protocol):
    """Says no before any request is read."""

    def __init__(self, refusal: Refusal) -> None:
        self._refusal = refusal

    def connection_made(self, transport: Any) -> None:
        transport.write(raw(self._refusal))
        transport.close()


class Listener:
    def __init__(self, runner: web.AppRunner, limits: ServerSettings, tls: ssl.SSLContext | None) -> None:
        self.runner, self.limits, self.tls, self.port = runner, limits, tls, 0
        self.places = Places("connections", limits.connections_max, limits.connections_share)
        self.loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._reserve: int | None = os.open(os.devnull, os.O_RDONLY)
        """A descriptor to give up where there is no other: with it, one connection can be accepted and refused."""
        self._arriving: set[asyncio.Task[None]] = set()
        self._refusing = 0
        self._short = False

    async def listen(self) -> "Listener":
        host, port = self.limits.host, self.limits.port
        try:
            self._sockets = await self._bound(host, port)
        except OSError as error:
            self._give_up_reserve()
            raise OffbeatError(
                f"cannot listen on {host} port {port}: {error.strerror}; choose another --port, or 0 for a free one"
            ) from error
        self.port = self._sockets[0].getsockname()[1]
        for one in self._sockets:
            self.loop.add_reader(one, self._accept, one)
        return self

    def close(self) -> None:
        """Let no further connection in."""
        for one in self._sockets:
            self.loop.remove_reader(one)
            one.close()
        self._sockets = []
        self._give_up_reserve()
        for task in self._arriving:
            task.cancel()

    async def _bound(self, host: str, port: int) -> list[socket.socket]:
        found = await self.loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets: list[socket.socket] = []
        failed: OSError | None = None
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                one = socket.create_server((address[0], port), family=family, backlog=BACKLOG)
            except OSError as error:  # a machine without IPv6 may still have a name for it
                failed = error
                if error.errno in NO_SUCH_ADDRESS:
                    continue
                break
            one.setblocking(False)
            sockets.append(one)
            port = one.getsockname()[1]
        if failed is not None and (not sockets or failed.errno not in NO_SUCH_ADDRESS):
            for one in sockets:
                one.close()
            raise failed
        return sockets

    # --- letting in --------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(listening, error)
                return
            self._short = False
            task = self.loop.create_task(self._welcome(accepted, self._identity(address)))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _identity(self, address: Any) -> Identity:
        remote = str(address[0])
        with suppress(ValueError):
            if self.limits.behind_proxy and ip_address(remote).is_loopback:
                return None
        return identity_of_address(remote)

    async def _welcome(self, accepted: socket.socket, identity: Identity) -> None:
        """Make a connection of what was accepted, which with TLS takes a handshake."""
        try:
            protocol = self._protocol(identity)
            if protocol is None:
                accepted.close()
                return
            await self._connected(protocol, accepted)
        except (OSError, asyncio.CancelledError):  # it has gone, or TLS has failed
            accepted.close()

    async def _connected(self, protocol: asyncio.Protocol, accepted: socket.socket) -> None:
        patience = self.limits.head_s if self.tls is not None else None
        try:
            accepted.setblocking(False)
            await self.loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=self.tls, ssl_handshake_timeout=patience
            )
        except BaseException:
            if isinstance(protocol, ClientConnection):
                protocol.leave_place()
            raise
        finally:
            if isinstance(protocol, RefusedConnection):
                self._refusing -= 1

    def _protocol(self, identity: Identity) -> asyncio.Protocol | None:
        server = self.runner.server
        try:
            if server is None:
                return None
            self.places.take(identity)
        except Refusal as refusal:
            if self._refusing >= REFUSING_MAX:
                return None
            self._refusing += 1
            return RefusedConnection(refusal)
        return ClientConnection(server, self.places, identity, self.limits.head_s)

    # --- out of descriptors ------------------------------------------------------------------------------------------

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment; else the loop would be busy with failing."""
        if not self._short:
            self._short = True
            log.warning("new connections cannot be accepted now: %s. %s", error.strerror, DO)
        if error.errno in NO_DESCRIPTORS:
            self._refuse_some(listening)
        self.loop.remove_reader(listening)
        self.loop.call_later(PAUSE_S, self._go_on, listening)

    def _refuse_some(self, listening: socket.socket) -> None:
        """Give up the reserve, and tell with it those who wait; over TLS they only see that it is closed."""
        for _ in range(REFUSED_AT_ONCE):
            self._give_up_reserve()
            with suppress(OSError):
                accepted, _ = listening.accept()
                with accepted:
                    self._say_shortage(accepted)
            if not self._have_reserve():
                return

    def _say_shortage(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if self.tls is None:
            accepted.send(raw(no_descriptors()))
            accepted.shutdown(socket.SHUT_WR)
            accepted.recv(REQUEST_MAX)  # what is closed unread resets the connection, and the client hears nothing

    def _give_up_reserve(self) -> None:
        if self._reserve is not None:
            os.close(self._reserve)
            self._reserve = None

    def _have_reserve(self) -> bool:
        with suppress(OSError):  # another thread was faster
            self._reserve = os.open(os.devnull, os.O_RDONLY)
        return self._reserve is not None

    def _go_on(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            if self._reserve is None:
                self._have_reserve()
            self.loop.add_reader(listening, self._accept, listening)


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
