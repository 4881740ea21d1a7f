"""Owns whose turn it is under `shuffled`: in a round every device gets one task before any device gets its second.

For n devices that are always there, every n tasks go to a fresh permutation of them, so after m*n tasks every device
had exactly m (AsGrad: Islamov et al., AISTATS 2024). No device counts more because it is fast; in return, fast ones
wait at the end of a round.

Rules kept here:
- The permutation is drawn on the way: the next task goes, with equal chance, to any device that waits and has not had
  its turn. So a device at work holds nobody up whose turn is still to come.
- At the end of a round the devices at work are waited for: each has its turn before the next round begins.
- No device is waited for that is gone: it left, is silent or quarantined, its lease ran out, or it did not ask within
  `SAME_WAIT_S` after its last task. One that waits and is not available is looked at again at the end of the round.
- A device that is passed over takes part in the next round and makes up for nothing.
- A million workers may wait: one is put in, taken out or drawn in constant time.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import Any

from offbeat.core import draws
from offbeat.protocol.idle import PICKS_MAX, TRIGGER_STREAM, WorkerSet


class Shuffled:
    """The workers that wait for a task, and which devices have had their turn in this round."""

    def __init__(self, seed: int, device: Callable[[int], int], at_work: Callable[[int], bool]) -> None:
        """`device` is that of a worker; `at_work` says whether a device has a task whose end is worth waiting for."""
        self.seed, self._device, self._at_work = seed, device, at_work
        self.drawn = 0
        self.round = 1
        self.held_until: float | None = None
        """Where the last pick found that the round waits for a device: until when, or until its task is over (inf)."""
        self._turn = WorkerSet()
        """Those who wait and have a turn left."""
        self._aside = WorkerSet()
        """Likewise, but they were not available when they were drawn."""
        self._next = WorkerSet()
        """Those who wait for the next round."""
        self._last: dict[int, int] = {}
        """The round in which a device had its last turn."""
        self._missing: OrderedDict[int, float] = OrderedDict()
        """Devices that do not wait, and until when they are expected if they are not at work.

        Those that have a turn left come first, so that one look says whether there is one.
        """
        self._gathering_until = 0.0

    def __len__(self) -> int:
        return len(self._turn) + len(self._aside) + len(self._next)

    def __contains__(self, worker: int) -> bool:
        return worker in self._turn or worker in self._aside or worker in self._next

    # --- who is there ------------------------------------------------------------------------------------------------

    def add(self, worker: int) -> None:
        """The worker waits."""
        if worker in self:
            return
        device = self._device(worker)
        (self._turn if self._has_turn(device) else self._next).add(worker)
        if device in self._missing and not self._at_work(device):
            del self._missing[device]

    def discard(self, worker: int) -> None:
        for waiting in (self._turn, self._aside, self._next):
            waiting.discard(worker)

    def clear(self) -> None:
        self._turn, self._aside, self._next = WorkerSet(), WorkerSet(), WorkerSet()

    def gather(self, until: float) -> None:
        """Everybody who waited will ask again: no round ends before this moment."""
        self._gathering_until = until

    def granted(self, device: int) -> None:
        """The device has its turn."""
        self._last[device], self._missing[device] = self.round, 0.0
        self._missing.move_to_end(device)

    def expect(self, device: int, until: float) -> None:
        """The device does not wait, and is expected to until this moment; longer only where it is at work."""
        self._missing[device] = until
        if self._has_turn(device):
            self._missing.move_to_end(device, last=False)

    def forget(self, device: int) -> None:
        """The device is not expected any more, unless it is at work for another worker of its own."""
        if device in self._missing:
            self._missing[device] = 0.0

    # --- whose turn it is --------------------------------------------------------------------------------------------

    def pick(self, available: Callable[[int], bool], at: float) -> int | None:
        """A worker that waits, has its turn and is available, taken out; None if the round waits, or none was found.

        The search is bounded: those that were not available are looked at last when it goes on.
        """
        self.held_until = None
        found = self._find(available)
        if found is None and not self._turn and self._begin_round(at):
            found = self._find(available)
        if found is not None:
            self.discard(found)
        return found

    def look_again_at(self, soon: float) -> float:
        """When to pick again after nobody was found: `soon`, or at the end of the wait where the round waits."""
        if self.held_until is None or self._aside:
            return soon
        return self.held_until

    def _find(self, available: Callable[[int], bool]) -> int | None:
        tries = 0
        while self._turn and tries < PICKS_MAX:
            worker = self._any_of(self._turn)
            if not self._has_turn(self._device(worker)):  # another worker of its device was faster
                self._move(worker, self._next)
                continue
            if available(worker):
                return worker
            self._move(worker, self._aside)
            tries += 1
        return None if self._turn else self._find_aside(available)

    def _find_aside(self, available: Callable[[int], bool]) -> int | None:
        looked_at: list[int] = []
        found = None
        while found is None and self._aside and len(looked_at) < PICKS_MAX:
            worker = self._any_of(self._aside)
            self._aside.discard(worker)
            looked_at.append(worker)
            if self._has_turn(self._device(worker)) and available(worker):
                found = worker
        for worker in looked_at:
            self._aside.add(worker)
        return found

    def _begin_round(self, at: float) -> bool:
        """Begin the next round unless this one waits for a device; those who were not available are passed over."""
        self.held_until = self._awaited_until(at)
        if self.held_until is not None:
            return False
        self.round += 1
        for worker in self._aside.members():
            self._move(worker, self._next)
        self._turn, self._next = self._next, self._turn
        return True

    def _awaited_until(self, at: float) -> float | None:
        if at < self._gathering_until:
            return self._gathering_until
        while self._missing:
            device, until = next(iter(self._missing.items()))
            if not self._has_turn(device):
                return None
            if self._at_work(device):
                return inf
            if at < until:
                return until
            del self._missing[device]  # it is gone
        return None

    def _has_turn(self, device: int) -> bool:
        return self._last.get(device, 0) < self.round

    def _any_of(self, workers: WorkerSet) -> int:
        if len(workers) == 1:  # then nothing is drawn
            return workers[0]
        self.drawn += 1
        return workers[draws.below(len(workers), self.seed, TRIGGER_STREAM, self.drawn)]

    def _move(self, worker: int, to: WorkerSet) -> None:
        self.discard(worker)
        to.add(worker)

    # --- what a checkpoint keeps -------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as plain numbers; orders are part of it."""
        return {
            "drawn": self.drawn,
            "round": self.round,
            "turn": self._turn.members(),
            "aside": self._aside.members(),
            "next": self._next.members(),
            "last": list(self._last.items()),
            "missing": list(self._missing.items()),
            "gathering_until": self._gathering_until,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn, self.round, self._gathering_until = state["drawn"], state["round"], state["gathering_until"]
        for workers, members in ((self._turn, "turn"), (self._aside, "aside"), (self._next, "next")):
            for worker in state[members]:
                workers.add(worker)
        self._last, self._missing = dict(state["last"]), OrderedDict(state["missing"])
