"""BatchNorm's statistics mix, stay on the device or are worked out anew, as the policy says."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from torch import Tensor, nn

import offbeat
import offbeat.torch
from offbeat.core.kernel import Updater, mixed
from offbeat.core.layout import Model
from offbeat.errors import InvalidValue
from offbeat.task import Work, solve, start

POLICIES = ["mix", "keep_local", "recompute"]
STATISTICS = {"0.running_mean", "0.running_var", "0.num_batches_tracked"}


def skewed(samples: int, seed: int = 0) -> Tensor:
    return 5 + 3 * torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed))


def network() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


def task_of(policy: Any, samples: int = 64, **changes: Any) -> offbeat.torch.Task:
    data = [(skewed(64), torch.zeros(64, 2))]
    test = (skewed(samples, seed=1), torch.ones(samples, 2))
    return offbeat.torch.Task(network, nn.functional.mse_loss, data, test, batch_norm=policy, **changes)


def flat_network(task: offbeat.torch.Task) -> nn.Module:
    return task._flat.module


def layer_of(task: offbeat.torch.Task) -> nn.BatchNorm1d:
    layer = flat_network(task).get_submodule("0")
    assert isinstance(layer, nn.BatchNorm1d)
    return layer


def kept(task: offbeat.torch.Task) -> dict[str, Any]:
    """What evaluation must put back: the layer's statistics and its setting."""
    layer = layer_of(task)
    return {name: buffer.tolist() for name, buffer in layer.named_buffers()} | {"momentum": layer.momentum}


def loss_with(task: offbeat.torch.Task, model: Model, mean: Tensor, var: Tensor) -> float:
    """The test loss of a model whose first layer normalises with these statistics."""
    assert task.test is not None
    inputs, targets = task.test
    arrays = {name: torch.tensor(array) for name, array in model.items()}
    scaled = (inputs - mean) / torch.sqrt(var + 1e-5) * arrays["0.weight"] + arrays["0.bias"]
    outputs = nn.functional.linear(scaled, arrays["1.weight"], arrays["1.bias"])
    return float(nn.functional.mse_loss(outputs, targets))


def test_mixed_statistics_travel_and_are_used() -> None:
    task = task_of("mix", batch_size=32)
    x = start(task, 0)
    assert set(x) >= STATISTICS
    x_new = solve(task, x, Work(device=0, local_iterations=3)).x_new
    assert x_new["0.num_batches_tracked"] == 3
    assert not np.array_equal(x_new["0.running_mean"], x["0.running_mean"])
    assert x["0.running_mean"].tolist() == [0, 0, 0, 0]
    for model in (x, x_new):
        mean, var = torch.tensor(model["0.running_mean"]), torch.tensor(model["0.running_var"])
        assert task.evaluate(model)["loss"] == pytest.approx(loss_with(task, model, mean, var), rel=1e-5)
        assert torch.equal(layer_of(task).running_mean, mean)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["keep_local", "recompute"])
def test_local_statistics_do_not_travel(policy: str) -> None:
    task = task_of(policy)
    x = start(task, 0)
    assert set(x) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(solve(task, x, Work(device=0)).x_new) == set(x)


@pytest.mark.parametrize("policy", ["keep_local", "recompute"])
def test_what_was_trained_before_changes_neither_evaluation_nor_training(policy: str) -> None:
    task = task_of(policy, batch_size=32)
    x = start(task, 0)
    evaluated = task.evaluate(x)
    trained = solve(task, x, Work(device=0)).x_new.vector
    for _ in range(3):
        assert task.evaluate(x) == evaluated
        assert np.array_equal(solve(task, x, Work(device=0)).x_new.vector, trained)


def test_kept_local_a_batch_is_evaluated_on_its_own_statistics() -> None:
    task = task_of("keep_local")
    x = solve(task, start(task, 0), Work(device=0)).x_new
    inputs = skewed(64, seed=1)
    expected = loss_with(task, x, inputs.mean(dim=0), inputs.var(dim=0, correction=0))
    assert task.evaluate(x)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("calibrated", [False, True])
def test_recomputed_statistics_are_those_of_the_calibration_inputs(calibrated: bool) -> None:
    task = task_of("recompute", calibration=skewed(200, seed=5) if calibrated else None)
    x = solve(task, start(task, 0), Work(device=0)).x_new
    inputs = skewed(200, seed=5) if calibrated else skewed(64, seed=1)
    expected = loss_with(task, x, inputs.mean(dim=0), inputs.var(dim=0))
    assert task.evaluate(x)["loss"] == pytest.approx(expected, rel=1e-5)


def test_recomputed_statistics_weigh_every_input_the_same() -> None:
    inputs = torch.cat([skewed(1000, seed=5), skewed(200, seed=6) + 10])
    task = task_of("recompute", calibration=inputs)
    x = start(task, 0)
    expected = loss_with(task, x, inputs.mean(dim=0), inputs.var(dim=0))
    assert task.evaluate(x)["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_test_set_of_any_size_can_be_evaluated(policy: str) -> None:
    task = task_of(policy, samples=1001)
    assert task.evaluate(start(task, 0)).keys() == {"loss"}


@pytest.mark.parametrize("policy", ["keep_local", "recompute"])
def test_evaluation_puts_settings_and_statistics_back(policy: str) -> None:
    task = task_of(policy)
    x = start(task, 0)
    solve(task, x, Work(device=0, local_iterations=2))
    before = kept(task)
    assert (before["num_batches_tracked"], before["momentum"]) == (2, 0.1)
    task.evaluate(x)
    assert kept(task) == before


@pytest.mark.parametrize("policy", ["keep_local", "recompute"])
def test_evaluation_that_fails_puts_settings_and_statistics_back(policy: str) -> None:
    def failing(*_: Tensor) -> Tensor:
        raise RuntimeError("the metric failed")

    task = task_of(policy, metrics={"failing": failing})
    x = start(task, 0)
    solve(task, x, Work(device=0, local_iterations=2))
    before = kept(task)
    with pytest.raises(RuntimeError, match="the metric failed"):
        task.evaluate(x)
    assert kept(task) == before


def test_calibration_that_fails_puts_settings_and_statistics_back() -> None:
    task = task_of("recompute", calibration=torch.ones(10, 5))
    x = start(task, 0)
    solve(task, x, Work(device=0, local_iterations=2))
    before = kept(task)
    with pytest.raises(RuntimeError, match="running_mean"):
        task.evaluate(x)
    assert kept(task) == before


class Spare(nn.Module):
    """Has a layer that only another use of the model would call."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare, self.head = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        answer: Tensor = self.head(self.used(inputs))
        return answer


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_that_is_not_called_does_no_harm(policy: Any) -> None:
    pair = (skewed(64), torch.zeros(64, 2))
    task = offbeat.torch.Task(Spare, nn.functional.mse_loss, [pair], pair, batch_norm=policy)
    assert task.evaluate(start(task, 0)).keys() == {"loss"}


@pytest.mark.parametrize("policy", POLICIES)
def test_images_are_normalised_by_channel(policy: Any) -> None:
    images = 5 + 3 * torch.randn(32, 4, 3, 3, generator=torch.Generator().manual_seed(2))
    pair = (images, torch.zeros(32, 36))
    model = nn.Sequential(nn.BatchNorm2d(4), nn.Flatten())
    task = offbeat.torch.Task(model, nn.functional.mse_loss, [pair], pair, batch_norm=policy)
    loss = task.evaluate(start(task, 0))["loss"]
    assert loss == pytest.approx(float(images.square().mean()) if policy == "mix" else 1.0, rel=1e-2)


def test_other_layers_stay_in_evaluation_mode() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.9), nn.Linear(4, 2))

    pair = (skewed(64), torch.zeros(64, 2))
    for policy in ("keep_local", "recompute"):
        task = offbeat.torch.Task(deep, nn.functional.mse_loss, [pair], pair, batch_norm=policy)
        x = start(task, 0)
        assert task.evaluate(x) == task.evaluate(x)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidValue, match="batch_norm is 'average'; use one of mix, newest, keep_local, recompute"):
        task_of("average")


def test_newest_is_as_if_the_worker_had_started_from_the_newest_statistics() -> None:
    """Done the slow way: the parameters of x_tau with the statistics of x_{t-1}, trained, mixed."""
    task, alpha = task_of("newest", batch_size=16, local_passes=1), 0.3
    x_tau = start(task, 0)
    newest = x_tau.copy()
    newest["0.running_mean"][:], newest["0.running_var"][:] = 7.0, 2.0
    newest["1.bias"][:] += 1.0
    joined = x_tau.copy()
    for name in ("0.running_mean", "0.running_var"):
        joined[name][:] = newest[name]
    update, slow = solve(task, x_tau, Work(0)), solve(task, joined.freeze(), Work(0))
    mix = offbeat.Mix(1 - alpha, alpha, 0.0, True)
    with Updater() as updater:
        w = mixed(updater, newest, mix, update.x_new)
        task.refresh(w, newest, x_tau, alpha, update.trained.gradients)
        expected = mixed(updater, newest, mix, slow.x_new)
    assert update.trained.gradients == 4
    assert np.abs(w["0.running_mean"] - expected["0.running_mean"]).max() < 1e-5
    assert np.abs(w["0.running_var"] - expected["0.running_var"]).max() < 1e-5
    assert np.array_equal(w["1.weight"], expected["1.weight"])


def test_newest_differs_from_mix_in_the_statistics_alone() -> None:
    ends = {
        policy: offbeat.simulate(task_of(policy, local_iterations=3), device_model="sampled:4", epochs=12).x
        for policy in ("mix", "newest")
    }
    for name in ends["mix"]:
        assert np.array_equal(ends["mix"][name], ends["newest"][name]) == ("running" not in name), name


# --- the averaged model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POLICIES, "newest"])
def test_the_averaged_model_has_the_newest_statistics_or_is_evaluated_with_its_own(policy: Any) -> None:
    data = [(skewed(64, seed=device), torch.ones(64, 2)) for device in range(3)]
    test = (skewed(64, seed=9), torch.zeros(64, 2))
    task = offbeat.torch.Task(network, nn.functional.mse_loss, data, test, batch_norm=policy, batch_size=16)
    run = offbeat.simulate(task, epochs=9, average="poly:0", executor="inline", evaluate_every=3, alpha=0.5)
    assert run.average is not None
    assert not np.array_equal(run.average["1.weight"], run.x["1.weight"])
    for name in STATISTICS & set(run.x):
        np.testing.assert_array_equal(run.average[name], run.x[name])
    assert run.summary["loss_average"] == task.evaluate(run.average)["loss"] != run.summary["loss"]
    if policy == "recompute":
        inputs = test[0]
        own = loss_with(task, run.average, inputs.mean(0), inputs.var(0))
        assert run.summary["loss_average"] == pytest.approx(own, rel=1e-5)
