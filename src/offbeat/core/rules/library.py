"""Owns the names of all rules, finishes, weights and averages: what settings build, and what `offbeat rules` lists.

fedbuff:10 + momentum:0.9        one aggregate, then finishes
"""

import difflib
from collections.abc import Callable
from typing import Any, NamedTuple

from offbeat.core.rules.average import Average, ema, poly
from offbeat.core.rules.buffered import fedavg, fedbuff, rennala
from offbeat.core.rules.cached import ace, ca2fl
from offbeat.core.rules.composition import compose
from offbeat.core.rules.every_arrival import StalenessFunction, asyncfeded, dcasgd, delta, fedasync, ringmaster, sgd
from offbeat.core.rules.interface import Finisher, Rule, Weight
from offbeat.core.rules.momentum import adam, amsgrad, fadas, momentum, nesterov
from offbeat.core.rules.numbers import Schedule
from offbeat.core.rules.weights import delay_adaptive, participation
from offbeat.core.staleness import spec_parts
from offbeat.errors import InvalidValue

NO_WEIGHTS = "none"
Numbers = Any
"""The numbers behind a name, as a list."""


class AlphaAndStaleness(NamedTuple):
    """What the settings say beside the rule's own numbers."""

    alpha: float | Schedule
    staleness_fn: StalenessFunction


class Entry(NamedTuple):
    """One name of the library."""

    usage: str
    """How it is written; words in capitals are parameters of `function`."""
    function: Callable[..., Any]
    """Whose docstring says the formula."""
    source: str
    numbers: tuple[int, int]
    """The fewest and the most numbers behind the name."""
    build: Callable[[Numbers, AlphaAndStaleness], Rule | Finisher | Weight | Average]
    example: str
    settings: tuple[str, ...] = ()
    """Settings that it takes beside its numbers."""


def _k(value: float) -> Any:
    """A whole number as one; others as they are, which the rule refuses with its own words."""
    return int(value) if value.is_integer() else value


def _alpha(numbers: Numbers, settings: AlphaAndStaleness) -> Any:
    """The rule's first number, or alpha."""
    return numbers[0] if numbers else settings.alpha


AGGREGATES = {
    "fedasync": Entry(
        "fedasync",
        fedasync,
        "Xie, Koyejo, Gupta 2019, arXiv 1903.03934",
        (0, 0),
        lambda _, s: fedasync(*s),
        "fedasync",
        ("alpha", "staleness_fn"),
    ),
    "delta": Entry(
        "delta[:BETA]",
        delta,
        "asynchronous SGD on differences; beta is ours",
        (0, 1),
        lambda n, s: delta(*s, *n),
        "delta",
        ("alpha", "staleness_fn"),
    ),
    "dcasgd": Entry(
        "dcasgd[:LAMBDA]",
        dcasgd,
        "DC-ASGD: Zheng et al. 2017, arXiv 1609.08326",
        (0, 1),
        lambda n, s: dcasgd(s.alpha, n[0] if n else 0.04, s.staleness_fn),
        "dcasgd:0.04",
        ("alpha", "staleness_fn"),
    ),
    "asyncfeded": Entry(
        "asyncfeded[:RATE[,EPS]]",
        asyncfeded,
        "AsyncFedED: Wang et al. 2022, arXiv 2205.13797",
        (0, 2),
        lambda n, _: asyncfeded(*n),
        "asyncfeded:1,1",
    ),
    "ringmaster": Entry(
        "ringmaster:R",
        ringmaster,
        "Maranjyan, Tyurin, Richtarik 2025, arXiv 2501.16168",
        (1, 1),
        lambda n, s: ringmaster(s.alpha, _k(n[0])),
        "ringmaster:8",
        ("alpha",),
    ),
    "fedbuff": Entry(
        "fedbuff:K[,ETA]",
        fedbuff,
        "Nguyen et al. 2022, arXiv 2106.06639",
        (1, 2),
        lambda n, s: fedbuff(_k(n[0]), n[1] if len(n) > 1 else 1.0, s.staleness_fn),
        "fedbuff:10",
        ("staleness_fn",),
    ),
    "rennala": Entry(
        "rennala:B[,ETA]",
        rennala,
        "Tyurin, Richtarik 2023, arXiv 2305.12387",
        (1, 2),
        lambda n, _: rennala(_k(n[0]), *n[1:]),
        "rennala:8",
    ),
    "fedavg": Entry(
        "fedavg:K",
        fedavg,
        "McMahan et al. 2017, arXiv 1602.05629",
        (1, 1),
        lambda n, _: fedavg(_k(n[0])),
        "fedavg:10",
    ),
    "nesterov": Entry(
        "nesterov[:N[,ETA[,BETA]]]",
        nesterov,
        "delayed Nesterov: Liu et al. 2024, arXiv 2401.09135",
        (0, 3),
        lambda n, _: nesterov(*map(_k, n[:1]), *n[1:]),
        "nesterov:10",
    ),
    "ca2fl": Entry(
        "ca2fl:M[,ETA[,GROUPS]]",
        ca2fl,
        "CA2FL: Wang et al., ICLR 2024",
        (1, 3),
        lambda n, _: ca2fl(_k(n[0]), *n[1:2], groups=_k(n[2]) if len(n) > 2 else 0),
        "ca2fl:10",
    ),
    "ace": Entry(
        "ace[:ETA[,GROUPS]]",
        ace,
        "ACE: 2025, arXiv 2511.19066; MIFA: Gu et al. 2021",
        (0, 2),
        lambda n, s: ace(_alpha(n, s), groups=_k(n[1]) if len(n) > 1 else 0),
        "ace:0.1",
        ("alpha",),
    ),
    "fadas": Entry(
        "fadas[:M[,ETA[,FREE]]]",
        fadas,
        "FADAS: Wang et al., ICML 2024",
        (0, 3),
        lambda n, _: fadas(*map(_k, n[:1]), *n[1:]),
        "fadas:5",
    ),
    "sgd": Entry("sgd", sgd, "the baseline of FedAsync's paper", (0, 0), lambda _n, _s: sgd(), "sgd"),
}
FINISHES = {
    "momentum": Entry(
        "momentum[:BETA]",
        momentum,
        "FedAvgM: Hsu et al. 2019, arXiv 1909.06335",
        (0, 1),
        lambda n, _: momentum(*n),
        "momentum:0.9",
    ),
    "adam": Entry(
        "adam[:ETA[,BETA1,BETA2[,EPS]]]",
        adam,
        "FedAdam: Reddi et al. 2021, arXiv 2003.00295",
        (0, 4),
        lambda n, _: adam(*n),
        "adam:0.01",
    ),
    "amsgrad": Entry(
        "amsgrad[:ETA[,BETA1,BETA2[,EPS[,FREE]]]]",
        amsgrad,
        "the finish of FADAS: Wang et al., ICML 2024",
        (0, 5),
        lambda n, _: amsgrad(*n),
        "amsgrad:0.001",
    ),
}
WEIGHTS = {
    "participation": Entry(
        "participation[:CAP]",
        participation,
        "after Rescaled ASGD: 2026, arXiv 2605.13434",
        (0, 1),
        lambda n, _: participation(*n),
        "participation",
    ),
    "delay-adaptive": Entry(
        "delay-adaptive:FREE",
        delay_adaptive,
        "Koloskova et al. 2022; Mishchenko et al. 2022",
        (1, 1),
        lambda n, _: delay_adaptive(*n),
        "delay-adaptive:32",
    ),
}
AVERAGES = {
    "poly": Entry("poly[:P]", poly, "Shamir, Zhang 2013, arXiv 1212.1824", (0, 1), lambda n, _: poly(*n), "poly:8"),
    "ema": Entry("ema:C", ema, "exponential moving average", (1, 1), lambda n, _: ema(*n), "ema:0.02"),
}
KINDS = {"rule": AGGREGATES, "finish": FINISHES, "weight": WEIGHTS, "average": AVERAGES}
"""All names of the library."""


def from_spec(spec: str, alpha: float | Schedule, staleness_fn: StalenessFunction, weights: str = NO_WEIGHTS) -> Rule:
    """The rule that settings strings name.

    >>> from offbeat.core.staleness import constant
    >>> from_spec("fedbuff:8", 0.6, constant()).spec
    'fedbuff(8, eta=1.0, constant)'
    >>> from_spec("delta + momentum:0.9", 0.1, constant(), "participation").spec
    'delta(0.1, constant, beta=0.0) * participation(4.0) + momentum(0.9)'
    """
    said = AlphaAndStaleness(alpha, staleness_fn)
    first, *others = [part.strip() for part in spec.split("+")]
    aggregate = _built(first, AGGREGATES, "rule", said)
    for other in others:
        name = spec_parts(other)[0]
        if name in AGGREGATES:
            raise InvalidValue(f"rule {spec!r} has two aggregates, {first} and {other}; a rule has one, then finishes")
    finishes = [_built(other, FINISHES, "finish", said) for other in others]
    return compose(aggregate, *weights_from_spec(weights), *finishes)


def weights_from_spec(spec: str) -> list[Weight]:
    """The weights that a settings string names, `none` or one or more with + between them."""
    if spec.strip() == NO_WEIGHTS:
        return []
    said = AlphaAndStaleness(1.0, lambda _: 1.0)
    return [_built(part.strip(), WEIGHTS, "weights", said) for part in spec.split("+")]


def _built(spec: str, entries: dict[str, Entry], what: str, said: AlphaAndStaleness) -> Any:
    name, numbers = spec_parts(spec)
    entry = entries.get(name)
    if entry is not None and numbers is not None and entry.numbers[0] <= len(numbers) <= entry.numbers[1]:
        return entry.build(numbers, said)
    if entry is not None:
        raise InvalidValue(f"{what} {spec!r} is not as it is written: {entry.usage}, for instance {entry.example}")
    near = difflib.get_close_matches(name, entries, 1)
    allowed = ", ".join(entry.usage for entry in entries.values())
    hint = f"did you mean {entries[near[0]].example}? " if near else ""
    raise InvalidValue(f"{what} {spec!r} is unknown; {hint}use {allowed}. `offbeat rules` tells about each")
