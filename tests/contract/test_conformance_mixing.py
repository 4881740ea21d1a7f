"""Conformance of one mixing step and of what it implies for a run: T10, T14 and the identities of T16.

Rules kept here:
- Runs that must be the same run are compared bit for bit, at every version.
- Devices push vectors of size 1, so an absolute tolerance is one in units of float32 rounding, 6e-8.
"""

from collections.abc import Callable

import numpy as np
import pytest

import offbeat
from offbeat import Facts, Rule
from offbeat.core.kernel import Updater
from offbeat.core.layout import Vector
from tests.contract.schedule import Arrival, Local, Run, jittered, lagged, run, same_bits

WIDTH = 50


def start_at() -> Vector:
    return np.random.default_rng(1).standard_normal(WIDTH, np.float32)


def learning() -> Local:
    """Devices that move a quarter of the way to a target drawn anew each time."""
    rng = np.random.default_rng(2)
    return lambda x_tau, _: x_tau + np.float32(0.25) * (rng.standard_normal(WIDTH, np.float32) - x_tau)


def delayed(rule: Rule, *, staleness_max: int, epochs: int = 200) -> Run:
    schedule = jittered(np.random.default_rng(3), [0] * epochs, staleness_max)
    assert max(t - arrival.tau for t, arrival in enumerate(schedule)) == staleness_max
    return run(rule, start_at(), schedule, learning())


def same_run(a: Run, b: Run) -> bool:
    return all(same_bits(x, y) for x, y in zip(a.versions, b.versions, strict=True))


def weight(rule: Rule, staleness: int) -> float:
    return rule.decide(Facts(t=100, tau=99 - staleness), rule.memory)[0].new


# --- T10: staleness functions ----------------------------------------------------------------------------------------


def test_t10_polynomial_and_hinge_take_the_papers_values() -> None:
    polynomial, hinge = offbeat.polynomial(0.5), offbeat.hinge(10, 4)
    assert [polynomial(u) for u in (0, 1, 3, 15)] == pytest.approx([1, 2**-0.5, 0.5, 0.25], rel=1e-15)
    assert [hinge(u) for u in range(5)] == [1.0] * 5
    assert [hinge(u) for u in (5, 6, 15)] == pytest.approx([1 / 11, 1 / 21, 1 / 111], rel=1e-15)


@pytest.mark.parametrize("s", [offbeat.constant(), offbeat.polynomial(0.5), offbeat.hinge(10, 4)])
@pytest.mark.parametrize("staleness", [0, 1, 4, 5, 15, 99])
def test_t10_the_weight_is_alpha_times_s_of_the_versions_in_between(s: Callable[[int], float], staleness: int) -> None:
    assert weight(offbeat.fedasync(0.6, s), staleness) == 0.6 * s(staleness)


def test_t10_hinge_is_constant_bit_for_bit_while_no_staleness_exceeds_b() -> None:
    constant = delayed(offbeat.fedasync(0.9), staleness_max=4)
    assert same_run(constant, delayed(offbeat.fedasync(0.9, offbeat.hinge(10, 4)), staleness_max=4))
    assert not same_run(constant, delayed(offbeat.fedasync(0.9, offbeat.hinge(10, 3)), staleness_max=4))


def test_t10_without_staleness_every_function_gives_the_same_run_bit_for_bit() -> None:
    functions = [offbeat.polynomial(0.5), offbeat.hinge(10, 4), offbeat.hinge(10, 0), offbeat.exponential(1)]
    constant = delayed(offbeat.fedasync(0.6), staleness_max=0)
    assert all(same_run(constant, delayed(offbeat.fedasync(0.6, s), staleness_max=0)) for s in functions)


def test_t10_alpha_does_not_compound_over_a_run() -> None:
    s = offbeat.polynomial(0.5)
    schedule = jittered(np.random.default_rng(4), [0] * 300, 15)
    mixes = run(offbeat.fedasync(0.6, s), start_at(), schedule, learning()).mixes
    assert [mix.new for mix in mixes] == [0.6 * s(t - arrival.tau) for t, arrival in enumerate(schedule)]


# --- T14: every version is a weighted mean of x_0 and of what was pushed ----------------------------------------------


def drawn_alphas(epochs: int) -> Callable[[int], float]:
    alphas = np.random.default_rng(5).uniform(0.05, 1, epochs)
    return lambda t: float(alphas[t - 1])


def test_t14_versions_are_means_of_the_pushed_models_with_weights_that_sum_to_one() -> None:
    epochs, alpha = 30, drawn_alphas(30)
    pushed = np.random.default_rng(6).standard_normal((epochs, WIDTH), np.float32)
    models = iter(pushed)
    result = run(offbeat.fedasync(alpha), start_at(), lagged(3, epochs), lambda *_: next(models))
    alphas = np.array([alpha(t) for t in range(1, epochs + 1)])
    left = np.append(np.cumprod(1 - alphas[::-1])[::-1], 1.0)  # how much of the state before epoch j survives
    weights = np.append(left[0], alphas * left[1:])
    assert weights.sum() == pytest.approx(1, abs=1e-14)
    assert [mix.keep + mix.new for mix in result.mixes] == pytest.approx([1] * epochs, abs=1e-15)
    answer = weights @ np.vstack([start_at(), pushed]).astype(float)
    # about two roundings at size 3 per epoch, forgotten as 1 - alpha: below ten in all
    np.testing.assert_allclose(result.x, answer, atol=2e-6)


def test_t14_no_version_leaves_the_hull_of_the_model_before_and_the_pushed_one() -> None:
    epochs = 300
    pushed = np.random.default_rng(7).standard_normal((epochs, 2_000), np.float32)
    models = iter(pushed)
    x_0 = np.random.default_rng(8).standard_normal(2_000, np.float32)
    versions = run(offbeat.fedasync(drawn_alphas(epochs)), x_0, lagged(0, epochs), lambda *_: next(models)).versions
    for before, x_new, after in zip(versions, pushed, versions[1:], strict=False):
        ulps = 2 * np.spacing(np.maximum(np.abs(before), np.abs(x_new)))
        # 1 - alpha and alpha, both products and the sum are each rounded once: two units in the last place
        assert (after >= np.minimum(before, x_new) - ulps).all()
        assert (after <= np.maximum(before, x_new) + ulps).all()


@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.9])
def test_t14_the_distance_to_a_model_that_all_devices_push_shrinks_by_one_minus_alpha(alpha: float) -> None:
    c = np.random.default_rng(9).standard_normal(WIDTH, np.float32)
    versions = run(offbeat.fedasync(alpha), start_at(), lagged(5, 40), lambda *_: c).versions
    for t, x in enumerate(versions):
        answer = c + (1 - alpha) ** t * (start_at().astype(float) - c)
        # two roundings at size 3 per epoch add up to 1/alpha of them; 1 - alpha missed once would be 1e-2
        np.testing.assert_allclose(x, answer, atol=5e-7 / alpha)


# --- T16: the family between the delta rule and FedAsync --------------------------------------------------------------


@pytest.mark.parametrize("s", [offbeat.constant(), offbeat.polynomial(0.5), offbeat.hinge(10, 4)])
def test_t16_a_pull_back_of_one_is_fedasync_bit_for_bit(s: Callable[[int], float]) -> None:
    fedasync = delayed(offbeat.fedasync(0.6, s), staleness_max=15)
    assert same_run(fedasync, delayed(offbeat.delta(0.6, s, beta=1), staleness_max=15))
    assert not same_run(fedasync, delayed(offbeat.delta(0.6, s, beta=0.999), staleness_max=15))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.25, 1.0])
def test_t16_a_step_adds_what_was_learnt_and_the_pull_back(beta: float, compiled: bool) -> None:
    if compiled:
        pytest.importorskip("numba")
    x_new = np.random.default_rng(10).standard_normal(WIDTH, np.float32)
    rule, schedule = offbeat.delta(0.6, offbeat.polynomial(1), beta), [Arrival(0), Arrival(0)]
    result = run(rule, start_at(), schedule, lambda *_: x_new, updater=Updater(compiled=compiled))
    x_0, x, x_t = result.versions
    x_tau, w = x_0.astype(float), x.astype(float)
    answer = w + 0.6 / 2 * ((x_new - x_tau) + beta * (x_tau - w))
    np.testing.assert_allclose(x_t, answer, atol=1e-6)  # five roundings at size 3


def test_t16_without_staleness_the_pull_back_has_no_say() -> None:
    fedasync = delayed(offbeat.fedasync(0.6), staleness_max=0, epochs=30)
    for beta in (0.0, 0.5):
        versions = delayed(offbeat.delta(0.6, beta=beta), staleness_max=0, epochs=30).versions
        # (1 - alpha) x and x - alpha x differ by rounding alone: two units at size 3, forgotten as 1 - alpha/4
        np.testing.assert_allclose(versions, fedasync.versions, atol=3e-6)
