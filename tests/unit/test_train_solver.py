"""The local solver takes the steps of plain SGD on the proximal problem, on the batches that the settings ask for."""

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.errors import InvalidValue
from offbeat.train.flat import FlatModule
from offbeat.train.sgd import PART, Batch, solve_proximal, take_step
from offbeat.train.solver import Solver

SAMPLES = st.integers(1, 60)
SIZES = st.integers(1, 25)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def batches(solver: Solver) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(23, 3, generator=generator), torch.randn(23, 2, generator=generator)
    rng = np.random.default_rng(7)
    indices = [torch.from_numpy(batch) for batch in solver.batches(23, rng)]
    return [(inputs[batch], targets[batch]) for batch in indices]


def flat_of(module: nn.Module) -> FlatModule:
    return FlatModule(module, mix_statistics=True, accelerator=torch.device("cpu"))


def plain_sgd(module: nn.Module, solver: Solver) -> tuple[Tensor, list[float]]:
    """The readable twin: torch's own SGD, with the proximal term written into the loss."""
    optimizer = torch.optim.SGD(module.parameters(), lr=solver.gamma, weight_decay=solver.weight_decay)
    x_tau = [parameter.detach().clone() for parameter in module.parameters()]
    seen = []
    for inputs, targets in batches(solver):
        optimizer.zero_grad()
        value = loss(module(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        if solver.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), solver.clip)
        pairs = zip(module.parameters(), x_tau, strict=True)
        prox = torch.stack([(parameter - start).square().sum() for parameter, start in pairs]).sum()
        (solver.rho / 2 * prox).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen.append(float(value.detach()))
    return torch.cat([parameter.detach().ravel() for parameter in module.parameters()]), seen


@pytest.mark.parametrize("rho", [0.0, 0.005, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
@pytest.mark.parametrize("work", [{"local_passes": 4}, {"local_iterations": 20}], ids=str)
def test_the_steps_are_those_of_plain_sgd(
    rho: float, weight_decay: float, clip: float | None, work: dict[str, int]
) -> None:
    solver = Solver(0.2, rho, weight_decay, clip, batch_size=5, **work)
    flat = flat_of(network())
    iterations, mean = solve_proximal(solver, flat, loss, batches(solver), flat.parameters.clone())
    expected, seen = plain_sgd(network(), solver)
    assert torch.allclose(flat.parameters, expected, rtol=0, atol=3e-6)
    assert iterations == len(seen) == 20
    assert mean == pytest.approx(sum(seen) / 20, rel=1e-5)


def test_one_step_worked_out_by_hand() -> None:
    x, gradient, x_tau = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0]), torch.tensor([1.0, 0.0])
    take_step(Solver(gamma=0.5, rho=0.25, weight_decay=2.0, clip=5.0), x, gradient, x_tau)
    # clipped [3, 4], decayed [9, 12]; x - 0.5 * ([9, 12] + 0.25 * [2, 4])
    assert x.tolist() == [-1.75, -2.5]
    assert x_tau.tolist() == [1.0, 0.0]


def test_a_gradient_within_the_clip_is_left_alone() -> None:
    x, gradient = torch.zeros(2), torch.tensor([3.0, 4.0])
    take_step(Solver(gamma=1.0, rho=0.0, clip=5.0), x, gradient, torch.zeros(2))
    assert x.tolist() == [-3.0, -4.0]


def test_without_a_gradient_x_tau_is_left_exactly_alone() -> None:
    x_tau = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x = x_tau.clone()
    for _ in range(50):
        take_step(Solver(gamma=0.3, rho=0.7), x, torch.zeros(1000), x_tau)
    assert torch.equal(x, x_tau)


def test_the_proximal_term_pulls_to_x_tau() -> None:
    x, x_tau = torch.full((4,), 5.0), torch.ones(4)
    for _ in range(200):
        take_step(Solver(gamma=0.5, rho=0.5), x, torch.zeros(4), x_tau)
    assert torch.allclose(x, x_tau)


def test_gradients_do_not_pile_up_over_trainings() -> None:
    solver = Solver(batch_size=5, local_iterations=3)
    flat = flat_of(network())
    flat.gradients.fill_(1e6)
    solve_proximal(solver, flat, loss, batches(solver), flat.parameters.clone())
    assert torch.allclose(flat.parameters, plain_sgd(network(), solver)[0], rtol=0, atol=1e-6)


def test_training_switches_the_module_to_train_mode() -> None:
    solver, flat = Solver(local_iterations=1), flat_of(network().eval())
    solve_proximal(solver, flat, loss, batches(solver), flat.parameters.clone())
    assert flat.module.training


@settings(derandomize=True, deadline=None, max_examples=100)
@given(SAMPLES, SIZES, st.integers(1, 6), st.integers(0, 1000))
def test_iterations_draw_without_replacement(samples: int, size: int, iterations: int, seed: int) -> None:
    solver = Solver(batch_size=size, local_iterations=iterations)
    drawn = list(solver.batches(samples, np.random.default_rng(seed)))
    assert len(drawn) == iterations
    for batch in drawn:
        assert len(batch) == len(set(batch.tolist())) == min(size, samples)
        assert 0 <= batch.min() <= batch.max() < samples


@settings(derandomize=True, deadline=None, max_examples=100)
@given(SAMPLES, SIZES, st.integers(1, 4), st.integers(0, 1000))
def test_passes_cover_every_sample_once_with_a_short_last_batch(
    samples: int, size: int, passes: int, seed: int
) -> None:
    solver = Solver(batch_size=size, local_passes=passes)
    drawn = list(solver.batches(samples, np.random.default_rng(seed)))
    each = math.ceil(samples / size)
    assert len(drawn) == passes * each
    for lo in range(0, len(drawn), each):
        one_pass = drawn[lo : lo + each]
        assert sorted(np.concatenate(one_pass).tolist()) == list(range(samples))
        assert all(len(batch) == min(size, samples) for batch in one_pass[:-1])


def test_batches_are_shuffled_and_follow_the_generator() -> None:
    for solver in (Solver(batch_size=30, local_passes=2), Solver(batch_size=30, local_iterations=2)):
        first, second = solver.batches(40, np.random.default_rng(1)), solver.batches(40, np.random.default_rng(1))
        ours, again = np.concatenate(list(first)), np.concatenate(list(second))
        other = np.concatenate(list(solver.batches(40, np.random.default_rng(2))))
        assert np.array_equal(ours, again)
        assert not np.array_equal(ours, other)
        assert ours[:30].tolist() != sorted(ours[:30])
        assert ours[:30].tolist() != ours[-30:].tolist()


def test_one_pass_is_the_default() -> None:
    drawn = list(Solver(batch_size=4).batches(10, np.random.default_rng(0)))
    assert [len(batch) for batch in drawn] == [4, 4, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("gamma", value) for value in (0.0, -0.1, math.nan, math.inf)],
        *[("rho", value) for value in (-0.001, math.nan, math.inf)],
        *[("weight_decay", value) for value in (-1.0, math.nan, math.inf)],
        *[("clip", value) for value in (0.0, -1.0, math.nan, math.inf)],
        *[("batch_size", value) for value in (0, -1, 2.5)],
        *[("local_passes", value) for value in (0, -1, 1.5)],
        *[("local_iterations", value) for value in (0, -3, 1.0)],
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{name} is "):
        Solver(**{name: value})


def test_passes_and_iterations_together_are_refused() -> None:
    with pytest.raises(InvalidValue, match="give local_passes or local_iterations, not both"):
        Solver(local_passes=1, local_iterations=1)


@pytest.mark.parametrize("size", [1, 7, PART - 1, PART, 2 * PART + 13])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_step_in_parts_has_the_bits_of_one_over_whole_vectors_and_clears_the_gradient(
    size: int, clip: float | None
) -> None:
    generator = torch.Generator().manual_seed(size)
    x, gradients, x_tau = (torch.randn(size, generator=generator) for _ in range(3))
    whole, slopes = x.clone(), gradients.clone()
    norm = float(torch.linalg.vector_norm(slopes))
    if clip is not None and norm > clip:
        slopes.mul_(clip / norm)
    slopes.add_(whole, alpha=0.01)
    whole.lerp_(x_tau, 0.1 * 0.3).add_(slopes, alpha=-0.1)
    take_step(Solver(gamma=0.1, rho=0.3, weight_decay=0.01, clip=clip), x, gradients, x_tau)
    assert torch.equal(x, whole)
    assert not gradients.any()
