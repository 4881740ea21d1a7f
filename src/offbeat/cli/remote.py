"""Owns how a command asks a server: one request, an answer or one line that says what is wrong."""

import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server.settings import LOOPBACK
from offbeat.storage.json_file import read_json

WHERE = "server.json"
CALL_S = 30.0


class NoAnswer(OffbeatError):
    """There is no server there."""


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


def call(url: str, method: str, path: str, token: str | None, ca: Path | None) -> Any:
    parts = urlsplit(url)
    if token and parts.scheme == "http" and parts.hostname not in LOOPBACK:
        raise InvalidValue(f"{url} would get the token in the clear; use https://")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=ca)
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=CALL_S, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=CALL_S)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request(method, parts.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url} does not answer: {error}; is the server running?") from error
    finally:
        connection.close()
    return _understood(response.status, dict(response.getheaders()), body)


def _understood(code: int, headers: dict[str, str], body: bytes) -> Any:
    if headers.get("Content-Type", "").startswith("application/octet-stream") and code < 300:
        return headers, body
    try:
        found = json.loads(body) if body else {}
    except ValueError as error:
        raise OffbeatError(f"this is no Offbeat server: it answered {code} with {body[:60]!r}") from error
    if code >= 400:
        raise OffbeatError(f"{found.get('message', code)}. {found.get('do', '')}".strip())
    return found
