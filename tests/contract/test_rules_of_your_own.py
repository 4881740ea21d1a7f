"""Rules that users write: with finishes, weights and the gate they mean what they mean alone, or they are refused."""

import numpy as np
import pytest

from offbeat.core import rules
from offbeat.core.gate import Gate, clipped
from offbeat.core.rules import (
    Answer,
    Facts,
    Finisher,
    Larger,
    Memory,
    Mix,
    Move,
    OnParameters,
    Product,
    Publication,
    Root,
    Rule,
    Steps,
    VectorStep,
    compose,
    move,
)
from offbeat.core.rules.composition import LANDING
from offbeat.core.rules.trial import tried
from offbeat.core.vectors import Order, Standing, Vectors
from offbeat.errors import InvalidValue
from tests.contract.rule_runs import NUMPY, Hand, by_hand, drawn, learning, model, run, start
from tests.contract.test_rule_hand_cases import learnt

NOTHING = rules.momentum(0.0)
"""A finish that changes nothing."""
D = move("_d", new=1.0, base=-1.0)


def answering(
    *steps: VectorStep, closing: tuple[VectorStep, ...] = (), slots: tuple[str, ...] = (), caches: int | None = None
) -> Rule:
    """A rule that publishes with every update, and always answers this."""
    answer = Steps(1.0, 1.0, 0.0, True, steps, closing)
    return Rule("own", lambda _, memory: (answer, memory), needs_base=True, slots=slots, caches=caches)


def alike(rule: Rule) -> None:
    """A rule and the same with a finish that changes nothing."""
    alone, finished = (run(one, start(0, 7), drawn(0), learning(0, 7)).x for one in (rule, compose(rule, NOTHING)))
    np.testing.assert_allclose(finished, alone, rtol=1e-4, atol=1e-4)


# --- memory ----------------------------------------------------------------------------------------------------------


def remembering(facts: Facts, memory: Memory) -> tuple[Answer, Memory]:
    """Every third update publishes; what is remembered in between is left out after it."""
    assert set(memory) <= {"staleness", "0.count"}
    count = memory.get("0.count", 0) + 1
    longest = max(memory.get("staleness", 0), facts.staleness)
    share = 1 / (3 + longest)
    return Mix(1.0, share, -share, count == 3), {} if count == 3 else {"0.count": count, "staleness": longest}


def test_a_rules_memory_is_its_own_whatever_the_names_in_it() -> None:
    alike(Rule("remembering", remembering, needs_base=True))


def test_finishes_remember_for_themselves() -> None:
    rule = compose(rules.delta(1.0), rules.amsgrad(0.1), rules.amsgrad(0.1))
    memory = rule.memory
    for count in range(1, 4):
        _, memory = rule.decide(Facts(count, count - 1), memory)
        assert sorted(memory.values()) == [0, count, count]


def test_slots_of_finishes_have_names_of_their_own() -> None:
    aggregate = Rule("own", rules.delta(1.0).formula, slots=("m", "m0", "m1"), needs_base=True)
    rule = compose(aggregate, rules.momentum(0.9), rules.momentum(0.9))
    assert len(set(rule.slots)) == len(rule.slots) == 6


# --- an aggregate of your own, with finishes -------------------------------------------------------------------------


def test_steps_into_g_or_into_x_plus_something_take_finishes() -> None:
    alike(answering(D, move("w", x=1.0, _d=0.3)))
    alike(answering(D, move("g", _d=0.3), closing=LANDING, slots=("g",)))


def test_steps_may_be_lists() -> None:
    def formula(_: Facts, memory: Memory) -> tuple[Answer, Memory]:
        return Steps(1.0, 0.3, -0.3, True, [D, move("g", _d=0.3)], list(LANDING)), memory  # type: ignore[arg-type]

    alike(Rule("lists", formula, needs_base=True, slots=("g",)))


@pytest.mark.parametrize(
    "rule",
    [
        answering(move("w", w=1.0, new=0.3, base=-0.3)),
        answering(D, move("w", x=1.0, w=0.5, _d=0.3)),
        answering(D, move("m", m=1.0, w=1.0), move("w", x=1.0, m=0.1), slots=("m",)),
        answering(D, OnParameters((move("w", x=1.0, _d=0.3),))),
        answering(D, closing=(move("w", x=1.0),)),
        answering(D, closing=(*LANDING, move("g", g=1.0)), slots=("g",)),
        answering(Product("w", 1.0, 0.3, "new", "base")),
    ],
    ids=lambda rule: str(rule.decide(Facts(1, 0), {})[0].steps)[:50],
)
def test_what_a_finish_would_not_see_is_refused(rule: Rule) -> None:
    tried(rule)  # alone, it may
    with pytest.raises(InvalidValue, match=r"rule with finishes .*w = x \+ \.\.\."):
        tried(compose(rule, NOTHING))


# --- what is read must be there --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (answering(move("w", w=1.0, v=1.0)), "rule own reads 'v', which is not there"),
        (answering(move("w", w=1.0, own=1.0)), "rule own reads 'own', which is not there"),
        (answering(move("w", _d=1.0)), "rule own reads '_d', which is not there"),
        (answering(Product("w", 0.0, 1.0, "new", "v")), "rule own reads 'v', which is not there"),
        (answering(Larger("w", "v")), "rule own reads 'v', which is not there"),
        (answering(Root("w", 1.0, "new", "v", 0.1)), "rule own reads 'v', which is not there"),
        (answering(D, closing=(move("w", x=1.0, new=1.0),)), "rule own reads 'new', which is not there"),
        (answering(D, closing=(move("w", x=1.0, _d=1.0),)), "rule own reads '_d', which is not there"),
        (
            answering(OnParameters((move("_a", new=1.0),)), move("w", x=1.0, _a=1.0)),
            "rule own reads '_a', which is not there for float buffers",
        ),
        (answering(move("x", new=1.0)), "rule own writes to 'x', which it may not"),
        (answering(move("new", x=1.0)), "rule own writes to 'new', which it may not"),
        (answering(move("mean", x=1.0)), "rule own writes to 'mean', which it may not"),
        (answering(move("v", new=1.0)), "rule own writes to 'v', which it may not"),
        (answering(move("own", new=1.0)), "rule own writes to 'own', which it may not"),
        (answering(D, closing=(move("own", x=1.0),), caches=0), "rule own writes to 'own', which it may not"),
        (answering(move("w", new=float("nan"))), "coefficients must be finite"),
        (answering(move("w", new=float("inf"))), "coefficients must be finite"),
        (answering(Product("w", 0.0, float("inf"), "new", "new")), "coefficients must be finite"),
        (answering(Root("w", 1.0, "new", "new", float("nan"))), "coefficients must be finite"),
    ],
)
def test_a_rule_that_answers_what_cannot_be_done_is_refused_before_the_run(rule: Rule, message: str) -> None:
    with pytest.raises(InvalidValue) as refusal:
        tried(rule)
    assert message in str(refusal.value)


def test_a_scratch_vector_of_parameters_may_be_read_for_parameters() -> None:
    tried(answering(OnParameters((move("_a", new=1.0), move("w", x=1.0, _a=1.0)))))
    tried(answering(move("_a", new=1.0), OnParameters((move("_a", _a=2.0),)), move("w", _a=1.0)))


def test_the_weight_that_people_see_is_finite_too() -> None:
    answer = Steps(1.0, float("nan"), 0.0, True, (move("w", new=1.0),))
    with pytest.raises(InvalidValue, match="must be finite"):
        tried(Rule("own", lambda _, memory: (answer, memory)))


@pytest.mark.parametrize("name", ["w", "x", "new", "base", "own", "mean", "_g", "a b", ""])
def test_a_slot_with_a_reserved_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=rf"rule own: a slot cannot be called '{name}'; w, x, new, base, own, mean"):
        answering(slots=(name,))


def test_a_rule_that_raises_is_refused_with_what_it_raised_and_for_what() -> None:
    rule = Rule("own", lambda _, memory: (Mix(0.5, 1 / memory["count"], 0.0, True), memory), {"count": 0})
    with pytest.raises(
        InvalidValue, match=r"rule own was tried on a made-up update and raised ZeroDivisionError: .*Facts\(t=1"
    ):
        tried(rule)


@pytest.mark.parametrize("answer", [None, 0.5, (0.5, 0.5), Mix("a", 0.5, 0.0, True)])  # type: ignore[arg-type]
def test_a_rule_that_answers_something_else_is_refused(answer: object) -> None:
    rule = Rule("own", lambda _, memory: (answer, memory))  # type: ignore[arg-type,return-value]
    with pytest.raises(InvalidValue, match="rule own was tried on a made-up update and raised"):
        tried(rule)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(factor: float) -> None:
    rule = compose(rules.delta(0.5), rules.Weight("odd", lambda _: factor))
    with pytest.raises(InvalidValue, match=r"weight odd is .* a weight must be a finite number > 0"):
        tried(rule)


def test_a_finish_that_reads_what_is_not_there_is_refused() -> None:
    def formula(_: Publication, memory: Memory) -> tuple[tuple[Move, ...], Memory]:
        return (move("g", v=1.0),), memory

    with pytest.raises(InvalidValue, match="reads 'v', which is not there"):
        tried(compose(rules.delta(0.5), Finisher("odd", formula)))


def test_a_rule_that_uses_x_tau_says_so() -> None:
    with pytest.raises(InvalidValue, match="rule own uses x_tau: build it with needs_base=True"):
        tried(Rule("own", lambda _, memory: (Steps(1.0, 1.0, -1.0, True, (D,)), memory)))


# --- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        answering(Product("w", 0.0, 1.0, "new", "new")),
        answering(move("_a", new=1.0), Larger("_a", "new"), move("w", _a=1.0)),
        answering(move("_a", x=1.0), Larger("_a", "new"), move("w", _a=1.0)),
        answering(OnParameters((move("w", new=1.0, base=-0.5),))),
        answering(D, move("w", x=1.0, _d=0.3)),
        rules.fedasync(0.5),
        rules.dcasgd(0.5, 0.5),
        rules.ca2fl(1, 0.5),
    ],
    ids=lambda rule: rule.spec,
)
def test_what_is_clipped_counts_as_if_it_had_been_pushed_so(rule: Rule) -> None:
    x, x_tau, x_new = (model([value, value], 0) for value in (10.0, 8.0, 16.0))
    pushed = model([10.0, 10.0], 0)  # a quarter of the way
    factor, _ = Gate(norm_max=2.0, policy="clip").judge(8.0, ())
    answer, _ = rule.decide(Facts(5, 2), rule.memory)
    plain, gated = (Vectors(Standing.first(x), NUMPY) for _ in range(2))
    plain.apply([Order(answer, pushed, x_tau, 5)])
    gated.apply([Order(clipped(answer, factor), x_new, x_tau, 5)])
    assert factor == 0.25
    np.testing.assert_allclose(gated.x.vector, plain.x.vector, rtol=1e-6)


# --- what is shown of a rule -----------------------------------------------------------------------------------------


def test_the_same_parts_in_another_order_are_another_rule() -> None:
    a, b = rules.momentum(0.5), rules.adam(0.1)
    first, second = (compose(rules.delta(1.0), *parts) for parts in ((a, b), (b, a)))
    assert first.spec != second.spec
    assert by_hand(first, learnt(-1, -2, -3)) != by_hand(second, learnt(-1, -2, -3))
    assert by_hand(first, [Hand(9, 10)]) == pytest.approx([9.9], rel=1e-3)
