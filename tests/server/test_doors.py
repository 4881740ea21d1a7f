"""Who is answered, and how: hosts and sites, HEAD, what is no HTTP, pushes with other bytes, TLS on the wrong port."""

import json
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offbeat.server import certificates
from offbeat.server.access import TOKENS, Role, TokenBook
from offbeat.server.app import ROUTES
from offbeat.server.server import ServeOptions
from offbeat.server.settings import AccessSettings
from offbeat.server.tls_words import MISTAKEN, SeldomLog
from offbeat.storage.ledger import Ledger
from offbeat.web.app import OF_RUN, OF_SITE, furnish
from offbeat.worker.settings import trusted
from tests.server import serving as served
from tests.server.serving import Answered, Running, Worker, packed, serving, without_head
from tests.server.speaking import Line, file_of, head, ones, refused, until, untouched
from tests.server.test_access_control import As

ROOM = {"tasks_per_device": 1000, "in_flight_max": 8000, "evaluate_every": 1_000_000}
EVIL = "evil.example"
PLACES = {"{worker}": "0", "{task}": "1", "{t}": "0", "{run}": "none", "{name:.+}": "app.js"}
PLACES |= {r"{task:\d+}": "1", r"{worker:\d+}": "0", "{what:quarantine|readmit}": "quarantine"}


def filled(path: str) -> str:
    for name, value in PLACES.items():
        path = path.replace(name, value)
    return path


EVERYWHERE = sorted({(r.method, filled(r.path)) for r in (*ROUTES, *OF_SITE, *OF_RUN)} | {("GET", "/no/such/path")})


@contextmanager
def furnished(
    folder: Path, limits: dict[str, Any] | None = None, access: AccessSettings | None = None
) -> Iterator[Running]:
    """A server with its page."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(served, "ServeOptions", partial(ServeOptions, extend=furnish))
        with serving(folder, ROOM, limits, access=access) as running:
            yield running


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with furnished(tmp_path_factory.mktemp("open")) as running:
        yield running
        assert Worker(running, "last").work().status == 200


def said(running: Running, method: str, path: str, host: str, **headers: str) -> Answered:
    """The answer to a request for this host."""
    fields = {"Host": host, "Content-Length": 0, **{name.replace("_", "-"): text for name, text in headers.items()}}
    with Line(running, head(method, path, fields, close=True)) as line:
        return line.answer()


# --- Host and Origin -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), EVERYWHERE)
def test_no_route_answers_to_another_name(running: Running, method: str, path: str) -> None:
    with untouched(running):
        for host in (EVIL, "localhost.evil.example:7733", "127.0.0.1.nip.io", "10.0.0.1", "0.0.0.0", "x y"):  # noqa: S104
            answer = said(running, method, path, host)
            body = refused(answer, 421, "wrong_host")
            assert "--public-name" in body["do"]


@pytest.mark.parametrize(("method", "path"), EVERYWHERE)
def test_no_route_answers_to_a_page_of_another_site(running: Running, method: str, path: str) -> None:
    for origin in ("http://evil.example", "https://localhost.evil.example", "null", "http://localhost:1", "file://"):
        answer = said(running, method, path, "localhost:7733", Origin=origin)
        refused(answer, 403, "wrong_origin")
    if method != "GET":
        refused(said(running, method, path, "localhost", Sec_Fetch_Site="cross-site"), 403, "wrong_origin")


@pytest.mark.parametrize("host", ["localhost", "LocalHost.", "127.0.0.1", "[::1]", "localhost:7744", "127.0.0.1:1"])
def test_its_own_names_are_accepted_on_every_port(running: Running, host: str) -> None:
    """A tunnel, `ssh -L 7744:localhost:7733`, has a port of its own."""
    assert said(running, "GET", "/v1/status", host).status == 200
    assert said(running, "GET", "/session.json", host, Origin=f"http://{host}").json["role"] == "admin"
    Worker(running, "one")
    assert said(running, "POST", "/v1/workers/0/readmit", host, Origin=f"http://{host}").status == 204


def test_a_link_from_another_site_leads_to_the_page(running: Running) -> None:
    assert said(running, "GET", "/", "localhost", Sec_Fetch_Site="cross-site").status == 200


def test_the_attack_that_was_found(running: Running) -> None:
    """DNS rebinding: the page of evil.example asks for the secret, bars a worker, downloads the model."""
    worker = Worker(running, "victim")
    for method, path in (
        ("GET", "/session.json"),
        ("POST", f"/v1/workers/{worker.number}/quarantine"),
        ("GET", "/v1/models/latest"),
    ):
        refused(said(running, method, path, EVIL, Origin=f"http://{EVIL}"), 421, "wrong_host")
    assert worker.ask()["state"] == "working"


def test_public_names_are_accepted_and_no_others(tmp_path: Path) -> None:
    with furnished(tmp_path, {"public_name": "fl.example.org,*.example.net"}) as running:
        for host in ("fl.example.org", "FL.example.org:443", "a.example.net", "localhost:7733"):
            assert said(running, "GET", "/v1/status", host).status == 200
        for host in (EVIL, "example.net", "a.b.example.net"):
            refused(said(running, "GET", "/v1/status", host), 421, "wrong_host")
        Worker(running)
        act = partial(said, running, "POST", "/v1/workers/0/readmit")
        assert act("127.0.0.1:7733", Origin="https://fl.example.org").status == 204, "a proxy that changes Host"
        refused(act("fl.example.org", Origin="https://evil.example"), 403, "wrong_origin")


def test_beyond_this_machine_every_host_is_answered_and_no_page_of_another_site(tmp_path: Path) -> None:
    with furnished(tmp_path, {"host": "0.0.0.0"}, AccessSettings(insecure=True)) as running:  # noqa: S104
        assert said(running, "GET", "/v1/status", "10.0.0.1:7733").status == 200
        refused(said(running, "GET", "/session.json", EVIL), 403, "not_allowed")
        Worker(running)
        act = partial(said, running, "POST", "/v1/workers/0/readmit", "fl.example.org")
        assert act(Origin="http://fl.example.org").status == 204
        refused(act(Origin="http://evil.example"), 403, "wrong_origin")


def test_with_a_public_name_the_address_of_the_connection_is_right_too(tmp_path: Path) -> None:
    """A probe of a load balancer knows the address only."""
    limits = {"host": "0.0.0.0", "public_name": "fl.example.org"}  # noqa: S104
    with furnished(tmp_path, limits, AccessSettings(insecure=True)) as running:
        port = running.url.rpartition(":")[2]
        elsewhere = Running(running.server, running.folder, f"http://127.0.0.2:{port}")
        assert said(elsewhere, "GET", "/v1/health", f"127.0.0.2:{port}").status == 200
        refused(said(elsewhere, "GET", "/v1/health", "127.0.0.3"), 421, "wrong_host")


def test_behind_a_proxy_each_name_that_is_said_must_be_right(tmp_path: Path) -> None:
    limits = {"behind_proxy": True, "public_name": "fl.example.org"}
    with furnished(tmp_path, limits, AccessSettings(insecure=True)) as running:
        look = partial(said, running, "GET", "/v1/status")
        assert look("fl.example.org").status == 200
        assert look("127.0.0.1:7733", X_Forwarded_Host="fl.example.org").status == 200
        refused(look(EVIL, X_Forwarded_Host="fl.example.org"), 421, "wrong_host")
        refused(look("127.0.0.1:7733", X_Forwarded_Host=EVIL), 421, "wrong_host")
        refused(look("127.0.0.1:7733", X_Forwarded_Host=f"fl.example.org, {EVIL}"), 421, "wrong_host")


def test_behind_a_proxy_that_is_believed_the_page_is_where_it_was_called(tmp_path: Path) -> None:
    with furnished(tmp_path, {"behind_proxy": True}, AccessSettings(insecure=True)) as running:
        Worker(running)
        act = partial(said, running, "POST", "/v1/workers/0/readmit", "127.0.0.1:7733")
        assert act(X_Forwarded_Host="fl.example.org", Origin="https://fl.example.org").status == 204
        assert act(Sec_Fetch_Site="same-origin", Origin="https://fl.example.org").status == 204
        refused(act(Origin="https://fl.example.org"), 403, "wrong_origin")
        refused(act(X_Forwarded_Host="fl.example.org", Origin="https://evil.example"), 403, "wrong_origin")


# --- HEAD ------------------------------------------------------------------------------------------------------------


CHANGING = {"Date", "Transfer-Encoding"}
READ = [path for method, path in EVERYWHERE if method == "GET" and not path.endswith("events")]


@pytest.mark.parametrize("path", READ)
def test_head_has_the_headers_of_get_and_no_body(running: Running, path: str) -> None:
    whole = said(running, "GET", path, "localhost")
    with Line(running, head("HEAD", path, {"Content-Length": 0}, close=True)) as line:
        status, headers = line.head()
        assert line.reader.read() == b""
    assert status == whole.status
    if not path.endswith(("status", "metrics", ".json", "backup")):  # whose length may change meanwhile
        assert headers.get("Content-Length") == whole.headers.get("Content-Length")
    assert {n: v for n, v in headers.items() if n not in CHANGING | {"Content-Length"}} == {
        n: v for n, v in whole.headers.items() if n not in CHANGING | {"Content-Length"}
    }


@pytest.mark.parametrize("path", ["/events", "/v1/events"])
def test_head_of_an_endless_stream_ends(running: Running, path: str) -> None:
    with Line(running, head("HEAD", path, close=True)) as line:
        status, headers = line.head()
        assert (status, headers["Content-Type"]) == (200, "text/event-stream")
        assert line.is_closed()


def test_head_of_a_model_sends_none_of_it(running: Running) -> None:
    with Line(running, head("HEAD", "/v1/models/latest")) as line:
        status, headers = line.head()
        assert (status, int(headers["Content-Length"])) == (200, len(packed(running.server.run.mixer.x)))
        line.send(head("GET", "/v1/health"))
        assert line.answer().json["state"] == "running", "the connection can be used again"


# --- what is no HTTP -------------------------------------------------------------------------------------------------


NO_HTTP = {
    "words": (b"hello\r\n\r\n", "bad_request"),
    "version": (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", "bad_request"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "bad_request"),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", "bad_request"),
    "no colon": (b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n", "bad_request"),
    "zero": (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: b\x00c\r\n\r\n", "bad_request"),
    "long line": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "too_long"),
    "long field": (b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 100_000 + b"\r\n\r\n", "too_long"),
    "transfer encoding": (
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\nxx",
        "bad_request",
    ),
    "two transfer encodings": (
        b"POST /v1/workers HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "bad_request",
    ),
    "chunk": (
        b"POST /v1/workers HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "bad_request",
    ),
    "length": (b"POST /v1/workers HTTP/1.1\r\nHost: localhost\r\nContent-Length: -4\r\n\r\n", "bad_request"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", "wrong_scheme"),
}


@pytest.mark.parametrize("what", NO_HTTP)
def test_errors_of_the_parser_are_the_documented_json(running: Running, what: str) -> None:
    data, word = NO_HTTP[what]
    with untouched(running), Line(running, data) as line:
        answer = line.answer()
        assert answer.headers["Content-Type"].startswith("application/json")
        assert answer.headers["Connection"] == "close"
        assert "aaaa" not in refused(answer, answer.status, word)["message"]
        assert line.is_closed()


@pytest.mark.parametrize("rest", [b"zz\r\nx\r\n0\r\n\r\n", b"5\r\ntok"])
def test_a_form_that_breaks_off_is_refused_in_words(running: Running, rest: bytes) -> None:
    form = {"Transfer-Encoding": "chunked", "Content-Type": "application/x-www-form-urlencoded"}
    with Line(running, head("POST", "/login", form | {"Accept": "application/json"}) + rest) as line:
        if rest.startswith(b"5"):
            assert line.ended().is_closed(), "it was the client who hung up"
        else:
            refused(line.answer(), 400, "bad_request")


def test_errors_of_the_parser_are_counted(running: Running) -> None:
    def counted() -> str:
        text = running.call("GET", "/metrics").body.decode()
        return next((line for line in text.splitlines() if 'refusals_total{error="too_long"}' in line), "")

    before = counted()
    with Line(running, NO_HTTP["long line"][0]) as line:
        refused(line.answer(), 413, "too_long")
    assert counted() != before


# --- a push that comes again -----------------------------------------------------------------------------------------


def other_bytes(number: float) -> bytes:
    return file_of({name: array * number for name, array in ones().items()})


def test_a_push_that_comes_again_with_other_bytes_is_refused(tmp_path: Path) -> None:
    """Now, after a restart, and after the checkpoint that let its file go."""
    with serving(tmp_path, ROOM, {"checkpoint_every": 1}) as running:
        worker = Worker(running)
        task = worker.lease()["task"]
        first = worker.push(task, other_bytes(1)).json
        with untouched(running):
            refused(worker.push(task, other_bytes(2)), 409, "other_bytes")
            assert without_head(worker.push(task, other_bytes(1)).json) == without_head(first) | {"repeated": True}
        for _ in range(4):
            assert worker.work().status == 200
        until(lambda: not running.server.run.updates.has(task))
        refused(worker.push(task, other_bytes(2)), 409, "other_bytes")
        assert without_head(worker.push(task, other_bytes(1)).json) == without_head(first) | {"repeated": True}
    with serving(tmp_path, ROOM, {"checkpoint_every": 1}) as again, untouched(again):
        back = Worker(again)
        refused(back.push(task, other_bytes(2)), 409, "other_bytes")
        assert without_head(back.push(task, other_bytes(1)).json) == without_head(first) | {"repeated": True}
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        digests = {json.loads(row.detail or "{}")["digest"] for row in ledger.rows("arrived", task=task)}
    assert len(digests) == 1, "what was refused does not become bytes that were acknowledged"


def test_after_a_refusal_other_bytes_do_not_get_in_either(running: Running) -> None:
    worker = Worker(running, "unlucky")
    task, bad = worker.lease()["task"], other_bytes(float("nan"))
    with untouched(running):
        for _ in range(2):
            refused(worker.push(task, bad), 422, "not_finite")
        refused(worker.push(task, other_bytes(1)), 409, "other_bytes")


# --- TLS on the wrong port -------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Running, ssl.SSLContext, str]]:
    access = tmp_path / "access"
    certificates.make(access, ["localhost", "fl.example.org"])
    token = TokenBook.begin(access / TOKENS).add("eye", Role.VIEWER)
    with furnished(tmp_path, access=AccessSettings(access)) as running:
        yield running, trusted(access / certificates.CA_CERT), token


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_http_to_a_tls_port_is_told_in_words(
    guarded: tuple[Running, ssl.SSLContext, str], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    running, trust, token = guarded
    MISTAKEN._told.clear()
    with caplog.at_level(logging.WARNING, "offbeat.server"):
        for _ in range(3):
            with Line(running, head(method, "/v1/status", {"Authorization": f"Bearer {token}"})) as line:
                body = refused(line.answer(), 426, "wrong_scheme")
                assert "speaks https" in body["message"]
                assert line.ended().is_closed()
    lines = [record.getMessage() for record in caplog.records if "speaks https" in record.getMessage()]
    assert len(lines) == 1, "the log is not filled with it"
    assert token not in caplog.text
    known = As(running.server, running.folder, running.url, trust, token)
    assert known.call("GET", "/v1/status").status == 200


def test_tls_to_an_http_port_fails_at_once_and_the_log_says_why(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    MISTAKEN._told.clear()
    with caplog.at_level(logging.WARNING, "offbeat.server"):
        for _ in range(3):
            with pytest.raises(ssl.SSLError, match=r"WRONG_VERSION_NUMBER|wrong version number"):
                Line(running, tls=ssl.create_default_context())
    lines = [record.getMessage() for record in caplog.records if "speaks http;" in record.getMessage()]
    assert len(lines) == 1


def test_what_comes_often_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    seldom = SeldomLog(60.0, lambda: now[0])
    with caplog.at_level(logging.WARNING, "offbeat.server"):
        for at in (100.0, 101.0, 159.0, 161.0):
            now[0] = at
            seldom.tell("again")
    assert [record.getMessage() for record in caplog.records] == [
        *("again", "again (and 2 more since this was last said)"),
    ]


def test_with_a_certificate_its_names_are_own_names(guarded: tuple[Running, ssl.SSLContext, str]) -> None:
    running, trust, token = guarded
    known = As(running.server, running.folder, running.url, trust, token)
    assert known.call("GET", "/v1/status", headers={"Host": "fl.example.org"}).status == 200
    refused(known.call("GET", "/v1/status", headers={"Host": EVIL}), 421, "wrong_host")
