"""Owns the rules that publish a version with every update and keep no vector beside the model."""

import math
from collections.abc import Callable

from offbeat.core import staleness
from offbeat.core.rules.interface import Facts, Memory, Mix, Product, Rule, Steps, move
from offbeat.core.rules.numbers import Schedule, above_0, at_least_0, schedule_of, spec_of, whole
from offbeat.errors import InvalidValue

StalenessFunction = Callable[[int], float]


def fedasync(alpha: float | Schedule, staleness_fn: StalenessFunction = staleness.constant()) -> Rule:
    """The paper's rule: x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new, alpha_t = alpha * s(staleness).

    Xie, Koyejo, Gupta 2019, arXiv 1903.03934. With weights, alpha_t is multiplied by them and is at most 1.

    >>> rule = fedasync(0.6, staleness.polynomial(0.5))
    >>> rule.decide(Facts(t=5, tau=1), rule.memory)  # staleness 3, s = 0.5
    (Mix(keep=0.7, new=0.3, base=0.0, publish=True), {})
    """
    alpha_at, s = schedule_of(alpha), staleness.checked(staleness_fn)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        alpha_t = min(1.0, alpha_at(facts.t) * s(facts.staleness) * facts.weight)
        return Mix(1.0 - alpha_t, alpha_t, 0.0, True), memory

    return Rule(f"fedasync({spec_of(alpha)}, {s.spec})", formula)


def sgd() -> Rule:
    """No federation: x_t = x_new. One machine trains on the data of all devices, one task after the other.

    >>> sgd().decide(Facts(t=1, tau=0), {})[0]
    Mix(keep=0.0, new=1.0, base=0.0, publish=True)
    """
    return fedasync(1.0)


def delta(alpha: float | Schedule, staleness_fn: StalenessFunction = staleness.constant(), beta: float = 0.0) -> Rule:
    """What the device learnt, added to the newest model: x_t = x + alpha_t (x_new - x_tau + beta (x_tau - x)).

    Asynchronous SGD on differences. beta is the pull-back towards the old model: 0 is the plain delta rule, 1 is
    FedAsync. With weights, alpha_t is multiplied by them; with a pull-back it is at most 1.

    >>> rule = delta(0.5)
    >>> rule.decide(Facts(t=1, tau=0), rule.memory)
    (Mix(keep=1.0, new=0.5, base=-0.5, publish=True), {})
    """
    if not 0.0 <= beta <= 1.0:
        raise InvalidValue(f"beta is {beta!r} but must lie in [0, 1]: 0 is the delta rule, 1 is FedAsync")
    alpha_at, s = schedule_of(alpha), staleness.checked(staleness_fn)
    alpha_max = 1.0 if beta else math.inf

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        alpha_t = min(alpha_max, alpha_at(facts.t) * s(facts.staleness) * facts.weight)
        return Mix(1.0 - alpha_t * beta, alpha_t, alpha_t * (beta - 1.0), True), memory

    return Rule(f"delta({spec_of(alpha)}, {s.spec}, beta={float(beta)!r})", formula, needs_base=True)


def ringmaster(alpha: float | Schedule, r: int) -> Rule:
    """Asynchronous SGD without the late ones: x_t = x + alpha (x_new - x_tau) where the staleness is below r.

    Ringmaster ASGD, with stops: Maranjyan, Tyurin, Richtarik 2025, arXiv 2501.16168. An update of staleness r or more
    is refused, and a lease is cancelled when its update would be: the worker begins anew from the newest model. Meant
    for devices with alike data: where they differ, the data of slow devices are never seen.

    >>> rule = ringmaster(1.0, 3)
    >>> rule.decide(Facts(t=3, tau=0), rule.memory)[0], rule.staleness_max, rule.cancels
    (Mix(keep=1.0, new=1.0, base=-1.0, publish=True), 2, True)
    """
    whole("ringmaster", r, "r", "staleness r is too stale")
    plain = delta(alpha)
    spec = f"ringmaster({spec_of(alpha)}, {r})"
    return Rule(spec, plain.formula, needs_base=True, staleness_max=r - 1, cancels=True)


def asyncfeded(rate: float = 1.0, eps: float = 1.0) -> Rule:
    """A step by how far the model has moved: x_t = x + eta (x_new - x_tau), eta = rate / (gamma + eps).

    gamma = ||x - x_tau|| / ||x_new - x_tau||. AsyncFedED: Wang et al. 2022, arXiv 2205.13797. Its rate and eps are not
    public; nor is the adaptation of local epochs part of this rule.

    >>> rule = asyncfeded(1.0, 1.0)
    >>> rule.decide(Facts(t=4, tau=0, dot={"D.D": 4.0, "L.L": 4.0}), rule.memory)[0]  # gamma = 2/2
    Mix(keep=1.0, new=0.5, base=-0.5, publish=True)
    """
    above_0("asyncfeded", "rate", rate)
    above_0("asyncfeded", "eps", eps)

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        moved, learnt = math.sqrt(facts.dot["L.L"]), math.sqrt(facts.dot["D.D"])
        eta = rate / (moved / learnt + eps) * facts.weight if learnt else 0.0
        return Mix(1.0, eta, -eta, True), memory

    spec = f"asyncfeded({float(rate)!r}, eps={float(eps)!r})"
    return Rule(spec, formula, needs_base=True, dots=("D.D", "L.L"))


def dcasgd(
    alpha: float | Schedule, lambda_: float = 0.04, staleness_fn: StalenessFunction = staleness.constant()
) -> Rule:
    """Delay compensation: x_t = x + alpha_t (D - lambda D*D*(x - x_tau)), D = x_new - x_tau, element by element.

    DC-ASGD: Zheng et al. 2017, arXiv 1609.08326, on differences in place of gradients (so lambda is that of the paper
    divided by the local rate). lambda 0 is the delta rule.

    >>> rule = dcasgd(1.0, 0.5)
    >>> for step in rule.decide(Facts(t=4, tau=0), rule.memory)[0].steps:
    ...     print(step)
    Move(into='_D', terms=(('new', 1.0), ('base', -1.0)))
    Move(into='_L', terms=(('x', 1.0), ('base', -1.0)))
    Product(into='_L', keep=0.0, share=1.0, left='_L', right='_D')
    Product(into='_D', keep=1.0, share=-0.5, left='_L', right='_D')
    Move(into='w', terms=(('x', 1.0), ('_D', 1.0)))
    """
    at_least_0("dcasgd", "lambda", lambda_)
    alpha_at, s = schedule_of(alpha), staleness.checked(staleness_fn)
    ahead = (move("_D", new=1.0, base=-1.0), move("_L", x=1.0, base=-1.0))
    compensated = (Product("_L", 0.0, 1.0, "_L", "_D"), Product("_D", 1.0, -lambda_, "_L", "_D"))

    def formula(facts: Facts, memory: Memory) -> tuple[Steps | Mix, Memory]:
        alpha_t = alpha_at(facts.t) * s(facts.staleness) * facts.weight
        if not lambda_ or not facts.staleness:  # nothing to compensate
            return Mix(1.0, alpha_t, -alpha_t, True), memory
        return Steps(1.0, alpha_t, -alpha_t, True, (*ahead, *compensated, move("w", x=1.0, _D=alpha_t))), memory

    return Rule(f"dcasgd({spec_of(alpha)}, {float(lambda_)!r}, {s.spec})", formula, needs_base=True)
