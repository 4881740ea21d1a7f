"""Owns who waits for a task, and who of them is next.

Rules kept here:
- `random` takes any waiting worker with equal chance (the paper), `fair` one whose device contributed least. For
  `shuffled` there is `shuffled.py`.
- A million workers may wait: one is put in, taken out or drawn in constant time, or in logarithmic time under `fair`.
"""

import heapq
from array import array
from collections.abc import Callable
from typing import Any, Literal

from offbeat.core import draws

Choice = Literal["random", "fair", "shuffled"]
Mass = Callable[[int], float]
"""What a worker's device has contributed so far."""

TRIGGER_STREAM = 0x7472_6967
PICKS_MAX = 64
NOWHERE = -1


class Idle:
    """The workers that wait for a task, and who of them is next: random, or least contribution first."""

    def __init__(self, choice: Choice, seed: int) -> None:
        self.choice, self.seed = choice, seed
        self.drawn = 0
        self._pool = WorkerSet()
        self._ranked: dict[int, tuple[float, int, int]] = {}
        self._by_mass: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._pool.workers) + len(self._ranked)

    def __contains__(self, worker: int) -> bool:
        return worker in self._pool or worker in self._ranked

    def add(self, worker: int, mass: float) -> None:
        """The worker waits; `mass` is what its device contributed so far."""
        if self.choice == "random" or mass == 0:
            self._pool.add(worker)
        elif worker not in self._ranked:
            self.drawn += 1
            entry = (mass, draws.word(self.seed, TRIGGER_STREAM, self.drawn), worker)
            self._ranked[worker] = entry
            heapq.heappush(self._by_mass, entry)

    def discard(self, worker: int) -> None:
        self._pool.discard(worker)
        if self._ranked.pop(worker, None) and len(self._by_mass) > 2 * len(self._ranked) + PICKS_MAX:
            self._by_mass = sorted(self._ranked.values())

    def clear(self) -> None:
        self._pool, self._ranked, self._by_mass = WorkerSet(), {}, []

    def pick(self, available: Callable[[int], bool], mass: Mass = lambda _: 0.0) -> int | None:
        """A worker that waits and is available, taken out; None if none was found in a bounded number of tries.

        `mass` is what a worker's device has contributed by now, which may be more than when it began to wait.
        """
        found = self._draw(available, mass if self.choice == "fair" else None)
        if found is None and self._ranked:
            found = self._least(available, mass)
        if found is not None:
            self.discard(found)
        return found

    def state(self) -> dict[str, Any]:
        """Everything, as plain numbers; the order of the pool is part of it."""
        return {"drawn": self.drawn, "pool": self._pool.members(), "ranked": list(self._ranked.values())}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
        for worker in state["pool"]:
            self._pool.add(worker)
        self._ranked = {worker: (mass, draw, worker) for mass, draw, worker in state["ranked"]}
        self._by_mass = sorted(self._ranked.values())

    def _draw(self, available: Callable[[int], bool], mass: Mass | None) -> int | None:
        for _ in range(PICKS_MAX):
            workers = self._pool.workers
            if not workers:
                return None
            self.drawn += 1
            one = len(workers) == 1  # then nothing is drawn
            worker = workers[0 if one else draws.below(len(workers), self.seed, TRIGGER_STREAM, self.drawn)]
            if mass is not None and mass(worker):
                self._pool.discard(worker)
                self.add(worker, mass(worker))
            elif available(worker):
                return worker
        return None

    def _least(self, available: Callable[[int], bool], mass: Mass) -> int | None:
        passed: list[tuple[float, int, int]] = []
        found = None
        while self._by_mass and len(passed) < PICKS_MAX and found is None:
            entry = heapq.heappop(self._by_mass)
            worker = entry[2]
            if self._ranked.get(worker) != entry:
                continue
            if mass(worker) > entry[0]:
                del self._ranked[worker]
                self.add(worker, mass(worker))
            elif available(worker):
                found = worker
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._by_mass, entry)
        return found


class WorkerSet:
    """A set of worker numbers with constant-time add, discard and indexing."""

    def __init__(self) -> None:
        self.workers = array("q")
        self._place = array("q")

    def __len__(self) -> int:
        return len(self.workers)

    def __contains__(self, worker: int) -> bool:
        return worker < len(self._place) and self._place[worker] != NOWHERE

    def __getitem__(self, index: int) -> int:
        return self.workers[index]

    def add(self, worker: int) -> None:
        if worker >= len(self._place):
            self._place.extend([NOWHERE] * (worker + 1 - len(self._place)))
        if self._place[worker] == NOWHERE:
            self._place[worker] = len(self.workers)
            self.workers.append(worker)

    def discard(self, worker: int) -> None:
        """Take a worker out; one that is out stays out. The last member moves into the gap."""
        if worker not in self:
            return
        gap, last = self._place[worker], self.workers.pop()
        if last != worker:
            self.workers[gap] = last
            self._place[last] = gap
        self._place[worker] = NOWHERE

    def members(self) -> list[int]:
        """All members in the order of their indexes, which a snapshot must keep."""
        return self.workers.tolist()
