"""Owns who may do what: tokens, their roles, and the file that the server knows them by.

Rules kept here:
- The file holds no token, only its sha256: who reads the file cannot use what it says.
- A check compares with every entry and never stops early: how long it takes tells nothing.
- While the file cannot be read, every token is refused. A running server sees a change of it within `LOOK_S`.
- Who changes the file holds the folder's lock from reading to renaming: two changes at once are both kept.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any, Self

from offbeat.errors import InvalidValue
from offbeat.storage.disk import aside, cannot_write
from offbeat.storage.json_file import read_json
from offbeat.storage.lock import Lock

TOKENS = "tokens.json"
LOCK = ".lock"
PREFIX = "ob_"
TOKEN_BYTES = 32
NAME_MAX = 100
ENTRIES_MAX = 10_000
"""Tokens of one book: a check compares with each, which takes about a millisecond for this many."""
LOOK_S = 1.0
"""A running server looks at the file this often at most."""
RETRY_S = 0.01
LOCK_TRIES = 1000
"""Tries to take the folder's lock, `RETRY_S` apart: its holder needs milliseconds. Tries are counted, and not time, so
that a machine which stood still for a while does not count as waiting."""

_BEARER = re.compile(r"bearer ([A-Za-z0-9._~+/-]{1,512}=*)", re.IGNORECASE | re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Right(StrEnum):
    WORK = "work"
    """Join, ask, heartbeat, push, leave."""
    MODELS = "models"
    """Read models."""
    WATCH = "watch"
    """Read status, workers, events and metrics."""
    MANAGE = "manage"
    """Step in: quarantine a worker, lift a quarantine, pause; and take the whole run away as a backup."""


class Role(StrEnum):
    WORKER = "worker"
    VIEWER = "viewer"
    ADMIN = "admin"

    def may(self, right: Right) -> bool:
        """May a token of this role make such a call?

        >>> Role.WORKER.may(Right.MODELS), Role.VIEWER.may(Right.WORK)
        (True, False)
        """
        return right in _RIGHTS[self]


_RIGHTS = {
    Role.WORKER: frozenset({Right.WORK, Right.MODELS}),
    Role.VIEWER: frozenset({Right.WATCH, Right.MODELS}),
    Role.ADMIN: frozenset(Right),
}


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """What is known of a token; dates are ISO 8601, UTC."""

    name: str
    role: Role
    sha256: str
    created: str
    revoked: str | None = None


class TokenBook:
    """The tokens of a server, in a file; `begin` one, or name one that is there."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.path, self._monotonic = path, monotonic
        self._entries: tuple[TokenEntry, ...] = ()
        self._seen: tuple[int, int, int] | None = None
        self._look_at = -inf

    @classmethod
    def begin(cls, path: Path) -> Self:
        """A book without a token; refused where there is one."""
        with locked(path.parent):
            if path.exists():
                raise InvalidValue(f"{path} is there already; add to it with: offbeat token add {path.parent} NAME")
            _write(path, ())
        return cls(path)

    def entries(self) -> tuple[TokenEntry, ...]:
        """All of them, as the file says now, in the order in which they were added."""
        self._key()
        return _parsed(self.path, read_json(self.path))

    def add(self, name: str, role: Role) -> str:
        """The new token of this name: shown now, and never again. A revoked name may be given again."""
        return self.add_all({name: role})[name]

    def add_all(self, roles: Mapping[str, Role]) -> dict[str, str]:
        """The new token of every name; all are added, or none."""
        tokens = {check_name(name): PREFIX + secrets.token_urlsafe(TOKEN_BYTES) for name in roles}
        with self._changing() as entries:
            for name, token in tokens.items():
                if name in entries and entries[name].revoked is None:
                    raise InvalidValue(f"there is a token named {name!r}; revoke it first, or choose another name")
                entries[name] = TokenEntry(name, roles[name], digest_of(token), _now())
            if len(entries) > ENTRIES_MAX:
                raise InvalidValue(f"{self.path} would have {len(entries)} tokens; at most {ENTRIES_MAX} are allowed")
        return tokens

    def revoke(self, name: str) -> TokenEntry:
        """The token is refused from now on; to revoke it twice does no harm."""
        with self._changing() as entries:
            if name not in entries:
                raise InvalidValue(f"no token is named {name!r}; see: offbeat token list {self.path.parent}")
            entries[name] = replace(entries[name], revoked=entries[name].revoked or _now())
            return entries[name]

    def check(self, token: str) -> TokenEntry | None:
        """The entry of this token; None if it is unknown or revoked."""
        return self.check_digest(digest_of(token))

    def check_digest(self, digest: str) -> TokenEntry | None:
        found = None
        for entry in self._current():
            if hmac.compare_digest(entry.sha256, digest) and entry.revoked is None:
                found = entry
        return found

    def _current(self) -> tuple[TokenEntry, ...]:
        """What was read last, unless the file has changed since."""
        now = self._monotonic()
        if now >= self._look_at:
            key = self._key()  # before reading: a change in between shows the next time
            if key != self._seen:
                self._entries, self._seen = self.entries(), key
            self._look_at = now + LOOK_S  # only if that went well: else every check tries again, and none succeeds
        return self._entries

    @contextmanager
    def _changing(self) -> Iterator[dict[str, TokenEntry]]:
        """The entries by name, to be changed; they are written when the block ends well."""
        self._key()
        with locked(self.path.parent):
            entries = {entry.name: entry for entry in self.entries()}
            yield entries
            _write(self.path, entries.values())

    def _key(self) -> tuple[int, int, int]:
        try:
            stat = self.path.stat()
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidValue(f"cannot read {self.path}: {why}; make one with: offbeat init DIR") from error
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def bearer(header: str | None) -> str | None:
    """The token of an `Authorization` header; None if there is none, or it is anything but `Bearer TOKEN`.

    >>> bearer("Bearer ob_x"), bearer("Basic ob_x"), bearer("Bearer  ob_x")
    ('ob_x', None, None)
    """
    match = _BEARER.fullmatch(header or "")
    return match[1] if match else None


def check_name(name: Any) -> str:
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_MAX or not name.isprintable() or name != name.strip():
        shown = repr(name)[: NAME_MAX + 2]
        raise InvalidValue(f"{shown} is no name; use 1 to {NAME_MAX} printable characters, no space at either end")
    return name


# --- files -----------------------------------------------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is in such a block; the others wait, but not for ever."""
    lock = _taken(folder / LOCK)
    try:
        yield
    finally:
        lock.release()


def _taken(path: Path) -> Lock:
    try:
        for _ in range(LOCK_TRIES):
            with suppress(InvalidValue):
                return Lock.take(path)
            time.sleep(RETRY_S)
        return Lock.take(path)  # or be told who has it
    except OSError as error:
        raise cannot_write(path, error) from error


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read, whole or not at all."""
    with aside(path) as temporary:
        temporary.unlink(missing_ok=True)  # a dead process may have left one that others can read
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)


def _write(path: Path, entries: Iterable[TokenEntry]) -> None:
    text = json.dumps({"tokens": [asdict(entry) for entry in entries]}, indent=2)
    write_private(path, f"{text}\n".encode())


def _parsed(path: Path, book: dict[str, Any]) -> tuple[TokenEntry, ...]:
    values, entries = book.get("tokens"), dict[str, TokenEntry]()
    if not isinstance(values, list):
        raise InvalidValue(f"{path} has no list of tokens; bring back a copy of it, or make another: offbeat init DIR")
    for number, value in enumerate(values, start=1):
        try:
            entry = _entry(value)
        except (KeyError, TypeError, ValueError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise InvalidValue(f"token {number} in {path} is damaged ({why}); mend it, or bring back a copy") from error
        if entries.setdefault(entry.name, entry) is not entry:
            raise InvalidValue(f"{entry.name!r} is twice in {path}; names are unique: remove one of them")
    return tuple(entries.values())


def _entry(value: Any) -> TokenEntry:
    """Anything but exactly what `_write` writes is refused: an entry that is unclear must not open anything."""
    entry = TokenEntry(
        check_name(value["name"]), Role(value["role"]), value["sha256"], value["created"], value["revoked"]
    )
    if not _SHA256.fullmatch(entry.sha256):
        raise InvalidValue("sha256 must be 64 hexadecimal digits")
    datetime.fromisoformat(entry.created)
    if entry.revoked is not None:
        datetime.fromisoformat(entry.revoked)
    return entry


def digest_of(token: str) -> str:
    """Plain sha256 is enough: 256 random bits cannot be guessed, so salt or slowness would add nothing."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
