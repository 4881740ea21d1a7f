"""Cases that were worked out by hand, one number per model: mostly x = 10, x_tau = 8, x_new = 6, staleness 3."""

import pytest

from offbeat import constant, polynomial
from offbeat.core import rules
from offbeat.core.rules import Facts, Rule, compose
from offbeat.method import method_of
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import AnswerPush, FleetJoined, MixUpdate, Outcome, SendTask, UpdateArrived, UpdateMixed
from offbeat.settings import Settings
from tests.contract.rule_runs import Hand, by_hand, by_hand_until

STALE = Hand(x_new=6.0, x_tau=8.0, staleness=3)
CLOSE = 1e-6


def learnt(*differences: float, staleness: int = 0) -> list[Hand]:
    """One update of every device in turn, each with what it has learnt."""
    return [Hand(20.0 + d, 20.0, staleness, device) for device, d in enumerate(differences)]


ONE_UPDATE: dict[str, tuple[Rule, float]] = {
    "fedasync": (rules.fedasync(0.6, polynomial(0.5)), 8.8),  # 0.7*10 + 0.3*6
    "delta": (rules.delta(0.6), 8.8),  # 10 - 0.6*2
    "delta, beta 0.2": (rules.delta(0.6, constant(), 0.2), 8.56),  # 10 + 0.6*(-2 - 0.4)
    "asyncfeded": (rules.asyncfeded(1.0, 1.0), 9.0),  # gamma = 2/2, so eta = 1/2
    "dcasgd": (rules.dcasgd(1.0, 0.5), 4.0),  # 10 + (-2 - 0.5*4*2)
    "fedbuff": (rules.fedbuff(1), 9.0),  # 10 - 2/2
    "fedavg": (rules.fedavg(1), 6.0),
    "nesterov": (rules.nesterov(1, 1.0, 0.5), 7.0),  # 10 - 2 - 0.5*2
    "ca2fl": (rules.ca2fl(1, devices=4), 8.0),  # h = 0, and no cache yet
    "ace": (rules.ace(1.0, devices=4), 9.5),  # 10 - 2/4
    "adam": (compose(rules.delta(1.0), rules.adam(0.1, eps=0.0)), 9.9),  # m = 0.1*-2, v = 0.01*4
    "momentum": (compose(rules.delta(1.0), rules.momentum(0.9)), 8.0),
}


@pytest.mark.parametrize("name", ONE_UPDATE)
def test_one_stale_update(name: str) -> None:
    rule, answer = ONE_UPDATE[name]
    assert by_hand(rule, [STALE]) == pytest.approx([answer], rel=CLOSE)


def test_fedbuff_of_two() -> None:
    updates = [STALE, Hand(9.0, 10.0)]  # -2 weighs 1/2, -1 weighs 1
    assert by_hand(rules.fedbuff(2), updates) == pytest.approx([9.5, 9.0], rel=CLOSE)


def test_fedbuff_with_momentum() -> None:
    rule = compose(rules.fedbuff(1), rules.momentum(0.9))
    assert by_hand(rule, learnt(-1, -1)) == pytest.approx([9.0, 7.1], rel=CLOSE)


def test_a_delay_adaptive_step() -> None:
    rule = compose(rules.delta(0.5), rules.delay_adaptive(2))
    assert by_hand(rule, learnt(-2, staleness=8)) == pytest.approx([9.75], rel=CLOSE)  # 0.5 * 2/8 * -2


def test_ca2fl_of_four_devices() -> None:
    updates = [Hand(8, 10, device=1), Hand(6, 10, device=2), Hand(6, 7, device=1), Hand(4, 7, device=3)]
    rule = rules.ca2fl(2, devices=4)
    assert by_hand(rule, updates)[1::2] == pytest.approx([7.0, 4.5], rel=CLOSE)
    for count, h in ((2, -1.5), (4, -2.0)):
        assert by_hand_until(rule, updates[:count]).standing.slots["sum"].item() / 4 == h


def test_ace_of_four_devices() -> None:
    updates = [Hand(8, 10, device=1), Hand(6, 10, device=2), Hand(9, 10, device=1)]
    assert by_hand(rules.ace(1.0, devices=4), updates) == pytest.approx([9.5, 8.0, 6.75], rel=CLOSE)


@pytest.mark.parametrize(("staleness", "answer"), [(0, 9.9), (1, 9.9), (5, 9.98)])
def test_the_first_step_of_fadas(staleness: int, answer: float) -> None:
    without_eps = compose(rules.fedbuff(1, 1.0, constant()), rules.amsgrad(0.1, eps=0.0))
    for rule in (without_eps, rules.fadas(1, 0.1)):
        assert by_hand(rule, learnt(-2, staleness=staleness)) == pytest.approx([answer], rel=CLOSE)


def test_delayed_nesterov_of_two() -> None:
    assert by_hand(rules.nesterov(2, 1.0, 0.5), learnt(-2, -4)) == pytest.approx([9.0, 5.5], rel=CLOSE)


def test_participation_of_two_devices() -> None:
    """Eight updates, six of one device and two of the other: in all, both count 4."""
    rule = compose(rules.delta(0.125), rules.participation())
    for devices, factor in (([1, 1] + [0] * 6, 2 / 3), ([0] * 6 + [1, 1], 2.0)):
        *_, before, after = [10.0, *by_hand(rule, [Hand(8, 16, device=device) for device in devices])]
        assert (before - after) / (0.125 * 8) == pytest.approx(factor, rel=1e-5)
        assert rules.participation().factor(Facts(9, 0, count=devices.count(devices[-1]), applied=8, seen=2)) == factor


# --- what the coordinator refuses ------------------------------------------------------------------------------------


def outcomes(rule: str, tasks: int) -> tuple[list[Outcome], int]:
    """What becomes of tasks that all started from version 0, pushed one after the other; and the versions then."""
    made = method_of(Settings(rule=rule, alpha=1.0, devices=tasks, in_flight_max=tasks), object())
    c, found = Coordinator(made.rule, made.plan), []
    leases = [command.lease for command in c.handle(FleetJoined(0.0, tasks)) if isinstance(command, SendTask)]
    assert len(leases) == tasks
    for lease in leases:
        commands = c.handle(UpdateArrived(1.0, lease.worker, lease.task, 1, 1))
        found += [command.outcome for command in commands if isinstance(command, AnswerPush)]
        for command in commands:
            if isinstance(command, MixUpdate):
                c.handle(UpdateMixed(1.0, command.decision.sequence))
    return found, c.t_decided


def test_ringmaster_of_three_applies_2_and_refuses_3() -> None:
    """What is refused makes no version: the fifth has a staleness of 3, too."""
    found, t = outcomes("ringmaster:3", 5)  # their staleness is 0, 1, 2, 3, 3
    assert found == [Outcome.APPLIED] * 3 + [Outcome.TOO_STALE] * 2
    assert t == 3
    assert by_hand(rules.ringmaster(1.0, 3), [STALE._replace(staleness=2)]) == [8.0]


def test_rennala_applies_fresh_updates_alone() -> None:
    found, t = outcomes("rennala:2", 5)
    assert found == [Outcome.APPLIED] * 2 + [Outcome.TOO_STALE] * 3
    assert t == 1
    assert by_hand(rules.rennala(2), learnt(-2, -4)) == pytest.approx([9.0, 7.0], rel=CLOSE)
