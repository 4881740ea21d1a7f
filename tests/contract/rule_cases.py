"""Every rule of the library, each with the reference that says what it must do."""

from typing import NamedTuple

import offbeat
from offbeat.core import rules
from offbeat.core.rules import Finisher, Rule, Weight, compose
from tests.contract import rule_references as references
from tests.contract.rule_references import Finish, Reference

N = 5
"""Devices of a run."""
ROOT = offbeat.polynomial(0.5)
CONSTANT = offbeat.constant()


class Case(NamedTuple):
    rule: Rule
    reference: Reference
    finishes: tuple[Finish, ...] = ()
    staleness_max: int = 4


AGGREGATES = {
    "fedasync": Case(rules.fedasync(0.6, ROOT), references.fedasync(0.6, 0.5)),
    "fedasync constant": Case(rules.fedasync(0.4), references.fedasync(0.4, 0.0)),
    "delta": Case(rules.delta(0.3), references.delta(0.3)),
    "delta polynomial": Case(rules.delta(0.5, ROOT), references.delta(0.5, 0.5)),
    "delta beta": Case(rules.delta(0.6, CONSTANT, 0.2), references.delta(0.6, 0.0, 0.2)),
    "delta beta 1": Case(rules.delta(0.6, ROOT, 1.0), references.fedasync(0.6, 0.5)),
    "dcasgd": Case(rules.dcasgd(0.3, 0.1), references.dcasgd(0.3, 0.1)),
    "asyncfeded": Case(rules.asyncfeded(0.7, 1.5), references.asyncfeded(0.7, 1.5)),
    "ringmaster": Case(rules.ringmaster(0.4, 3), references.delta(0.4), staleness_max=2),
    "fedbuff": Case(rules.fedbuff(4, 0.7), references.fedbuff(4, 0.7, 0.5)),
    "fedbuff constant": Case(rules.fedbuff(3, 1.0, CONSTANT), references.fedbuff(3, 1.0, 0.0)),
    "rennala": Case(rules.rennala(3, 0.9), references.fedbuff(3, 0.9, 0.0), staleness_max=0),
    "fedavg": Case(rules.fedavg(4), references.fedavg(4)),
    "nesterov": Case(rules.nesterov(4, 0.7, 0.9), references.nesterov(4, 0.7, 0.9)),
    "ca2fl declared": Case(rules.ca2fl(4, 0.5, devices=8), references.ca2fl(4, 0.5, 8)),
    "ca2fl seen": Case(rules.ca2fl(3, 0.5), references.ca2fl(3, 0.5)),
    "ca2fl groups": Case(rules.ca2fl(3, 0.5, groups=2), references.ca2fl(3, 0.5, groups=2)),
    "ace declared": Case(rules.ace(0.3, devices=8), references.ace(0.3, 8)),
    "ace seen": Case(rules.ace(0.2), references.ace(0.2)),
    "ace groups": Case(rules.ace(0.2, groups=3), references.ace(0.2, groups=3)),
}
FADAS = {
    "fadas": Case(rules.fadas(4, 0.05, 9), references.fedbuff(4, 1, 0), (references.amsgrad(0.05, 9),)),
    "fadas delay-adaptive": Case(rules.fadas(4, 0.05), references.fedbuff(4, 1, 0), (references.amsgrad(0.05, 1),)),
}
FINISHES: dict[str, tuple[Finisher, Finish]] = {
    "momentum": (rules.momentum(0.9), references.momentum(0.9)),
    "adam": (rules.adam(0.05, 0.8, 0.95, 1e-3), references.adam(0.05, 0.8, 0.95, 1e-3)),
    "amsgrad": (rules.amsgrad(0.05, 0.9, 0.99, 1e-8, 2), references.amsgrad(0.05, 2)),
}
WEIGHTS: dict[str, Weight] = {
    "participation": rules.participation(),
    "participation at most 1.5": rules.participation(1.5),
    "delay-adaptive": rules.delay_adaptive(2),
}


def finished(aggregate: str, *names: str) -> Case:
    case, finishes = AGGREGATES[aggregate], [FINISHES[name] for name in names]
    rule = compose(case.rule, *(finish for finish, _ in finishes))
    return Case(rule, case.reference, tuple(reference for _, reference in finishes), case.staleness_max)


FINISHED = {f"{aggregate} + {name}": finished(aggregate, name) for aggregate in AGGREGATES for name in FINISHES}
CHAINED = {
    "fedbuff + momentum + adam": finished("fedbuff", "momentum", "adam"),
    "fedavg + adam + momentum": finished("fedavg", "adam", "momentum"),
    "nesterov + momentum + momentum": finished("nesterov", "momentum", "momentum"),
    "ca2fl + momentum + amsgrad": finished("ca2fl seen", "momentum", "amsgrad"),
}
CASES = AGGREGATES | FADAS | FINISHED | CHAINED
