"""Conformance of the local solver and of the mixing that must not change its bits: T1, T2 and T7 with real training.

Rules kept here:
- Training goes through `offbeat.torch.Task`; the answer is a loop written by hand, or linear algebra in float64.
- Bit for bit means every published version, the sign of zero included, with numpy and with compiled code.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

import offbeat
from offbeat import Work
from offbeat.core.kernel import Updater
from offbeat.core.layout import Layout, Model, Vector
from offbeat.task import solve, start
from offbeat.torch import Task
from offbeat.train.sgd import keyed
from tests.contract.schedule import Arrival, Local, lagged, run, same_bits

SEED = 5
Doubles = npt.NDArray[np.float64]


@pytest.fixture(params=[False, True], ids=["numpy", "compiled"])
def updater(request: pytest.FixtureRequest) -> Updater:
    if request.param:
        pytest.importorskip("numba")
    return Updater(compiled=request.param)


def trained_by(task: Task, layout: Layout) -> Local:
    """The task as a local map; it counts the tasks of every device."""
    given: Counter[int] = Counter()

    def local(x_tau: Vector, device: int) -> Vector:
        work = Work(device, given[device], SEED)
        given[device] += 1
        return solve(task, Model(layout, x_tau), work).x_new.vector

    return local


# --- T1: with alpha = 1 and no staleness FedAsync is SGD -------------------------------------------------------------


class NoisyDescent:
    """SGD on a quadratic in float32, with the noise of every iteration laid down beforehand."""

    def __init__(self, width: int = 300, tasks: int = 40, local_iterations: int = 5) -> None:
        rng = np.random.default_rng(1)
        self.curvature = rng.uniform(0.2, 2, width).astype(np.float32)
        self.optimum = rng.standard_normal(width, np.float32)
        self.noise = iter(rng.standard_normal((tasks, local_iterations, width), np.float32))

    def __call__(self, x: Vector, _: int = 0) -> Vector:
        for noise in next(self.noise):
            x = x - np.float32(0.1) * (self.curvature * (x - self.optimum) + noise)
        return x


def sgd_iterates(x: Vector, tasks: int) -> list[Vector]:
    descent, iterates = NoisyDescent(), [x]
    for _ in range(tasks):
        iterates.append(descent(iterates[-1]))
    return iterates


def test_t1_alpha_one_without_staleness_is_sgd_bit_for_bit(updater: Updater) -> None:
    x_0 = np.random.default_rng(2).standard_normal(300, np.float32)
    versions = run(offbeat.fedasync(1.0), x_0, lagged(0, 40), NoisyDescent(), updater=updater).versions
    assert all(same_bits(x, y) for x, y in zip(versions, sgd_iterates(x_0, 40), strict=True))


def test_t1_the_lerp_form_would_not_be_sgd() -> None:
    iterates = sgd_iterates(np.random.default_rng(2).standard_normal(300, np.float32), 40)
    lerped = [x + np.float32(1) * (x_new - x) for x, x_new in pairwise(iterates)]
    assert not all(same_bits(x, x_new) for x, x_new in zip(lerped, iterates[1:], strict=True))


def test_t1_alpha_one_keeps_the_sign_of_zero(updater: Updater) -> None:
    pushed = np.array([-0.0, 0.0, 1.5], np.float32)
    assert same_bits(run(offbeat.fedasync(1.0), [1, 2, 3], [Arrival(0)], lambda *_: pushed, updater=updater).x, pushed)


def test_t1_a_weight_of_zero_returns_x_bit_for_bit(updater: Updater) -> None:
    def only_fresh(staleness: int) -> float:
        return 1.0 if staleness == 0 else 0.0

    rng = np.random.default_rng(3)
    x_0 = rng.standard_normal(300, np.float32)
    x_0[:2] = -0.0, 1e-45
    rule = offbeat.fedasync(0.6, only_fresh)
    schedule = [Arrival(0), Arrival(0), Arrival(0), Arrival(3)]
    versions = run(rule, x_0, schedule, lambda *_: rng.standard_normal(300), updater=updater).versions
    assert same_bits(versions[1], versions[2])
    assert same_bits(versions[1], versions[3])
    assert not same_bits(versions[3], versions[4])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def two_classes() -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(4)
    inputs = rng.standard_normal((40, 3), np.float32)
    return torch.from_numpy(inputs), torch.from_numpy((inputs.sum(axis=1) > 0).astype(np.int64))


def sgd_by_hand(task: Task, x_0: Model, tasks: int) -> Iterator[Vector]:
    """An ordinary module and an ordinary loop over the batches that the task draws."""
    module, (inputs, targets) = classifier(), two_classes()
    module.load_state_dict({name: torch.tensor(array) for name, array in x_0.items()})
    for number in range(tasks):
        with keyed(Work(0, number, SEED)) as rng:
            for batch in task.solver.batches(len(inputs), rng):
                loss = nn.functional.cross_entropy(module(inputs[batch]), targets[batch])
                gradients = torch.autograd.grad(loss, list(module.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                        parameter.add_(gradient, alpha=-0.1)
        yield torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).numpy()


def test_t1_a_chain_of_trainings_is_a_plain_torch_loop_bit_for_bit(updater: Updater) -> None:
    task = Task(
        classifier, nn.functional.cross_entropy, [two_classes()], gamma=0.1, rho=0, batch_size=8, local_iterations=6
    )
    x_0 = start(task, SEED)
    result = run(offbeat.fedasync(1.0), x_0.vector, lagged(0, 12), trained_by(task, x_0.layout), updater=updater)
    by_hand = list(sgd_by_hand(task, x_0, 12))
    assert all(same_bits(x, y) for x, y in zip(result.versions[1:], by_hand, strict=True))
    assert not np.allclose(by_hand[0], by_hand[-1])


# --- T2: the local problem in closed form ----------------------------------------------------------------------------


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * (outputs - targets).square().mean()


class LeastSquares:
    """Devices whose loss is a quadratic: 1/2 (x - c)' A (x - c) + constant, as linear regression without noise."""

    def __init__(self, sizes: tuple[int, ...], width: int = 4) -> None:
        rng = np.random.default_rng(6)
        self.inputs = [rng.standard_normal((size, width), np.float32) for size in sizes]
        self.optima = rng.standard_normal((len(sizes), width), np.float32)
        self.width = width

    def task(self, gamma: float, rho: float, local_iterations: int) -> Task:
        data = [(z, (z @ c)[:, None]) for z, c in zip(self.inputs, self.optima, strict=True)]
        return Task(
            lambda: nn.Linear(self.width, 1, bias=False),
            squares,
            data,
            gamma=gamma,
            rho=rho,
            batch_size=max(map(len, self.inputs)),
            local_iterations=local_iterations,
        )

    def quadratic(self, device: int) -> tuple[Doubles, Doubles]:
        z = self.inputs[device].astype(float)
        return z.T @ z / len(z), self.optima[device].astype(float)


def closed_form(a: Doubles, c: Doubles, x_tau: Doubles, gamma: float, rho: float, local_iterations: int) -> Doubles:
    identity = np.eye(len(a))
    b = a + rho * identity
    left = np.linalg.matrix_power(identity - gamma * b, local_iterations)
    return np.asarray(x_tau + (identity - left) @ np.linalg.solve(b, a @ (c - x_tau)))


@pytest.mark.parametrize("local_iterations", [1, 2, 9])
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_t2_the_local_solve_is_the_closed_form_of_the_proximal_quadratic(rho: float, local_iterations: int) -> None:
    problem = LeastSquares((32,))
    task = problem.task(0.13, rho, local_iterations)
    x_tau = start(task, SEED)
    x_new = solve(task, x_tau, Work(0, seed=SEED)).x_new
    answer = closed_form(*problem.quadratic(0), x_tau.vector.astype(float), 0.13, rho, local_iterations)
    # nine steps of float32 rounding on numbers of size 1; taking the gradient after the pull would be off by 1e-3
    np.testing.assert_allclose(x_new.vector, answer, atol=2e-6)


def test_t2_the_authors_split_update_is_the_papers_with_rho_their_flag_over_gamma() -> None:
    gamma, flag, local_iterations = 0.13, 0.09, 9
    problem = LeastSquares((32,))
    task = problem.task(gamma, flag / gamma, local_iterations)
    x_tau = start(task, SEED)
    (a, c), x = problem.quadratic(0), x_tau.vector.astype(float)
    for _ in range(local_iterations):
        gradient = a @ (x - c)
        x = (1 - flag) * x + flag * x_tau.vector
        x = x - gamma * gradient
    pushed = solve(task, x_tau, Work(0, seed=SEED)).x_new.vector
    np.testing.assert_allclose(pushed, x, atol=2e-6)  # float32 rounding, as above
    literal = closed_form(a, c, x_tau.vector.astype(float), gamma, flag, local_iterations)
    assert np.abs(pushed - literal).max() > 1e-2  # the flag taken for rho would be caught


# --- T7: FedAvg over every device with one local iteration -----------------------------------------------------------


def test_t7_fedavg_of_single_full_batch_steps_is_gradient_descent_on_the_pooled_data() -> None:
    sizes, gamma = (32, 8, 20, 4), 0.2
    problem = LeastSquares(sizes)
    task = problem.task(gamma, rho=0.3, local_iterations=1)  # the first step starts at x_tau: rho has no say
    x_0 = start(task, SEED)
    schedule = [Arrival(t, device) for t in range(6) for device in range(4)]
    result = run(offbeat.fedavg(4), x_0.vector, schedule, trained_by(task, x_0.layout), samples=sizes)
    x = x_0.vector.astype(float)
    for t in range(6):
        np.testing.assert_allclose(result.versions[t], x, atol=2e-6)  # float32 rounding of six steps at size 1
        gradients = [a @ (x - c) for a, c in map(problem.quadratic, range(4))]
        x = x - gamma * np.average(gradients, axis=0, weights=sizes)
    assert len(result.versions) == 7
