"""What must be the same under two rules, and what a shift of all models must do."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import constant, polynomial
from offbeat.core import rules
from offbeat.core.layout import Vector
from offbeat.core.rules import Facts, Rule, compose, ema, poly
from offbeat.core.vectors import Order, Standing, Vectors
from tests.contract.rule_cases import CASES
from tests.contract.rule_runs import NUMPY, Arrival, Run, drawn, learning, model, run, start

SIZE, DEVICES = 7, 5


def assert_near(a: npt.ArrayLike, b: npt.ArrayLike) -> None:
    np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), rtol=1e-5, atol=1e-5)


def ran(rule: Rule, arrivals: list[Arrival] | None = None, seed: int = 0) -> Run:
    return run(rule, start(seed, SIZE), arrivals or drawn(seed), learning(seed, SIZE))


def assert_same_bits(a: Run, b: Run) -> None:
    assert [x.vector.tobytes() for x in a.versions] == [x.vector.tobytes() for x in b.versions]


def assert_close(a: Run, b: Run) -> None:
    assert len(a.versions) > 5
    assert_near([x.vector for x in a.versions], [x.vector for x in b.versions])


PAIRS = {
    "fedbuff of one is delta": (rules.fedbuff(1, 0.5, constant()), rules.delta(0.5)),
    "fedbuff of one, discounted, is delta, discounted": (rules.fedbuff(1), rules.delta(1.0, polynomial(0.5))),
    "dcasgd without lambda is delta": (rules.dcasgd(0.5, 0.0), rules.delta(0.5)),
    "dcasgd without lambda has delta's discount": (
        rules.dcasgd(0.5, 0.0, polynomial(0.5)),
        rules.delta(0.5, polynomial(0.5)),
    ),
    "ringmaster, where nothing is too stale, is delta": (rules.ringmaster(0.5, 9), rules.delta(0.5)),
    "rennala, where everything is fresh, is fedbuff": (rules.rennala(3), rules.fedbuff(3, 1.0, constant())),
    "a delay-adaptive step, where no delay is longer, is delta": (
        compose(rules.delta(0.5), rules.delay_adaptive(4)),
        rules.delta(0.5),
    ),
    "ca2fl of as many groups as devices is ca2fl": (rules.ca2fl(3, 0.5, groups=DEVICES), rules.ca2fl(3, 0.5)),
    "ace of as many groups as devices is ace": (rules.ace(0.2, groups=DEVICES), rules.ace(0.2)),
    "ca2fl with seen devices is ca2fl, once all were seen": (
        rules.ca2fl(DEVICES, 0.5, devices=DEVICES),
        rules.ca2fl(DEVICES, 0.5),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_rules_have_the_same_bits(pair: str) -> None:
    arrivals = [Arrival(i % DEVICES, 0 if "fresh" in pair else k % 5) for k, i in enumerate(range(40))]
    a, b = (ran(rule, arrivals) for rule in PAIRS[pair])
    assert_same_bits(a, b)


@pytest.mark.parametrize("rule", [rules.fedbuff(3), rules.nesterov(2), rules.ca2fl(3, 0.5), rules.fedavg(4)], ids=str)
def test_momentum_0_changes_nothing_but_rounding(rule: Rule) -> None:
    assert_close(ran(compose(rule, rules.momentum(0.0))), ran(rule))


def test_ca2fl_with_every_device_once_per_buffer_is_fedbuff_whatever_the_caches() -> None:
    rng, n = np.random.default_rng(3), 4
    caches = {device: rng.normal(size=SIZE).astype(np.float32) for device in range(n)}
    x_0, (rule, plain) = start(0, SIZE), (rules.ca2fl(n), rules.fedbuff(n, 1.0, constant()))
    slots = {"sum": np.asarray(np.sum([*caches.values()], axis=0), np.float32)}
    calibrated = Vectors(Standing(x_0, x_0, slots), NUMPY, caches=caches)
    buffered = Vectors(Standing.first(x_0), NUMPY)
    memory, count = {"count": 0, "there": n}, plain.memory
    for t in range(1, 7):
        for device in rng.permutation(n):
            x_new, facts = model(rng.normal(size=SIZE)), Facts(t, t - 1, int(device), caches=n)
            answer, memory = rule.decide(facts, memory)  # type: ignore[assignment]
            calibrated.apply([Order(answer, x_new, calibrated.x, t if answer.publish else None)])
            mix, count = plain.decide(facts, count)
            buffered.apply([Order(mix, x_new, buffered.x, t if mix.publish else None)])
        assert_near(calibrated.x.vector, buffered.x.vector)


def test_ace_steps_by_the_mean_of_what_every_device_sent_last() -> None:
    result = ran(rules.ace(0.2, devices=DEVICES), [Arrival(k % DEVICES, k % 3) for k in range(25)])
    differences = [
        order.x_new.vector.astype(float) - order.x_tau.vector
        for order in result.orders
        if order.x_new is not None and order.x_tau is not None
    ]
    for k in range(DEVICES - 1, 25):
        step = result.versions[k + 1].vector.astype(float) - result.versions[k].vector
        assert_near(step, 0.2 * np.mean(differences[k - DEVICES + 1 : k + 1], axis=0))


def test_nesterov_of_one_is_nesterovs_momentum() -> None:
    eta, beta, m = 0.5, 0.8, np.zeros(SIZE)
    result = ran(rules.nesterov(1, eta, beta), [Arrival(0)] * 20)
    x = result.versions[0].vector.astype(float)
    for k, order in enumerate(result.orders):
        assert order.x_new is not None
        d = order.x_new.vector - result.versions[k].vector.astype(float)
        m = beta * m + d
        x = x + eta * (d + beta * m)
        assert_near(result.versions[k + 1].vector, x)


@pytest.mark.parametrize("m", [1, 3])
def test_the_first_step_of_fadas_is_eta_times_the_sign(m: int) -> None:
    result = ran(rules.fadas(m, 0.01, 9), [Arrival(device) for device in range(m)])
    x_0, trained = result.versions[0].vector.astype(float), SIZE - 2
    g = np.mean([order.x_new.vector - x_0 for order in result.orders if order.x_new is not None], axis=0)
    step = result.x - x_0
    np.testing.assert_allclose(step[:trained], 0.01 * np.sign(g[:trained]), rtol=1e-3)
    assert_near(step[trained:], g[trained:])  # float buffers are averaged as they are


@pytest.mark.parametrize("average", [poly(0), poly(8), ema(0.3), ema(1.0)], ids=str)
@pytest.mark.parametrize("name", ["fedasync", "fedbuff + momentum", "ace seen", "dcasgd"])
def test_the_average_of_versions_that_stand_still_is_the_version(name: str, average: rules.Average) -> None:
    def stand_still(x_tau: Vector, _: int) -> npt.ArrayLike:
        return x_tau

    x_0 = start(0, SIZE)
    result = run(CASES[name].rule, x_0, drawn(0, count=60), stand_still, average=average)
    assert len(result.means) > 10
    for mean in result.means:
        np.testing.assert_allclose(mean.vector, x_0.vector, rtol=1e-5)


# --- a shift of all models -------------------------------------------------------------------------------------------

SHIFTED = [name for name in CASES if not any(word in name for word in ("adam", "amsgrad", "fadas", "dcasgd"))]
"""Steps that are divided by their own size turn the rounding of a shift into a step."""


@settings(derandomize=True, deadline=None, max_examples=120)
@given(st.sampled_from(SHIFTED), st.integers(0, 99), st.floats(-8, 8, width=32))
def test_a_shift_of_every_model_shifts_the_result(name: str, seed: int, shift: float) -> None:
    case = CASES[name]
    arrivals = drawn(seed, 24, staleness_max=case.staleness_max)
    noise = np.random.default_rng(seed).normal(size=(24, SIZE))

    def moved(by: float) -> Run:
        def local(x_tau: Vector, number: int) -> npt.ArrayLike:
            return np.asarray(by + 0.8 * (x_tau - by) + noise[number])

        return run(case.rule, model(start(seed, SIZE).vector + np.float32(by)), arrivals, local)

    plain, shifted = moved(0.0), moved(shift)
    size = max(1.0, *(float(np.abs(x.vector).max()) for x in plain.versions))
    np.testing.assert_allclose(shifted.x, plain.x + shift, atol=2e-4 * size)


def test_the_shift_would_show_coefficients_that_do_not_sum_to_one() -> None:
    leaking = Rule("leaking", lambda _, memory: (rules.Mix(0.5, 0.49, 0.0, True), memory))
    starts = {by: model(np.full(SIZE, by)) for by in (0.0, 4.0)}
    plain, shifted = (run(leaking, x_0, drawn(0, 24), lambda x_tau, _: x_tau).x - by for by, x_0 in starts.items())
    assert np.abs(shifted - plain).max() > 0.1
