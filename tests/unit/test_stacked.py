"""Lanes of one tensor program: the numbers of the same trainings alone, and bits that no neighbour changes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor, nn

import offbeat.torch
from offbeat.core.layout import Model, Vector
from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.task import Trained, Work, solve, start
from offbeat.train.samples import SamplePool, Samples
from offbeat.train.sgd import Batch, keyed
from offbeat.train.solver import SORTED_SAMPLES_MAX, Solver, stream
from offbeat.train.stacked import lanes_for

LANES = lanes_for(parameters=66)
SIZES = (3, 7, 8, 12, 13, 20, 5, 40)
TOLERANCE = 1e-5
"""What float32 rounding in another order may add up to over a training of numbers around 1."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def classes(device: int) -> Batch:
    generator = torch.Generator().manual_seed(device)
    samples = SIZES[device % len(SIZES)]
    return torch.randn(samples, 5, generator=generator), torch.randint(3, (samples,), generator=generator)


def images(device: int) -> Batch:
    inputs, targets = classes(device)
    return inputs.repeat_interleave(2, dim=1).view(-1, 5, 2), targets


def numbers(device: int) -> Batch:
    inputs, _ = classes(device)
    return inputs, inputs[:, :3].cumsum(1).sin()


def sequences(device: int) -> Batch:
    inputs, _ = classes(device)
    inputs = torch.stack([inputs, inputs.flip(1)], dim=1)
    return inputs, inputs[..., :3].cos()


def with_activation(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), activation, nn.Linear(7, 3))


def perceptron() -> nn.Module:
    return with_activation(nn.ReLU())


def task_of(model: Callable[[], nn.Module] = perceptron, **changes: Any) -> offbeat.torch.Task:
    settings: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "data": classes,
        "gamma": 0.2,
        "rho": 0.1,
        "batch_size": 8,
        "local_iterations": 6,
        **changes,
    }
    return offbeat.torch.Task(model, **settings)


def works(count: int = 20) -> list[Work]:
    """Unequal devices, numbers, seeds, gammas and iterations."""
    return [
        Work(n % 11, n // 11, seed=n % 2, gamma=0.05 * (n % 3) or None, local_iterations=(n * 5) % 9 or None)
        for n in range(count)
    ]


def together(task: offbeat.torch.Task, x_tau: Model, given: Sequence[Work]) -> list[tuple[Vector, Trained]]:
    results, _ = task.train_many([(x_tau, work) for work in given])
    return [(x_new.vector, trained) for x_new, trained in results]


def programs(task: offbeat.torch.Task, given: Sequence[Work]) -> int:
    x_tau = start(task, 0)
    return task.train_many([(x_tau, work) for work in given])[1]


def agree_with_one_by_one(task: offbeat.torch.Task, given: Sequence[Work]) -> None:
    assert task.batchable() is None
    x_tau = start(task, 3)
    for (x_new, trained), work in zip(together(task, x_tau, given), given, strict=True):
        alone = solve(task, x_tau, work)
        np.testing.assert_allclose(x_new, alone.x_new.vector, rtol=0, atol=TOLERANCE)
        assert not np.array_equal(x_new, x_tau.vector)
        assert (trained.samples, trained.gradients) == (alone.trained.samples, alone.trained.gradients)
        assert trained.metrics["training_loss"] == pytest.approx(alone.trained.metrics["training_loss"], rel=1e-4)


# --- the same numbers as one by one ----------------------------------------------------------------------------------

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.LeakyReLU(0.2),
    nn.LeakyReLU(0.3, inplace=True),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.SiLU(inplace=True),
    nn.Softplus(beta=2.0, threshold=1.5),
    nn.ELU(0.7, inplace=True),
    nn.Identity(),
    nn.Dropout(0.0),
]


def named(what: object) -> str:
    """What a test is called by: functions have addresses in their text, which are others in every process."""
    return getattr(what, "__name__", str(what))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_activation(activation: nn.Module) -> None:
    agree_with_one_by_one(task_of(lambda: with_activation(activation)), works())


def nested() -> nn.Module:
    shared = nn.Tanh()
    inner = nn.Sequential(nn.Linear(10, 6, bias=False), shared, nn.Sequential(nn.Linear(6, 6), shared))
    return nn.Sequential(nn.Flatten(), nn.Identity(), inner, nn.Linear(6, 3))


@pytest.mark.parametrize("model", [nested, lambda: nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(10, 3))])
def test_nests_of_layers_on_images(model: Callable[[], nn.Module]) -> None:
    agree_with_one_by_one(task_of(model, data=images), works())


def test_a_single_layer_is_a_model_too() -> None:
    agree_with_one_by_one(task_of(lambda: nn.Linear(5, 3)), works())


@pytest.mark.parametrize("work", [{"local_iterations": 6}, {"local_passes": 1}, {"local_passes": 3}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 8, 50])
@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1)], ids=named)
def test_unequal_devices_with_short_batches(loss: Any, batch_size: int, work: dict[str, int]) -> None:
    settings: dict[str, Any] = {"local_iterations": None, "local_passes": None, **work}
    given = [Work(device, device) for device in range(11)] + works(5)
    agree_with_one_by_one(task_of(batch_size=batch_size, loss=loss, **settings), given)


@pytest.mark.parametrize("rho", [0.0, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.05, 0.5, 100.0])
def test_the_local_problem(rho: float, weight_decay: float, clip: float | None) -> None:
    agree_with_one_by_one(task_of(rho=rho, weight_decay=weight_decay, clip=clip), works())


def squares_of_largest(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().amax(-1).mean()


@pytest.mark.parametrize(
    "loss", [nn.functional.mse_loss, nn.MSELoss(), nn.MSELoss(reduction="sum"), squares_of_largest], ids=named
)
@pytest.mark.parametrize("data", [numbers, sequences])
def test_losses_of_numbers(loss: Any, data: Callable[[int], Batch]) -> None:
    agree_with_one_by_one(task_of(loss=loss, data=data, clip=0.5), works())


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        nn.CrossEntropyLoss(reduction="sum"),
    ],
    ids=named,
)
def test_losses_of_classes(loss: Any) -> None:
    agree_with_one_by_one(task_of(loss=loss, clip=0.5), works())


# --- bits ------------------------------------------------------------------------------------------------------------


def odd() -> nn.Module:
    """Sizes that no vector register divides."""
    return nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 9), nn.GELU(), nn.Linear(9, 3))


@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_place_gives_the_same_bits(activation: nn.Module, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.train.stacked.lanes_for", lambda _: lanes)
    task = task_of(lambda: nn.Sequential(odd(), activation, nn.Linear(3, 3)), batch_size=7, clip=0.3, weight_decay=0.01)
    x_tau, work = start(task, 0), Work(3, 9, gamma=0.3)
    others = [Work(n % 11, n) for n in range(lanes)]  # of equal length: the order is that of the lanes
    ((alone, report),) = together(task, x_tau, [work])
    for place in range(lanes):
        given = [*others[:place], work, *others[place + 1 :]]
        x_new, trained = together(task, x_tau, given)[place]
        assert np.array_equal(x_new, alone)
        assert trained == report


@pytest.mark.parametrize("loss", [nn.functional.mse_loss, squares_of_largest], ids=named)
@pytest.mark.parametrize("passes", [None, 2])
def test_the_neighbours_do_not_matter(loss: Any, passes: int | None) -> None:
    iterations = None if passes else 4
    task = task_of(odd, loss=loss, data=numbers, batch_size=6, local_passes=passes, local_iterations=iterations)
    x_tau, given = start(task, 0), works(3 * LANES + 5)
    expected = together(task, x_tau, given)
    for chosen in ([0], [3, 50], list(range(7, 40)), list(reversed(range(len(given))))):
        results = together(task, x_tau, [given[place] for place in chosen])
        for place, (x_new, trained) in zip(chosen, results, strict=True):
            assert np.array_equal(x_new, expected[place][0])
            assert trained == expected[place][1]


def test_run_after_run_and_task_after_task() -> None:
    answers = {
        b"".join(x_new.tobytes() for x_new, _ in together(task, start(task, 0), works(40)))
        for task in [task_of(odd), *[task_of(odd)] * 3]
    }
    assert len(answers) == 1


def test_a_lane_that_is_done_stands_still_while_others_go_on() -> None:
    task = task_of()
    x_tau = start(task, 0)
    lengths = [1, 9, 2, 40, 9]
    given = [Work(3, n, local_iterations=length) for n, length in enumerate(lengths)]
    for work, (x_new, trained) in zip(given, together(task, x_tau, given), strict=True):
        ((alone, report),) = together(task, x_tau, [work])
        assert np.array_equal(x_new, alone)
        assert trained == report
        assert trained.gradients == work.local_iterations


def test_long_trainings_go_on_span_by_span(monkeypatch: pytest.MonkeyPatch) -> None:
    task, given = task_of(), [Work(n, local_iterations=n + 1) for n in range(9)]
    x_tau = start(task, 0)
    expected = together(task, x_tau, given)
    monkeypatch.setattr("offbeat.train.lanes.SAMPLES_AT_ONCE", 3 * LANES * 16)
    for (x_new, trained), (whole, report) in zip(together(task, x_tau, given), expected, strict=True):
        assert np.array_equal(x_new, whole)
        assert trained.metrics["training_loss"] == pytest.approx(report.metrics["training_loss"], rel=1e-6)
        assert trained.gradients == report.gradients


def test_after_an_error_the_next_run_is_as_ever() -> None:
    def data(device: int) -> Batch:
        inputs, targets = classes(device)
        return inputs, targets + 7 * (device == 2)  # classes that the model does not have

    task = task_of(data=data)
    x_tau = start(task, 0)
    before = together(task, x_tau, [Work(0), Work(1)])
    with pytest.raises(RuntimeError):
        together(task, x_tau, [Work(0), Work(2)])
    for (x_new, trained), (whole, report) in zip(together(task, x_tau, [Work(0), Work(1)]), before, strict=True):
        assert np.array_equal(x_new, whole)
        assert trained == report


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_lane_that_diverges_harms_no_other() -> None:
    task = task_of(clip=None)
    x_tau, wild, calm = start(task, 0), Work(3, gamma=1e30), Work(3, 1, local_iterations=3)
    results = together(task, x_tau, [wild, calm, wild])
    assert not np.isfinite(results[0][0]).all()
    assert np.array_equal(results[1][0], together(task, x_tau, [calm])[0][0])


def test_every_lane_starts_from_its_own_x_tau() -> None:
    task = task_of()
    models = [start(task, seed) for seed in range(4)]
    results, _ = task.train_many([(x_tau, Work(3)) for x_tau in models])
    for x_tau, (x_new, _) in zip(models, results, strict=True):
        np.testing.assert_allclose(x_new.vector, solve(task, x_tau, Work(3)).x_new.vector, rtol=0, atol=TOLERANCE)
        assert not np.shares_memory(x_new.vector, x_tau.vector)
    assert not np.shares_memory(results[0][0].vector, results[1][0].vector)


# --- who shares a run ------------------------------------------------------------------------------------------------


def test_runs_are_filled_whatever_the_devices_hold() -> None:
    given = [Work(device) for device in (5, 7, 13)]  # 20, 40 and 20 samples: batches of 8, the last of a pass short
    assert programs(task_of(local_iterations=None, local_passes=2), given) == 1
    assert programs(task_of(), [Work(5, n, local_iterations=n + 1) for n in range(LANES)]) == 1
    assert programs(task_of(), [Work(5, n) for n in range(LANES + 1)]) == 2
    assert programs(task_of(), []) == 0


def test_much_smaller_devices_run_apart() -> None:
    assert programs(task_of(batch_size=40), [Work(0), Work(7), Work(5)]) == 3  # 3, 40 and 20 samples: 5, 40, 20 wide
    assert programs(task_of(batch_size=40), [Work(3), Work(4), Work(5)]) == 1  # 12, 13 and 20 samples: 20 wide


def test_a_loss_without_weights_needs_batches_of_equal_shape() -> None:
    settings: dict[str, Any] = {"loss": squares_of_largest, "data": numbers, "batch_size": 5}
    given = [Work(device) for device in (5, 7, 3, 4)]  # 20 = 4 x 5, 40 = 8 x 5, 12 = 5 + 5 + 2, 13 = 5 + 5 + 3
    assert programs(task_of(local_iterations=None, local_passes=2, **settings), given) == 3
    assert programs(task_of(**settings), given) == 1


# --- randomness and data ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [Work(0), Work(5, 3, 8), Work(2**40, 7, 2**63)], ids=str)
def test_the_stream_is_where_a_training_alone_finds_it(work: Work) -> None:
    ours = stream(work)
    with keyed(work) as rng:
        assert (
            ours.integers(2**32, size=9, dtype=np.uint32).tolist()
            == rng.integers(2**32, size=9, dtype=np.uint32).tolist()
        )
        assert ours.random() == rng.random()


def test_global_states_and_threads_stay_as_they_were() -> None:
    task = task_of()
    x_tau = start(task, 0)
    torch.set_num_threads(2)
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    assert task.batchable() is None
    together(task, x_tau, works(3))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("samples", [6, SORTED_SAMPLES_MAX + 1])
def test_every_subset_is_as_likely_as_any_other(samples: int) -> None:
    """Pairs of the first six samples: 15 of them, 12,000 draws; the bound is ten standard deviations wide."""
    solver = Solver(batch_size=samples // 3, local_iterations=12_000)
    drawn, _ = solver.draw(samples, np.random.default_rng(0))
    inside = np.zeros((len(drawn), samples), bool)
    np.put_along_axis(inside, drawn, True, axis=1)
    share = inside.mean(axis=0)
    pairs = (inside[:, :6].T.astype(float) @ inside[:, :6])[np.triu_indices(6, 1)] / len(drawn)
    size = samples // 3
    assert inside.sum(axis=1).tolist() == [size] * len(drawn)
    assert np.abs(share - size / samples).max() < 0.05
    assert np.abs(pairs - size * (size - 1) / (samples * (samples - 1))).max() < 0.05


def test_fillings_of_short_batches_are_samples_of_the_same_batch() -> None:
    indices, counts = Solver(batch_size=8, local_passes=3).draw(20, np.random.default_rng(1))
    assert (indices.shape, counts.tolist()) == ((9, 8), [8, 8, 4] * 3)
    assert (indices[2::3, 4:] == indices[2::3, :1]).all()


def test_data_are_asked_for_once_and_no_more_than_the_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.train.task.DEVICES_CACHED", LANES)
    asked: list[int] = []

    def data(device: int) -> Batch:
        asked.append(device)
        return classes(device)

    task = task_of(data=data)
    few = [Work(device) for device in (4, 2, 4, 0)]
    x_tau = start(task, 0)
    together(task, x_tau, few)
    together(task, x_tau, few)
    assert asked == [0, 4, 2]
    many = [Work(device) for device in range(3 * LANES)]
    expected = [solve(task, x_tau, work).x_new.vector for work in many]
    for _ in range(2):
        results = [x_new for x_new, _ in together(task, x_tau, many)]
        np.testing.assert_allclose(results, expected, rtol=0, atol=TOLERANCE)


def test_a_pool_holds_so_many_devices() -> None:
    def loaded(device: int) -> Samples:
        inputs, targets = classes(device)
        return inputs.numpy(), targets.numpy()

    pool = SamplePool(loaded, devices_max=3)
    for devices in ([0, 1, 2], [1, 3], [4, 5, 6], [6, 6, 4]):
        for device, begin in zip(devices, pool.begins(devices), strict=True):
            inputs, targets = loaded(device)
            assert np.array_equal(pool.arrays[0][begin : begin + len(inputs)], inputs)
            assert np.array_equal(pool.arrays[1][begin : begin + len(inputs)], targets)
            assert pool.place(device) == (begin, len(inputs))
    assert len(pool.arrays[0]) < 2 * sum(SIZES)


# --- what cannot be ---------------------------------------------------------------------------------------------------


def half_frozen() -> nn.Module:
    module = perceptron()
    next(iter(module.parameters())).requires_grad_(False)
    return module


def tied() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3))


def with_buffer() -> nn.Module:
    module = perceptron()
    module.register_buffer("seen", torch.zeros(1))
    return module


def hooked() -> nn.Module:
    module = perceptron()
    module.register_forward_hook(lambda *_: None)
    return module


class Own(nn.Linear):
    """A layer of the user's own."""


class Residual(nn.Sequential):
    """A way of its own through the layers."""

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = x + super().forward(x)  # type: ignore[no-untyped-call]
        return answer


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: with_activation(nn.Dropout(0.5)), "Dropout 1 draws random numbers while it trains"),
        (lambda: nn.Sequential(perceptron(), nn.BatchNorm1d(3)), "is a buffer, which lanes do not have"),
        (lambda: with_activation(nn.LayerNorm(7)), "LayerNorm 1 is not among nn.Sequential, Linear,"),
        (lambda: nn.Sequential(perceptron(), nn.Sequential(nn.PReLU())), "PReLU 1.0 is not among"),
        (lambda: Own(5, 3), "Own is not among"),
        (lambda: nn.Sequential(Residual(nn.Linear(5, 5)), nn.Linear(5, 3)), "Residual 0 is not among"),
        (lambda: nn.Sequential(nn.Flatten(0), nn.Linear(5, 3)), "Flatten 0 has other dimensions than start_dim=1"),
        (half_frozen, "parameter 0.weight is frozen"),
        (tied, "parameters 2.weight and 0.weight are tied"),
        (with_buffer, "seen is a buffer"),
        (hooked, "Sequential has hooks"),
    ],
)
def test_a_model_that_cannot_be_batched_says_why(model: Callable[[], nn.Module], reason: str) -> None:
    task = task_of(model)
    assert reason in str(task.batchable())
    with pytest.raises(InvalidValue, match=r"cannot run together: .*; train one at a time"):
        task.train_many([(start(task, 0), Work(0))])


def with_branch(outputs: Tensor, targets: Tensor) -> Tensor:
    value = nn.functional.cross_entropy(outputs, targets)
    return value if value > 1 else 2 * value


def with_noise(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets) * (1 + torch.rand(()))


def with_numpy_noise(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets) * (1 + np.random.rand())  # noqa: NPY002 (as users do)


def with_memory(outputs: Tensor, targets: Tensor) -> Tensor:
    calls.append(len(outputs))
    return nn.functional.cross_entropy(outputs, targets) * len(calls)


calls: list[int] = []


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (with_branch, "its loss does not work over lanes: RuntimeError: "),
        (with_noise, "its loss gives two answers for one batch"),
        (with_numpy_noise, "its loss gives two answers for one batch"),
        (with_memory, "its loss gives two answers for one batch"),
    ],
)
def test_a_loss_that_cannot_be_batched_says_why(loss: Any, reason: str) -> None:
    assert str(task_of(loss=loss).batchable()).startswith(reason)


def test_classes_that_cross_entropy_ignores_are_refused() -> None:
    def data(device: int) -> Batch:
        inputs, targets = classes(device)
        return inputs, targets.where(targets < 2 if device == 2 else targets < 3, torch.tensor(-100))

    task = task_of(data=data)
    x_tau = start(task, 0)
    together(task, x_tau, [Work(0), Work(1)])
    with pytest.raises(InvalidValue, match="device 2 has the class -100; lanes take none below 0"):
        together(task, x_tau, [Work(0), Work(2)])


def test_samples_of_another_kind_are_refused() -> None:
    task = task_of(data=lambda device: images(device) if device == 2 else classes(device))
    with pytest.raises(InvalidValue, match=r"a sample of device 2 is float32\[5, 2\], others are"):
        together(task, start(task, 0), [Work(0), Work(2)])


def test_a_model_of_another_layout_is_refused() -> None:
    task = task_of()
    stranger = Model.of({"w": np.zeros(start(task, 0).layout.size, np.float32)})
    with pytest.raises(LayoutMismatch):
        together(task, stranger, [Work(0)])


def test_a_lease_out_of_range_is_refused() -> None:
    task = task_of()
    for work in (Work(0, gamma=0.0), Work(0, local_iterations=0)):
        with pytest.raises(InvalidValue, match="but must be"):
            together(task, start(task, 0), [work])
