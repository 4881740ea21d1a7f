"""Rules that cannot be meant are refused when they are named, in the words that a user sees."""

import math
import re
from collections.abc import Callable

import pytest

from offbeat.core import rules
from offbeat.core.rules import average_from_spec, compose, from_spec
from offbeat.core.rules.library import AGGREGATES, FINISHES, WEIGHTS, weights_from_spec
from offbeat.core.staleness import constant
from offbeat.errors import InvalidValue

NAN, INF = math.nan, math.inf


def said(build: Callable[[], object]) -> str:
    with pytest.raises(InvalidValue) as refusal:
        build()
    message = str(refusal.value)
    assert "\n" not in message
    return message


RULES = {
    "fedbuf:8": "rule 'fedbuf:8' is unknown; did you mean fedbuff:10? use fedasync, delta[:BETA], dcasgd[:LAMBDA], ",
    "xyz": "rule 'xyz' is unknown; use fedasync, delta[:BETA], ",
    "": "rule '' is unknown; use fedasync, ",
    "momentum:0.9": "rule 'momentum:0.9' is unknown; use fedasync, ",
    "fedbuff": "rule 'fedbuff' is not as it is written: fedbuff:K[,ETA], for instance fedbuff:10",
    "fedbuff:1,2,3": "rule 'fedbuff:1,2,3' is not as it is written: fedbuff:K[,ETA], for instance fedbuff:10",
    "fedbuff:ten": "rule 'fedbuff:ten' is not as it is written: fedbuff:K[,ETA], for instance fedbuff:10",
    "fedbuff:0": "fedbuff: k is 0 but must be a whole number >= 1: how many updates make one version",
    "fedbuff:2.5": "fedbuff: k is 2.5 but must be a whole number >= 1: how many updates make one version",
    "fedbuff:-3": "fedbuff: k is -3 but must be a whole number >= 1: how many updates make one version",
    "fedbuff:inf": "fedbuff: k is inf but must be a whole number >= 1: how many updates make one version",
    "fedbuff:nan": "fedbuff: k is nan but must be a whole number >= 1: how many updates make one version",
    "fedbuff:4,0": "fedbuff: eta is 0.0 but must be a finite number > 0",
    "fedbuff:4,nan": "fedbuff: eta is nan but must be a finite number > 0",
    "fedavg:0": "fedavg: k is 0 but must be a whole number >= 1: how many updates make one version",
    "rennala:0": "rennala: b is 0 but must be a whole number >= 1: how many updates make one version",
    "rennala:4,-1": "rennala: eta is -1.0 but must be a finite number > 0",
    "ringmaster:0": "ringmaster: r is 0 but must be a whole number >= 1: staleness r is too stale",
    "delta:1.5": "beta is 1.5 but must lie in [0, 1]: 0 is the delta rule, 1 is FedAsync",
    "delta:nan": "beta is nan but must lie in [0, 1]: 0 is the delta rule, 1 is FedAsync",
    "dcasgd:-1": "dcasgd: lambda is -1.0 but must be a finite number >= 0",
    "asyncfeded:0": "asyncfeded: rate is 0.0 but must be a finite number > 0",
    "asyncfeded:1,0": "asyncfeded: eps is 0.0 but must be a finite number > 0",
    "nesterov:0": "nesterov: n is 0 but must be a whole number >= 1: how many updates make one step of momentum",
    "nesterov:2,1,1": "nesterov: beta is 1.0 but must lie in [0, 1)",
    "ca2fl:0": "ca2fl: m is 0 but must be a whole number >= 1: how many updates make one version",
    "ca2fl:2,1,-1": "ca2fl: groups is -1 but must be a whole number >= 0; 0 is a vector per device",
    "ca2fl:2,1,1.5": "ca2fl: groups is 1.5 but must be a whole number >= 0; 0 is a vector per device",
    "ace:0": "ace: eta is 0.0 but must be a finite number > 0",
    "fadas:0": "fadas: m is 0 but must be a whole number >= 1: how many updates make one version",
    "fadas:5,0": "amsgrad: eta is 0.0 but must be a finite number > 0",
    "fadas:5,0.1,-1": "amsgrad: free is -1.0 but must be a finite number >= 0",
    "delta + moment:0.9": "finish 'moment:0.9' is unknown; did you mean momentum:0.9? use momentum[:BETA], adam[:ETA",
    "delta +": "finish '' is unknown; use momentum[:BETA], ",
    "delta + momentum:1": "momentum: beta is 1.0 but must lie in [0, 1)",
    "delta + momentum:x": "finish 'momentum:x' is not as it is written: momentum[:BETA], for instance momentum:0.9",
    "delta + adam:0": "adam: eta is 0.0 but must be a finite number > 0",
    "delta + adam:1,1": "adam: beta1 is 1.0 but must lie in [0, 1)",
    "delta + adam:1,0,1": "adam: beta2 is 1.0 but must lie in [0, 1)",
    "delta + adam:1,0,0,-1": "adam: eps is -1.0 but must be a finite number >= 0",
    "fedbuff:4 + delta": "rule 'fedbuff:4 + delta' has two aggregates, fedbuff:4 and delta; a rule has one, then",
    "fedbuff:4 + fedavg:2": "rule 'fedbuff:4 + fedavg:2' has two aggregates, fedbuff:4 and fedavg:2; a rule has one",
    "fadas:5 + momentum:0.9": "has its finishes already; give all of them at once",
}


@pytest.mark.parametrize("spec", RULES)
def test_a_rule_that_cannot_be_meant_is_refused(spec: str) -> None:
    assert RULES[spec] in said(lambda: from_spec(spec, 0.6, constant()))


OTHERS: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown weight": (
        lambda: weights_from_spec("participate"),
        "weights 'participate' is unknown; did you mean participation? use participation[:CAP], delay-adaptive:FREE",
    ),
    "no number for the delay": (
        lambda: weights_from_spec("delay-adaptive"),
        "weights 'delay-adaptive' is not as it is written: delay-adaptive:FREE, for instance delay-adaptive:32",
    ),
    "a delay of 0": (
        lambda: weights_from_spec("delay-adaptive:0"),
        "delay-adaptive: free is 0.0 but must be a finite number > 0",
    ),
    "a cap below 1": (
        lambda: weights_from_spec("participation:0.5"),
        "participation: the cap is 0.5 but must be a number >= 1; 4 is usual",
    ),
    "a cap that is none": (lambda: rules.participation(NAN), "participation: the cap is nan but must be a number >= 1"),
    "an average of an average": (
        lambda: average_from_spec("poly:8 + ema:0.1"),
        "average is 'poly:8 + ema:0.1', but an average of an average is not kept: use poly:P or ema:C",
    ),
    "an unknown average": (
        lambda: average_from_spec("mean"),
        "average 'mean' is unknown; use poly:P, ema:C or none, for instance poly:8",
    ),
    "ema of nothing": (
        lambda: average_from_spec("ema:0"),
        "average: ema's C is 0.0 but must lie in (0, 1]; 0.02 averages about 100 versions",
    ),
    "poly of infinity": (
        lambda: rules.poly(INF),
        "average: poly's P is inf but must be a finite number >= 0; 8 is usual",
    ),
    "no devices": (
        lambda: rules.ca2fl(2, devices=0),
        "ca2fl: devices is 0 but must be a whole number >= 1: how many devices there are, those included that never",
    ),
    "half a device": (lambda: rules.ace(devices=1.5), "ace: devices is 1.5 but must be a whole number >= 1"),  # type: ignore[arg-type]
    "two rules in one": (
        lambda: compose(rules.delta(0.5), rules.fedbuff(2)),  # type: ignore[arg-type]
        "a rule has one aggregate; what follows it are weights and finishes, not (Rule(spec='fedbuff(2",
    ),
    "finishes twice": (
        lambda: compose(compose(rules.delta(0.5), rules.momentum()), rules.adam()),
        "delta(0.5, constant, beta=0.0) + momentum(0.9) has its finishes already; give all of them at once",
    ),
    "an inner product that there is not": (
        lambda: rules.Rule("own", rules.delta(0.5).formula, dots=("D.x",)),
        "rule own asks for 'D.x'; a rule may ask for D.D, D.L, L.L",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_parts_that_cannot_be_meant_are_refused(what: str) -> None:
    build, message = OTHERS[what]
    assert message in said(build)


@pytest.mark.parametrize("entries", [AGGREGATES, FINISHES, WEIGHTS], ids=["rules", "finishes", "weights"])
def test_every_example_that_a_message_offers_works(entries: dict[str, object]) -> None:
    for name, entry in {**AGGREGATES, **FINISHES, **WEIGHTS}.items():
        if name not in entries:
            continue
        if entries is WEIGHTS:
            assert weights_from_spec(entry.example)
        else:
            spec = entry.example if entries is AGGREGATES else f"delta + {entry.example}"
            assert from_spec(spec, 0.6, constant()).spec
        assert re.match(rf"{name}\b", entry.example)
        assert re.match(rf"{name}\b", entry.usage)


def test_weights_behind_finishes_are_named_before_them() -> None:
    assert from_spec("fadas:5", 0.6, constant(), "participation").spec == (
        "fedbuff(5, eta=1.0, constant) * participation(4.0) + amsgrad(0.001, 0.9, 0.99, eps=1e-08, 1)"
    )
