"""Owns login sessions, in a file beside the tokens: a server that is started again knows its visitors.

Rules kept here:
- The file holds no secret: a cookie is known by its digest, and so is the token that it was given for.
- A session ends after a while, when its visitor logs out, or when there are too many: then the oldest go.
- Where the file cannot be written or read, sessions last as long as the server, and the page still works.
"""

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server.access import write_private
from offbeat.storage.json_file import read_json

FILE = "sessions.json"
SECRET_BYTES = 32
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 1000
log = logging.getLogger("offbeat.web")


class LoginSession(NamedTuple):
    """A login, until it ends."""

    token: str
    """The digest of the token that they showed."""
    ends_at: float


class LoginSessions:
    """Every session by the digest of its cookie."""

    def __init__(self, path: Path | None, now: Callable[[], float] = time.time) -> None:
        self.path, self._now = path, now
        self._known = self._read()

    def begin(self, token: str) -> str:
        """The cookie of a new session for the token of this digest."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        self._known[_digest(secret)] = LoginSession(token, self._now() + SESSION_S)
        self._known = dict(list(self._current().items())[-SESSIONS_MAX:])
        self._write()
        return secret

    def find(self, secret: str) -> LoginSession | None:
        """By its digest: how long the search takes tells nothing about the secret."""
        session = self._known.get(_digest(secret))
        return session if session is not None and session.ends_at > self._now() else None

    def end(self, secret: str) -> None:
        if self._known.pop(_digest(secret), None) is not None:
            self._write()

    def _current(self) -> dict[str, LoginSession]:
        return {cookie: session for cookie, session in self._known.items() if session.ends_at > self._now()}

    def _read(self) -> dict[str, LoginSession]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            found = read_json(self.path)["sessions"]
            return {str(cookie): LoginSession(str(token), float(ends_at)) for cookie, token, ends_at in found}
        except (InvalidValue, KeyError, TypeError, ValueError) as error:
            log.warning("all visitors must log in again: %s is damaged (%s)", self.path, error)
            return {}

    def _write(self) -> None:
        if self.path is None:
            return
        rows = [[cookie, *session] for cookie, session in self._known.items()]
        try:
            write_private(self.path, json.dumps({"sessions": rows}).encode())
        except OffbeatError as error:
            log.warning("sessions cannot be kept, so visitors must log in again after a restart: %s", error)


def csrf_of(secret: str) -> str:
    """What must come with whatever this session changes; follows from the cookie, which no other site can read."""
    return hmac.new(secret.encode("utf-8", "surrogatepass"), b"csrf", hashlib.sha256).hexdigest()


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
