"""Commands that ask a server: what they send, and one line that says what to do where something is wrong."""

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offbeat.cli import main
from offbeat.cli.remote import call, download_model
from offbeat.worker.api_answers import RequestRefused, Unreachable
from tests.unit.test_worker_http import Peer, said, served

CERTIFICATE = "no certificate"


@pytest.fixture(autouse=True)
def _without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFBEAT_TOKEN", "OFFBEAT_CA"):
        monkeypatch.delenv(name, raising=False)


def offbeat(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def said_once(result: Result, *words: str) -> None:
    """One line, no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert all(word in result.output for word in words), result.output


def test_an_authority_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "ca.pem")
    said_once(offbeat("status", "https://127.0.0.1:1", "--ca", missing), missing, "No such file", "give a PEM file")


def test_an_authority_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(CERTIFICATE)
    said_once(offbeat("status", "https://127.0.0.1:1", "--ca", str(tmp_path / "ca.pem")), "ca.pem", "give a PEM file")


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[::1", "http://host:port", "https://", "http://:1"])
@pytest.mark.parametrize("command", [["status"], ["export", "x.safetensors"], ["readmit", "3"]])
def test_a_url_that_is_none_is_shown_with_how_to_write_it(url: str, command: list[str]) -> None:
    said_once(offbeat(command[0], url, *command[1:]), repr(url), "write it as https://HOST:PORT")


def test_a_token_does_not_go_over_a_network_in_the_clear() -> None:
    said_once(offbeat("status", "http://fl.example", "--token", "abc"), "in the clear; use https://")


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    said_once(offbeat("status", url), f"{url} does not answer: Connection refused")


def test_the_token_goes_along_and_the_authority_is_ignored_without_tls(tmp_path: Path) -> None:
    heads = []

    def connection(peer: Peer) -> None:
        heads.append(peer.request())
        peer.answer("200 OK", b'{"t": 3}')

    with served(connection) as address:
        assert call(str(address), "GET", "/v1/status", "abc", tmp_path / "missing") == {"t": 3}
    assert heads[0]["Authorization"] == "Bearer abc"


def test_a_refusal_is_shown_with_what_to_do() -> None:
    refusal = said("403 Forbidden", b'{"error": "not_allowed", "message": "a viewer may not", "do": "Ask."}')
    with served(refusal) as address, pytest.raises(RequestRefused, match=r"^a viewer may not\. Ask\.$"):
        call(str(address), "POST", "/v1/workers/3/readmit", None, None)


def test_a_model_comes_whole_with_its_epoch() -> None:
    body = bytes(range(256)) * 10_000
    with served(said("200 OK", body, "Offbeat-Epoch: 7\r\n")) as address:
        assert download_model(str(address), "latest", None, None) == ("7", body)


def test_a_model_that_breaks_off_is_none() -> None:
    def connection(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\nOffbeat-Epoch: 7\r\nContent-Length: 100\r\n\r\nabc")

    with served(connection) as address, pytest.raises(Unreachable, match="breaks off"):
        download_model(str(address), "latest", None, None)


def test_a_page_is_no_model() -> None:
    with served(said("200 OK", b"<html>")) as address, pytest.raises(Unreachable, match="not as an Offbeat server"):
        download_model(str(address), "latest", None, None)
