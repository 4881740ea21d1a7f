"""Owns the answers of the latest tasks, for pushes that come again: as many as the plan says, each in few bytes.

An answer consists of thirty objects, which take 760 bytes; there may be a hundred thousand of them. So each is
kept as one packed record, and made anew when it is asked for: equal to the first, but for the steps of a rule that has
some, which only the ledger keeps.
"""

import struct
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from offbeat.core.rules import Mix
from offbeat.protocol.messages import AnswerPush, Decision, Lease, Outcome

_RECORD = struct.Struct("<BB10q7d")
_APPLIED, _PUBLISHES, _HAS_ITERATIONS, _HAS_GAMMA = 1, 2, 4, 8
_OUTCOMES = tuple(Outcome)
_NUMBER = {outcome.value: number for number, outcome in enumerate(_OUTCOMES)}


class DecidedTask(NamedTuple):
    """A decision as plain values under the names of the ledger's columns: a restart takes up a hundred thousand."""

    task: int
    outcome: str
    worker: int
    decision: int
    device: int
    number: int
    tau: int
    t: int
    staleness: int
    samples: int
    gradients: int
    local_iterations: int | None
    at: float
    granted_at: float
    deadline: float
    keep: float | None
    new: float | None
    base: float | None
    gamma: float | None
    publish: bool | None


class AnswerBook(Mapping[int, AnswerPush]):
    """Answers by task, the oldest first; every one says that it is `repeated`."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._packed: dict[int, bytes | AnswerPush] = {}
        self._order: deque[int] = deque()

    def remember(self, answer: AnswerPush) -> None:
        """Keep the answer to a task that was decided on; where there are too many, the oldest is forgotten."""
        if answer.decision is None:
            raise AssertionError("only decided tasks are remembered")
        d, lease = answer.decision, answer.decision.lease
        keep, new, base, publish = d.mix[:4] if d.mix else (None, None, None, None)
        try:
            packed = _packed(
                lease.task,
                d.outcome.value,
                lease.worker,
                d.sequence,
                lease.device,
                lease.number,
                lease.tau,
                d.t,
                d.staleness,
                d.samples,
                d.gradients,
                lease.local_iterations,
                d.at,
                lease.granted_at,
                lease.deadline,
                keep,
                new,
                base,
                lease.gamma,
                publish,
            )
        except struct.error:  # a number does not fit
            self._put(answer.task, answer.again())
        else:
            self._put(answer.task, packed + answer.why.encode() if answer.why else packed)

    def take_up(self, decided: DecidedTask) -> None:
        """Keep the answer to a task that was decided on before a restart, as the ledger has it."""
        self._put(decided[0], _packed(*decided))

    def _put(self, task: int, packed: bytes | AnswerPush) -> None:
        if task not in self._packed:
            self._order.append(task)
        self._packed[task] = packed
        if len(self._order) > self._kept:
            del self._packed[self._order.popleft()]

    def __getitem__(self, task: int) -> AnswerPush:
        packed = self._packed[task]
        return _answer(task, packed) if isinstance(packed, bytes) else packed

    def __contains__(self, task: object) -> bool:
        return task in self._packed

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def _packed(
    _task: int,
    outcome: str,
    worker: int,
    decision: int,
    device: int,
    number: int,
    tau: int,
    t: int,
    staleness: int,
    samples: int,
    gradients: int,
    iterations: int | None,
    at: float,
    granted_at: float,
    deadline: float,
    keep: float | None,
    new: float | None,
    base: float | None,
    gamma: float | None,
    publish: bool | None,
) -> bytes:
    what = 0
    if keep is not None:
        what = _APPLIED + _PUBLISHES if publish else _APPLIED
    if iterations is not None:
        what += _HAS_ITERATIONS
    if gamma is not None:
        what += _HAS_GAMMA
    return _RECORD.pack(
        *(_NUMBER[outcome], what, worker, decision, device, number, tau, t, staleness, samples, gradients),
        *(iterations or 0, at, granted_at, deadline, keep or 0.0, new or 0.0, base or 0.0, gamma or 0.0),
    )


def _answer(task: int, packed: bytes) -> AnswerPush:
    outcome, what, worker, sequence, device, number, tau, t, staleness, samples, gradients, iterations, *reals = (
        _RECORD.unpack_from(packed)
    )
    at, granted_at, deadline, keep, new, base, gamma = reals
    work = (iterations if what & _HAS_ITERATIONS else None, gamma if what & _HAS_GAMMA else None)
    lease = Lease(task, worker, device, number, tau, granted_at, deadline, *work)
    mix = Mix(keep, new, base, bool(what & _PUBLISHES)) if what & _APPLIED else None
    decision = Decision(sequence, at, lease, _OUTCOMES[outcome], t, staleness, mix, samples, gradients)
    why = packed[_RECORD.size :].decode()
    return AnswerPush(worker, task, _OUTCOMES[outcome], decision, repeated=True, why=why)
