"""Owns one connection of a client: how long the head of a request may take, and whose connection it is.

Rules kept here:
- The first head and every later one has `head_s`, from its first byte on; a byte now and then does not prolong that.
- A connection belongs to an address until a request on it shows a token, from then on to that token.
- A connection of a proxy carries the requests of many clients: each of them counts while it is being answered.
"""

import asyncio

from aiohttp import web

from offbeat.server.http_connection import HttpConnection
from offbeat.server.places import Identity, Places
from offbeat.server.refusals import Refusal


class ClientConnection(HttpConnection):
    __slots__ = ("_has_place", "_head_s", "_heads", "_places", "_timer", "identity", "turned_away")

    def __init__(self, server: web.Server, places: Places, identity: Identity, head_s: float) -> None:
        """`identity` has taken its place already, and the connection leaves it."""
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **server._kwargs)  # as `server` itself makes them
        self._places, self.identity, self._head_s = places, identity, head_s
        self._has_place, self.turned_away = True, False
        self._heads = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._timer = self._loop.call_later(self._head_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._request_count != self._heads:
            self._heads = self._request_count
            self._stop_timer()
        elif self._timer is None and self._waits():  # a part of the next head
            self._timer = self._loop.call_later(self._head_s, self._too_slow)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self.leave_place()

    def leave_place(self) -> None:
        """It has ended, or never began; a second time does nothing."""
        if self._has_place:
            self._has_place = False
            self._places.leave(self.identity)

    def belongs_to(self, identity: Identity) -> None:
        """A request has shown whose connection this is; refused where that client has too many."""
        if identity == self.identity:
            return
        try:
            self._places.move(self.identity, identity)
        except Refusal:
            self.turned_away = True
            raise
        self.identity = identity

    def _waits(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _too_slow(self) -> None:
        self._timer = None
        if self._waits() or not self._heads:
            self.force_close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
