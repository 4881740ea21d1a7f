"""More bugs that were read in public code, of buffers, caches, momentum and adaptive steps: none of them is here.

Rules kept here:
- One bug, one test; the docstring says what it does, and names the system where one was read.
- The right answer is a number that was worked out by hand, with that of the bug beside it.
"""

import math

import pytest

from offbeat import constant, polynomial
from offbeat.core import rules
from offbeat.core.rules import Facts, Mix, Rule, Steps, compose
from tests.contract.rule_runs import Hand, by_hand, by_hand_until
from tests.contract.test_rule_hand_cases import learnt, outcomes

CLOSE = 1e-6


def decided(rule: Rule, count: int, staleness: int = 0) -> list[Mix | Steps]:
    """What a rule answers to updates of as many devices."""
    found, memory, t = list[Mix | Steps](), rule.memory, 100
    for device in range(count):
        facts = Facts(t, t - 1 - staleness, device, seen=device + 1, applied=device + 1, caches=device + 1)
        answer, memory = rule.decide(facts, memory)
        found.append(answer)
        t += answer.publish
    return found


# --- FedBuff ---------------------------------------------------------------------------------------------------------


def test_fedbuff_divides_by_k_and_not_by_the_weights() -> None:
    """FedScale divides the buffer by the sum of the weights, so that a buffer of stale updates counts in full."""
    assert by_hand(rules.fedbuff(2), learnt(-2, -2, staleness=3))[-1] == pytest.approx(9.0, rel=CLOSE)  # FedScale: 8


def test_fedbuff_divides_by_k_once_also_with_a_finish() -> None:
    """AFL-Lib divides the sum of the buffer by K when it is filled and again when it is applied."""
    for finishes in ([], [rules.momentum(0.9)]):
        rule = compose(rules.fedbuff(4, 1.0, constant()), *finishes)
        assert by_hand(rule, learnt(-1, -1, -1, -1))[-1] == pytest.approx(9.0, rel=CLOSE)  # AFL-Lib: 9.75


def test_fedbuff_weighs_stale_updates_where_it_is_asked_to() -> None:
    """Plato's FedBuff has no weight by staleness at all."""
    assert [rules.fedbuff(1).decide(Facts(9, 8 - s), {"count": 0})[0].new for s in (0, 3)] == [1.0, 0.5]


def test_fedbuffs_weight_does_not_depend_on_the_others() -> None:
    """FLSim divides s by s of the mean staleness: one slow device makes all others count more."""
    rule, memory = rules.fedbuff(3), rules.fedbuff(3).memory
    weights = []
    for staleness in (80, 0, 80):
        answer, memory = rule.decide(Facts(t=100, tau=99 - staleness), memory)
        weights.append(answer.new)
    assert weights == pytest.approx([1 / 27, 1 / 3, 1 / 27])


@pytest.mark.parametrize("finishes", [[], [rules.momentum(0.9)], [rules.adam()], [rules.amsgrad()]], ids=str)
def test_a_fresh_update_has_staleness_0_in_every_part(finishes: list[rules.Finisher]) -> None:
    """NVFlare calls a fresh update's staleness 1."""
    weights = (rules.delay_adaptive(0.5), rules.participation())
    for aggregate in (rules.fedasync(0.5, polynomial(2)), rules.delta(0.5, polynomial(2)), rules.fedbuff(1, 0.5)):
        assert decided(compose(aggregate, *weights, *finishes), 1)[0].new == 0.5


def test_momentum_is_that_of_versions_and_not_of_updates() -> None:
    """Momentum that steps with every update of a buffer forgets as often as devices come."""
    rule = compose(rules.fedbuff(2, 1.0, constant()), rules.momentum(0.5))
    assert by_hand(rule, learnt(-1, -1, -1, -1))[1::2] == pytest.approx([9.0, 7.5], rel=CLOSE)


# --- rules that refuse -----------------------------------------------------------------------------------------------


def test_what_rennala_refuses_does_not_count_towards_b() -> None:
    """Where a stale update gets a weight of 0 and is counted, versions are made of fewer than b updates."""
    found, t = outcomes("rennala:3", 8)
    assert (len([outcome for outcome in found if outcome == "applied"]), t) == (3, 1)


def test_what_ringmaster_refuses_makes_no_version() -> None:
    """Where a refused update advances t, all others become staler and are refused, too."""
    assert outcomes("ringmaster:2", 8)[1] == 2


# --- a vector per device ---------------------------------------------------------------------------------------------


def test_ca2fl_subtracts_what_the_device_sent_before() -> None:
    """AFL-Lib stores the new difference first and subtracts it from itself: only h is left."""
    updates = [Hand(8, 10, device=0), Hand(9, 10, device=0)]
    answers = by_hand(rules.ca2fl(1, devices=2), updates)
    assert answers == pytest.approx([8.0, 8.0], rel=CLOSE)  # -1 + (-1 - -2) = 0; AFL-Lib: 10, 9


def test_ca2fls_h_is_from_before_the_buffer() -> None:
    """With h of after the buffer, an update is counted in h and in its own difference."""
    rule = rules.ca2fl(1, devices=1)
    assert by_hand(rule, [Hand(8, 10)]) == pytest.approx([8.0])  # from after: 6
    assert by_hand(rule, [Hand(8, 10), Hand(7, 10)]) == pytest.approx([8.0, 5.0])  # h = -2, difference -1; after: 4


def test_a_device_that_comes_twice_in_a_buffer_is_compared_with_itself() -> None:
    """Where differences are formed when the buffer is full, both are compared with what was there before it."""
    updates = [Hand(8, 10, device=0), Hand(7, 10, device=0)]
    vectors = by_hand_until(rules.ca2fl(2, devices=2), updates)
    assert vectors.x.vector.item() == pytest.approx(8.5)  # (-2 + (-3 - -2))/2; when full: (-2 - 3)/2
    assert vectors.caches[0].item() == -3
    assert vectors.standing.slots["sum"].item() == -3  # and not -5: it counts once in h


def test_caches_are_the_devices_own() -> None:
    """AFL-Lib's list of clients is never filled, so that all of them share one cache."""
    updates = [Hand(8, 10, device=3), Hand(6, 10, device=8)]
    for rule in (rules.ca2fl(1), rules.ace(0.1)):
        caches = by_hand_until(rule, updates).caches
        assert {device: cache.item() for device, cache in caches.items()} == {3: -2, 8: -4}


def test_ca2fl_divides_by_all_devices_where_they_are_declared() -> None:
    """AsyncFlower divides h by the devices seen; the paper by all of them. Both are offered, and differ."""
    updates = [Hand(8, 10, device=0), Hand(10, 10, device=1)]
    assert by_hand(rules.ca2fl(1, devices=4), updates)[-1] == pytest.approx(7.5)  # h = -2/4
    assert by_hand(rules.ca2fl(1), updates)[-1] == pytest.approx(6.0)  # h = -2/1


def test_ace_steps_at_every_arrival() -> None:
    """The authors' server for ACED steps only after as many arrivals as there are devices."""
    assert [answer.publish for answer in decided(rules.ace(0.1, devices=5), 5)] == [True] * 5
    assert by_hand(rules.ace(1.0, devices=5), learnt(-5))[0] == pytest.approx(9.0)


def test_a_device_that_comes_again_replaces_what_it_sent() -> None:
    """Where caches are added to a sum and never taken out, ACE is a momentum that never forgets."""
    updates = [Hand(8, 10, device=0)] * 3
    assert by_hand(rules.ace(1.0, devices=1), updates) == pytest.approx([8.0, 6.0, 4.0])  # never taken out: 8, 4, -2


# --- adaptive steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish", [rules.adam(0.1, eps=0.0), rules.amsgrad(0.1, eps=0.0)], ids=str)
def test_an_adaptive_step_divides_by_the_root(finish: rules.Finisher) -> None:
    """AFL-Lib divides by v: the step then shrinks where the difference grows."""
    rule = compose(rules.fedbuff(1, 1.0, constant()), finish)
    for difference in (-1e-3, -2.0, -1e3):
        assert by_hand(rule, learnt(difference))[0] == pytest.approx(9.9, rel=1e-5)


def test_the_step_of_fadas_shrinks_with_the_delay() -> None:
    """The paper prints min(eta, 1/staleness), which never acts at its eta of 0.001; its code divides eta."""
    steps = [10 - by_hand(rules.fadas(1, 0.1), learnt(-2, staleness=s))[0] for s in (1, 2, 5, 20)]
    assert steps == pytest.approx([0.1, 0.05, 0.02, 0.005], rel=1e-3)  # as printed: 0.1, 0.1, 0.1, 0.05


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_delay_of_a_version_is_its_longest(place: int) -> None:
    """The delay of the update that completes the buffer is not that of the buffer."""
    updates = [Hand(18, 20, 5 if k == place else 0, k) for k in range(3)]
    assert by_hand(rules.fadas(3, 0.1), updates)[-1] == pytest.approx(9.98, rel=CLOSE)


def test_the_delay_of_a_version_is_not_that_of_the_next() -> None:
    rule = rules.fadas(1, 0.1)
    assert by_hand(rule, [Hand(18, 20, 5), Hand(18, 20, 0)]) == pytest.approx([9.98, 9.88], rel=CLOSE)


def test_amsgrad_keeps_the_largest_v() -> None:
    """Without the maximum it is Adam, and a rare large difference is forgotten."""
    updates = learnt(-100, *[-1] * 30)
    kept, forgot = (
        by_hand_until(compose(rules.delta(1.0), finish), updates).standing.slots
        for finish in (rules.amsgrad(0.1), rules.adam(0.1))
    )
    assert kept["largest"].item() == pytest.approx(0.01 * 100**2)
    assert kept["v"].item() == pytest.approx(forgot["v"].item())
    assert forgot["v"].item() < 80


# --- weights ---------------------------------------------------------------------------------------------------------


def test_a_slow_devices_first_update_does_not_explode() -> None:
    """Without a cap, it would count as much as all that the others sent meanwhile."""
    weight = rules.participation().factor(Facts(t=2000, tau=0, count=1, applied=1000, seen=2))
    assert weight == 4.0  # without: 500


def test_weights_act_once_per_update_and_not_on_the_step_of_a_version() -> None:
    rule = compose(rules.fedbuff(2, 1.0, constant()), rules.delay_adaptive(1), rules.momentum(0.0))
    answers = by_hand(rule, [Hand(18, 20, 0, 0), Hand(16, 20, 4, 1)])
    assert answers[-1] == pytest.approx(10 + (-2 - 4 / 4) / 2, rel=CLOSE)


def test_delay_adaptive_has_no_jump_where_it_begins() -> None:
    """1/staleness in place of free/staleness would jump from 1 to 1/(free + 1)."""
    factor = rules.delay_adaptive(32).factor
    assert math.isclose(factor(Facts(100, 99 - 33)), 32 / 33)
