"""Owns whom to trigger, when, and with how much work: the policies inside the coordinator.

Rules kept here:
- `random` takes any waiting worker with equal chance (the paper), `fair` one whose device contributed least.
- `trigger_every_s` = 0 triggers as soon as there is room; otherwise all waiting workers are triggered together, and
  then none for that long.
- Groups make it synchronous: k tasks (or more, with over-selection) start from one version and the next ones only
  when it is followed by another. FedAvg is this and the rule `fedavg(k)`.
- How much one task trains is part of its lease: gamma may follow t and past evaluations, H the speed of the device.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from offbeat.core import draws
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Evaluated
from offbeat.protocol.worker_set import WorkerSet

Choice = Literal["random", "fair"]
GammaSchedule = Callable[[int, Sequence[Evaluated]], float]
"""gamma from t and the evaluations so far."""
Mass = Callable[[int], float]
"""What a worker's device has contributed so far."""

TRIGGER_STREAM = 0x7472_6967
PICKS_MAX = 64


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The settings of the scheduler."""

    choice: Choice = "random"
    trigger_every_s: float = 0.0
    group: int = 0
    """Tasks that make one synchronous group; 0 is asynchronous."""
    over_selection: float = 1.0
    """Tasks started per group, as a multiple of `group`; the latecomers are refused."""
    group_deadline_s: float | None = None
    """A group is published with what has arrived by then."""
    gamma: GammaSchedule | None = None
    local_iterations_min: int | None = None
    local_iterations_max: int | None = None
    """Where set, the fastest device does the most local iterations and slower ones fewer, down to the minimum."""

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise InvalidValue(f"scheduler is {self.choice!r}; use one of {', '.join(get_args(Choice))}")
        if not self.trigger_every_s >= 0:
            raise InvalidValue(f"trigger_every_s is {self.trigger_every_s!r} but must be >= 0")
        if self.group < 0:
            raise InvalidValue(f"group is {self.group} but must be >= 0; 0 is asynchronous")
        if not 1 <= self.over_selection < math.inf:
            raise InvalidValue(f"over_selection is {self.over_selection!r} but must be >= 1; 1.3 is usual")
        if self.group_deadline_s is not None and not self.group_deadline_s > 0:
            raise InvalidValue(f"group_deadline_s is {self.group_deadline_s!r} but must be > 0")
        low, high = self.local_iterations_min, self.local_iterations_max
        if (low is None) != (high is None) or (low is not None and high is not None and not 1 <= low <= high):
            raise InvalidValue("give local_iterations_min and local_iterations_max together, 1 <= min <= max")

    @property
    def quota(self) -> int:
        """How many tasks one group starts."""
        return math.ceil(self.group * self.over_selection - 1e-9)

    def local_iterations(self, seconds: float | None, fastest: float | None) -> int | None:
        """H for a device that takes `seconds` per iteration, where the fastest one takes `fastest`."""
        low, high = self.local_iterations_min, self.local_iterations_max
        if low is None or high is None:
            return None
        if not seconds or not fastest:
            return high
        return max(low, min(high, round(high * fastest / seconds)))


class Idle:
    """The workers that wait for a task, and who of them is next: random, or least contribution first."""

    def __init__(self, choice: Choice, seed: int) -> None:
        self.choice, self.seed = choice, seed
        self.drawn = 0
        self._pool = WorkerSet()
        self._ranked: dict[int, tuple[float, int, int]] = {}
        self._by_mass: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._pool) + len(self._ranked)

    def __contains__(self, worker: int) -> bool:
        return worker in self._pool or worker in self._ranked

    def workers(self) -> list[int]:
        """All workers that wait."""
        return [*self._pool.members(), *self._ranked]

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
        """The worker no longer waits."""
        self._pool.discard(worker)
        if self._ranked.pop(worker, None) and len(self._by_mass) > 2 * len(self._ranked) + PICKS_MAX:
            self._by_mass = sorted(self._ranked.values())

    def clear(self) -> None:
        for worker in self.workers():
            self.discard(worker)

    def pick(self, available: Callable[[int], bool], mass: Mass = lambda _: 0.0) -> int | None:
        """A worker that waits and is available, taken out; None if none was found in a bounded number of tries.

        `mass` is what a worker's device has contributed by now, which may be more than when it began to wait.
        """
        found = self._draw(available, mass if self.choice == "fair" else lambda _: 0.0)
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

    def _draw(self, available: Callable[[int], bool], mass: Mass) -> int | None:
        for _ in range(PICKS_MAX):
            if not len(self._pool):
                return None
            self.drawn += 1
            worker = self._pool[draws.below(len(self._pool), self.seed, TRIGGER_STREAM, self.drawn)]
            if mass(worker):
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
