"""Word that a run has moved: soon, rarely, to everybody, and not where nobody listens."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest
from aiohttp import web

from offbeat.server.access import Role, TokenBook
from offbeat.sim.run import Simulation
from offbeat.web.app import make_app, mount
from offbeat.web.run_reader import RunReader
from offbeat.web.site import Site
from tests.server.serving import PATIENCE_S
from tests.web.looking import Listener, Visitor, opened, page_of, simulated


class Slow:
    """A simulation that goes on when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.until, self.t = folder, 10, 0
        self._turn = threading.Condition()
        self.thread = threading.Thread(target=lambda: simulated(folder, self._hold, executor="inline"))
        self.thread.start()
        self.go(10)

    def _hold(self, simulation: Simulation) -> None:
        assert simulation.ledger is not None
        with self._turn:
            self.t = simulation.coordinator.t
            if self.t >= self.until:
                simulation.ledger.flush()
                self._turn.notify_all()
                self._turn.wait_for(lambda: self.t < self.until, PATIENCE_S)

    def go(self, until: int) -> None:
        """Let it go on until an epoch."""
        with self._turn:
            self.until = until
            self._turn.notify_all()
            assert until > 60 or self._turn.wait_for(lambda: self.t >= until, PATIENCE_S)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    slow = Slow(tmp_path / "run")
    yield slow
    slow.go(1000)
    slow.thread.join(PATIENCE_S)


def test_who_listens_hears_that_the_run_moved(slow: Slow) -> None:
    sites: list[Site] = []

    def make() -> web.Application:
        app = make_app()
        sites.append(mount(app, RunReader(slow.folder)))
        return app

    with opened(make) as visitor:
        listener = Listener(visitor)
        assert listener.answer.getheader("Content-Type") == "text/event-stream"
        first = listener.next()
        assert (first["event"], first["data"]["t"]) == ("moved", slow.t)
        assert first["id"] == str(first["data"]["sequence"])
        before = monotonic()
        slow.go(25)
        second = listener.next()
        assert second["data"]["t"] == slow.t >= 25
        assert second["data"]["sequence"] > first["data"]["sequence"]
        assert visitor.get("/overview.json")["sequence"] >= second["data"]["sequence"]
        assert visitor.get("/overview.json")["t"] == slow.t
        slow.go(30)
        listener.next()
        assert monotonic() - before > 0.9  # two words, and a second between them
        again = Listener(visitor, last=second["id"])
        assert again.next()["data"]["t"] == slow.t >= 30
        again.close()
        listener.close()
        _until(lambda: not any(watch._task for watch in sites[0]._watches.values()))


def _until(holds: Callable[[], bool]) -> None:
    """Without a signal to wait for: the server notices that a connection is closed in its own time."""
    deadline = monotonic() + PATIENCE_S
    while not holds():
        assert monotonic() < deadline
        threading.Event().wait(0.01)


def test_whoever_heard_the_newest_hears_nothing_until_it_moves(slow: Slow) -> None:
    with opened(page_of(slow.folder)) as visitor:
        newest = visitor.get("/overview.json")["sequence"]
        listener = Listener(visitor, last=str(newest))
        slow.go(20)
        assert listener.next()["data"]["t"] == slow.t
        listener.close()


def test_a_page_that_stops_lets_listeners_go(tmp_path: Path) -> None:
    simulated(tmp_path / "run")

    with opened(page_of(tmp_path / "run")) as visitor:
        listener = Listener(visitor)
        listener.next()
        begun = monotonic()
    assert monotonic() - begun < 2.0  # nobody had to be cut off
    assert listener.ended()
    listener.close()


def test_there_are_not_more_listeners_than_there_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "run")
    monkeypatch.setattr("offbeat.web.site.LISTENERS_MAX", 1)

    with opened(page_of(tmp_path / "run")) as visitor:
        listener = Listener(visitor)
        listener.next()
        assert visitor.call("GET", "/events").status == 503
        listener.close()


def test_a_revoked_token_ends_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "run")
    monkeypatch.setattr("offbeat.web.run_watch.KEEP_ALIVE_S", 0.1)
    book = TokenBook.begin(tmp_path / "tokens.json")
    token = book.add("eye", Role.VIEWER)

    with opened(page_of(tmp_path / "run", tokens=book)) as visitor:
        visitor.log_in(token)
        listener = Listener(Visitor(visitor.url, cookie=visitor.cookie))
        listener.next()
        book.revoke("eye")
        lines = listener.answer.read()
        assert lines.count(b": still here") >= 1
        listener.close()
