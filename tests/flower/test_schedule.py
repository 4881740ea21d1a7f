"""The arithmetic of a run on Flower, bit for bit: an explicit schedule against the paper's algorithm in one file."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from offbeat.core import rules, staleness
from offbeat.core.rules import Facts, Rule
from tests.contract.plain_vectors import PlainVectors
from tests.flower.fake import X_0, FakeGrid, Node, one_file, pushed, start

pytestmark = pytest.mark.slow

SPEEDS = {3: 1.0, 8: 2.5, 5: 4.0}
"""Seconds that a task takes on each node."""


def arrivals(count: int) -> list[int]:
    """Who answers when, all three being given the next task at once; nothing here falls on the same moment."""
    times = sorted((task_s * n, node) for node, task_s in SPEEDS.items() for n in range(1, count + 1))
    assert len({at for at, _ in times[:count]}) == count, "choose speeds without ties"
    return [node for _, node in times[:count]]


def grid() -> FakeGrid:
    return FakeGrid({node: Node(task_s) for node, task_s in SPEEDS.items()})


def bits(array: Any) -> bytes:
    return np.asarray(array, np.float32).tobytes()


@pytest.mark.parametrize(
    ("spec", "name", "numbers"), [("polynomial:0.5", "polynomial", (0.5,)), ("hinge:10,1", "hinge", (10, 1))]
)
def test_fedasync_is_the_paper_s(spec: str, name: str, numbers: tuple[float, ...]) -> None:
    oracle = one_file()
    s = getattr(oracle, name)(*numbers)
    x, x_tau, tau, history = X_0, dict.fromkeys(SPEEDS, X_0), dict.fromkeys(SPEEDS, 0), []
    for t, node in enumerate(arrivals(3), 1):
        x, alpha_t = oracle.updater(x, pushed(x_tau[node], node), tau[node], t, 0.6, s)
        history.append((t, node, tau[node], t - 1 - tau[node], alpha_t))
        x_tau[node], tau[node] = x, t
    result = start(grid(), epochs=3, alpha=0.6, staleness_fn=spec)
    assert [applied[:5] for applied in result.history] == history
    assert bits(result.arrays["x"].numpy()) == bits(x)


def run_by_hand(rule: Rule, schedule: list[int]) -> tuple[Any, list[tuple[int, int, int]]]:
    """The rule and numpy alone, without coordinator, Grid or clock: x, and (t, node, tau) of every update."""
    plain, t, memory, counts = PlainVectors(X_0.copy()), 0, rule.memory, Counter[int]()
    tau, seen = dict.fromkeys(SPEEDS, 0), []
    for node in schedule:
        x_tau = plain.versions[tau[node]]
        x_new = pushed(x_tau, node)
        learnt, moved = (np.subtract(one, x_tau, dtype=float) for one in (x_new, plain.x))
        dots = {"D.D": float(learnt @ learnt), "L.L": float(moved @ moved)}
        counts[node] += 1
        counted = (counts[node], counts.total(), len(counts), len(counts))
        facts = Facts(t + 1, tau[node], node, 10, float(np.linalg.norm(learnt)), *counted, dot=dots)
        answer, memory = rule.decide(facts, memory)
        plain.apply(answer, x_new, x_tau, t + 1)
        seen.append((t + 1, node, tau[node]))
        t += answer.publish
        tau[node] = t
    return plain.x, seen


@pytest.mark.parametrize(
    "rule",
    [
        rules.fedasync(0.9, staleness.constant()),
        rules.fedasync(0.5, staleness.exponential(0.3)),
        rules.delta(0.7, staleness.polynomial(1.0)),
        rules.delta(0.7, staleness.polynomial(1.0), 0.25),
        rules.fedbuff(2),
        rules.fedbuff(3, 0.5),
        rules.compose(rules.fedbuff(2), rules.participation(), rules.momentum(0.9)),
        rules.ca2fl(2),
        rules.ace(0.2),
        rules.nesterov(2),
        rules.asyncfeded(),
        rules.fadas(2, 0.1),
    ],
    ids=lambda rule: rule.spec,
)
def test_every_rule_is_applied_as_it_decides(rule: Rule) -> None:
    schedule = [3, 3, 8, 3]
    x, seen = run_by_hand(rule, schedule)
    until_s = 3.3  # 3 answers at 1, 2 and 3, 8 at 2.5
    result = start(grid(), rule, until_s=until_s)
    assert [(applied.t, applied.node, applied.tau) for applied in result.history] == seen
    assert bits(result.arrays["x"].numpy()) == bits(x)


def test_a_rule_by_its_name_is_the_rule() -> None:
    named = start(grid(), "fedbuff:2", epochs=3)
    itself = start(grid(), rules.fedbuff(2), epochs=3)
    assert named.arrays["x"].numpy().tobytes() == itself.arrays["x"].numpy().tobytes()
    assert named.summary["settings"]["rule"] == "fedbuff:2"
    assert named.summary["settings"]["alpha"] == 0.6
    assert "alpha" not in itself.summary["settings"]
    assert itself.summary["settings"]["rule"] == "fedbuff(2, eta=1.0, polynomial:0.5)"


def test_fedavg_waits_for_its_group_and_weighs_by_samples() -> None:
    result = start(grid(), "fedavg:3", epochs=2)
    x = X_0
    for _ in range(2):
        x = np.mean([pushed(x, node) for node in SPEEDS], axis=0)
    assert np.allclose(result.arrays["x"].numpy(), x, atol=1e-6)
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(np.mean(list(SPEEDS)))
    assert [applied.staleness for applied in result.history] == [0] * 6


def test_the_metrics_of_a_training_stand_at_the_epoch_that_it_went_into() -> None:
    result = start(grid(), epochs=3, alpha=0.5)
    said = {t: metrics["loss"] for t, metrics in result.train_metrics_clientapp.items()}
    assert said == {applied.t: float(applied.node) for applied in result.history}
    assert result.evaluate_metrics_clientapp == {}


def test_replies_that_come_together_are_mixed_in_the_order_in_which_they_come() -> None:
    result = start(FakeGrid({8: Node(1.15), 3: Node(1.05), 5: Node(1.1)}), epochs=6, alpha=0.6)
    assert [applied.node for applied in result.history] == [3, 5, 8, 3, 5, 8]
    assert [applied.staleness for applied in result.history[:3]] == [0, 1, 2]
