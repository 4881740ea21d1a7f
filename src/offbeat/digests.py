"""Owns the digests of updates: which kinds there are, how one is written, and how it is made.

A digest is text that says its kind: `blake3:` and 64 hexadecimal digits, or 64 digits alone, which are SHA-256.

Rules kept here:
- SHA-256 is always there: every worker and every server that knows no other kind speaks it. BLAKE3, which is several
  times as fast, is used where its package is installed at both ends.
- What was told with one kind is checked with that kind. Where its package is missing, an error says what to install.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import OffbeatError

SHA256, BLAKE3 = "sha256", "blake3"
PIECE = 1 << 18
"""Bytes of a file that are read at a time: they are still in the processor's cache when they are hashed."""
_DIGEST = re.compile(r"(?:blake3:)?[0-9a-f]{64}", re.ASCII)


class DigestUnknown(OffbeatError):
    """A digest is of a kind that cannot be made here."""


class Hash(Protocol):
    """What hashes bytes as they come."""

    def update(self, data: Any, /) -> Any: ...
    def hexdigest(self) -> str: ...


class Hasher:
    """Makes one digest."""

    def __init__(self, kind: str = SHA256) -> None:
        self.kind = kind
        self._hash: Hash = _blake3()() if kind == BLAKE3 else hashlib.sha256()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)

    def text(self) -> str:
        """The digest of all bytes so far.

        >>> Hasher().text()[:8]
        'e3b0c442'
        """
        digits = self._hash.hexdigest()
        return digits if self.kind == SHA256 else f"{self.kind}:{digits}"


@cache
def known_digests() -> tuple[str, ...]:
    """The kinds that can be made here, the fastest first."""
    try:
        _blake3()
    except DigestUnknown:
        return (SHA256,)
    return (BLAKE3, SHA256)


def chosen_digest(theirs: Iterable[str]) -> str:
    """The fastest kind that the other end takes, too.

    >>> chosen_digest(["sha256", "another"]), chosen_digest([])
    ('sha256', 'sha256')
    """
    taken = set(theirs)
    return next((kind for kind in known_digests() if kind in taken), SHA256)


def kind_of(digest: str) -> str:
    """
    >>> kind_of("ab" * 32), kind_of("blake3:" + "ab" * 32)
    ('sha256', 'blake3')
    """
    return digest.partition(":")[0] if ":" in digest else SHA256


def is_digest(text: str) -> bool:
    """Is this a digest as we write them?"""
    return _DIGEST.fullmatch(text) is not None


def digest_of_file(path: Path, kind: str = SHA256) -> str:
    hasher, piece = Hasher(kind), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            hasher.update(piece[:count])
    return hasher.text()


def holds(path: Path, digest: str) -> bool:
    """Does this file hold the bytes that this digest is of?"""
    return digest_of_file(path, kind_of(digest)) == digest


def _blake3() -> Any:
    try:
        from blake3 import blake3
    except ImportError as error:
        what = "pip install 'offbeat[serve]' on a server, 'offbeat[work]' on a device"
        raise DigestUnknown(f"this needs BLAKE3 digests, whose package is not installed; {what}") from error
    return blake3
