"""A training is a pure function of x_tau and its work: nothing that it draws depends on what ran before it."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor, nn

import offbeat.torch
from offbeat.core.layout import Model, Vector
from offbeat.task import Work, solve, start
from offbeat.train.sgd import keyed, one_thread

WORK = Work(device=1, number=2, seed=3)
OTHERS = [Work(device=0, number=2, seed=3), Work(device=1, number=1, seed=3), Work(device=1, number=2, seed=4)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def shared_data(_: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))


def task_of(
    model: Callable[[], nn.Module] = classifier,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    batch_size: int = 8,
) -> offbeat.torch.Task:
    return offbeat.torch.Task(model, loss, shared_data, batch_size=batch_size, local_iterations=4)


def trained(task: offbeat.torch.Task, work: Work = WORK, x_tau: Model | None = None) -> Vector:
    return solve(task, task.initial(0) if x_tau is None else x_tau, work).x_new.vector


def draws() -> list[float]:
    return [*np.random.rand(3).tolist(), *torch.rand(3).tolist()]  # noqa: NPY002 (the global state is the subject)


def global_states() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 (see above)
    return kind, np.asarray(keys).tobytes(), *rest, torch.get_rng_state().numpy().tobytes(), torch.get_num_threads()


@pytest.mark.parametrize("model", [classifier, with_dropout])
def test_same_work_same_bits(model: Callable[[], nn.Module]) -> None:
    first = trained(task_of(model))
    task = task_of(model)
    for work in OTHERS:
        trained(task, work)
    assert np.array_equal(trained(task), first)
    assert np.array_equal(trained(task), first)


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_other_work_other_bits(other: Work) -> None:
    task = task_of()
    x_tau = start(task, 0)
    assert not np.array_equal(trained(task, WORK, x_tau), trained(task, other, x_tau))


def test_the_global_random_states_do_not_matter() -> None:
    answers = []
    for seed in (0, 99):
        np.random.seed(seed)  # noqa: NPY002 (see above)
        torch.manual_seed(seed)
        answers.append(trained(task_of(with_dropout)).tobytes())
    assert len(set(answers)) == 1


def test_the_number_of_threads_does_not_matter() -> None:
    def wide() -> nn.Module:
        return nn.Linear(6, 20_000)

    def far_from_mean(outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs.square().mean() - 3).square()  # a long sum, which threads would cut into parts

    answers = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        answers.append(trained(task_of(wide, far_from_mean, batch_size=40)).tobytes())
    assert len(set(answers)) == 1


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_dropout_is_keyed_by_the_work(other: Work) -> None:
    for model, same in ((classifier, True), (with_dropout, False)):
        task = task_of(model, batch_size=40)  # all of the data in every batch: only dropout can tell works apart
        x_tau = start(task, 0)
        first = trained(task, WORK, x_tau)
        assert np.array_equal(trained(task, WORK, x_tau), first)
        assert np.allclose(trained(task, other, x_tau), first, atol=1e-5) is same


def noisy_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    noise = float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002 (as users do)
    return nn.functional.cross_entropy(outputs, targets) * (1 + noise)


def test_what_user_code_draws_is_keyed() -> None:
    first = trained(task_of(loss=noisy_loss))
    draws()
    assert np.array_equal(trained(task_of(loss=noisy_loss)), first)
    assert not np.array_equal(trained(task_of()), first)


def test_a_training_leaves_the_global_states_as_they_were() -> None:
    torch.set_num_threads(2)
    task = task_of(with_dropout, noisy_loss)
    before = global_states()
    trained(task)
    assert global_states() == before


def test_a_training_that_fails_leaves_the_global_states_as_they_were() -> None:
    def failing(_: Tensor, __: Tensor) -> Tensor:
        draws()
        raise RuntimeError("the loss failed")

    torch.set_num_threads(2)
    task = task_of(with_dropout, failing)
    x_tau = start(task, 0)
    before = global_states()
    with pytest.raises(RuntimeError, match="the loss failed"):
        trained(task, WORK, x_tau)
    assert global_states() == before


def test_evaluation_leaves_the_global_states_as_they_were() -> None:
    task = offbeat.torch.Task(with_dropout, noisy_loss, shared_data, shared_data(0))
    torch.set_num_threads(2)
    x = task.initial(0)
    threads = torch.get_num_threads()
    task.evaluate(x)
    assert torch.get_num_threads() == threads == 2


def test_making_a_model_leaves_the_global_states_as_they_were() -> None:
    before = global_states()
    first = task_of().initial(5).vector
    assert global_states() == before
    torch.manual_seed(77)
    assert np.array_equal(task_of().initial(5).vector, first)
    assert not np.array_equal(task_of().initial(6).vector, first)


def test_a_model_that_draws_from_numpy_is_keyed_by_the_seed_too() -> None:
    def drawn() -> nn.Module:
        module = nn.Linear(2, 2)
        module.weight.data[:] = torch.from_numpy(np.random.rand(2, 2))  # noqa: NPY002 (as users do)
        return module

    assert np.array_equal(task_of(drawn).initial(5).vector, task_of(drawn).initial(5).vector)


def test_the_stream_of_a_training_is_that_of_its_work() -> None:
    with keyed(WORK) as rng, keyed(WORK) as again:
        assert rng.integers(1000, size=5).tolist() == again.integers(1000, size=5).tolist()
    with keyed(WORK) as rng:
        own, ours = rng.random(), draws()
    with keyed(WORK) as rng:
        draws()
        assert rng.random() == own
    for other in OTHERS:
        with keyed(other) as rng:
            assert rng.random() != own
            assert not set(draws()) & set(ours)


def test_one_thread_is_used_and_given_back() -> None:
    torch.set_num_threads(2)
    with keyed(WORK):
        assert torch.get_num_threads() == 1
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
