"""Mixing rules are pure scalar arithmetic: same facts, same coefficients, and nothing kept on an object."""

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.rules import Facts, Memory, Mix, Rule, delta, fedasync, fedavg, fedbuff, from_spec, scaled_from
from offbeat.core.staleness import constant, exponential, hinge, polynomial
from offbeat.errors import InvalidValue, OffbeatError

BAD_ALPHAS = [0, 0.0, -0.1, 1.0000001, 2, math.nan, math.inf, -math.inf]
ALPHAS = st.floats(0, 1, exclude_min=True)
STALENESS_FNS = st.sampled_from([constant(), polynomial(0.5), hinge(10, 4), exponential(0.3)])
KS = st.integers(1, 6)
FEDASYNC = st.builds(fedasync, ALPHAS, STALENESS_FNS)
DELTA = st.builds(delta, ALPHAS, STALENESS_FNS, st.floats(0, 1))
FEDBUFF = st.builds(fedbuff, KS, st.floats(0.01, 10), STALENESS_FNS)
FEDAVG = st.builds(fedavg, KS)
FACTS = st.integers(1, 10**6).flatmap(
    lambda t: st.builds(
        Facts, st.just(t), st.integers(0, t - 1), device=st.integers(0, 99), samples=st.integers(1, 10**9)
    )
)
FRESH = Facts(t=1, tau=0)
REFUSED = r"is unknown; .*use fedasync, delta|is not as it is written|must be a whole number"


def decided(rule: Rule, facts: list[Facts]) -> list[Mix]:
    mixes, memory = list[Mix](), rule.memory
    for fact in facts:
        mix, memory = rule.decide(fact, memory)
        assert isinstance(mix, Mix)
        mixes.append(mix)
    return mixes


@settings(derandomize=True, deadline=None, max_examples=150)
@given(FEDASYNC | DELTA | FEDBUFF | FEDAVG, st.lists(FACTS, min_size=1, max_size=8))
def test_same_arguments_same_answer_and_arguments_untouched(rule: Rule, facts: list[Facts]) -> None:
    memory = rule.memory
    for fact in facts:
        before, locked = dict(memory), MappingProxyType(dict(memory))
        first = rule.decide(fact, locked)
        assert rule.decide(fact, locked) == first
        assert dict(locked) == before
        assert dict(memory) == before
        memory = first[1]
    assert decided(rule, facts) == decided(rule, facts)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(FEDASYNC | DELTA | FEDBUFF | FEDAVG, st.lists(FACTS, min_size=1, max_size=8))
def test_coefficients_sum_to_one(rule: Rule, facts: list[Facts]) -> None:
    for mix in decided(rule, facts):
        assert mix.keep + mix.new + mix.base == pytest.approx(1.0, abs=1e-12)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(FEDASYNC | FEDAVG, st.lists(FACTS, min_size=1, max_size=8))
def test_means_are_convex_and_need_no_base(rule: Rule, facts: list[Facts]) -> None:
    assert not rule.needs_base
    for mix in decided(rule, facts):
        assert 0.0 <= mix.keep <= 1.0
        assert 0.0 <= mix.new <= 1.0
        assert mix.base == 0.0


@settings(derandomize=True, deadline=None, max_examples=150)
@given(ALPHAS, STALENESS_FNS, FACTS)
def test_fedasync_is_the_papers_rule(alpha: float, s: Callable[[int], float], facts: Facts) -> None:
    alpha_t = alpha * s(facts.t - 1 - facts.tau)
    rule = fedasync(alpha, s)
    for _ in range(3):  # alpha must not compound
        assert rule.decide(facts, rule.memory) == (Mix(1.0 - alpha_t, alpha_t, 0.0, True), {})


@settings(derandomize=True, deadline=None, max_examples=100)
@given(ALPHAS, STALENESS_FNS, FACTS)
def test_delta_is_plain_with_beta_0_and_fedasync_with_beta_1(
    alpha: float, s: Callable[[int], float], facts: Facts
) -> None:
    alpha_t = alpha * s(facts.staleness)
    plain, pulled = delta(alpha, s), delta(alpha, s, beta=1.0)
    assert plain.needs_base
    assert plain.decide(facts, {})[0] == Mix(1.0, alpha_t, -alpha_t, True)
    assert pulled.decide(facts, {}) == fedasync(alpha, s).decide(facts, {})


def test_delta_pulls_back_by_beta() -> None:
    mix, _ = delta(0.5, beta=0.25).decide(FRESH, {})
    assert mix == Mix(0.875, 0.5, -0.375, True)


@pytest.mark.parametrize("build", [fedasync, delta, lambda alpha: scaled_from(alpha, 10)])
@pytest.mark.parametrize("alpha", BAD_ALPHAS)
def test_alpha_out_of_range_is_refused_when_built(build: Callable[[float], object], alpha: float) -> None:
    with pytest.raises(InvalidValue, match=r"must lie in \(0, 1\]"):
        build(alpha)


@pytest.mark.parametrize("build", [fedasync, delta])
@pytest.mark.parametrize("alpha", BAD_ALPHAS)
def test_a_schedule_out_of_range_is_refused_at_use(build: Callable[..., Rule], alpha: float) -> None:
    rule = build(lambda t: 0.5 if t == 1 else alpha)
    assert rule.decide(FRESH, rule.memory)[0].new == 0.5
    with pytest.raises(InvalidValue, match=r"must lie in \(0, 1\]"):
        rule.decide(Facts(t=2, tau=1), rule.memory)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.floats(1e-6, 1), st.integers(1, 1000), st.floats(0.01, 1), st.integers(1, 2000))
def test_scaled_from_scales_from_its_epoch_on(alpha: float, epoch: int, factor: float, t: int) -> None:
    expected = alpha if t < epoch else alpha * factor
    assert scaled_from(alpha, epoch, factor)(t) == expected
    rule = fedasync(scaled_from(alpha, epoch, factor))
    assert rule.decide(Facts(t=t, tau=t - 1), rule.memory)[0].new == expected


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0, math.nan])
def test_scaled_from_refuses_a_factor_that_leaves_the_range(factor: float) -> None:
    with pytest.raises(InvalidValue, match=r"must lie in \(0, 1\]"):
        scaled_from(0.9, 800, factor)


@pytest.mark.parametrize(("t", "tau"), [(1, 1), (3, 3), (3, 4), (3, -1), (0, 0), (0, -1)])
def test_facts_refuse_a_tau_that_was_not_yet_published(t: int, tau: int) -> None:
    with pytest.raises(InvalidValue, match=f"tau is {tau}"):
        Facts(t=t, tau=tau)


@pytest.mark.parametrize("samples", [0, -5])
def test_facts_refuse_an_update_without_samples(samples: int) -> None:
    with pytest.raises(InvalidValue, match="at least one sample"):
        Facts(t=1, tau=0, samples=samples)


def test_staleness_is_zero_when_fresh_and_counts_versions() -> None:
    assert [Facts(t=7, tau=tau).staleness for tau in (6, 5, 0)] == [0, 1, 6]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(KS, st.floats(0.01, 10), STALENESS_FNS, st.lists(FACTS, min_size=1, max_size=15))
def test_fedbuff_publishes_every_kth(k: int, eta: float, s: Callable[[int], float], facts: list[Facts]) -> None:
    rule = fedbuff(k, eta, s)
    mixes = decided(rule, facts)
    assert [mix.publish for mix in mixes] == [n % k == 0 for n in range(1, len(facts) + 1)]
    assert [mix.new for mix in mixes] == pytest.approx([s(fact.staleness) * eta / k for fact in facts])
    assert all(mix.keep == 1.0 and mix.base == -mix.new for mix in mixes)
    assert rule.needs_base


@settings(derandomize=True, deadline=None, max_examples=60)
@given(KS, st.lists(st.tuples(st.integers(1, 1000), st.floats(-100, 100)), min_size=1, max_size=18))
def test_fedavg_is_the_weighted_mean_of_each_group(k: int, pushes: list[tuple[int, float]]) -> None:
    rule, w, group = fedavg(k), 1e6, []
    memory = rule.memory
    for samples, value in pushes:
        mix, memory = rule.decide(Facts(t=1, tau=0, samples=samples), memory)
        w = mix.keep * w + mix.new * value
        group.append((samples, value))
        counts, values = zip(*group, strict=True)
        assert w == pytest.approx(np.average(values, weights=counts), abs=1e-9)
        assert mix.publish == (len(group) == k)
        if mix.publish:
            group = []
            assert memory == rule.memory == {"count": 0, "samples": 0}


@pytest.mark.parametrize("build", [fedbuff, fedavg])
@pytest.mark.parametrize("k", [0, -1, 1.5, 2.0, True, "2", None, math.nan])
def test_a_bad_k_is_refused(build: Callable[[Any], Rule], k: Any) -> None:
    with pytest.raises(InvalidValue, match=r"k is .* but must be a whole number >= 1"):
        build(k)


@pytest.mark.parametrize("eta", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_eta_is_refused(eta: float) -> None:
    with pytest.raises(InvalidValue, match="eta"):
        fedbuff(2, eta)


@pytest.mark.parametrize("beta", [-0.1, 1.1, math.nan])
def test_a_bad_beta_is_refused(beta: float) -> None:
    with pytest.raises(InvalidValue, match="beta"):
        delta(0.5, beta=beta)


@pytest.mark.parametrize("staleness_fn", [None, 0.5, "polynomial:0.5"])
def test_a_staleness_fn_that_is_not_callable_is_refused(staleness_fn: Any) -> None:
    for build in (fedasync, delta):
        with pytest.raises(InvalidValue, match="staleness_fn must be a function"):
            build(0.5, staleness_fn)
    with pytest.raises(InvalidValue, match="staleness_fn must be a function"):
        fedbuff(2, staleness_fn=staleness_fn)


def test_a_custom_staleness_fn_is_checked() -> None:
    assert fedasync(0.5, lambda u: 1 / (u + 1)).decide(Facts(t=4, tau=0), {})[0].new == 0.125
    with pytest.raises(InvalidValue, match=r"s\(0\)"):
        fedasync(0.5, lambda _: 0.5)


def answering(mix: Mix) -> Callable[[Facts, Memory], tuple[Mix, Memory]]:
    return lambda _, memory: (mix, memory)


def test_a_custom_rule_that_uses_x_tau_must_say_so() -> None:
    formula = answering(Mix(1.0, 0.5, -0.5, True))
    with pytest.raises(InvalidValue, match="needs_base=True"):
        Rule("mine", formula).decide(FRESH, {})
    assert Rule("mine", formula, needs_base=True).decide(FRESH, {}) == (Mix(1.0, 0.5, -0.5, True), {})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_coefficients_that_are_not_finite_are_refused(bad: float) -> None:
    for mix in (Mix(bad, 0.5, 0.5, True), Mix(0.5, bad, 0.5, True), Mix(0.5, 0.5, bad, True)):
        with pytest.raises(InvalidValue, match="coefficients must be finite"):
            Rule("mine", answering(mix), needs_base=True).decide(FRESH, {})


def test_a_custom_rule_keeps_its_memory_outside() -> None:
    rule = Rule("counting", lambda _, memory: (Mix(0.0, 1.0, 0.0, True), {"seen": memory["seen"] + 1}), {"seen": 0})
    first = rule.decide(FRESH, rule.memory)[1]
    assert rule.decide(FRESH, first)[1] == {"seen": 2}
    assert rule.memory == {"seen": 0}


def test_specs_tell_rules_apart() -> None:
    rules = [
        *(fedasync(0.6), fedasync(0.7), fedasync(0.6, polynomial(0.5)), fedasync(scaled_from(0.6, 800))),
        *(delta(0.6), delta(0.6, beta=0.5), fedbuff(2), fedbuff(3), fedbuff(2, eta=0.5), fedavg(2)),
    ]
    assert len({rule.spec for rule in rules}) == len(rules)
    assert fedasync(0.6, hinge(10, 4)) == fedasync(0.6, hinge(10, 4))


def test_specs_tell_numbers_apart_to_the_last_digit() -> None:
    near = math.nextafter(0.6, 1.0)
    assert fedasync(0.6) != fedasync(near)
    assert delta(0.5, beta=0.6) != delta(0.5, beta=near)
    assert fedbuff(2, 0.6) != fedbuff(2, near)


def test_specs_are_equal_where_the_numbers_are() -> None:
    assert fedasync(1) == fedasync(1.0) == fedasync(np.float64(1.0))
    assert delta(0.5, beta=0) == delta(np.float64(0.5), beta=0.0)
    assert fedbuff(2, 1) == fedbuff(2, 1.0)


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("fedasync", fedasync(0.6, hinge(10, 4))),
        ("delta", delta(0.6, hinge(10, 4))),
        ("delta:0.25", delta(0.6, hinge(10, 4), 0.25)),
        ("fedbuff:10", fedbuff(10, staleness_fn=hinge(10, 4))),
        ("fedbuff:10,0.5", fedbuff(10, 0.5, hinge(10, 4))),
        ("fedavg:3", fedavg(3)),
        ("sgd", fedasync(1.0)),
    ],
)
def test_a_settings_string_names_its_rule(spec: str, rule: Rule) -> None:
    named = from_spec(spec, 0.6, hinge(10, 4))
    assert named == rule
    facts = [Facts(t=t, tau=t // 3, samples=t) for t in range(1, 20)]
    assert decided(named, facts) == decided(rule, facts)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "fedsync", "FedAsync", "fedasync:1", "sgd:1", "delta:1,2", "delta:a", "fedbuff", "fedbuff:"),
        *("fedbuff:1.5", "fedbuff:nan", "fedbuff:inf", "fedbuff:2,1,1", "fedavg", "fedavg:2,3", "fedavg:x"),
    ],
)
def test_a_settings_string_that_names_nothing_is_refused(spec: str) -> None:
    with pytest.raises(InvalidValue, match=REFUSED):
        from_spec(spec, 0.6, constant())


@pytest.mark.parametrize("spec", ["fedbuff:0", "fedbuff:-1", "fedbuff:2,0", "fedavg:0", "delta:2", "delta:nan"])
def test_a_settings_string_with_numbers_out_of_range_says_which(spec: str) -> None:
    with pytest.raises(InvalidValue, match="but must"):
        from_spec(spec, 0.6, constant())


@pytest.mark.parametrize("wrong", [lambda: fedasync(0), lambda: Facts(t=1, tau=1), lambda: fedavg(0)])
def test_refusals_belong_to_the_error_tree_and_are_value_errors(wrong: Callable[[], object]) -> None:
    with pytest.raises(OffbeatError) as refusal:
        wrong()
    assert isinstance(refusal.value, ValueError)
