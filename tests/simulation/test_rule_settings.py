"""Every rule of the library runs as settings name it, and weights and averages are not forgotten on the way."""

from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.core.rules.library import AGGREGATES, FINISHES, WEIGHTS
from offbeat.settings import Settings

LINE = Path(__file__).parents[1] / "golden" / "line.py"
SPECS = [
    *(entry.example for name, entry in AGGREGATES.items() if name != "fedavg"),
    "fedavg:5",  # there are six devices
    *(f"fedbuff:3 + {entry.example}" for entry in FINISHES.values()),
    "fedavg:3 + momentum:0.9",
    "sgd + momentum:0.5",
]


def simulate(**settings: Any) -> offbeat.Run:
    usual: dict[str, Any] = {"epochs": 12, "seed": 1, "executor": "inline", "alpha": 0.3}
    return offbeat.simulate(LINE, **usual | settings)


@pytest.mark.parametrize("spec", SPECS)
def test_every_rule_runs(spec: str) -> None:
    run = simulate(rule=spec, average="poly:8")
    assert run.summary["t"] == 12
    assert any(name.endswith("_average") for name in run.summary)


@pytest.mark.parametrize("entry", WEIGHTS.values(), ids=lambda entry: entry.example)
def test_every_weight_runs(entry: Any) -> None:
    assert simulate(rule="delta", weights=entry.example).summary["t"] == 12


def test_weights_act_beside_functions_of_your_own() -> None:
    """`simulate` builds the rule itself, where alpha or the staleness function is a function."""
    for own in ({"alpha": lambda _: 0.3}, {"staleness_fn": lambda _: 1.0}):
        run = simulate(rule="delta", weights="participation", epochs=40, **own)
        assert len({decision.mix.new for decision in run.ledger if decision.mix}) > 3


def test_weights_beside_a_rule_of_your_own_are_refused() -> None:
    with pytest.raises(offbeat.OffbeatError, match=r"a rule of your own has its weights inside: .*compose"):
        simulate(rule=offbeat.delta(0.3), alpha=None, weights="participation")


@pytest.mark.parametrize("rule", ["sgd", "sgd + momentum:0.5", " sgd "])
def test_sgd_trains_on_one_machine_whatever_follows_it(rule: str) -> None:
    assert Settings(rule=rule).on_one_machine
    assert not Settings(rule="delta + momentum:0.5").on_one_machine
