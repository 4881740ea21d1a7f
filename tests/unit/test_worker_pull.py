"""Models that come in whole, in pieces and after cuts; and everything through TLS."""

import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from offbeat.core.layout import Model
from offbeat.errors import LayoutMismatch
from offbeat.wire import BadPayload, body_of, header_of
from offbeat.worker.api_answers import LeasedTask, RequestRefused, Unreachable
from offbeat.worker.api_client import ApiClient, Hello
from offbeat.worker.download import pull
from offbeat.worker.http_client import HttpClient
from offbeat.worker.settings import Address, WorkerSettings
from tests.unit.test_worker_api_client import DATA, finished_in, joining, takes, working
from tests.unit.test_worker_http import CONTINUE, LONG_S, QUICK, SLOW, Connection, Peer, said, served, speaking

# --- models ----------------------------------------------------------------------------------------------------------

VALUES = np.random.default_rng(1).standard_normal(700_000).astype(np.float32)
X = Model.of(
    {"x": VALUES, "y": VALUES[:10].copy(), "n": np.array(3), "none": np.zeros(0, np.int8)}, buffers=["n", "none"]
)
PACKED = header_of(X.layout) + b"".join(bytes(part) for part in body_of(X))
ETAG = 'ETag: "r1-7"\r\n'


def gives(end: int | None = None, etag: str = ETAG) -> Connection:
    """Sends the model up to this byte and hangs up."""

    def connection(peer: Peer) -> None:
        peer.request()
        peer.say(f"HTTP/1.1 200 OK\r\nContent-Length: {len(PACKED)}\r\n{etag}\r\n".encode() + PACKED[:end])

    return connection


def rest(begin: int, end: int | None = None, etag: str = ETAG, asked: list[dict[str, str]] | None = None) -> Connection:
    """Sends the rest that it was asked for."""

    def connection(peer: Peer) -> None:
        headers = peer.request()
        if asked is not None:
            asked.append(headers)
        size = len(PACKED)
        head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {size - begin}\r\n{etag}"
        peer.say(f"{head}Content-Range: bytes {begin}-{size - 1}/{size}\r\n\r\n".encode() + PACKED[begin:end])

    return connection


def patient(tries: int, seen: list[str] | None = None) -> Callable[[Unreachable | RequestRefused], None]:
    left = iter(range(tries))

    def patience(error: Unreachable | RequestRefused) -> None:
        if seen is not None:
            seen.append(str(error))
        if next(left, None) is None:
            raise error

    return patience


def same(model: Model) -> bool:
    return np.array_equal(model.vector, X.vector) and model.carried["n"] == 3 and model.vector.ctypes.data % 64 == 0


def test_a_model_is_pulled() -> None:
    with speaking(gives()) as http:
        model = pull(http, "/v1/models/7", X.layout, patient(0))
    assert same(model)
    assert model.vector.flags.writeable
    assert model.carried["none"].shape == (0,)


def test_a_cut_model_goes_on_after_the_cut() -> None:
    asked: list[dict[str, str]] = []
    connections = [gives(5), rest(5, 100), rest(100, 1_000_000), rest(1_000_000, None, asked=asked)]
    seen: list[str] = []
    with speaking(*connections) as http:
        assert same(pull(http, "/v1/models/7", X.layout, patient(9, seen)))
    assert len(seen) == 2  # after the third cut there was no need to be patient
    assert (asked[0]["Range"], asked[0]["If-Range"]) == ("bytes=1000000-", '"r1-7"')


def test_a_part_that_nobody_asked_for_is_no_model() -> None:
    with speaking(rest(5), gives()) as http:
        assert same(pull(http, "/v1/models/7", X.layout, patient(1)))


def test_a_model_that_is_cut_too_often_is_given_up() -> None:
    with speaking(gives(500), rest(500, 600), rest(600, 700)) as http, pytest.raises(Unreachable):
        pull(http, "/v1/models/7", X.layout, patient(2))


@pytest.mark.parametrize(
    "second",
    [
        gives(700, 'ETag: "r2-7"\r\n'),
        gives(700),
        rest(500, None, 'ETag: "r2-7"\r\n'),
        rest(400),
        said("416 Range Not Satisfiable", b'{"error": "no_such_bytes", "message": "m", "do": "d"}'),
    ],
)
def test_a_model_that_is_another_one_after_the_cut_starts_over(second: Connection) -> None:
    with speaking(gives(500), second, gives()) as http:
        assert same(pull(http, "/v1/models/7", X.layout, patient(5)))


def test_without_an_etag_a_cut_model_starts_over() -> None:
    with speaking(gives(500, ""), gives(None, "")) as http:
        assert same(pull(http, "/v1/models/7", X.layout, patient(5)))


def test_a_model_that_always_changes_is_given_up() -> None:
    connections = [gives(500), gives(500)] * 5
    with speaking(*connections) as http, pytest.raises(Unreachable, match="another model whenever"):
        pull(http, "/v1/models/7", X.layout, patient(100))


def test_a_server_that_is_busy_meanwhile_is_waited_for() -> None:
    seen: list[str] = []
    busy = said("503 Unavailable", b'{"error": "not_now", "message": "not now", "do": "d"}')
    with speaking(busy, gives(500), busy, rest(500)) as http:
        assert same(pull(http, "/v1/models/7", X.layout, patient(9, seen)))
    assert len(seen) == 3


def test_a_model_that_is_shorter_than_its_header_says_is_none() -> None:
    with speaking(said("200 OK", PACKED[:1000])) as http, pytest.raises(Unreachable, match="less of the model"):
        pull(http, "/v1/models/7", X.layout, patient(0))


def test_a_version_that_is_gone_is_refused() -> None:
    gone = said("410 Gone", b'{"error": "gone", "message": "m", "do": "d"}')
    with speaking(gives(500), gone) as http, pytest.raises(RequestRefused) as refused:
        pull(http, "/v1/models/7", X.layout, patient(9))
    assert refused.value.status == 410


def test_a_model_that_drips_is_not_waited_for() -> None:
    done = threading.Event()

    def connection(peer: Peer) -> None:
        peer.request()
        peer.say(f"HTTP/1.1 200 OK\r\nContent-Length: {len(PACKED)}\r\n{ETAG}\r\n".encode())
        for byte in PACKED[:1000]:
            with suppress(OSError):
                peer.say(bytes([byte]))
            if done.wait(0.05):
                return

    with speaking(connection, timeouts=QUICK) as http:
        with pytest.raises(Unreachable, match=r"too long|timed out"):
            pull(http, "/v1/models/7", X.layout, patient(0))
        done.set()


def test_a_model_in_another_order_and_in_chunks_is_taken() -> None:
    text = safetensors.numpy.save({name: X[name].copy() for name in reversed(list(X))})

    def connection(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(text), 300_000):
            piece = text[start : start + 300_000]
            peer.say(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        peer.say(b"0\r\n\r\n")

    with speaking(connection) as http:
        assert same(pull(http, "/v1/models/7", X.layout, patient(0)))


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"\xff" * 100, BadPayload),
        (b"\x00" * 100, BadPayload),
        (header_of(Model.of({"z": VALUES}).layout) + VALUES.tobytes(), LayoutMismatch),
        (header_of(Model.of({"x": VALUES[:5]}).layout) + VALUES.tobytes(), LayoutMismatch),
    ],
)
def test_what_is_no_model_is_refused(body: bytes, error: type[Exception]) -> None:
    with speaking(said("200 OK", body)) as http, pytest.raises(error):
        pull(http, "/v1/models/7", X.layout, patient(0))


def test_a_lease_cannot_send_the_token_elsewhere() -> None:
    lease = LeasedTask(3, 2, 4, 7, 1, "@elsewhere.example/v1/models/7", None)
    with working(lambda _peer: None) as calls, pytest.raises(Unreachable, match="no path of its own"):
        calls.pull(lease, X.layout, patient(0))


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("access")
    certificates_module = pytest.importorskip("offbeat.server.certificates")
    certificates_module.make(folder, ["127.0.0.1"])
    return folder


@pytest.fixture
def tls(certificates: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    return context


def test_everything_works_through_tls(tmp_path: Path, certificates: Path, tls: ssl.SSLContext) -> None:
    bodies: list[bytes] = []
    context = WorkerSettings(server="https://127.0.0.1", ca=certificates / "ca.pem").context()
    model_and_update = joining(lambda peer: (gives()(peer), takes(bodies)(peer)))
    with served(model_and_update, gives(900_000), rest(900_000), context=tls) as address:
        calls = ApiClient(HttpClient(address, context=context, timeouts=SLOW), Hello("w", "digits"))
        calls.join()
        assert same(pull(calls.http, "/v1/models/7", X.layout, patient(0)))
        assert calls.push(finished_in(tmp_path)).t == 9
        assert same(pull(calls.http, "/v1/models/7", X.layout, patient(1)))
        calls.http.close()
    assert bodies == [DATA]


def test_an_early_answer_is_heard_through_tls(tmp_path: Path, certificates: Path, tls: ssl.SSLContext) -> None:
    heard = threading.Event()

    def connection(peer: Peer) -> None:
        peer.head()
        peer.say(CONTINUE)
        peer.body(100_000)
        peer.answer("413 Too Large", b'{"error": "too_long", "message": "m", "do": "d"}')
        assert heard.wait(LONG_S)

    context = WorkerSettings(server="https://127.0.0.1", ca=certificates / "ca.pem").context()
    with served(joining(connection), context=tls) as address:
        calls = ApiClient(HttpClient(address, context=context), Hello("w", "digits"))
        calls.join()
        with pytest.raises(RequestRefused) as refused:
            calls.push(finished_in(tmp_path))
        heard.set()
        calls.http.close()
    assert refused.value.error == "too_long"


def test_a_stranger_s_certificate_is_not_trusted(certificates: Path) -> None:
    context = WorkerSettings(server="https://127.0.0.1").context()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "server.pem", certificates / "server.key")

    def accept(peer: Peer) -> None:
        with suppress(ssl.SSLError, OSError):
            tls.wrap_socket(peer.sock, server_side=True)

    with served(accept) as address, pytest.raises(Unreachable, match=r"certificate is not trusted .*--ca"):
        HttpClient(Address(address.host, address.port, True), context=context).call("GET", "/")


def test_a_server_without_tls_is_no_server_with_tls() -> None:
    context = WorkerSettings(server="https://127.0.0.1").context()
    with served(lambda peer: peer.say(b"HTTP/1.1 400 Bad\r\n\r\n")) as address, pytest.raises(Unreachable):
        HttpClient(Address(address.host, address.port, True), context=context, timeouts=SLOW).call("GET", "/")
