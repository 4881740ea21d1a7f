"""Owns `offbeat ui`: a small server, on this machine only, for the runs in a folder."""

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server.host_names import LOOPBACK, names_in
from offbeat.server.http_connection import HttpRunner
from offbeat.server.own_names import OwnNames
from offbeat.web.app import make_app, mount_runs
from offbeat.web.pages import STATIC
from offbeat.web.runs import Find, Runs

CLOSE_S = 2.0
KEEP_ALIVE_S = 75.0
"""How long a connection may take to send the head of its next request."""


class Ui:
    def __init__(
        self, folder: Path, find: Find, *, host: str, port: int, static: Path = STATIC, public_name: str = ""
    ) -> None:
        """`find` gives the folders of runs below a folder; `public_name` has further names that browsers may use."""
        if host not in LOOPBACK:
            raise InvalidValue(
                f"host is {host!r}, but these pages need no token and are for this machine only: use "
                f"{', '.join(LOOPBACK)}, and from elsewhere a tunnel: ssh -L 7744:localhost:7744 HOST"
            )
        list(find(folder))  # a folder that is not there is refused now
        self.host, self.port, self.url = host, port, ""
        self.app = make_app(OwnNames(public=names_in(public_name)))
        mount_runs(self.app, Runs(folder, find), static=static)
        self.stopped = asyncio.Event()

    async def open(self) -> None:
        self._runner = HttpRunner(
            self.app,
            handle_signals=False,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_S,
            keepalive_timeout=KEEP_ALIVE_S,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.host, self.port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise OffbeatError(
                f"cannot listen on {self.host} port {self.port}: {error.strerror}; choose another --port, or 0"
            ) from error
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()


def serve(
    folder: Path, find: Find, *, host: str, port: int, ready: Callable[[Ui], None], public_name: str = ""
) -> None:
    """Serve until a signal; `ready` hears of it once browsers can come."""

    async def live() -> None:
        ui = Ui(folder, find, host=host, port=port, public_name=public_name)
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError, RuntimeError):  # not on the main thread, which then stops us in another way
                asyncio.get_running_loop().add_signal_handler(number, ui.stopped.set)
        await ui.open()
        ready(ui)
        try:
            await ui.stopped.wait()
        finally:
            await ui.close()

    asyncio.run(live())
