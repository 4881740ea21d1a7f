"""The PyTorch task turns a model, a loss and data into `initial`, `train` and `evaluate`."""

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor, nn

import offbeat
import offbeat.torch
from offbeat.core.layout import Model
from offbeat.errors import InvalidValue
from offbeat.task import Work, solve, start

Pair = tuple[Any, Any]


def blobs(samples: int = 30, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    return inputs, (inputs.sum(dim=1) > 0).long()


def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))


def task_of(model: nn.Module | Callable[[], nn.Module] = classifier, **changes: Any) -> offbeat.torch.Task:
    settings: dict[str, Any] = {"data": lambda device: blobs(seed=device), "test": blobs(50, 9), "gamma": 0.5} | changes
    return offbeat.torch.Task(model, settings.pop("loss", nn.functional.cross_entropy), **settings)


def half_frozen() -> nn.Module:
    module = classifier()
    module[0].requires_grad_(False)
    return module


class Tied(nn.Module):
    """Reads and writes with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        answer: Tensor = self.head(self.embed(tokens))
        return answer


class Counting(nn.Module):
    """Keeps a running number that it assigns anew, as plain code does."""

    seen: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.seen + len(inputs)
        self.calls = self.calls + 1
        answer: Tensor = self.layer(inputs)
        return answer


def test_it_is_a_task() -> None:
    assert isinstance(task_of(), offbeat.Task)


def test_training_learns_and_reports() -> None:
    task = task_of(batch_size=8, local_passes=20)
    x = start(task, 0)
    update = solve(task, x, Work(device=1))
    assert update.trained.samples == 30
    assert update.trained.gradients == 20 * 4
    assert update.trained.metrics.keys() == {"training_loss"}
    assert task.evaluate(update.x_new)["loss"] < task.evaluate(x)["loss"] / 2
    assert task.evaluate(update.x_new)["accuracy"] > 0.8


def test_x_tau_is_untouched() -> None:
    task = task_of()
    x_tau = start(task, 0)
    before = x_tau.vector.copy()
    update = solve(task, x_tau, Work(device=0))
    assert np.array_equal(x_tau.vector, before)
    assert not np.array_equal(update.x_new.vector, before)
    assert not np.shares_memory(update.x_new.vector, x_tau.vector)


def test_training_starts_from_x_tau_and_not_from_where_the_module_stands() -> None:
    task, work = task_of(), Work(device=0)
    x_tau = start(task, 0)
    first = solve(task, x_tau, work).x_new
    moved = x_tau.copy()
    moved.vector[:] += 1
    solve(task, moved, Work(device=2))
    task.evaluate(moved)
    assert np.array_equal(solve(task, x_tau, work).x_new.vector, first.vector)


def test_a_lease_overrides_gamma_and_local_iterations() -> None:
    task = task_of(batch_size=30, local_passes=7)
    x = start(task, 0)
    assert solve(task, x, Work(device=0)).trained.gradients == 7
    update = solve(task, x, Work(device=0, local_iterations=3, gamma=0.01))
    assert update.trained.gradients == 3
    same = task_of(batch_size=30, local_iterations=3, gamma=0.01)
    assert np.array_equal(update.x_new.vector, solve(same, x, Work(device=0)).x_new.vector)
    assert solve(task, x, Work(device=0)).trained.gradients == 7


def test_a_lease_out_of_range_is_refused() -> None:
    task = task_of()
    for work in (Work(device=0, gamma=0.0), Work(device=0, local_iterations=0)):
        with pytest.raises(InvalidValue, match="but must be"):
            solve(task, start(task, 0), work)


def test_frozen_parameters_stay_and_are_the_same_for_the_same_seed() -> None:
    tasks = [task_of(half_frozen, local_passes=3) for _ in range(2)]
    x = [start(task, 4) for task in tasks]
    assert "0.weight" not in x[0]
    assert np.array_equal(x[0].vector, x[1].vector)
    updates = [solve(task, x[0], Work(device=0, seed=4)) for task in (*tasks, task_of(half_frozen, local_passes=3))]
    assert len({update.x_new.vector.tobytes() for update in updates}) == 1


def test_frozen_parameters_are_those_of_the_runs_seed_whatever_the_task_did_before() -> None:
    used, fresh, work = task_of(half_frozen), task_of(half_frozen), Work(device=0, seed=5)
    x = start(used, 4)
    assert np.array_equal(solve(used, x, work).x_new.vector, solve(fresh, x, work).x_new.vector)


def test_tied_parameters_train_as_one() -> None:
    tokens = torch.arange(5).repeat(4)
    task = offbeat.torch.Task(Tied, nn.functional.cross_entropy, [(tokens, tokens)], (tokens, tokens), gamma=0.5)
    x = start(task, 0)
    x_new = solve(task, x, Work(device=0, local_iterations=5)).x_new
    assert x.layout.size == 15
    assert set(x_new) == {"embed.weight", "head.weight"}
    assert np.array_equal(x_new["embed.weight"], x_new["head.weight"])
    assert task.evaluate(x_new)["loss"] < task.evaluate(x)["loss"]


def test_buffers_that_the_module_assigns_anew_travel_too() -> None:
    task = task_of(Counting, batch_size=10, local_passes=1)
    x = start(task, 0)
    for _ in range(2):
        x_new = solve(task, x, Work(device=0)).x_new
        assert (float(x_new["seen"]), int(x_new["calls"])) == (30, 3)


def test_a_module_given_as_it_is_stays_as_it_is() -> None:
    module = classifier()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    task = task_of(module)
    x = start(task, 0)
    solve(task, x, Work(device=0))
    task.evaluate(x)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in module.parameters())
    for seed in (0, 1):
        assert np.array_equal(start(task, seed)["0.weight"], before["0.weight"].numpy())


@pytest.mark.parametrize("made", [None, 3, lambda inputs: inputs])
def test_a_function_that_makes_no_module_is_refused(made: Any) -> None:
    with pytest.raises(InvalidValue, match=r"model must be a torch\.nn\.Module or a function that makes one"):
        task_of(lambda: made).initial(0)


def test_evaluation_measures_loss_and_accuracy_over_all_batches() -> None:
    test = blobs(2500, 3)
    task = task_of(test=test)
    x = start(task, 0)
    module = classifier()
    module.load_state_dict({name: torch.tensor(array) for name, array in x.items()})
    with torch.no_grad():
        outputs = module(test[0])
    measures = task.evaluate(x)
    assert measures.keys() == {"loss", "accuracy"}
    assert measures["loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, test[1])), rel=1e-5)
    assert measures["accuracy"] == pytest.approx(float((outputs.argmax(1) == test[1]).double().mean()), abs=1e-12)


def test_metrics_of_the_users_own() -> None:
    def largest(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.max(dim=1).values * 0 + 7

    def one(outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.mean() * 0 + 1

    measures = task_of(metrics={"largest": largest, "one": one}).evaluate(task_of().initial(0))
    assert measures.keys() == {"loss", "largest", "one"}
    assert (measures["largest"], measures["one"]) == (7, 1)


def test_regression_has_a_loss_and_no_accuracy() -> None:
    inputs, _ = blobs()
    pair = (inputs, inputs[:, :1])
    task = task_of(lambda: nn.Linear(4, 1), loss=nn.functional.mse_loss, data=[pair], test=pair)
    assert task.evaluate(task.initial(0)).keys() == {"loss"}


def test_without_test_data_there_is_nothing_to_measure() -> None:
    task = task_of(test=None)
    assert task.evaluate(task.initial(0)) == {}


def test_a_published_model_is_evaluated_without_a_warning_and_not_changed() -> None:
    task = task_of()
    x = start(task, 0)
    before = x.vector.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert task.evaluate(x) == task.evaluate(x)
    assert np.array_equal(x.vector, before)


def test_evaluation_uses_no_dropout() -> None:
    task = task_of(lambda: nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.9), nn.Linear(50, 2)))
    x = start(task, 0)
    solve(task, x, Work(device=0))
    assert task.evaluate(x) == task.evaluate(x)


def test_data_may_be_a_list_or_a_function_and_numpy_or_torch() -> None:
    pairs = [blobs(seed=device) for device in range(3)]
    numpy_pairs = [(inputs.double().numpy(), targets.int().numpy()) for inputs, targets in pairs]
    answers: set[bytes] = set()
    for data in (pairs, tuple(pairs), pairs.__getitem__, numpy_pairs, [(x.tolist(), y.tolist()) for x, y in pairs]):
        task = task_of(data=data)
        answers.add(solve(task, start(task, 0), Work(device=2)).x_new.vector.tobytes())
    assert len(answers) == 1


def test_read_only_numpy_data_are_welcome() -> None:
    inputs, targets = (part.numpy() for part in blobs())
    inputs.flags.writeable = targets.flags.writeable = False
    task = task_of(data=[(inputs, targets)], test=(inputs, targets))
    assert solve(task, start(task, 0), Work(device=0)).trained.samples == 30


def test_data_are_asked_for_when_needed_and_once() -> None:
    asked: list[int] = []

    def data(device: int) -> Pair:
        asked.append(device)
        return blobs(seed=device)

    task = task_of(data=data)
    x = start(task, 0)
    assert asked == []
    for device in (3, 1, 3):
        solve(task, x, Work(device=device))
    assert asked == [3, 1]


@pytest.mark.parametrize(
    ("pair", "complaint"),
    [
        ((torch.zeros(0, 4), torch.zeros(0)), "device 0 has no samples; leave it out, or give it at least one"),
        ((torch.zeros(3, 4), torch.zeros(2)), "device 0 has 3 inputs but 2 targets"),
    ],
)
def test_data_that_do_not_fit_are_refused(pair: Pair, complaint: str) -> None:
    for data in ([pair], lambda _: pair):
        task = task_of(data=data)
        with pytest.raises(InvalidValue, match=complaint):
            solve(task, start(task, 0), Work(device=0))
    with pytest.raises(InvalidValue, match=complaint.replace("device 0", "test")):
        task_of(test=pair)


def test_a_device_without_data_is_refused() -> None:
    task = task_of(data=[blobs(), blobs()])
    with pytest.raises(InvalidValue, match=r"device 2 has no data: the task holds data for devices 0\.\.1"):
        solve(task, start(task, 0), Work(device=2))


@pytest.mark.parametrize(
    "wrong", [{"gamma": 0.0}, {"rho": -1.0}, {"batch_size": 0}, {"local_passes": 1, "local_iterations": 1}], ids=str
)
def test_settings_out_of_range_are_refused_when_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        task_of(**wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_type_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(InvalidValue, match=rf"'0\.weight' is {dtype}"):
        task_of(lambda: classifier().to(dtype)).initial(0)


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_a_model_of_another_layout_is_refused(verb: str) -> None:
    task = task_of()
    start(task, 0)
    stranger = Model.of({"w": np.zeros(37, np.float32)})
    assert stranger.layout.size == task.initial(0).layout.size
    with pytest.raises(InvalidValue):
        task.train(stranger, Work(device=0)) if verb == "train" else task.evaluate(stranger)


@pytest.mark.parametrize("name", ["device", "number", "seed"])
def test_work_below_zero_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidValue, match=f"{name} is -1"):
        Work(**{"device": 0, name: -1})


def test_what_is_frozen_is_the_same_in_every_run_and_every_process() -> None:
    """A server that starts again, or a task that serves several seeds at once, evaluates with the same constants."""
    one, fresh = task_of(half_frozen), task_of(half_frozen)
    x = start(one, 7)
    start(one, 8)
    assert one.evaluate(x) == fresh.evaluate(x)
    first, second = (solve(task, x, Work(0, seed=7)).x_new.vector for task in (one, fresh))
    assert np.array_equal(first, second)


def test_a_batch_of_one_under_batch_norm_is_explained() -> None:
    pair = (torch.randn(5, 4), torch.zeros(5, 2))
    task = offbeat.torch.Task(
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), nn.functional.mse_loss, [pair], batch_size=4
    )
    with pytest.raises(InvalidValue, match="leaves a batch of one; BatchNorm needs two"):
        solve(task, start(task, 0), Work(0))


def test_settings_can_be_changed_and_data_pooled() -> None:
    task = task_of(data=[blobs()], local_iterations=3, gamma=0.1)
    assert task.devices == 1
    other = task.with_settings(gamma=0.5, local_passes=2)
    assert (other.solver.gamma, other.solver.local_passes, other.solver.local_iterations) == (0.5, 2, None)
    assert task.solver.gamma == 0.1
    assert (task.iterations(Work(0)), task.iterations(Work(0, local_iterations=7))) == (3, 7)
    samples = len(task.device_data(0)[0])
    assert other.iterations(Work(0)) == 2 * -(-samples // other.solver.batch_size)
    pair = (torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))
    three = offbeat.torch.Task(classifier, nn.functional.cross_entropy, [pair, pair, pair])
    assert len(three.pooled().device_data(0)[0]) == 9
    assert len(three.pooled(2).device_data(0)[0]) == 6
    given = offbeat.torch.Task(classifier, nn.functional.cross_entropy, lambda _: pair)
    assert given.devices is None
    with pytest.raises(InvalidValue, match="say with `devices`"):
        given.pooled()


def test_a_task_travels_by_its_arguments() -> None:
    pair = (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    task = offbeat.torch.Task(classifier, nn.functional.cross_entropy, [pair], gamma=0.25)
    copied = pickle.loads(pickle.dumps(task))  # noqa: S301 (made in the same line)
    x = start(task, 3)
    first, second = (solve(each, x, Work(0)).x_new.vector for each in (task, copied))
    assert np.array_equal(first, second)


def test_an_unknown_accelerator_is_refused() -> None:
    with pytest.raises(InvalidValue, match="accelerator is 'gpu'"):
        task_of(accelerator="gpu")


def test_a_worker_measures_what_it_received_on_data_that_it_does_not_train_on() -> None:
    rng = np.random.default_rng(0)
    inputs, targets = rng.standard_normal((2, 30, 4)).astype(np.float32), rng.integers(0, 3, (2, 30))
    held_out = [(inputs[device][:10], targets[device][:10]) for device in range(2)]
    data = [(inputs[device][10:], targets[device][10:]) for device in range(2)]

    def task(**options: Any) -> offbeat.torch.Task:
        make = lambda: nn.Linear(4, 3)  # noqa: E731
        return offbeat.torch.Task(make, nn.functional.cross_entropy, data, local_iterations=3, **options)

    asked = task(held_out=held_out)
    x_tau = start(asked, 1)
    trained = solve(asked, x_tau, Work(1)).trained
    same = task(test=held_out[1]).evaluate(x_tau)
    assert {name: trained.metrics[name] for name in ("loss", "accuracy")} == same
    assert solve(task(), x_tau, Work(1)).trained.metrics.keys() == {"training_loss"}
    assert asked.evaluate(x_tau) == {}
    plain = solve(task(), x_tau, Work(1)).x_new.vector
    assert solve(asked, x_tau, Work(1)).x_new.vector.tobytes() == plain.tobytes(), "measuring changes nothing"
