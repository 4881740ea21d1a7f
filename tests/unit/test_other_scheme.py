"""A worker that speaks http where the server speaks https, or the reverse: it says so, and does not try for ever."""

import ssl
from pathlib import Path

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.server import certificates
from offbeat.server.access import TOKENS, TokenBook
from offbeat.server.settings import AccessSettings
from offbeat.worker.api_answers import RequestRefused, Unreachable
from offbeat.worker.http_client import HttpClient
from offbeat.worker.other_scheme import WrongScheme
from offbeat.worker.retrying import MISTAKEN_AT_FIRST_MAX, MISTAKEN_MAX
from offbeat.worker.settings import Address
from tests.server.serving import serving
from tests.unit.test_worker_http import Peer, said, served
from tests.unit.test_worker_loop import FINISHED, Case, Scripted, joined, keep, lease, refused

MISTAKEN = WrongScheme("the server at x speaks http, not https: use http://x")


def context(folder: Path) -> ssl.SSLContext:
    certificates.make(folder, ["localhost"])
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(folder / certificates.SERVER_CERT, folder / certificates.SERVER_KEY)
    return made


def asked(address: Address) -> str:
    """What a client is told that calls this address."""
    http = HttpClient(address, context=ssl.create_default_context() if address.tls else None)
    with pytest.raises(Unreachable) as told:
        http.call("GET", "/v1/health")
    http.close()
    assert isinstance(told.value, WrongScheme), told.value
    return str(told.value)


# --- which it is -----------------------------------------------------------------------------------------------------


def test_https_to_a_server_of_ours_that_speaks_http(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        where = Address.of(running.url)
        words = asked(Address(where.host, where.port, tls=True))
        assert words.startswith(f"the server at {where.netloc} speaks http, not https: use {running.url}")
        result = CliRunner().invoke(main, ["status", running.url.replace("http:", "https:")])
        assert (result.exit_code, "speaks http, not https: use http://" in result.output) == (2, True), result.output


def test_http_to_a_server_of_ours_that_speaks_https(tmp_path: Path) -> None:
    certificates.make(tmp_path / "access", ["localhost"])
    TokenBook.begin(tmp_path / "access" / TOKENS)
    with serving(tmp_path, access=AccessSettings(tmp_path / "access")) as running:
        where = Address.of(running.url)
        words = asked(Address(where.host, where.port, tls=False))
        assert words.startswith(f"the server at {where.netloc} speaks https, not http: use {running.url}, with --ca")
        result = CliRunner().invoke(main, ["status", running.url.replace("https:", "http:")])
        assert (result.exit_code, "speaks https, not http: use https://" in result.output) == (2, True), result.output


def test_http_to_a_tls_server_that_just_hangs_up(tmp_path: Path) -> None:
    """As the version before did: it is asked in TLS before that is said."""
    with served(lambda peer: peer.head(), lambda _: None, context=None) as plain:
        http = HttpClient(plain)
        with pytest.raises(Unreachable) as told:
            http.call("GET", "/")
        assert not isinstance(told.value, WrongScheme), "it hung up, and that is all that is known"
    made = context(tmp_path)

    def hangs_up_on_http(peer: Peer) -> None:
        peer.sock.recv(1)

    def shakes_hands(peer: Peer) -> None:
        made.wrap_socket(peer.sock.dup(), server_side=True).close()

    with served(hangs_up_on_http, shakes_hands) as address:
        assert "speaks https, not http" in asked(address)


@pytest.mark.parametrize(
    "words",
    [b"<center>The plain HTTP request was sent to HTTPS port</center>", b'{"error": "wrong_scheme", "message": "no"}'],
)
def test_words_of_the_server_and_of_proxies_are_understood(words: bytes) -> None:
    with served(said("400 Bad Request", words)) as address:
        assert "speaks https, not http" in asked(address)


def test_a_tls_server_that_cannot_agree_is_not_taken_for_http(tmp_path: Path) -> None:
    """Its answer to http, of whatever kind, does not make it an http server."""
    made = context(tmp_path)
    made.maximum_version = ssl.TLSVersion.TLSv1_2
    client = ssl.create_default_context()
    client.minimum_version = ssl.TLSVersion.TLSv1_3

    def disagrees(peer: Peer) -> None:
        with pytest.raises(ssl.SSLError):
            made.wrap_socket(peer.sock.dup(), server_side=True)

    for status in ("400 Bad Request", "426 Upgrade Required"):
        with served(disagrees, said(status, b"use https")) as plain:
            http = HttpClient(Address(plain.host, plain.port, tls=True), context=client)
            with pytest.raises(Unreachable) as told:
                http.call("GET", "/")
            assert not isinstance(told.value, WrongScheme)


def test_no_token_is_sent_to_find_out() -> None:
    heard: list[bytes] = []

    def garbage(peer: Peer) -> None:
        peer.sock.recv(1)
        peer.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    def answers(peer: Peer) -> None:
        heard.append(repr(peer.head()).encode())
        peer.answer("200 OK")

    with served(garbage, answers) as plain:
        secret = {"Authorization": "Bearer ob_secret"}
        http = HttpClient(Address(plain.host, plain.port, tls=True), secret, ssl.create_default_context())
        with pytest.raises(WrongScheme):
            http.call("GET", "/v1/status")
    assert heard
    assert b"ob_secret" not in heard[0]


# --- how often it is tried -------------------------------------------------------------------------------------------


def test_at_first_it_is_tried_a_few_times(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(join=[MISTAKEN] * 100))
    with pytest.raises(WrongScheme, match="speaks http, not https"):
        case.run()
    assert case.calls == ["join None"] * MISTAKEN_AT_FIRST_MAX
    assert len([line for line in case.lines if "speaks http" in line]) == 1


def test_later_it_is_tried_for_longer_and_the_update_stays(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[lease(), FINISHED], push=[MISTAKEN] * 100))
    with pytest.raises(WrongScheme):
        case.run()
    assert len([call for call in case.calls if call.startswith("push 3")]) == MISTAKEN_MAX
    assert case.held() == 3


def test_a_proxy_that_is_changed_may_be_mistaken_for_a_while(tmp_path: Path) -> None:
    asks = [*[MISTAKEN] * (MISTAKEN_MAX - 1), lease(), *[MISTAKEN] * (MISTAKEN_MAX - 1), FINISHED]
    case = Case(tmp_path, Scripted(join=[*[MISTAKEN] * (MISTAKEN_AT_FIRST_MAX - 1), joined()], ask=asks)).run()
    assert case.outcomes() == ["applied"]


# --- other doors -----------------------------------------------------------------------------------------------------


def test_other_bytes_are_dropped_as_answered(tmp_path: Path) -> None:
    keep(tmp_path)
    case = Case(tmp_path, Scripted(ask=[lease(), FINISHED], push=[refused(409, "other_bytes")])).run()
    assert case.calls[:3] == ["join 2", "push 2 resume", "ask"]
    assert case.outcomes() == ["other_bytes", "applied"]
    assert case.held() is None


def test_a_wrong_host_ends_the_worker_and_its_update_stays(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[lease()], push=[refused(421, "wrong_host")]))
    with pytest.raises(RequestRefused, match="it is wrong_host"):
        case.run()
    assert case.held() == 3
