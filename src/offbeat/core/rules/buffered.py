"""Owns the rules that gather several updates into one version, and keep no vector beside the model."""

from offbeat.core import staleness
from offbeat.core.rules.every_arrival import StalenessFunction
from offbeat.core.rules.interface import Facts, Memory, Mix, Rule
from offbeat.core.rules.numbers import above_0, whole


def fedbuff(k: int, eta: float = 1.0, staleness_fn: StalenessFunction = staleness.polynomial(0.5)) -> Rule:
    """FedBuff: every k-th update publishes x + eta/k * sum of s*(x_new - x_tau).

    Nguyen et al. 2022, arXiv 2106.06639: s = (staleness + 1)^-1/2, and the sum is divided by k, not by the weights.
    Server momentum, as in the paper, is `momentum` behind it.

    >>> rule = fedbuff(2)
    >>> rule.decide(Facts(t=1, tau=0), rule.memory)
    (Mix(keep=1.0, new=0.5, base=-0.5, publish=False), {'count': 1})
    """
    whole("fedbuff", k)
    above_0("fedbuff", "eta", eta)
    s = staleness.checked(staleness_fn)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        share = s(facts.staleness) * eta / k * facts.weight
        complete = memory["count"] + 1 == k
        return Mix(1.0, share, -share, complete), {"count": 0 if complete else memory["count"] + 1}

    return Rule(f"fedbuff({k}, eta={float(eta)!r}, {s.spec})", formula, {"count": 0}, needs_base=True)


def rennala(b: int, eta: float = 1.0) -> Rule:
    """Fresh updates alone: every b-th that started from the newest version publishes x + eta/b * sum of differences.

    Rennala SGD: Tyurin, Richtarik 2023, arXiv 2305.12387. All other updates are refused and do not count towards b.

    >>> rule = rennala(2)
    >>> rule.decide(Facts(t=1, tau=0), rule.memory)[0], rule.staleness_max
    (Mix(keep=1.0, new=0.5, base=-0.5, publish=False), 0)
    """
    gathered = fedbuff(whole("rennala", b, "b"), above_0("rennala", "eta", eta), staleness.constant())
    spec = f"rennala({b}, eta={float(eta)!r})"
    return Rule(spec, gathered.formula, gathered.memory, needs_base=True, staleness_max=0)


def fedavg(k: int) -> Rule:
    """FedAvg: the mean of k models, weighed by their samples, kept as a running mean.

    McMahan et al. 2017, arXiv 1602.05629. The k tasks start from the same version; with a deadline, the version is
    published with what has arrived. FedAvgM and FedAdam are `momentum` and `adam` behind it.

    >>> rule = fedavg(2)
    >>> mix, memory = rule.decide(Facts(t=1, tau=0, samples=30), rule.memory)
    >>> mix, rule.decide(Facts(t=1, tau=0, samples=10), memory)[0]
    (Mix(keep=0.0, new=1.0, base=0.0, publish=False), Mix(keep=0.75, new=0.25, base=0.0, publish=True))
    """
    whole("fedavg", k)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        before = memory["samples"]
        weight = facts.samples if facts.weight == 1.0 else facts.samples * facts.weight
        total = before + weight
        complete = memory["count"] + 1 == k
        after = {"count": 0, "samples": 0} if complete else {"count": memory["count"] + 1, "samples": total}
        return Mix(before / total, weight / total, 0.0, complete), after

    return Rule(f"fedavg({k})", formula, {"count": 0, "samples": 0}, group=k)
