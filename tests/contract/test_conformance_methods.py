"""Conformance of whole methods on quadratics of several devices: T6, T7, T12, T13, T15 and T17.

Rules kept here:
- Devices take H real gradient steps in float32; the answers use their linear maps P = I - (I - gamma A)^H in float64.
- Methods that the library does not ship are written as a user would: `offbeat.Rule` with a formula of facts.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

import offbeat
from offbeat import Facts, Mix, Rule
from offbeat.core.layout import Vector
from offbeat.core.rules import Memory
from tests.contract.schedule import Arrival, Run, jittered, run, same_bits

Doubles = npt.NDArray[np.float64]
COUNT, WIDTH = 5, 3
DURATIONS = (1.0, 2.0, 3.0, 5.0, 8.0)
GAMMA = 0.1


class Quadratics:
    """Devices with f_i = 1/2 (x - c_i)' A_i (x - c_i), far apart: no two share an optimum."""

    def __init__(self, local_iterations: int = 3, *, equal: bool = False) -> None:
        rng = np.random.default_rng(6)
        curvature = rng.uniform(0.5, 2, (COUNT, WIDTH))
        self.curvature = np.ones_like(curvature) if equal else curvature
        self.optima = rng.standard_normal((COUNT, WIDTH)) * 3
        self.local_iterations = local_iterations

    def __call__(self, x_tau: Vector, device: int) -> Vector:
        a, c, x = self.curvature[device].astype(np.float32), self.optima[device].astype(np.float32), x_tau
        for _ in range(self.local_iterations):
            x = x - np.float32(GAMMA) * a * (x - c)
        return x

    def fixed_point(self, weights: npt.ArrayLike) -> Doubles:
        """(sum w_i P_i)^-1 sum w_i P_i c_i; the curvatures are diagonal, so this is a mean per coordinate."""
        progress = 1 - (1 - GAMMA * self.curvature) ** self.local_iterations
        return np.asarray(np.average(self.optima, axis=0, weights=np.asarray(weights)[:, None] * progress))


def by_device(alphas: Sequence[float]) -> Rule:
    """FedAsync with a mixing weight of every device's own."""

    def formula(facts: Facts, memory: Memory) -> tuple[Mix, Memory]:
        alpha_t = alphas[facts.device]
        return Mix(1 - alpha_t, alpha_t, 0.0, True), memory

    return Rule("by_device", formula)


def interleaved(frequencies: Sequence[float], arrivals: int) -> list[int]:
    """Devices in turn, each as often as its frequency says and as evenly as can be."""
    credit, order = np.zeros(len(frequencies)), []
    for _ in range(arrivals):
        credit += frequencies
        order.append(int(credit.argmax()))
        credit[order[-1]] -= 1
    return order


def always_busy(durations: Sequence[float], arrivals: int) -> list[Arrival]:
    """Each device trains for its duration, pushes, and starts again from the version that its push made."""
    finishing = [(duration, device) for device, duration in enumerate(durations)]
    heapq.heapify(finishing)
    tau, schedule = dict.fromkeys(range(len(durations)), 0), []
    for t in range(1, arrivals + 1):
        at, device = finishing[0]
        heapq.heapreplace(finishing, (at + durations[device], device))
        schedule.append(Arrival(tau[device], device))
        tau[device] = t
    return schedule


def settled(result: Run, last: int = 3_000) -> Doubles:
    """The mean of the last versions: what is left of a constant mixing weight's wandering averages out."""
    return np.asarray(np.mean(result.versions[-last:], axis=0, dtype=float))


# --- T6 and T15: where uneven participation leads --------------------------------------------------------------------


def test_t6_fedasync_settles_where_frequency_weight_and_local_progress_balance() -> None:
    devices, frequencies, alphas = Quadratics(), [0.5, 0.2, 0.15, 0.1, 0.05], [0.01, 0.006, 0.006, 0.004, 0.004]
    schedule = jittered(np.random.default_rng(7), interleaved(frequencies, 12_000), 7)
    x = settled(run(by_device(alphas), np.zeros(WIDTH), schedule, devices))
    answer = devices.fixed_point(np.multiply(frequencies, alphas))
    assert np.abs(answer - devices.fixed_point(frequencies)).max() > 0.1  # ... and not without the weights
    assert np.abs(answer - devices.fixed_point(np.ones(COUNT))).max() > 0.5  # ... nor in the middle
    # the closed form is the limit of a small alpha: what is left halves with alpha, and is 0.0025 here
    np.testing.assert_allclose(x, answer, atol=0.005)


def test_t6_equal_devices_settle_at_their_frequency_weighted_mean() -> None:
    devices, schedule = Quadratics(equal=True), always_busy(DURATIONS, 12_000)
    x = settled(run(offbeat.fedasync(0.01), np.zeros(WIDTH), schedule, devices))
    frequencies = 1 / np.array(DURATIONS)
    mean = np.average(devices.optima, axis=0, weights=frequencies)
    np.testing.assert_allclose(x, mean, atol=1e-3)  # float32 rounding at size 3, over alpha times the progress
    assert np.abs(mean - devices.optima.mean(axis=0)).max() > 0.3


def test_t15_weights_inverse_to_frequency_remove_the_bias() -> None:
    devices, durations = Quadratics(equal=True), np.array(DURATIONS)
    corrections = durations * (1 / durations).sum() / COUNT
    schedule = always_busy(DURATIONS, 12_000)
    frequencies = np.bincount([device for _, device in schedule]) / len(schedule)
    np.testing.assert_allclose(frequencies * corrections, 1 / COUNT, rtol=1e-2)  # the last turn is cut short
    x = settled(run(by_device(list(0.005 * corrections)), np.zeros(WIDTH), schedule, devices))
    # the limit of a small alpha again: what is left halves with alpha, and is 0.014 here; the bias was above 0.3
    np.testing.assert_allclose(x, devices.optima.mean(axis=0), atol=0.02)


# --- T7 and T17: the synchronous and the buffered methods ------------------------------------------------------------


def in_step(epochs: int) -> list[Arrival]:
    """Every device once per version, all of them fresh."""
    return [Arrival(t, device) for t in range(epochs) for device in range(COUNT)]


def test_t7_fedavg_of_single_steps_of_all_devices_is_gradient_descent() -> None:
    devices = Quadratics(local_iterations=1)
    versions = run(offbeat.fedavg(COUNT), np.ones(WIDTH), in_step(30), devices).versions
    x = np.ones(WIDTH)
    for version in versions:
        np.testing.assert_allclose(version, x, atol=2e-6)  # ten roundings at size 3 per epoch, contracted
        x = x - GAMMA * np.mean(devices.curvature * (x - devices.optima), axis=0)
    assert len(versions) == 31


def test_t17_fedbuff_of_all_devices_fresh_is_fedavg() -> None:
    averaged = run(offbeat.fedavg(COUNT), np.ones(WIDTH), in_step(30), Quadratics())
    buffered = run(offbeat.fedbuff(COUNT, eta=1.0), np.ones(WIDTH), in_step(30), Quadratics())
    assert len(buffered.versions) == 31
    # the same sums in another order: ten roundings at size 3 per epoch, contracted
    np.testing.assert_allclose(buffered.versions, averaged.versions, atol=2e-6)


def test_t17_fedbuff_of_one_without_discount_is_the_delta_rule_bit_for_bit() -> None:
    rng = np.random.default_rng(17)
    schedule = jittered(rng, rng.integers(COUNT, size=200), 6)
    buffered = run(offbeat.fedbuff(1, staleness_fn=offbeat.constant()), np.ones(WIDTH), schedule, Quadratics())
    added = run(offbeat.delta(1.0), np.ones(WIDTH), schedule, Quadratics())
    assert buffered.mixes == added.mixes
    assert all(same_bits(x, y) for x, y in zip(buffered.versions, added.versions, strict=True))


# --- T12: delay compensation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [0.3, 1.0, 2.0, 2.5])
def test_t12_exact_delay_compensation_is_gradient_descent_without_delay(curvature: float) -> None:
    """With Hessian lambda*I, compensating the gradient for x - x_tau is a pull-back of gamma*lambda."""
    gamma, x_0, c = 0.4, np.array([3.0, -1.0, 2.0]), np.ones(3)
    schedule = jittered(np.random.default_rng(12), [0] * 30, 5)

    def step(x_tau: Vector, _: int) -> Doubles:
        return np.asarray(x_tau - gamma * curvature * (x_tau - c))

    versions = run(offbeat.delta(1.0, beta=gamma * curvature), x_0, schedule, step).versions
    answer = [c + (1 - gamma * curvature) ** t * (x_0 - c) for t in range(31)]
    # four roundings at size 3 per version, at most 1/(gamma lambda) of them; uncompensated delay is off by 0.1
    np.testing.assert_allclose(versions, answer, atol=5e-6)


# --- T13: AREA -------------------------------------------------------------------------------------------------------


class Area:
    """Devices that remember the model they pushed last, and push how far they have come since."""

    def __init__(self, devices: Quadratics) -> None:
        self.devices, self.pushed = devices, np.zeros((COUNT, WIDTH), np.float32)
        self.means = [np.zeros(WIDTH)]

    def __call__(self, x_tau: Vector, device: int) -> Vector:
        x_new = self.devices(x_tau, device)
        difference = np.asarray(x_new - self.pushed[device])
        self.pushed[device] = x_new
        self.means.append(self.pushed.mean(axis=0, dtype=float))
        return difference


def test_t13_area_keeps_the_mean_of_the_pushed_models_and_finds_the_unweighted_optimum() -> None:
    devices = Quadratics(local_iterations=1)
    area, schedule = Area(devices), always_busy(DURATIONS, 4_000)
    rule = Rule("area", lambda _, memory: (Mix(1.0, 1 / COUNT, 0.0, True), memory))
    versions = run(rule, np.zeros(WIDTH), schedule, area).versions
    # three roundings at size 3 per update, which nothing forgets: a walk of 4,000 steps of 2e-7
    np.testing.assert_allclose(versions, area.means, atol=5e-5)
    optimum = np.average(devices.optima, axis=0, weights=devices.curvature)
    np.testing.assert_allclose(versions[-1], optimum, atol=1e-4)  # ... and contracted: 3e-5 is left


def test_t13_fedasync_under_the_same_schedule_finds_another_point() -> None:
    devices, frequencies = Quadratics(local_iterations=1), 1 / np.array(DURATIONS)
    optimum = np.average(devices.optima, axis=0, weights=devices.curvature)
    x = settled(run(offbeat.fedasync(0.02), np.zeros(WIDTH), always_busy(DURATIONS, 12_000), devices))
    np.testing.assert_allclose(x, devices.fixed_point(frequencies), atol=0.02)  # of order alpha, as in T6
    assert np.abs(x - optimum).max() > 0.3
