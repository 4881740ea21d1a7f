"""What the tests of the page share: small runs, a server for one application, a visitor with a cookie, an oracle."""

import asyncio
import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode, urlsplit

from aiohttp import web

from offbeat.cli.standing import run_folders
from offbeat.settings import Settings
from offbeat.sim.run import Run, Simulation
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import Row
from offbeat.web.app import make_app, mount, mount_runs
from offbeat.web.run_reader import RunReader
from offbeat.web.runs import Runs
from tests.server.serving import PATIENCE_S, Answered
from tests.simulation.quadratic import Quadratic

DEVICES = 9


def simulated(folder: Path, on_progress: Callable[[Simulation], None] = lambda _: None, **settings: Any) -> Run:
    """A small run with stragglers; without the pictures that `simulate` draws."""
    task = Quadratic([device / DEVICES for device in range(DEVICES)], [0.5] * DEVICES)
    usual = {"epochs": 60, "in_flight_max": 5, "device_model": "lognormal:1", "evaluate_every": 7, "seed": 3}
    return Simulation.of(task, Settings.of(usual | settings), folder=folder).run(on_progress)


SOME: dict[str, Any] = {"dropout": 0.1, "lease_s": 4.0, "staleness_policy": "reject", "staleness_max": 6}
"""Settings under which tasks are lost and updates refused."""


def rows_of(folder: Path) -> list[Row]:
    """Everything in the ledger."""
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        return list(ledger.rows())


# --- an oracle: everything from all rows, the plain way --------------------------------------------------------------


@dataclass
class Told:
    """What the rows say, counted without any haste."""

    rows: list[Row]
    of: dict[str, list[Row]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            self.of.setdefault(row.kind, []).append(row)

    def kind(self, kind: str) -> list[Row]:
        return self.of.get(kind, [])

    @property
    def applied(self) -> list[Row]:
        return [row for row in self.kind("decided") if row.keep is not None]

    @property
    def t(self) -> int:
        return max((row.t or 0 for row in self.kind("published")), default=0)

    @property
    def staleness(self) -> Counter[int]:
        return Counter(row.staleness or 0 for row in self.applied)

    def rejected(self, rows: list[Row] | None = None) -> dict[str, int]:
        decided = self.kind("decided") if rows is None else rows
        return dict(Counter(str(row.outcome) for row in decided if row.keep is None))

    def open_at(self, at: float) -> set[int]:
        """The tasks in flight after all that happened until then."""
        until = [row for row in self.rows if row.at <= at]
        ended = {row.task for row in until if row.kind in ("decided", "released")}
        return {row.task or 0 for row in until if row.kind == "leased"} - ended

    def published_at(self, t: int) -> float | None:
        """When version t could be read."""
        return next((row.at for row in self.kind("published") if (row.t or 0) >= t), None) if t else 0.0

    def gradients(self, t: int) -> int:
        """In version t."""
        return sum(row.gradients or 0 for row in self.applied if (row.t or 0) <= t)

    def mass(self, worker: int) -> float:
        """Where every update is a version: the sum of its weights."""
        return sum(row.new or 0.0 for row in self.applied if row.worker == worker)

    def seconds(self, worker: int) -> float | None:
        took = [row.at - (row.granted_at or 0) for row in self.kind("decided") if row.worker == worker]
        return median(took) if took else None


# --- a server, and who looks -----------------------------------------------------------------------------------------


@dataclass
class Visitor:
    """Somebody with a browser, or with a token."""

    url: str
    token: str = ""
    cookie: str = ""

    def call(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answered:
        """One request on a connection of its own."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
        known = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        known |= {"Cookie": f"offbeat={self.cookie}"} if self.cookie else {}
        data = urlencode(body).encode() if isinstance(body, dict) else body
        known |= {"Content-Type": "application/x-www-form-urlencoded"} if isinstance(body, dict) else {}
        try:
            connection.request(method, path, data, {**known, **(headers or {})})
            answer = connection.getresponse()
            return Answered(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """JSON, which must be there."""
        answer = self.call("GET", path)
        assert answer.status == 200, (path, answer)
        assert len(answer.body) < 1 << 20, path
        return answer.json

    def log_in(self, token: str) -> Answered:
        """As the form does it."""
        answer = self.call("POST", "/login", {"token": token})
        if answer.status == 303:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0].removeprefix("offbeat=")
        return answer


def runs_of(folder: Path) -> Callable[[], web.Application]:
    """The page of a folder of runs."""

    def make() -> web.Application:
        app = make_app()
        mount_runs(app, Runs(folder, run_folders))
        return app

    return make


def page_of(folder: Path, **options: Any) -> Callable[[], web.Application]:
    """Makes an application with the page of one run, on the loop that it is served by."""

    def make() -> web.Application:
        app = make_app()
        mount(app, RunReader(folder), **options)
        return app

    return make


@contextmanager
def opened(make: Callable[[], web.Application]) -> Iterator[Visitor]:
    """An application, made and served on a loop of its own, in a thread."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    place: list[str] = []

    async def live() -> None:
        runner = web.AppRunner(make(), handler_cancellation=True, shutdown_timeout=2.0, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        place.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),), name="page")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield Visitor(place[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        loop.close()


class Listener:
    """Hears the server-sent events."""

    def __init__(self, visitor: Visitor, path: str = "/events", last: str | None = None) -> None:
        where = urlsplit(visitor.url)
        self.connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE_S)
        headers = {"Cookie": f"offbeat={visitor.cookie}"} if visitor.cookie else {}
        self.connection.request("GET", path, headers=headers | ({"Last-Event-ID": last} if last else {}))
        self.answer = self.connection.getresponse()

    def next(self) -> dict[str, Any]:
        """The next event."""
        found: dict[str, Any] = {}
        while True:
            line = self.answer.readline()
            assert line, "the stream has ended"
            text = line.decode().rstrip("\n")
            if not text and "event" in found:
                return found | {"data": json.loads(found["data"])}
            name, _, value = text.partition(": ")
            if name in ("id", "event", "data"):
                found[name] = value

    def ended(self) -> bool:
        """Is there nothing more to come?"""
        return not self.answer.read()

    def close(self) -> None:
        """Hang up."""
        self.answer.close()
        self.connection.close()
