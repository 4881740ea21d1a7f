"""Fetching over a real connection: whole and unchanged or not at all, with a line that says what to do instead."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from offbeat.data import archive
from offbeat.data.cache import ready
from offbeat.errors import InvalidValue, OffbeatError
from tests.unit.test_data_archives import FILES, MIRROR, in_folder, names, source_of, tarred

PACKED = tarred(in_folder())
SOURCE = source_of(PACKED)
Answer = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    """Silent where a client hangs up."""

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """The address of a server on this machine that answers like that."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/set.tar.gz"
        finally:
            server.shutdown()
            thread.join()


def sends(body: bytes, length: int | None = None, then: Callable[[], object] = lambda: None) -> Answer:
    """Answers with this body, and does something before it hangs up."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        request.end_headers()
        request.wfile.write(body)
        then()

    return answer


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv(MIRROR, raising=False)


def test_an_archive_is_fetched_once_and_kept(tmp_path: Path) -> None:
    asked: list[str | None] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.headers["User-Agent"])
        sends(PACKED)(request)

    root = tmp_path / "not" / "there" / "yet"
    with served(answer) as address:
        source = replace(SOURCE, official=(address,))
        for _ in range(2):
            place = ready(source, root)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == FILES
    assert (root / "set.tar.gz").read_bytes() == PACKED
    assert names(root) == ["set", "set.tar.gz", "set/a.bin", "set/b.bin", "set/c.bin"]
    assert asked == ["offbeat"]


def test_a_mirror_replaces_the_official_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mirror copy").write_bytes(PACKED)
    monkeypatch.setenv(MIRROR, (tmp_path / "mirror copy").as_uri())
    with served(lambda request: request.send_error(500)) as address:
        ready(replace(SOURCE, official=(address,)), tmp_path / "root")
    assert (tmp_path / "root" / "set" / "c.bin").read_bytes() == b"c"


@pytest.mark.parametrize("mirror", ["set.tar.gz", "/tmp/set.tar.gz", "ftp://host/set.tar.gz", "data:,x"])  # noqa: S108
def test_a_mirror_is_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str) -> None:
    monkeypatch.setenv(MIRROR, mirror)
    with pytest.raises(InvalidValue, match=f"{MIRROR} is .*starts with https://, http://, file://"):
        ready(SOURCE, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (sends(PACKED[:-1]), f"ends after {len(PACKED) - 1:,} of {len(PACKED):,} bytes"),
        (sends(PACKED[:1000], length=len(PACKED)), f"ends after 1,000 of {len(PACKED):,} bytes"),
        (sends(b""), "ends after 0 of"),
        (sends(PACKED + b"!" * 10_000_000), "longer than the expected"),
        (sends(PACKED[:-1] + b"!"), "its sha256 is"),
        (lambda request: request.send_error(404), "HTTP 404 Not Found"),
        (lambda request: request.send_error(503), "HTTP 503 Service Unavailable"),
        (lambda request: request.wfile.write(b"no such protocol\r\n\r\n"), "no such protocol"),
        (lambda request: request.connection.close(), "without response"),
    ],
)
def test_what_is_not_the_archive_is_removed_and_told(tmp_path: Path, answer: Answer, says: str) -> None:
    with served(answer) as address, pytest.raises(OffbeatError, match=says) as refused:
        ready(replace(SOURCE, official=(address,)), tmp_path)
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"cannot fetch Set ({address}: ")
    assert f"put set.tar.gz into {tmp_path}, or unpack it there (it makes {tmp_path / 'set'})" in second
    assert f"set {MIRROR} to a mirror's address" in second
    assert names(tmp_path) == []


@pytest.mark.parametrize("body", [b"", PACKED[:1000]])
def test_a_silent_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(archive, "TIMEOUT_S", 0.1)
    over = Event()
    with served(sends(body, len(PACKED), then=lambda: over.wait(10))) as address:
        try:
            with pytest.raises(OffbeatError, match="timed out"):
                ready(replace(SOURCE, official=(address,)), tmp_path)
        finally:
            over.set()
    assert names(tmp_path) == []


def test_without_a_network_two_lines_say_what_to_put_where(tmp_path: Path) -> None:
    with served(sends(b"")) as closed:
        pass
    missing = (tmp_path / "missing").as_uri()
    with pytest.raises(OffbeatError) as refused:
        ready(replace(SOURCE, official=(closed, missing, "http://[")), tmp_path)
    first, second = str(refused.value).splitlines()
    assert f"{closed}: Connection refused" in first
    assert f"{missing}: No such file or directory" in first
    assert "http://[: Invalid IPv6 URL" in first
    assert f"put set.tar.gz into {tmp_path}" in second
    (tmp_path / "set.tar.gz").write_bytes(PACKED)
    assert names(ready(replace(SOURCE, official=(closed,)), tmp_path)) == ["a.bin", "b.bin", "c.bin"]


def test_the_next_address_is_tried(tmp_path: Path) -> None:
    with served(lambda request: request.send_error(403)) as refuses, served(sends(PACKED[:-1] + b"!")) as alters:
        (tmp_path / "copy").write_bytes(PACKED)
        ready(replace(SOURCE, official=(refuses, alters, (tmp_path / "copy").as_uri())), tmp_path / "root")
    assert (tmp_path / "root" / "set.tar.gz").read_bytes() == PACKED


PROGRAM = """
import sys
from pathlib import Path
from offbeat.data.cache import ready
from tests.unit.test_data_fetch import SOURCE
ready(SOURCE, Path(sys.argv[1]))
"""


def fetching(root: Path, address: str, stderr: int) -> subprocess.Popen[bytes]:
    """A process of its own that fetches the set."""
    environment = os.environ | {MIRROR: address, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(["src", "."])}
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(root)]
    return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=stderr, stderr=stderr)


def until_hung_up(terminal: int) -> bytes:
    """All that a process wrote to its terminal."""
    written = b""
    with suppress(OSError):  # how Linux tells that nobody writes any more
        while chunk := os.read(terminal, 100_000):
            written += chunk
    os.close(terminal)
    return written


def test_a_terminal_sees_progress_and_a_pipe_sees_nothing(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    (tmp_path / "copy").write_bytes(PACKED)
    address = (tmp_path / "copy").as_uri()
    with fetching(tmp_path / "piped", address, subprocess.PIPE) as piped:
        assert piped.communicate() == (b"", b"")
    ours, theirs = pty.openpty()
    with fetching(tmp_path / "seen", address, theirs) as seen:
        os.close(theirs)
        assert b"set.tar.gz" in until_hung_up(ours)
    assert seen.returncode == 0
    assert names(tmp_path / "piped") == ["set", "set.tar.gz", "set/a.bin", "set/b.bin", "set/c.bin"]
