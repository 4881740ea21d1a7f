"""Owns what happens to whom, and when: drawn from one seed, so that a soak can be repeated, as far as processes can."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

SERVER = -1
"""The number of the server among those that something happens to."""
LEASE_S = 6.0
"""Short, so that a stalled worker outlives its lease at times."""


class Deed(Enum):
    KILL = "killed"
    STALL = "stalled"
    LEAVE = "left"


@dataclass(frozen=True, slots=True)
class Blow:
    """Something that is done to a process."""

    at_s: float
    deed: Deed
    whom: int
    back_s: float
    """How long it is gone, or stands still."""
    again_s: float | None = None
    """Of the server: after how long it is killed once more, while it starts."""


def server_blows(seed: int) -> Iterator[Blow]:
    """Kills of the server, without end: one in 12 s or so. `at_s` counts from when it was ready."""
    chance = random.Random(f"server {seed}")  # noqa: S311 (chosen moments)
    while True:
        kind = chance.random()
        lives_s = (
            chance.uniform(20, 40) if kind < 0.08 else chance.uniform(0, 2) if kind < 0.3 else chance.uniform(2, 18)
        )
        back_s = chance.uniform(0.5, 4) if chance.random() < 0.2 else 0.0
        again_s = chance.uniform(0.05, 0.7) if chance.random() < 0.12 else None
        yield Blow(lives_s, Deed.KILL, SERVER, back_s, again_s)


def worker_blows(seed: int, workers: int) -> Iterator[Blow]:
    """What happens to workers, without end, in the order of time: a kill in 3 s or so."""
    chance, at_s = random.Random(f"workers {seed}"), 0.0  # noqa: S311 (chosen moments)
    while True:
        at_s += chance.expovariate(1 / 1.9)
        if chance.random() < 0.01:  # a power cut where they all are
            yield from (Blow(at_s, Deed.KILL, whom, chance.uniform(0, 3)) for whom in range(workers))
        kind, whom = chance.random(), chance.randrange(workers)
        if kind < 0.72:
            yield Blow(at_s, Deed.KILL, whom, chance.uniform(0.0, 2.0))
        elif kind < 0.88:
            yield Blow(at_s, Deed.STALL, whom, chance.uniform(0.2, 2.5 * LEASE_S))
        else:
            yield Blow(at_s, Deed.LEAVE, whom, chance.uniform(0.0, 10.0))
