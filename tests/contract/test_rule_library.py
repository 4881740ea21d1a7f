"""Every rule of the library is the formula of its paper: beside numpy in float64, on updates at random."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from offbeat.core.rules import Average, Rule, compose, ema, poly
from tests.contract import rule_references as references
from tests.contract.rule_cases import AGGREGATES, CASES, WEIGHTS, Case
from tests.contract.rule_references import Doubles, Update, versions
from tests.contract.rule_runs import BUFFERS, Run, drawn, learning, run, start

SIZE = 7
SEEDS = (0, 1, 2)
RELATIVE = 1e-6


def ran(rule: Rule, seed: int, staleness_max: int = 4, average: Average | None = None) -> tuple[Run, list[Update]]:
    """A run of 40 updates, and the same as the references are told it."""
    arrivals = drawn(seed, staleness_max=staleness_max)
    result = run(rule, start(seed, SIZE), arrivals, learning(seed, SIZE), average=average)
    updates, t = list[Update](), 1
    for arrival, order, tau in zip(arrivals, result.orders, result.taus, strict=True):
        assert order.x_new is not None
        x_new = order.x_new.vector.astype(float)
        updates.append(Update(x_new, tau, arrival.device, arrival.samples, t - 1 - tau, 1.0))
        t += order.publishes is not None
    return result, updates


def assert_alike(found: Sequence[Doubles], expected: Sequence[Doubles]) -> None:
    assert len(found) == len(expected) > 5
    for x, answer in zip(found, expected, strict=True):
        assert np.linalg.norm(x - answer) <= RELATIVE * np.linalg.norm(answer)


def found(result: Run) -> list[Doubles]:
    return [x.vector.astype(float) for x in result.versions]


def answer(case: Case, updates: Sequence[Update], result: Run) -> list[Doubles]:
    return versions(case.reference, found(result), updates, SIZE - BUFFERS, case.finishes)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CASES)
def test_every_version_is_the_formulas(name: str, seed: int) -> None:
    case = CASES[name]
    result, updates = ran(case.rule, seed, case.staleness_max)
    assert_alike(found(result), answer(case, updates, result))


# --- weights ---------------------------------------------------------------------------------------------------------


def weighed(name: str, updates: Sequence[Update]) -> list[Update]:
    """The updates with the weights of the papers."""
    cap = {"participation": 4.0, "participation at most 1.5": 1.5}.get(name)
    if cap is not None:
        factors = references.participations([update.device for update in updates], cap)
    else:
        factors = references.delay_adaptive([update.staleness for update in updates], 2.0)
    assert len(set(factors)) > 2
    return [update._replace(weight=factor) for update, factor in zip(updates, factors, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("name", [name for name, case in AGGREGATES.items() if case.staleness_max > 2])
def test_every_weight_multiplies_the_update_under_every_rule(name: str, weight: str, seed: int) -> None:
    case = AGGREGATES[name]
    result, updates = ran(compose(case.rule, WEIGHTS[weight]), seed)
    assert_alike(found(result), answer(case, weighed(weight, updates), result))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_weights_are_multiplied_and_finishes_follow_them(seed: int) -> None:
    case = CASES["fedbuff + momentum + adam"]
    rule = compose(AGGREGATES["fedbuff"].rule, *(WEIGHTS[name] for name in ("participation", "delay-adaptive")))
    result, updates = ran(compose(rule, *case.rule.finishes), seed)
    once, twice = (weighed(name, updates) for name in ("participation", "delay-adaptive"))
    both = [a._replace(weight=a.weight * b.weight) for a, b in zip(once, twice, strict=True)]
    assert_alike(found(result), answer(case, both, result))


# --- the averaged model ----------------------------------------------------------------------------------------------

AVERAGES: dict[str, tuple[Average, Callable[[Sequence[Doubles]], Doubles]]] = {
    "poly:8": (poly(8), lambda xs: references.poly(xs, 8)),
    "poly:0": (poly(0), lambda xs: references.poly(xs, 0)),
    "ema:0.2": (ema(0.2), lambda xs: references.ema(xs, 0.2)),
    "ema:1": (ema(1), lambda xs: xs[-1]),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", ["fedasync", "fedbuff", "fedavg + adam", "ca2fl seen", "dcasgd"])
def test_the_average_is_a_mean_of_the_versions(name: str, average: str, seed: int) -> None:
    kept, reference = AVERAGES[average]
    result, _ = ran(CASES[name].rule, seed, average=kept)
    xs, trained = found(result), SIZE - BUFFERS
    for t, mean in enumerate(result.means, 1):
        expected = reference(xs[: t + 1])[:trained]
        assert np.linalg.norm(mean.vector[:trained] - expected) <= RELATIVE * np.linalg.norm(expected)
        assert mean.vector[trained:].tobytes() == result.versions[t].vector[trained:].tobytes()
        assert mean["seen"] == result.versions[t]["seen"]


@pytest.mark.parametrize("name", CASES)
def test_an_average_changes_no_version(name: str) -> None:
    case = CASES[name]
    alone, _ = ran(case.rule, 0, case.staleness_max)
    beside, _ = ran(case.rule, 0, case.staleness_max, poly())
    assert [x.vector.tobytes() for x in alone.versions] == [x.vector.tobytes() for x in beside.versions]


# --- these tests can fail --------------------------------------------------------------------------------------------


def test_another_number_is_another_run() -> None:
    case = CASES["fedbuff + momentum"]
    result, updates = ran(case.rule, 0)
    others = [Case(case.rule, references.fedbuff(4, 0.71, 0.5), case.finishes)]
    others.append(Case(case.rule, case.reference, (references.momentum(0.91),)))
    for other in others:
        with pytest.raises(AssertionError):
            assert_alike(found(result), answer(other, updates, result))
