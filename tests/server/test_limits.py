"""Every wait has an end, and no client uses up what all share: slow heads, bodies and uploads, and greedy clients."""

import json
import select
import socket
import sqlite3
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.errors import InvalidValue
from offbeat.server import certificates
from offbeat.server import uploads as server_uploads
from offbeat.server.access import TOKENS, Role, TokenBook
from offbeat.server.server import ServeOptions
from offbeat.server.settings import AccessSettings, ServerSettings
from offbeat.server.slow_readers import has_gone
from offbeat.web.app import furnish
from offbeat.worker.settings import trusted
from tests.server import serving as served
from tests.server.serving import BEFORE_THE_CHAIN, PATIENCE_S, Answered, Running, Worker, serving
from tests.server.speaking import Line, file_of, head, ones, put, refused, settled, until
from tests.server.test_access_control import As

OTHER = "127.0.0.2"
"""Another address of this machine."""
DATA = file_of(ones())
ROOM = {"tasks_per_device": 1000, "in_flight_max": 8000, "epochs": 1_000_000, "evaluate_every": 1_000_000}
HEALTH = head("GET", "/v1/health")


class LineFrom(Line):
    """A connection from another address."""

    def __init__(self, running: Running, data: bytes = b"", address: str = OTHER) -> None:
        where = urlsplit(running.url)
        target = (where.hostname or "", where.port or 0)
        self.socket = socket.create_connection(target, PATIENCE_S, source_address=(address, 0))
        self.reader = self.socket.makefile("rb")
        self.send(data)

    def __enter__(self) -> Self:
        return self


def dripped(line: Line, data: bytes) -> bytes:
    """What the server says to a client that sends a byte now and then, until it hangs up."""
    line.socket.settimeout(0.05)
    said, end = b"", monotonic() + PATIENCE_S
    for number in range(10**9):
        assert monotonic() < end, "the server waits for ever"
        with suppress(TimeoutError):
            try:
                line.socket.sendall(data[number % len(data) :][:1])
                more = line.socket.recv(4096)
            except ConnectionError:
                return said
            if not more:
                return said
            said += more
    return said


@pytest.fixture
def with_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ServeOptions", partial(ServeOptions, extend=furnish))


# --- slow heads and bodies -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_page")
def test_the_form_of_the_page_waits_for_its_body_only_so_long(tmp_path: Path) -> None:
    """It used to wait for ever, and as many connections as may be took the server away."""
    limits = {"head_s": 1.0, "connections_max": 6, "connections_share": 1.0}
    facts = {"Content-Length": 60_000, "Content-Type": "application/json", "Accept": "application/json"}
    begun = head("POST", "/login", facts) + b"{"
    with serving(tmp_path, ROOM, limits) as running:
        lines = [Line(running, begun) for _ in range(6)]
        for line in lines:
            told = refused(line.answer(), 408, "stalled")
            assert told["do"].startswith("Send the request again")
            assert line.is_closed()
            line.cut()
        until(lambda: running.call("GET", "/v1/health").status == 200)


BODIES = ["/v1/workers", "/v1/workers/0/quarantine", "/login"]


@pytest.mark.usefixtures("with_page")
@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_drips_has_an_end_on_every_route(tmp_path: Path, path: str) -> None:
    with serving(tmp_path, ROOM, {"head_s": 0.7}) as running:
        worker = Worker(running)
        facts = {"Content-Type": "application/json", "Content-Length": 60_000, **worker.session}
        with Line(running, head("POST", path, facts)) as line:
            assert b"408" in dripped(line, b"          ")[:20]
        with Line(
            running, head("POST", path, {**facts, "Transfer-Encoding": "chunked"} | {"Content-Length": 0})
        ) as line:
            assert line.head()[0] == 400, "two lengths are none"
        chunked = {name: value for name, value in facts.items() if name != "Content-Length"}
        with Line(running, head("POST", path, {**chunked, "Transfer-Encoding": "chunked"})) as line:
            assert b"408" in dripped(line, b"1\r\n \r\n")[:20]


def test_a_heartbeat_that_drips_has_an_end(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"head_s": 0.7}) as running:
        worker = Worker(running)
        facts = {"Content-Type": "application/json", "Content-Length": 60_000, **worker.session}
        with Line(running, head("POST", f"/v1/tasks/{worker.lease()['task']}/heartbeat", facts)) as line:
            assert b"408" in dripped(line, b"          ")[:20]


@pytest.mark.parametrize("first", [b"", HEALTH, 3 * HEALTH], ids=["first", "second", "fourth"])
def test_a_head_that_drips_has_an_end_also_when_it_is_not_the_first(tmp_path: Path, first: bytes) -> None:
    with serving(tmp_path, ROOM, {"head_s": 0.7, "keep_alive_s": 3600.0}) as running, Line(running, first) as line:
        for _ in range(first.count(b"GET")):
            assert line.answer().status == 200
        begun = monotonic()
        assert dripped(line, HEALTH[:-4] + b"\r\nX-More: " + b"x" * 10_000) == b""
        assert monotonic() - begun < PATIENCE_S / 2


def test_between_two_requests_a_connection_may_be_idle_for_a_while_and_not_for_ever(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"head_s": 0.3, "keep_alive_s": 2.0}) as running, Line(running, HEALTH) as line:
        assert line.answer().status == 200
        line.socket.settimeout(1.0)
        with pytest.raises(TimeoutError):
            line.socket.recv(1)  # longer than a head may take
        line.socket.settimeout(PATIENCE_S)
        assert line.socket.recv(1) == b""


def test_an_answer_that_nobody_reads_has_an_end(tmp_path: Path) -> None:
    large = served.TASK.replace("np.zeros(6, np.float32)", "np.zeros(6_000_000, np.float32)")
    limits = {"stall_s": 0.5, "upload_rate_min": 1 << 30}
    with serving(tmp_path, ROOM, limits, task=large) as running:
        where = urlsplit(running.url)
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((where.hostname, where.port))
            silent.sendall(head("GET", "/v1/models/latest"))
            until(lambda: len(running.server.listener.places) == 1)
            until(lambda: len(running.server.listener.places) == 0)


# --- TLS -------------------------------------------------------------------------------------------------------------


@contextmanager
def guarded(folder: Path, limits: Mapping[str, Any], roles: Mapping[str, Role]) -> Iterator[tuple[Running, Any]]:
    """A server with tokens, and a function that speaks for one of them."""
    certificates.make(folder / "access", ["localhost"])
    tokens = TokenBook.begin(folder / "access" / TOKENS).add_all(roles)
    trust = trusted(folder / "access" / certificates.CA_CERT)
    with serving(folder, ROOM, {"host": "127.0.0.1", **limits}, access=AccessSettings(folder / "access")) as running:
        url = running.url.replace("127.0.0.1", "localhost")
        yield running, lambda name: As(running.server, running.folder, url, trust, tokens[name])


def test_a_handshake_that_drips_has_an_end_and_counts_meanwhile(tmp_path: Path) -> None:
    context = ssl.create_default_context()
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = context.wrap_bio(into, out, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    limits = {"head_s": 1.0, "connections_max": 4}
    with guarded(tmp_path, limits, {"eye": Role.VIEWER}) as (running, by), Line(running) as line:
        until(lambda: len(running.server.listener.places) == 1)
        assert b"HTTP" not in dripped(line, out.read())
        until(lambda: len(running.server.listener.places) == 0)
        assert by("eye").call("GET", "/v1/status").status == 200


# --- uploads ---------------------------------------------------------------------------------------------------------


class Dripping:
    """An upload of which some bytes have come, and hardly more will."""

    def __init__(self, running: Running, name: str, kind: type[Line] = Line) -> None:
        self.worker = Worker(running, name)
        self.task = self.worker.lease()["task"]
        self.line = kind(running, put(self.worker, self.task, DATA) + DATA[:50])

    def offset(self) -> Any:
        path = f"/v1/tasks/{self.task}/update"
        return self.worker.running.call("GET", path, headers=self.worker.session).json["offset"]

    def resumed(self) -> Answered:
        at = self.offset()
        facts = self.worker.head(DATA) | {"Offbeat-Offset": str(at), "Offbeat-Size": str(len(DATA))}
        return self.worker.running.call("PUT", f"/v1/tasks/{self.task}/update", DATA[at:], facts)


def test_an_upload_that_drips_is_cut_and_can_be_resumed(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"stall_s": 1.0, "upload_rate_min": 1000}) as running:
        slow = Dripping(running, "slow")
        told = dripped(slow.line, DATA[50:])
        assert told.startswith(b"HTTP/1.1 408"), told
        assert b"stalled" in told
        slow.line.cut()
        assert slow.offset() >= 50, "what came is kept"
        assert slow.resumed().status == 200


def test_an_upload_on_a_slow_link_is_not_cut(tmp_path: Path) -> None:
    """Ten pieces, each after a pause, together far longer than stall_s, and above the rate."""
    with serving(tmp_path, ROOM, {"stall_s": 1.0, "upload_rate_min": 10}) as running:
        worker = Worker(running)
        task = worker.lease()["task"]
        with Line(running, put(worker, task, DATA)) as line:
            line.socket.settimeout(0.3)
            for at in range(0, len(DATA), 25):
                with suppress(TimeoutError):
                    line.socket.sendall(DATA[at : at + 25])
                    if at + 25 < len(DATA):
                        line.socket.recv(1)
            line.socket.settimeout(PATIENCE_S)
            assert line.answer().status == 200


def test_uploads_that_crawl_do_not_keep_others_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are taken by slow uploads of the same address; before, this was 503 for ten times stall_s."""
    monkeypatch.setattr(server_uploads, "GRACE_S", 0.5)
    with serving(tmp_path, ROOM, {"stall_s": 600.0, "uploads_max": 3}) as running:
        slow = [Dripping(running, f"slow{i}") for i in range(3)]
        until(lambda: len(running.server.app[server_uploads.UPLOADS]) == 3)
        honest = Worker(running, "honest")
        task = honest.lease()["task"]
        until(lambda: honest.push(task, DATA).status == 200)
        answers = [one for one in slow if one.line.socket in readable(slow)]
        refused(answers[0].line.answer(), 503, "not_now")
        assert answers[0].offset() >= 50
        for one in slow:
            one.line.cut()
        until(lambda: slow[0].resumed().status == 200)


def readable(some: list[Dripping]) -> list[socket.socket]:
    return select.select([one.line.socket for one in some], [], [], PATIENCE_S)[0]


def test_who_has_more_than_a_share_of_the_uploads_gives_way(tmp_path: Path) -> None:
    """Without waiting: the uploads of the greedy client need not even be slow."""
    with serving(tmp_path, ROOM, {"stall_s": 600.0, "uploads_max": 4}) as running:
        greedy = [Dripping(running, f"greedy{i}", LineFrom) for i in range(4)]
        until(lambda: len(running.server.app[server_uploads.UPLOADS]) == 4)
        for _ in range(3):
            assert Worker(running, "honest").work().status == 200
        refused(greedy[-1].line.answer(), 503, "not_now")
        assert len(running.server.app[server_uploads.UPLOADS]) == 3, "one place was enough"
        for one in greedy:
            one.line.cut()


def test_one_client_alone_may_have_all_uploads(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"stall_s": 600.0, "uploads_max": 4}) as running:
        some = [Dripping(running, f"w{i}") for i in range(4)]
        until(lambda: len(running.server.app[server_uploads.UPLOADS]) == 4)
        extra = Worker(running, "extra")
        refused(extra.push(extra.lease()["task"], DATA), 503, "not_now")
        for one in some:
            one.line.send(DATA[50:])
            assert one.line.answer().status == 200
            one.line.cut()


# --- connections -----------------------------------------------------------------------------------------------------


def test_one_address_cannot_have_all_connections(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"connections_max": 8}) as running, ExitStack() as open_lines:
        greedy = [open_lines.enter_context(LineFrom(running, HEALTH)) for _ in range(4)]
        assert [line.answer().status for line in greedy] == [200] * 4
        with LineFrom(running) as extra:
            told = refused(extra.answer(), 503, "not_now")
            assert OTHER in told["message"]
            assert extra.is_closed()
        assert Worker(running).work().status == 200, "others have their places"
        greedy[0].cut()
        until(lambda: running.server.listener.places.of(f"the address {OTHER}") == 3)
        with LineFrom(running, HEALTH) as again:
            assert again.answer().status == 200


def test_a_connection_belongs_to_the_token_that_it_shows(tmp_path: Path) -> None:
    """Many workers behind one address, each with a token, are many clients; one token is one, wherever it is used."""
    roles = {"eye": Role.VIEWER, "other": Role.VIEWER}
    with guarded(tmp_path, {"connections_max": 8}, roles) as (running, by), ExitStack() as open_lines:
        places = running.server.listener.places

        def line(name: str) -> Line:
            who = by(name)
            asked = head("GET", "/v1/status", {"Authorization": f"Bearer {who.token}"})
            return open_lines.enter_context(Line(who, asked, tls=who.trust))

        mine = [line("eye") for _ in range(4)]
        assert [one.answer().status for one in mine] == [200] * 4
        assert (places.of("the token 'eye'"), places.of("the address 127.0.0.1")) == (4, 0)
        fifth = line("eye")
        told = refused(fifth.answer(), 503, "not_now")
        assert "eye" in told["message"]
        assert fifth.is_closed()
        assert line("other").answer().status == 200, "from the same address"
        mine[0].cut()
        until(lambda: places.of("the token 'eye'") == 3)


def test_behind_a_proxy_the_address_that_it_names_counts(tmp_path: Path) -> None:
    limits = {"behind_proxy": True, "connections_max": 8}
    access = AccessSettings(insecure=True)
    with serving(tmp_path, {**ROOM, "in_flight_max": 1}, limits, access=access) as running, ExitStack() as open_lines:
        busy = Worker(running, "busy")
        busy.lease()

        def waits(number: int, address: str) -> Line:
            worker = Worker(running, f"w{number}")
            facts = {**worker.session, "X-Forwarded-For": address}
            return open_lines.enter_context(Line(running, head("POST", f"/v1/workers/{worker.number}/ask", facts)))

        first = [waits(number, "192.0.2.1") for number in range(4)]
        until(lambda: running.server.context.forwarded.of("the address 192.0.2.1") == 4)
        told = refused(waits(4, "192.0.2.1").answer(), 503, "not_now")
        assert "192.0.2.1" in told["message"]
        waits(5, "192.0.2.2")
        until(lambda: running.server.context.forwarded.of("the address 192.0.2.2") == 1)
        assert running.server.listener.places.of(None) >= 5, "the proxy itself is not limited"
        first[0].cut()
        until(lambda: running.server.context.forwarded.of("the address 192.0.2.1") == 3)


# --- listeners -------------------------------------------------------------------------------------------------------

EVENTS = head("GET", "/v1/events")


@pytest.mark.usefixtures("with_page")
def test_one_address_cannot_have_all_listeners_and_the_page_counts_too(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"listeners_max": 4, "listeners_share": 0.5}) as running, ExitStack() as lines:
        for asked in (EVENTS, head("GET", "/events")):
            assert lines.enter_context(LineFrom(running, asked)).head()[0] == 200
        for asked in (EVENTS, head("GET", "/events")):
            with LineFrom(running, asked) as extra:
                told = refused(extra.answer(), 503, "not_now")
                assert OTHER in told["message"]
        for _ in range(2):
            assert lines.enter_context(Line(running, EVENTS)).head()[0] == 200
        with LineFrom(running, EVENTS, "127.0.0.3") as extra:
            refused(extra.answer(), 503, "not_now")
        lines.close()
        until(lambda: len(running.server.context.listeners) == 0)
        assert lines.enter_context(Line(running, EVENTS)).head()[0] == 200


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux tells how many files are open")
def test_a_listener_costs_one_descriptor(tmp_path: Path) -> None:
    """It used to cost three; both ends of its connection are in this process."""
    with serving(tmp_path, ROOM) as running, ExitStack() as lines:
        Worker(running).work()
        assert lines.enter_context(Line(running, EVENTS)).head()[0] == 200
        before = descriptors()
        listening = [lines.enter_context(Line(running, EVENTS)) for _ in range(15)]
        assert [line.head()[0] for line in listening] == [200] * 15
        until(lambda: descriptors() <= before + 2 * 15)
        Worker(running).work()
        assert all(
            b"event: " in line.reader.readline() + line.reader.readline() + line.reader.readline() for line in listening
        )


def test_a_client_that_has_hung_up_is_no_failure_of_the_server() -> None:
    """uvloop raises RuntimeError where something is written to a connection that was aborted."""
    request: Any = SimpleNamespace(transport=None)
    assert has_gone(request, RuntimeError("the handler is closed"))
    assert not has_gone(request, ValueError("a mistake"))
    request.transport = SimpleNamespace(is_closing=lambda: False)
    assert not has_gone(request, RuntimeError("a mistake"))


# --- totals ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_page")
def test_a_run_whose_workers_claimed_absurd_gradients_can_be_looked_at(tmp_path: Path) -> None:
    """As a ledger of a version before may hold: together they do not fit 63 bits."""
    with serving(tmp_path, ROOM) as running:
        for _ in range(4):
            assert Worker(running).work().status == 200
        settled(running)
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.sqlite")) as ledger, ledger:
        ledger.executescript(BEFORE_THE_CHAIN)
        ledger.execute("UPDATE events SET gradients = ? WHERE gradients IS NOT NULL", (2**62,))
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").glob("*.json")):
        if checkpoint.stem != min(one.stem for one in checkpoint.parent.glob("*.json")):
            checkpoint.unlink()  # the rows are read again
    asked = {"catch_exceptions": False}
    shown = CliRunner().invoke(main, ["status", str(tmp_path / "run"), "--json"], **asked)  # type: ignore[arg-type]
    assert json.loads(shown.output)["t"] == 4
    assert CliRunner().invoke(main, ["runs", str(tmp_path)], **asked).exit_code == 0  # type: ignore[arg-type]
    with serving(tmp_path, ROOM) as running:
        assert running.status()["t"] == 4
        assert running.call("GET", "/overview.json").json["gradients"] == 2**63 - 1
        assert running.call("GET", "/updates.json").status == 200
        assert running.call("GET", "/v1/metrics").status == 200
        assert Worker(running).work().status == 200
        assert running.status()["gradients"] <= 2**63 - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("connections_share", 0.0),
        ("uploads_share", 1.5),
        ("listeners_max", 0),
        ("upload_rate_min", -1),
        ("keep_alive_s", 0),
    ],
)
def test_limits_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        ServerSettings(**{name: value})  # type: ignore[arg-type]
