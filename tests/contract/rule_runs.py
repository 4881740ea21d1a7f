"""Runs a rule of the library as a server would: the judge decides, the data plane mixes, versions are published.

Rules kept here:
- The facts of an update are those that `protocol.judging` makes; nothing of them is made up here.
- x_tau is the version that was published, never a copy of it that somebody computed.
- Every model has parameters, float buffers and a whole number beside them, so that no rule is tried without.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.core.kernel import Updater
from offbeat.core.layout import Model, Vector
from offbeat.core.rules import Average, Rule
from offbeat.core.rules.interface import Answer
from offbeat.core.vectors import Order, Standing, Vectors
from offbeat.protocol.judging import Judge
from offbeat.protocol.messages import Lease, Outcome, UpdateArrived
from offbeat.protocol.plan import Plan

BUFFERS = 2
"""Float buffers of a model; what is before them is trained."""
Doubles = npt.NDArray[np.float64]
Local = Callable[[Vector, int], npt.ArrayLike]
"""x_tau and the number of the update in, x_new out."""
NUMPY = Updater(compiled=False)


class Arrival(NamedTuple):
    """One update: whose it is, and how many versions before the newest it began, if there are as many."""

    device: int
    staleness: int = 0
    samples: int = 1


@dataclass
class Run:
    """What became of a sequence of updates."""

    vectors: Vectors
    versions: list[Model]
    means: list[Model] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    taus: list[int] = field(default_factory=list)

    @property
    def x(self) -> Doubles:
        return self.versions[-1].vector.astype(float)

    @property
    def answers(self) -> list[Answer]:
        return [order.answer for order in self.orders if order.answer is not None]


def model(values: npt.ArrayLike, buffers: int = BUFFERS, count: int = 0) -> Model:
    """Values as a model, of which the last `buffers` are float buffers."""
    vector = np.asarray(values, np.float32)
    arrays: dict[str, Any] = {"w": vector[: len(vector) - buffers], "seen": np.array(count)}
    if buffers:
        arrays["statistics"] = vector[len(vector) - buffers :]
    return Model.of(arrays, buffers=[name for name in arrays if name != "w"]).freeze()


def run(
    rule: Rule,
    x_0: Model,
    arrivals: Sequence[Arrival],
    local: Local,
    *,
    average: Average | None = None,
    updater: Updater = NUMPY,
) -> Run:
    """Let updates arrive one after the other."""
    vectors = Vectors(Standing.first(x_0, average), updater, average)
    judge, result = Judge(rule, Plan()), Run(vectors, [x_0])
    for number, arrival in enumerate(arrivals):
        t = len(result.versions)
        tau = max(0, t - 1 - arrival.staleness)
        x_tau = result.versions[tau]
        x_new = Model(x_0.layout, _vector(local(x_tau.vector, number)), {"seen": np.array(number + 1)}).freeze()
        dots = vectors.dots(rule.dots, x_new, x_tau)
        lease = Lease(number, 0, arrival.device, 0, tau, 0.0, 1.0)
        event = UpdateArrived(0.0, 0, number, arrival.samples, 1, dots=dots)
        answer = judge.decide(event, lease, Outcome.APPLIED, t).mix
        assert answer is not None
        result.orders.append(Order(answer, x_new, x_tau, t if answer.publish else None))
        result.taus.append(tau)
        vectors.apply(result.orders[-1:])
        if answer.publish:
            result.versions.append(vectors.x)
            if vectors.mean is not None:
                result.means.append(vectors.mean)
    return result


def applied(run: Run, passes: Sequence[int], updater: Updater, average: Average | None = None) -> Vectors:
    """The orders of a run carried out anew, several in a pass."""
    vectors, done = Vectors(Standing.first(run.versions[0], average), updater, average), 0
    for count in passes:
        vectors.apply(run.orders[done : done + count])
        done += count
    vectors.apply(run.orders[done:])
    return vectors


class Hand(NamedTuple):
    """An update that is worked out by hand: x_tau is whatever it is said to be."""

    x_new: float
    x_tau: float
    staleness: int = 0
    device: int = 0


def by_hand(rule: Rule, updates: Sequence[Hand], x_0: float = 10.0) -> list[float]:
    """w after every update, for models of one number."""
    return [by_hand_until(rule, updates[: k + 1], x_0).w.vector.item() for k in range(len(updates))]


def by_hand_until(rule: Rule, updates: Sequence[Hand], x_0: float = 10.0) -> Vectors:
    vectors, judge, t = Vectors(Standing.first(model([x_0], 0)), NUMPY), Judge(rule, Plan()), 100
    for number, update in enumerate(updates):
        x_new, x_tau = model([update.x_new], 0), model([update.x_tau], 0)
        lease = Lease(number, 0, update.device, 0, t - 1 - update.staleness, 0.0, 1.0)
        event = UpdateArrived(0.0, 0, number, 1, 1, dots=vectors.dots(rule.dots, x_new, x_tau))
        answer = judge.decide(event, lease, Outcome.APPLIED, t).mix
        assert answer is not None
        vectors.apply([Order(answer, x_new, x_tau, t if answer.publish else None)])
        t += answer.publish
    return vectors


def drawn(seed: int, count: int = 40, devices: int = 5, staleness_max: int = 4) -> list[Arrival]:
    """Devices, staleness and samples at random; devices come again."""
    rng = np.random.default_rng(seed)
    return [
        Arrival(int(rng.integers(devices)), int(rng.integers(staleness_max + 1)), int(rng.integers(1, 50)))
        for _ in range(count)
    ]


def learning(seed: int, size: int) -> Local:
    """A device that goes a tenth of the way to 0, and somewhere."""
    noise = np.random.default_rng([seed, 1])
    drawn_so_far: list[Doubles] = []

    def local(x_tau: Vector, number: int) -> npt.ArrayLike:
        while len(drawn_so_far) <= number:
            drawn_so_far.append(noise.normal(size=size))
        return 0.9 * x_tau.astype(float) + drawn_so_far[number]

    return local


def start(seed: int, size: int) -> Model:
    return model(np.random.default_rng([seed, 2]).normal(size=size))


def _vector(values: npt.ArrayLike) -> Vector:
    return np.ascontiguousarray(values, np.float32)
