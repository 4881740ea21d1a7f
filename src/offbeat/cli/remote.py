"""Owns how a command asks a server: with the worker's HTTP client, one request on a connection of its own."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from offbeat.errors import InvalidValue
from offbeat.storage.json_file import read_json
from offbeat.worker.api_answers import RequestRefused, Unreachable
from offbeat.worker.http_client import PIECE, HttpClient
from offbeat.worker.settings import Address, Timeouts, trusted

WHERE = "server.json"
BACKUP_S = 600.0
"""For the first byte of a backup: the server copies its ledger first."""


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def url_of(source: str) -> str:
    """A URL, or that of the server of a folder."""
    if is_url(source):
        return source
    where = Path(source) / WHERE
    if not where.is_file():
        raise InvalidValue(f"{source} is not being served; give the URL of a server, or the --dir of a running one")
    return str(read_json(where)["url"])


def call(url: str, method: str, path: str, token: str | None, ca: Path | None) -> dict[str, Any]:
    with _client(url, token, ca) as client:
        return client.call(method, path)


def download_model(url: str, epoch: str, token: str | None, ca: Path | None) -> tuple[str, bytes]:
    """The epoch of a model and its file, from a server."""
    with _client(url, token, ca) as client:
        try:
            _, headers = client.open(f"/v1/models/{epoch}")
        except RequestRefused as refused:
            if epoch != "result" or refused.error != "bad_request":
                raise
            _, headers = client.open("/v1/models/latest")  # a server of the version before has no other result
        if "offbeat-epoch" not in headers:
            raise Unreachable(f"{url} answers, but not as an Offbeat server does; check the URL")
        body, piece = bytearray(), memoryview(bytearray(PIECE))
        while count := client.readinto(piece):
            body += piece[:count]
    return headers["offbeat-epoch"], bytes(body)


@contextmanager
def backup_stream(url: str, token: str | None, ca: Path | None) -> Iterator[tuple["BodyReader", int]]:
    """A backup of the run of a server, to be read, and how many bytes it has."""
    with _client(url, token, ca, Timeouts(answer_s=BACKUP_S)) as client:
        try:
            _, headers = client.open("/v1/backup")
        except RequestRefused as refused:
            if refused.status == 404:
                raise InvalidValue(f"the server at {url} cannot give out backups; upgrade it") from refused
            raise
        if headers.get("content-type") != "application/x-tar":
            raise Unreachable(f"{url} answers, but not as an Offbeat server does; check the URL")
        yield BodyReader(client), int(headers.get("content-length", 0))


class BodyReader:
    """The body of an answer as a file to read from."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    def read(self, size: int) -> bytes:
        piece = memoryview(bytearray(size))
        return bytes(piece[: self._client.readinto(piece)])


@contextmanager
def _client(
    url: str,
    token: str | None,
    ca: Path | None,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 (a frozen value)
) -> Iterator[HttpClient]:
    address = Address.of(url)
    if token and not (address.tls or address.loopback):
        raise InvalidValue(f"{url} would get the token in the clear; use https://")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with closing(HttpClient(address, headers, trusted(ca) if address.tls else None, timeouts)) as client:
        yield client
