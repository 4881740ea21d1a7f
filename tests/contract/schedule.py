"""Runs a rule of the library over an explicit schedule of arrivals.

Rules kept here:
- The result comes from the library alone: Facts, then `Rule.decide`, then `Updater.mix`. Nothing is mixed here.
- The working vector lives on between publications; published versions are kept and are read-only.
- Vectors are float32: what a local map answers in another precision is rounded once, when it is pushed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat import Facts, Mix, Rule
from offbeat.core.kernel import Term, Updater
from offbeat.core.layout import Vector

Local = Callable[[Vector, int], npt.NDArray[np.floating[Any]]]
"""x_tau and the device in, what the device pushes out."""


class Arrival(NamedTuple):
    """One update that reaches the server: the epoch of the model it started from, and who trained it."""

    tau: int
    device: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What a rule made of a schedule: x_0 and every published version, and the coefficients of every arrival."""

    versions: list[Vector]
    mixes: list[Mix] = field(default_factory=list)

    @property
    def x(self) -> Vector:
        """The newest version."""
        return self.versions[-1]


def run(
    rule: Rule,
    x_0: npt.ArrayLike,
    schedule: Iterable[tuple[int, int]],
    local: Local,
    *,
    samples: Sequence[int] | None = None,
    updater: Updater | None = None,
) -> Run:
    """Let the updates of a schedule arrive one after the other; `samples` says how many each device holds."""
    updater = updater or Updater()
    result = Run([_published(x_0)])
    w, memory = result.x.copy(), rule.memory
    for tau, device in schedule:
        facts = Facts(len(result.versions), tau, device, samples[device] if samples else 1)
        x_tau = result.versions[tau]
        x_new = _published(local(x_tau, device))
        if rule.needs_base:
            facts = replace(facts, distance=updater.distance(x_new, x_tau))
        mix, memory = rule.decide(facts, memory)
        assert isinstance(mix, Mix)
        updater.mix(w, w, [Term(mix, x_new, x_tau)])
        result.mixes.append(mix)
        if mix.publish:
            result.versions.append(_published(w))
    return result


def lagged(staleness: int, epochs: int) -> list[Arrival]:
    """Every update has this staleness, or all the staleness there can be in the first epochs."""
    return [Arrival(max(0, t - 1 - staleness)) for t in range(1, epochs + 1)]


def jittered(rng: np.random.Generator, devices: Iterable[int], staleness_max: int) -> list[Arrival]:
    """One update of each device in turn, its staleness drawn uniformly from 0..staleness_max."""
    return [Arrival(t - int(rng.integers(min(t, staleness_max) + 1)), device) for t, device in enumerate(devices)]


def same_bits(a: Vector, b: Vector) -> bool:
    """Equal to the last bit, the sign of zero included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _published(values: npt.ArrayLike) -> Vector:
    vector = np.array(values, np.float32)
    vector.flags.writeable = False
    return vector
