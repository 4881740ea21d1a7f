"""The worker's HTTP against servers that do what none should: an error of ours comes of it, and never a hang."""

import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from offbeat.worker.api_answers import RequestRefused, Unreachable
from offbeat.worker.http_client import JSON_MAX, HttpClient
from offbeat.worker.settings import Address, Timeouts

SLOW = Timeouts(connect_s=10, answer_s=10, continue_s=10, piece_s=10)
QUICK = Timeouts(connect_s=10, answer_s=0.5, continue_s=0.3, piece_s=0.6)
"""For what must run into its limit."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LONG_S = 10.0
"""No test takes so long; a server that waits longer fails."""


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.file = sock, sock.makefile("rb")
        self.line = self.offset = ""

    def head(self) -> dict[str, str]:
        """Read a request's head; its headers by name."""
        self.line = self.file.readline().decode().strip()
        headers = {}
        while line := self.file.readline().decode().strip():
            name, _, value = line.partition(": ")
            headers[name] = value
        return headers

    def request(self) -> dict[str, str]:
        """Read a request with its body."""
        headers = self.head()
        self.body(int(headers.get("Content-Length", 0)))
        return headers

    def body(self, size: int) -> bytes:
        return self.file.read(size)

    def say(self, data: bytes) -> None:
        with suppress(ConnectionError):  # the worker may have heard enough
            self.sock.sendall(data)

    def answer(self, status: str, body: bytes = b"{}", headers: str = "") -> None:
        self.say(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body)

    def reset(self) -> None:
        """Hang up the hard way."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def gone(self) -> bool:
        """Has the worker hung up?"""
        try:
            return not self.file.read(1)
        except OSError:
            return True


Connection = Callable[[Peer], object]


@contextmanager
def served(*connections: Connection, context: ssl.SSLContext | None = None) -> Iterator[Address]:
    """A server that behaves like this on its first connection, its second, and so on."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(LONG_S)
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            for connection in connections:
                sock, _ = listener.accept()
                sock.settimeout(LONG_S)
                if context is not None:
                    sock = context.wrap_socket(sock, server_side=True)
                peer = Peer(sock)
                with sock, peer.file:
                    connection(peer)
        except BaseException as error:
            failed.append(error)
        finally:
            listener.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Address("127.0.0.1", listener.getsockname()[1], tls=context is not None)
    finally:
        thread.join(LONG_S + 5)
        assert not thread.is_alive()
        if failed:
            raise failed[0]


@contextmanager
def speaking(*connections: Connection, timeouts: Timeouts = SLOW) -> Iterator[HttpClient]:
    """A worker that speaks to such a server."""
    with served(*connections) as address:
        http = HttpClient(address, timeouts=timeouts)
        try:
            yield http
        finally:
            http.close()


def said(status: str, body: bytes = b"{}", headers: str = "") -> Connection:
    """Answers one request like this and hangs up."""

    def connection(peer: Peer) -> None:
        peer.request()
        peer.answer(status, body, headers)

    return connection


# --- small calls -----------------------------------------------------------------------------------------------------


def test_one_connection_serves_many_calls() -> None:
    heads = []

    def connection(peer: Peer) -> None:
        for _ in range(3):
            heads.append(peer.request())
            peer.answer("200 OK", b'{"a": 1}')

    with served(connection) as address:
        http = HttpClient(Address(address.host, address.port, False, "/prefix"), {"Offbeat-Protocol": "1"})
        assert [http.call("POST", "/v1/x", {"b": 2}, {"Offbeat-Session": "s"}) for _ in range(3)] == [{"a": 1}] * 3
        http.close()
    assert heads[0] == {
        "Host": address.netloc,
        "Accept-Encoding": "identity",
        "Offbeat-Protocol": "1",
        "Content-Type": "application/json",
        "Offbeat-Session": "s",
        "Content-Length": "8",
    }


def test_a_connection_is_kept_after_an_answer_in_chunks() -> None:
    def connection(peer: Peer) -> None:
        for number in range(2):
            peer.request()
            peer.say(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"n\r\n')
            peer.say(b'4\r\n": %d\r\n1\r\n}\r\n0\r\n\r\n' % number)

    with speaking(connection) as http:
        assert [http.call("GET", "/") for _ in range(2)] == [{"n": 0}, {"n": 1}]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_connection_that_the_server_will_close_is_not_used_again(version: str) -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        peer.say(f"HTTP/{version} 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert peer.gone()

    with speaking(connection, said("200 OK", b'{"n": 2}')) as http:
        http.call("GET", "/")
        assert http.call("GET", "/") == {"n": 2}


def test_the_path_prefix_of_the_server_is_kept() -> None:
    lines = []

    def connection(peer: Peer) -> None:
        peer.request()
        lines.append(peer.line)
        peer.answer("204 No Content", b"")

    with served(connection) as address:
        http = HttpClient(Address(address.host, address.port, False, "/a/b"))
        assert http.call("DELETE", "/v1/x") == {}
        http.close()
    assert lines == ["DELETE /a/b/v1/x HTTP/1.1"]


def test_a_connection_that_the_server_closed_meanwhile_is_opened_again() -> None:
    with speaking(said("200 OK", b'{"n": 1}'), said("200 OK", b'{"n": 2}')) as http:
        assert http.call("GET", "/") == {"n": 1}
        assert http.call("GET", "/") == {"n": 2}


def test_a_connection_that_is_closed_when_it_is_used_again_is_opened_again() -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        peer.answer("200 OK")
        peer.request()  # and no answer
        peer.reset()

    with speaking(connection, said("200 OK", b'{"n": 2}')) as http:
        http.call("GET", "/")
        assert http.call("GET", "/") == {"n": 2}


def test_what_was_said_on_an_idle_connection_is_no_answer_to_the_next_request() -> None:
    told = threading.Event()

    def connection(peer: Peer) -> None:
        peer.request()
        peer.answer("200 OK")
        peer.answer("408 Request Timeout", b"bye")
        told.set()
        peer.gone()

    with speaking(connection, said("200 OK", b'{"n": 2}')) as http:
        http.call("GET", "/")
        assert told.wait(LONG_S)
        assert http.call("GET", "/") == {"n": 2}


def test_a_new_connection_without_an_answer_is_not_tried_for_ever() -> None:
    with speaking(lambda peer: peer.request()) as http, pytest.raises(Unreachable, match="hung up"):
        http.call("GET", "/")


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unreachable, match=f"http://127.0.0.1:{port} does not answer: Connection refused"):
        HttpClient(Address("127.0.0.1", port, False)).call("GET", "/")


def test_a_refusal_carries_what_the_server_said() -> None:
    body = b'{"error": "wrong_offset", "message": "not there", "do": "Append.", "offset": 7, "retry_after_s": 1.5}'
    with speaking(said("409 Conflict", body)) as http, pytest.raises(RequestRefused) as refused:
        http.call("GET", "/")
    found = refused.value
    assert (found.status, found.error, found.offset, found.retry_after_s) == (409, "wrong_offset", 7, 1.5)
    assert (found.message, found.do, str(found)) == ("not there", "Append.", "not there. Append.")
    assert not found.temporary


@pytest.mark.parametrize(
    ("status", "headers", "retry_after_s", "temporary"),
    [
        ("502 Bad Gateway", "", None, True),
        ("503 Unavailable", "Retry-After: 7\r\n", 7.0, True),
        ("503 Unavailable", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n", None, True),
        ("429 Too Many", "Retry-After: -1\r\n", None, True),
        ("429 Too Many", "Retry-After: 1e999\r\n", None, True),
        ("404 Not Found", "", None, False),
    ],
)
def test_a_refusal_that_is_not_ours_is_one_too(
    status: str, headers: str, retry_after_s: float | None, temporary: bool
) -> None:
    page = b"<html>\x1b[31m\n gateway  says no</html>"
    with (
        speaking(said(status, page, headers)) as http,
        pytest.raises(RequestRefused, match="gateway says no") as refused,
    ):
        http.call("GET", "/")
    assert refused.value.status == int(status[:3])
    assert refused.value.error == ""
    assert refused.value.retry_after_s == retry_after_s
    assert refused.value.temporary is temporary
    assert "\x1b" not in str(refused.value)


def test_an_answer_that_comes_before_the_request_is_sent_is_read_whole() -> None:
    def connection(peer: Peer) -> None:
        peer.head()
        peer.answer("401 Unauthorized", b'{"error": "no_token", "message": "who are you", "do": "d"}')
        assert not peer.file.read().endswith(b"]")

    with speaking(connection, said("200 OK", b'{"n": 2}')) as http:
        with pytest.raises(RequestRefused, match="who are you"):
            http.call("POST", "/", ["x" * 50_000_000])
        assert http.call("GET", "/") == {"n": 2}  # on another connection: on the first one, it would be the rest


def test_a_server_that_moved_says_where() -> None:
    moved = said("301 Moved", b"", "Location: https://there.example/\r\n")
    with speaking(moved) as http, pytest.raises(RequestRefused, match=r"it is now at https://there\.example/"):
        http.call("GET", "/")


@pytest.mark.parametrize(
    "odd",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (JSON_MAX + 10),
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 " + b"x" * 100_000,
        CONTINUE * 1000,
        b"HTTP/1.1 100 Continue\r\nX: " + b"x" * 100_000,
        b"\r\n",
        b"\0" * 1000,
    ],
)
def test_garbage_is_no_answer(odd: bytes) -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        peer.say(odd)

    with speaking(connection) as http, pytest.raises(Unreachable):
        http.call("GET", "/")


@pytest.mark.parametrize(
    "silence", [b"", b"HT", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"]
)
def test_a_server_that_falls_silent_is_not_waited_for(silence: bytes) -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        peer.say(silence)
        assert peer.gone()

    began = time.monotonic()
    with (
        speaking(connection, timeouts=QUICK) as http,
        pytest.raises(Unreachable, match=r"too long|says nothing|timed out"),
    ):
        http.call("GET", "/")
    assert time.monotonic() - began < 3


def test_a_server_that_drips_is_not_waited_for() -> None:
    """Each byte comes in time; together they do not."""
    done = threading.Event()

    def connection(peer: Peer) -> None:
        peer.request()
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: " + b"x" * 1000:
            with suppress(OSError):
                peer.say(bytes([byte]))
            if done.wait(0.05):
                return

    began = time.monotonic()
    with speaking(connection, timeouts=QUICK) as http:
        with pytest.raises(Unreachable, match=r"too long|timed out"):
            http.call("GET", "/")
        done.set()
    assert time.monotonic() - began < 3


def test_a_long_poll_is_waited_for() -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        assert not threading.Event().wait(0.8)  # longer than answer_s
        peer.answer("200 OK", b'{"n": 1}')

    with speaking(connection, timeouts=QUICK) as http:
        assert http.call("POST", "/", wait_s=5) == {"n": 1}


def test_nothing_takes_longer_than_one_has_when_in_a_hurry() -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        assert peer.gone()

    began = time.monotonic()
    with speaking(connection, timeouts=Timeouts()) as http:
        http.hurry(0.2)
        with pytest.raises(Unreachable):
            http.call("GET", "/", wait_s=100)
    assert time.monotonic() - began < 3


def test_another_thread_can_end_a_call() -> None:
    asked = threading.Event()

    def connection(peer: Peer) -> None:
        peer.request()
        asked.set()
        assert peer.gone()

    with speaking(connection, timeouts=Timeouts()) as http:

        def end() -> None:
            asked.wait(LONG_S)
            http.abort()

        other = threading.Thread(target=end)
        other.start()
        with pytest.raises(Unreachable):
            http.call("GET", "/")
        other.join()


class Interrupted(BaseException):
    """What a signal raises."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_call_leaves_no_answer_behind() -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        assert peer.gone()

    with speaking(connection, said("200 OK", b'{"n": 2}'), timeouts=Timeouts()) as http:
        with pytest.raises(Interrupted), interrupted_after(0.1):
            http.call("GET", "/")
        assert http.call("GET", "/") == {"n": 2}


def test_a_header_cannot_be_smuggled_in() -> None:
    http = HttpClient(Address("127.0.0.1", 1, False))
    with pytest.raises(Unreachable, match="header"):
        http.call("GET", "/", headers={"Offbeat-Session": "a\r\nX: y"})
