"""Owns what a local training is: its rates, how much it trains, and on which samples (Algorithm 1, the worker).

It needs no torch: `sgd` takes the steps with torch, `loops` in compiled loops.
"""

from dataclasses import dataclass
from math import isfinite

import numpy as np

from offbeat.errors import InvalidValue
from offbeat.task import Work

SORTED_SAMPLES_MAX = 256
"""Up to this many samples, sorting random numbers is faster than a call of `choice` per iteration."""
SORTED_MAX = 2**20
"""Random numbers that are sorted at once."""
SEED_WORDS = 3
"""How many 64-bit words `sgd.seeded` takes from a stream; a test compares the two."""


@dataclass(frozen=True, slots=True)
class Solver:
    gamma: float = 0.1
    rho: float = 0.005
    weight_decay: float = 0.0
    clip: float | None = None
    """Largest norm of the gradient of f; a longer one is scaled down to it."""
    batch_size: int = 50
    local_passes: int | None = None
    """Passes over the device's data, shuffled, the last batch of a pass short where it must be."""
    local_iterations: int | None = None
    """H iterations, each on min(batch_size, n_i) samples drawn afresh: the paper."""

    def __post_init__(self) -> None:
        _require("gamma", self.gamma, right=self.gamma > 0, allowed="> 0")
        _require("rho", self.rho, right=self.rho >= 0, allowed=">= 0; 0 switches the proximal term off")
        _require("weight_decay", self.weight_decay, right=self.weight_decay >= 0, allowed=">= 0")
        if self.clip is not None:
            _require("clip", self.clip, right=self.clip > 0, allowed="> 0, or None for no clipping")
        for name in ("batch_size", "local_passes", "local_iterations"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidValue(f"{name} is {value!r} but must be a whole number >= 1")
        if self.local_passes is not None and self.local_iterations is not None:
            raise InvalidValue("give local_passes or local_iterations, not both: each says how much one task trains")

    def iterations(self, samples: int) -> int:
        size = min(self.batch_size, samples)
        return self.local_iterations or (self.local_passes or 1) * -(-samples // size)

    def batches(self, samples: int, rng: np.random.Generator) -> list[np.ndarray]:
        indices, counts = self.draw(samples, rng)
        return [batch[:count] for batch, count in zip(indices, counts.tolist(), strict=True)]

    def draw(self, samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """All batches at once: indices (iterations, size), and how many of each count; the rest fills short batches."""
        size = min(self.batch_size, samples)
        if self.local_iterations is not None:
            return _subsets(rng, self.local_iterations, samples, size), np.full(self.local_iterations, size)
        each = -(-samples // size)
        indices, counts = [], np.full((self.local_passes or 1, each), size)
        for _ in counts:
            order = rng.permutation(samples)
            filling = np.full(each * size - samples, order[(each - 1) * size])
            indices.append(np.concatenate([order, filling]).reshape(each, size))
        counts[:, -1] = samples - (each - 1) * size
        return np.concatenate(indices), counts.ravel()


def _subsets(rng: np.random.Generator, rows: int, samples: int, size: int) -> np.ndarray:
    """In every row, `size` of the samples without replacement; for small data all rows are drawn at once."""
    if samples <= SORTED_SAMPLES_MAX and rows * samples <= SORTED_MAX:
        return rng.random(rows * samples).reshape(rows, samples).argsort(axis=1)[:, :size]
    return np.stack([rng.choice(samples, size, replace=False) for _ in range(rows)])


def _require(name: str, value: float, *, right: bool, allowed: str) -> None:
    if not (right and isfinite(value)):
        raise InvalidValue(f"{name} is {value!r} but must be a finite number {allowed}")


def stream(work: Work) -> np.random.Generator:
    """A training's random stream as `sgd.keyed` yields it: the seeds of global generators are drawn already."""
    rng = work.rng()
    rng.bit_generator.advance(SEED_WORDS)  # type: ignore[attr-defined]  # default_rng's PCG64 has it
    return rng
