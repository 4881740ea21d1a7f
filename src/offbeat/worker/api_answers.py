"""Owns what the server tells a worker: answers of the API as values, read from JSON that is checked first.

Other fields of an answer are ignored: a newer server may say more.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from offbeat.worker.request_errors import Unreachable

WHOLE_MAX = 2**63
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Joined:
    """What a worker must know of the run."""

    worker: int
    session: str
    device: int
    run: str
    seed: int
    task: str
    settings: dict[str, Any]
    layout: str
    """The layout's fingerprint."""
    update_bytes_max: int
    poll_s: float
    heartbeat_s: float
    state: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class LeasedTask:
    """A task, leased to this worker."""

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


def read(kind: type[T], values: Mapping[str, Any]) -> T:
    """A value of this kind from JSON; `Unreachable` where it does not fit."""
    hints = get_type_hints(kind)
    found = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            found[field.name] = _typed(kind, field.name, values[field.name], hints[field.name])
        elif field.default is MISSING:
            raise Unreachable(f"the server's {kind.__name__} lacks {field.name!r}")
    return kind(**found)


def answer_of(values: Mapping[str, Any]) -> AskAnswer:
    """The answer to a worker that asked for a task."""
    lease = read(LeasedTask, values["lease"]) if isinstance(values.get("lease"), dict) else None
    answer = read(AskAnswer, {**values, "lease": lease})
    if answer.state not in ("working", "idle", "finished") or (answer.state == "working") != (lease is not None):
        raise Unreachable(f"the server's answer is {answer.state!r}" + (" with a lease" if lease else " without one"))
    return answer


def _typed(kind: type, name: str, value: Any, hint: Any) -> Any:
    kinds = _kinds(hint)
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
