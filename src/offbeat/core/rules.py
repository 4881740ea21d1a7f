"""Owns the mixing rules: facts about one update in, coefficients out.

The data plane holds a working vector w and applies what a rule answers:

    w = keep*w + new*x_new + base*x_tau,    and `publish` makes w the next version x_t.

Rules kept here:
- Scalar arithmetic only. A rule never sees a vector, so no rule can hoard models.
- Nothing is kept on an object: a rule's memory goes in and comes out, so alpha cannot compound by accident and a
  checkpoint needs no more than that memory.
- Staleness is derived from t and tau, which the server knows; no worker reports it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.core import staleness
from offbeat.errors import InvalidValue

Schedule = Callable[[int], float]
"""A number that depends on the epoch t."""


class Mix(NamedTuple):
    """w = keep*w + new*x_new + base*x_tau; `publish` makes w the next version. A coefficient of 0 skips its term."""

    keep: float
    new: float
    base: float
    publish: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about one update when it is decided on."""

    t: int
    """The epoch that the update goes into: one more than the versions published so far."""
    tau: int
    """The epoch of the model that the worker received, from its lease."""
    device: int = 0
    samples: int = 1
    distance: float | None = None
    """||x_new - x_tau||, where the rule asked for it with `needs_distance`."""

    def __post_init__(self) -> None:
        if not 0 <= self.tau < self.t:
            raise InvalidValue(
                f"tau is {self.tau} but must lie in 0..{self.t - 1}, the versions published before epoch {self.t}"
            )
        if self.samples < 1:
            raise InvalidValue(f"samples is {self.samples} but an update needs at least one sample")

    @property
    def staleness(self) -> int:
        """Versions published between the lease and this mixing; 0 when the update is fresh."""
        return self.t - 1 - self.tau


Memory = Mapping[str, float]
"""What a rule remembers between updates: names and numbers, never changed in place."""

Formula = Callable[[Facts, Memory], tuple[Mix, Memory]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A mixing rule. Write your own with `Rule("name", formula)`; `spec` is what settings and the ledger call it."""

    spec: str
    formula: Formula = field(repr=False, compare=False)
    memory: Memory = field(default_factory=dict, repr=False)
    """What the rule remembers before the first update, and again after a publication."""
    needs_base: bool = False
    """The rule uses x_tau, so leased versions must be kept."""
    needs_distance: bool = False
    """The rule reads `Facts.distance`, so every update is measured against its x_tau."""
    group: int = 0
    """How many tasks make one synchronous group; 0 is asynchronous."""

    def decide(self, facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        mix, after = self.formula(facts, memory)
        if not (math.isfinite(mix.keep) and math.isfinite(mix.new) and math.isfinite(mix.base)):
            raise InvalidValue(f"rule {self.spec} answered {mix} to {facts}; coefficients must be finite")
        if mix.base and not self.needs_base:
            raise InvalidValue(
                f"rule {self.spec} uses x_tau: build it with needs_base=True, so that leased versions are kept"
            )
        return mix, after


def fedasync(alpha: float | Schedule, staleness_fn: Callable[[int], float] = staleness.constant()) -> Rule:
    """The paper's rule: x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new, alpha_t = alpha * s(staleness).

    >>> rule = fedasync(0.6, staleness.polynomial(0.5))
    >>> rule.decide(Facts(t=5, tau=1), rule.memory)  # staleness 3, s = 0.5
    (Mix(keep=0.7, new=0.3, base=0.0, publish=True), {})
    """
    alpha_at, s = _schedule(alpha), staleness.checked(staleness_fn)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        alpha_t = alpha_at(facts.t) * s(facts.staleness)
        return Mix(1.0 - alpha_t, alpha_t, 0.0, True), memory

    return Rule(f"fedasync({_spec(alpha)}, {s.spec})", formula)


def delta(
    alpha: float | Schedule, staleness_fn: Callable[[int], float] = staleness.constant(), beta: float = 0.0
) -> Rule:
    """What the device learnt, added to the newest model: x_t = x + alpha_t (x_new - x_tau + beta (x_tau - x)).

    beta is the pull-back towards the old model: 0 is the plain delta rule, 1 is FedAsync.

    >>> rule = delta(0.5)
    >>> rule.decide(Facts(t=1, tau=0), rule.memory)
    (Mix(keep=1.0, new=0.5, base=-0.5, publish=True), {})
    """
    if not 0.0 <= beta <= 1.0:
        raise InvalidValue(f"beta is {beta!r} but must lie in [0, 1]: 0 is the delta rule, 1 is FedAsync")
    alpha_at, s = _schedule(alpha), staleness.checked(staleness_fn)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        alpha_t = alpha_at(facts.t) * s(facts.staleness)
        return Mix(1.0 - alpha_t * beta, alpha_t, alpha_t * (beta - 1.0), True), memory

    return Rule(f"delta({_spec(alpha)}, {s.spec}, beta={float(beta)!r})", formula, needs_base=True)


def fedbuff(k: int, eta: float = 1.0, staleness_fn: Callable[[int], float] = staleness.polynomial(0.5)) -> Rule:
    """FedBuff (Nguyen et al. 2022): every k-th update publishes x + eta/k * sum of s*(x_new - x_tau).

    >>> rule = fedbuff(2)
    >>> rule.decide(Facts(t=1, tau=0), rule.memory)
    (Mix(keep=1.0, new=0.5, base=-0.5, publish=False), {'count': 1})
    """
    _whole("fedbuff", k)
    if not (math.isfinite(eta) and eta > 0):
        raise InvalidValue(f"fedbuff: eta is {eta!r} but must be a finite number > 0; 1 is the usual choice")
    s = staleness.checked(staleness_fn)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        share = s(facts.staleness) * eta / k
        complete = memory["count"] + 1 == k
        return Mix(1.0, share, -share, complete), {"count": 0 if complete else memory["count"] + 1}

    return Rule(f"fedbuff({k}, eta={float(eta)!r}, {s.spec})", formula, {"count": 0}, needs_base=True)


def fedavg(k: int) -> Rule:
    """FedAvg: the mean of k models, weighed by their samples, kept as a running mean.

    >>> rule = fedavg(2)
    >>> mix, memory = rule.decide(Facts(t=1, tau=0, samples=30), rule.memory)
    >>> mix, rule.decide(Facts(t=1, tau=0, samples=10), memory)[0]
    (Mix(keep=0.0, new=1.0, base=0.0, publish=False), Mix(keep=0.75, new=0.25, base=0.0, publish=True))
    """
    _whole("fedavg", k)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        before, total = memory["samples"], memory["samples"] + facts.samples
        complete = memory["count"] + 1 == k
        after = {"count": 0, "samples": 0} if complete else {"count": memory["count"] + 1, "samples": total}
        return Mix(before / total, facts.samples / total, 0.0, complete), after

    return Rule(f"fedavg({k})", formula, {"count": 0, "samples": 0}, group=k)


def from_spec(spec: str, alpha: float | Schedule, staleness_fn: Callable[[int], float]) -> Rule:
    """The rule that a settings string names.

    >>> from_spec("fedbuff:8", 0.6, staleness.constant()).spec
    'fedbuff(8, eta=1.0, constant)'
    """
    match staleness.spec_parts(spec):
        case "fedasync", []:
            return fedasync(alpha, staleness_fn)
        case "delta", []:
            return delta(alpha, staleness_fn)
        case "delta", [beta]:
            return delta(alpha, staleness_fn, beta)
        case "fedbuff", [k] if k.is_integer():
            return fedbuff(int(k), staleness_fn=staleness_fn)
        case "fedbuff", [k, eta] if k.is_integer():
            return fedbuff(int(k), eta, staleness_fn)
        case "fedavg", [k] if k.is_integer():
            return fedavg(int(k))
        case "sgd", []:
            return fedasync(1.0)
    raise InvalidValue(
        f"rule {spec!r} is unknown; use fedasync, delta, delta:BETA, fedbuff:K, fedbuff:K,ETA, fedavg:K or sgd, "
        "for instance fedbuff:10"
    )


def scaled_from(alpha: float, epoch: int, factor: float = 0.5) -> Schedule:
    """The schedule of the authors' code: alpha up to `epoch`, alpha*factor from there on.

    >>> [scaled_from(0.9, 800)(t) for t in (1, 799, 800, 2000)]
    [0.9, 0.9, 0.45, 0.45]
    """
    _in_0_1(alpha)
    _in_0_1(alpha * factor)

    def schedule(t: int) -> float:
        return alpha if t < epoch else alpha * factor

    schedule.__name__ = f"{alpha!r}*{factor!r} from {epoch}"
    return schedule


def _schedule(alpha: float | Schedule) -> Schedule:
    """alpha as a function of t: a number is checked here, a schedule at every use."""
    if callable(alpha):
        return lambda t: _in_0_1(alpha(t))
    number = _in_0_1(alpha)
    return lambda _: number


def _spec(alpha: float | Schedule) -> str:
    return getattr(alpha, "__name__", type(alpha).__name__) if callable(alpha) else repr(float(alpha))


def _in_0_1(alpha: float) -> float:
    if not 0.0 < alpha <= 1.0:
        raise InvalidValue(f"alpha is {alpha!r} but must lie in (0, 1]; 0.6 is a good start")
    return float(alpha)


def _whole(rule: str, k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidValue(f"{rule}: k is {k!r} but must be a whole number >= 1: how many updates make one version")
