"""Owns who looks: a token is exchanged for a cookie, and what changes something needs a second secret.

Rules kept here:
- The cookie holds a random number and never the token. A token that is revoked ends its sessions: it is looked up again
  at every request.
- The CSRF token belongs to the session. A request with a token of its own needs none: no browser sends one along
  by itself. Without access control there is one CSRF token for all, which other sites cannot read. (What comes from a
  page of another site does not get here at all: `server/own_names.py`.)
- Who tries token after token is made to wait.
- Sessions are in a file beside the tokens, so a server that is started again knows its visitors. The file holds no
  secret: a cookie is known by its digest, and so is the token that it was given for.
- A session ends after a while, when its visitor logs out, or when there are too many: then the oldest go.
- Where the file cannot be written or read, sessions last as long as the server, and the page still works.
- The cookie goes back to this page alone, also where a proxy has others beside it.
"""

import hashlib
import hmac
import json
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server.access import Right, Role, TokenBook, TokenEntry, bearer, digest_of, write_private
from offbeat.server.listener import address_of, over_tls
from offbeat.server.places import identity_of_address, identity_of_token
from offbeat.server.refusals import Refusal
from offbeat.storage.json_file import read_json

FILE = "sessions.json"
SECRET_BYTES = 32
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 1000
COOKIE = "offbeat"
CSRF = "X-CSRF-Token"
TRIES_MAX = 10
TRIES_S = 60.0
"""After TRIES_MAX wrong tokens within this time an address must wait."""
ADDRESSES_MAX = 10_000
LOG_IN = "Log in at /login, or send `Authorization: Bearer TOKEN`."
log = logging.getLogger("offbeat.web")


class LoginSession(NamedTuple):
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


class Visitor(NamedTuple):
    role: Role | None
    """None where the visitor has not logged in."""
    csrf: str | None = None
    """What must come with whatever changes something; None where nothing need come."""


class PageAccess:
    def __init__(
        self,
        tokens: TokenBook | None,
        *,
        tls: bool = False,
        behind_proxy: bool = False,
        open_role: Role = Role.ADMIN,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Without tokens every visitor has `open_role`."""
        self.tokens, self.tls, self.open_role, self._now = tokens, tls, open_role, now
        self._behind_proxy = behind_proxy
        self._csrf = secrets.token_urlsafe(SECRET_BYTES)
        self._sessions = LoginSessions(tokens.path.with_name(FILE) if tokens else None, now)
        self._tries: OrderedDict[str, deque[float]] = OrderedDict()

    # --- who looks ---------------------------------------------------------------------------------------------------

    def visitor(self, request: web.Request) -> Visitor:
        if self.tokens is None:
            return Visitor(self.open_role, self._csrf)
        if "Authorization" in request.headers:
            return Visitor(self._role(digest_of(bearer(request.headers["Authorization"]) or "")))
        secret = request.cookies.get(COOKIE, "")
        session = self._sessions.find(secret)
        role = self._role(session.token) if session else None
        return Visitor(role, csrf_of(secret) if role else None)

    def identity(self, request: web.Request) -> str:
        """Who looks, for limits of what one visitor may take: a token's name, else an address."""
        entry = None
        if self.tokens is not None and "Authorization" in request.headers:
            entry = self._entry(digest_of(bearer(request.headers["Authorization"]) or ""))
        elif self.tokens is not None and (session := self._sessions.find(request.cookies.get(COOKIE, ""))):
            entry = self._entry(session.token)
        if entry is not None:
            return identity_of_token(entry.name)
        return identity_of_address(address_of(request, behind_proxy=self._behind_proxy))

    def admit(self, request: web.Request, right: Right) -> Visitor:
        """The visitor who sent this request, if their role has this right; else refused."""
        visitor = self.visitor(request)
        if visitor.role is None:
            word = "bad_token" if "Authorization" in request.headers or COOKIE in request.cookies else "no_token"
            raise Refusal(word, "this page is for those who have logged in", do=LOG_IN)
        if not visitor.role.may(right):
            raise Refusal("not_allowed", f"a token of role {visitor.role.value} may not do this")
        return visitor

    def check_csrf(self, request: web.Request, visitor: Visitor) -> None:
        sent = request.headers.get(CSRF, "").encode("utf-8", "surrogatepass")
        if visitor.csrf is not None and not hmac.compare_digest(visitor.csrf.encode(), sent):
            raise Refusal("not_allowed", f"{CSRF} is missing or wrong", do="Load the page again; see /session.json.")

    def _role(self, digest: str) -> Role | None:
        if self.tokens is None:
            return self.open_role
        entry = self._entry(digest)
        return entry.role if entry else None

    def _entry(self, digest: str) -> TokenEntry | None:
        try:
            return self.tokens.check_digest(digest) if self.tokens else None
        except InvalidValue as error:
            raise Refusal("not_now", "the server cannot read its tokens", retry_after_s=5) from error

    # --- sessions ----------------------------------------------------------------------------------------------------

    def log_in(self, request: web.Request, token: str, response: web.Response) -> None:
        """Give the cookie to a visitor whose token allows looking."""
        if self.tokens is None:
            return
        address = address_of(request, behind_proxy=self._behind_proxy)
        self._refuse_tries(address)
        role = self._role(digest_of(token))
        if role is None:
            self._tries.setdefault(address, deque(maxlen=TRIES_MAX)).append(self._now())
            raise Refusal("bad_token", "this token is not known, or was revoked")
        if not role.may(Right.WATCH):
            raise Refusal("not_allowed", f"a token of role {role.value} is for work, not for looking")
        secret = self._sessions.begin(digest_of(token))
        _set_cookie(response, secret, int(SESSION_S), secure=self._secure(request))

    def log_out(self, request: web.Request, response: web.Response) -> None:
        self._sessions.end(request.cookies.get(COOKIE, ""))
        _set_cookie(response, "", 0, secure=self._secure(request))

    def _secure(self, request: web.Request) -> bool:
        return self.tls or over_tls(request)

    def _refuse_tries(self, address: str) -> None:
        while len(self._tries) > ADDRESSES_MAX:
            self._tries.popitem(last=False)
        tries = self._tries.get(address)
        wait_s = TRIES_S - (self._now() - tries[0]) if tries and len(tries) == TRIES_MAX else 0.0
        if wait_s > 0:
            do = "Try again after Retry-After seconds."
            raise Refusal("busy", "too many wrong tokens came from this address", retry_after_s=wait_s, do=do)


def _set_cookie(response: web.Response, value: str, max_age: int, *, secure: bool) -> None:
    """Without a path: then it is for the folder that the browser sees the form in, and not for its neighbours."""
    response.set_cookie(COOKIE, value, max_age=max_age, path="", httponly=True, samesite="Strict", secure=secure)
