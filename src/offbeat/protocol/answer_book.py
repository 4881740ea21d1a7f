"""Owns the answers of the latest tasks, for pushes that come again: as many as the plan says, each in few bytes.

An answer consists of thirty objects and would take a kilobyte; there may be a hundred thousand of them. So each is
kept as one packed record, and made anew, equal to the first, when it is asked for.
"""

import struct
from collections import deque
from collections.abc import Iterator, Mapping

from offbeat.core.rules import Mix
from offbeat.protocol.messages import AnswerPush, Decision, Lease, Outcome

_RECORD = struct.Struct("<BB10q7d")
_APPLIED, _PUBLISHES, _HAS_ITERATIONS, _HAS_GAMMA = 1, 2, 4, 8
_OUTCOMES = tuple(Outcome)
_NO_MIX = Mix(0.0, 0.0, 0.0, publish=False)
_NUMBER = {outcome: number for number, outcome in enumerate(_OUTCOMES)}


class AnswerBook(Mapping[int, AnswerPush]):
    """Answers by task, the oldest first; every one says that it is `repeated`."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._packed: dict[int, bytes | AnswerPush] = {}
        self._order: deque[int] = deque()

    def remember(self, answer: AnswerPush) -> None:
        """Keep the answer to a task that was decided on; where there are too many, the oldest is forgotten."""
        if answer.task not in self._packed:
            self._order.append(answer.task)
        self._packed[answer.task] = _packed(answer)
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


def _packed(answer: AnswerPush) -> bytes | AnswerPush:
    """The record, with the words behind it; the answer itself where a number does not fit."""
    d = answer.decision
    if d is None:
        raise AssertionError("only decided tasks are remembered")
    lease, mix = d.lease, d.mix or _NO_MIX
    what = _APPLIED * (d.mix is not None) + _PUBLISHES * bool(mix.publish)
    what += _HAS_ITERATIONS * (lease.local_iterations is not None) + _HAS_GAMMA * (lease.gamma is not None)
    try:
        record = _RECORD.pack(
            *(_NUMBER[answer.outcome], what, answer.worker, d.sequence, lease.device, lease.number, lease.tau),
            *(d.t, d.staleness, d.samples, d.gradients, lease.local_iterations or 0),
            *(d.at, lease.granted_at, lease.deadline, mix.keep, mix.new, mix.base, lease.gamma or 0.0),
        )
    except struct.error:
        return answer.again()
    return record + answer.why.encode()


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
