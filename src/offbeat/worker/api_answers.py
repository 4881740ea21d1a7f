"""Owns what the server tells a worker: answers of the API as values, or one of two errors.

Rules kept here:
- `RequestRefused`: the server said no. `Unreachable`: there is no answer that can be believed.
- JSON is checked before it becomes a value. Other fields of an answer are ignored: a newer server may say more.
"""

import json
import ssl
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from offbeat.errors import OffbeatError

WHOLE_MAX = 2**63
SHOWN_MAX = 400
"""Characters that are shown of what a server says."""
BUSY = frozenset({408, 425, 429})
FOR_GOOD = frozenset(
    {"replaced", "no_token", "bad_token", "not_allowed", "wrong_version", "wrong_host", "wrong_origin", "wrong_base"}
)
CHECK = "Check the address of the server, and any proxy in front of it."
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Joined:
    worker: int
    session: str
    device: int
    run: str
    seed: int
    task: str
    settings: dict[str, Any]
    layout: str
    """The layout's fingerprint."""
    poll_s: float
    heartbeat_s: float
    state: str
    samples: int | None = None
    """What the server holds this worker to, from an earlier time."""
    digests: list[str] | None = None
    """The kinds of digests that it takes; an earlier version does not say, and takes SHA-256."""


@dataclass(frozen=True, slots=True)
class LeasedTask:
    task: int
    device: int
    number: int
    tau: int
    seed: int
    model: str
    """The path to pull from."""
    lease_s: float | None
    local_iterations: int | None = None
    gamma: float | None = None


@dataclass(frozen=True, slots=True)
class AskAnswer:
    """A task (working), none yet (idle), or the run is finished."""

    state: str
    lease: LeasedTask | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The update is on the server's disk and will be mixed exactly once."""

    task: int
    outcome: str
    t: int
    tau: int
    staleness: int
    alpha_t: float | None
    repeated: bool
    head: str = ""
    """Of the server's ledger: it covers this decision and all before it."""


def read(kind: type[T], values: Mapping[str, Any]) -> T:
    """A value of this kind from JSON; `Unreachable` where it does not fit."""
    found = {}
    for name, kinds, needed in _fields_of(kind):  # type: ignore[arg-type] # every class can be hashed
        if name in values:
            found[name] = _typed(kind, name, values[name], kinds)
        elif needed:
            raise Unreachable(f"the server's {kind.__name__} lacks {name!r}")
    return kind(**found)


@cache
def _fields_of(kind: type) -> list[tuple[str, tuple[type, ...], bool]]:
    """Of every field: its name, its types, and whether it must be there."""
    hints = get_type_hints(kind)
    return [(field.name, _kinds(hints[field.name]), field.default is MISSING) for field in fields(kind)]


def answer_of(values: Mapping[str, Any]) -> AskAnswer:
    lease = read(LeasedTask, values["lease"]) if isinstance(values.get("lease"), dict) else None
    answer = read(AskAnswer, {**values, "lease": lease})
    if answer.state not in ("working", "idle", "finished") or (answer.state == "working") != (lease is not None):
        raise Unreachable(f"the server's answer is {answer.state!r}" + (" with a lease" if lease else " without one"))
    return answer


def _typed(kind: type, name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if isinstance(value, bool):  # which Python counts among the whole numbers
        fits = bool in kinds
    elif isinstance(value, int | float):
        sound = isfinite(value) if isinstance(value, float) else 0 <= value < WHOLE_MAX
        fits = sound and (type(value) in kinds or float in kinds)
    else:
        fits = isinstance(value, kinds)
    if not fits:
        raise Unreachable(f"the server's {kind.__name__} has {name} = {value!r:.60}")
    return value


def _kinds(hint: Any) -> tuple[type, ...]:
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(part) or part for part in parts)


# --- errors -----------------------------------------------------------------------------------------------------------


class Unreachable(OffbeatError):
    """There is no answer from the server, or none that makes sense; it may help to try again."""


class RequestRefused(OffbeatError):
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
