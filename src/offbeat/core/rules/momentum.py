"""Owns what becomes of a version's step g before it is added: momentum, and steps whose size follows each element.

`momentum` behind FedBuff is its server momentum, behind FedAvg it is FedAvgM; `adam` behind FedAvg is FedAdam. Delayed
Nesterov is an aggregate: it adds every update at once and its momentum now and then.
"""

from offbeat.core import staleness
from offbeat.core.rules.buffered import fedbuff
from offbeat.core.rules.composition import LANDING, compose
from offbeat.core.rules.interface import (
    Elementwise,
    Facts,
    Finisher,
    Larger,
    Memory,
    Product,
    Publication,
    Root,
    Rule,
    Steps,
    VectorStep,
    move,
)
from offbeat.core.rules.numbers import above_0, at_least_0, below_1, whole


def momentum(beta: float = 0.9) -> Finisher:
    """Heavy ball: m = beta*m + g, and m is added in place of g.

    FedAvgM: Hsu et al. 2019, arXiv 1909.06335.

    >>> momentum(0.9).formula(Publication(1, 0), {})
    ((Move(into='m', terms=(('m', 0.9), ('g', 1.0))), Move(into='g', terms=(('m', 1.0),))), {})
    """
    below_1("momentum", "beta", beta)
    steps = (move("m", m=beta, g=1.0), move("g", m=1.0))
    return Finisher(f"momentum({float(beta)!r})", lambda _, memory: (steps, memory), slots=("m",))


def adam(eta: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-3) -> Finisher:
    """FedAdam: m = b1*m + (1-b1)*g, v = b2*v + (1-b2)*g*g, and eta*m/(sqrt(v) + eps) is added in place of g.

    Reddi et al. 2021, arXiv 2003.00295, without bias correction as there; v begins at 0, theirs at eps squared.

    >>> for step in adam(0.1).formula(Publication(1, 0), {})[0]:
    ...     print(step)
    Move(into='m', terms=(('m', 0.9), ('g', 0.09999999999999998)))
    Product(into='v', keep=0.99, share=0.010000000000000009, left='g', right='g')
    Root(into='g', step=0.1, over='m', under='v', eps=0.001)
    """
    _check_adam("adam", eta, beta1, beta2, eps)
    steps = (*_moments(beta1, beta2), Root("g", eta, "m", "v", eps))
    spec = f"adam({float(eta)!r}, {float(beta1)!r}, {float(beta2)!r}, eps={eps:g})"
    return Finisher(spec, lambda _, memory: (steps, memory), slots=("m", "v"))


def amsgrad(
    eta: float = 0.001, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-8, free: float = 1.0
) -> Finisher:
    """AMSGrad whose step shrinks with the delay: eta_t*m/(sqrt(largest v so far) + eps) is added in place of g.

    eta_t = eta, divided by the largest staleness in the version where that is above `free`. As in the code of
    FADAS (Wang et al., ICML 2024): with Adam's bias correction and eta/staleness; the paper prints neither.

    >>> steps, memory = amsgrad(0.1, eps=0.0).formula(Publication(1, 5), {"count": 0})
    >>> round(steps[-1].step, 12), memory
    (0.02, {'count': 1})
    """
    _check_adam("amsgrad", eta, beta1, beta2, eps)
    at_least_0("amsgrad", "free", free)

    def formula(published: Publication, memory: Memory) -> tuple[tuple[Elementwise, ...], Memory]:
        count = int(memory["count"]) + 1
        eta_t = eta if published.staleness <= free else eta / published.staleness
        first, second = 1.0 - beta1**count, (1.0 - beta2**count) ** 0.5
        root = Root("g", eta_t * second / first, "m", "largest", eps * second)
        return (*_moments(beta1, beta2), Larger("largest", "v"), root), {"count": count}

    spec = f"amsgrad({float(eta)!r}, {float(beta1)!r}, {float(beta2)!r}, eps={eps:g}, {free:g})"
    return Finisher(spec, formula, slots=("m", "v", "largest"), memory={"count": 0})


def fadas(m: int = 5, eta: float = 0.001, free: float = 1.0) -> Rule:
    """FADAS: the mean of m differences, unweighed, through `amsgrad` with a step that shrinks with the delay.

    Wang et al., ICML 2024.

    >>> fadas(5).spec
    'fedbuff(5, eta=1.0, constant) + amsgrad(0.001, 0.9, 0.99, eps=1e-08, 1)'
    """
    whole("fadas", m, "m")
    return compose(fedbuff(m, 1.0, staleness.constant()), amsgrad(eta, free=free))


def nesterov(n: int = 10, eta: float = 0.7, beta: float = 0.9) -> Rule:
    """Delayed Nesterov: every update publishes x + eta/n * D; every n-th, m = beta*m + mean of D, adds eta*beta*m.

    Liu et al. 2024, arXiv 2401.09135; n = 1 is Nesterov's momentum. D = x_new - x_tau.

    >>> rule = nesterov(1, 1.0, 0.5)
    >>> answer, _ = rule.decide(Facts(t=1, tau=0), rule.memory)
    >>> for step in answer.steps + answer.closing[:-2]:
    ...     print(step.into, "=", " ".join(f"{c:+g} {name}" for name, c in step.terms))
    _d = +1 new -1 base
    g = +1 _d
    gathered = +1 gathered +1 _d
    m = +0.5 m +1 gathered
    g = +1 g +0.5 m
    gathered =\x20
    """
    whole("nesterov", n, "n", "how many updates make one step of momentum")
    above_0("nesterov", "eta", eta)
    below_1("nesterov", "beta", beta)

    def formula(facts: Facts, memory: Memory) -> tuple[Steps, Memory]:
        share = eta / n * facts.weight
        complete = memory["count"] + 1 == n
        gathered = move("gathered", gathered=1.0, _d=facts.weight / n)
        steps: tuple[VectorStep, ...] = (move("_d", new=1.0, base=-1.0), move("g", _d=share), gathered)
        closing: tuple[VectorStep, ...] = LANDING
        if complete:
            moved = (move("m", m=beta, gathered=1.0), move("g", g=1.0, m=eta * beta), move("gathered"))
            closing = (*moved, *LANDING)
        return Steps(1.0, share, -share, True, steps, closing), {"count": 0 if complete else memory["count"] + 1}

    spec = f"nesterov({n}, eta={float(eta)!r}, {float(beta)!r})"
    return Rule(spec, formula, {"count": 0}, needs_base=True, slots=("g", "gathered", "m"))


def _moments(beta1: float, beta2: float) -> tuple[Elementwise, ...]:
    return (move("m", m=beta1, g=1.0 - beta1), Product("v", beta2, 1.0 - beta2, "g", "g"))


def _check_adam(name: str, eta: float, beta1: float, beta2: float, eps: float) -> None:
    above_0(name, "eta", eta)
    below_1(name, "beta1", beta1)
    below_1(name, "beta2", beta2)
    at_least_0(name, "eps", eps)
