"""Owns what can go wrong between a worker and its server, as two errors: it said no, or no answer can be believed."""

import json
import ssl
from collections.abc import Mapping
from math import isfinite
from typing import Any

from offbeat.errors import OffbeatError

SHOWN_MAX = 400
"""Characters that are shown of what a server says."""
BUSY = frozenset({408, 425, 429})
FOR_GOOD = frozenset({"replaced", "no_token", "bad_token", "not_allowed", "wrong_version"})
CHECK = "Check the address of the server, and any proxy in front of it."


class Unreachable(OffbeatError):
    """There is no answer from the server, or none that makes sense; it may help to try again."""


class RequestRefused(OffbeatError):
    """The server said no."""

    def __init__(
        self,
        status: int,
        error: str,
        message: str,
        do: str = "",
        *,
        retry_after_s: float | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(f"{message.rstrip('.')}. {do}" if do else message)
        self.status, self.error, self.message, self.do = status, error, message, do
        self.retry_after_s, self.offset = retry_after_s, offset

    @property
    def temporary(self) -> bool:
        """Is the same request worth another try, later?"""
        return self.status in BUSY or self.status >= 500

    @property
    def for_good(self) -> bool:
        """Is it about the worker itself, whatever it asks for or sends?"""
        return self.error in FOR_GOOD or self.status == 426


def refusal(status: int, headers: Mapping[str, str], text: bytes) -> RequestRefused:
    """The error for an answer that is none of 2xx; it need not be from an Offbeat server, but from a proxy, say."""
    body = object_of(text) or {}
    retry_after_s = _seconds(body.get("retry_after_s", headers.get("retry-after")))
    error, message, do, offset = (body.get(name) for name in ("error", "message", "do", "offset"))
    if not isinstance(error, str) or not isinstance(message, str):
        moved = f"; it is now at {shown(headers['location'])}" if "location" in headers else ""
        said = f"the server answered {status}{moved}: {shown(text) or 'nothing'}"
        return RequestRefused(status, "", said, CHECK, retry_after_s=retry_after_s)
    place = offset if isinstance(offset, int) and not isinstance(offset, bool) and offset >= 0 else None
    next_ = shown(do) if isinstance(do, str) else ""
    return RequestRefused(status, error, shown(message), next_, retry_after_s=retry_after_s, offset=place)


def object_of(text: bytes) -> dict[str, Any] | None:
    """The JSON object in this text, if it is one."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def reason(error: BaseException) -> str:
    """What went wrong with a connection, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); give the authority that signed it with --ca"
    return shown(str(getattr(error, "strerror", None) or error)) or type(error).__name__


def shown(text: bytes | str) -> str:
    """Text from outside as one line, without control characters for a terminal."""
    plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return "".join(letter for letter in " ".join(plain.split()) if letter.isprintable())[:SHOWN_MAX]


def _seconds(value: Any) -> float | None:
    """Seconds to wait; None for a date or nonsense."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        return None
    return seconds if isfinite(seconds) and seconds >= 0 else None
