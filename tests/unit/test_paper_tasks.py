"""The paper's tasks, on small made-up data in the official layout: the local step is the one written by hand."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offbeat
from offbeat.core.layout import Model
from offbeat.data import images, text
from offbeat.errors import InvalidValue
from offbeat.reproduce.paper import CIFAR, WIKITEXT, As
from offbeat.task import Work, solve, start
from offbeat.tasks import cifar10 as cifar10_module
from offbeat.tasks import wikitext2 as wikitext2_module
from offbeat.tasks.cifar10 import PaperCNN, cifar10
from offbeat.tasks.wikitext2 import LanguageModel, chunks, wikitext2
from offbeat.train.task import Task, WarmUp

IMAGES, TESTED, WORDS = 1000, 100, 50


def made_up_images() -> images.Images:
    """A thousand images of noise."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (IMAGES + TESTED, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(IMAGES + TESTED) % 10
    return images.Images(pixels[:IMAGES], labels[:IMAGES], pixels[IMAGES:], labels[IMAGES:])


def made_up_text(vocabulary: int | None = None) -> text.Text:
    """A text of fifty words, in any order."""
    words = np.random.default_rng(0).integers(0, vocabulary or WORDS, 30_000).astype(np.int32)
    return text.Text(words, words[:2000], words[:3000], tuple(f"word{i}" for i in range(vocabulary or WORDS)))


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10_module, "data", made_up_images)
    monkeypatch.setattr(wikitext2_module, "data", made_up_text)


# --- cifar10 ---------------------------------------------------------------------------------------------------------


def test_the_cnn_is_the_papers_table() -> None:
    layers = [type(layer).__name__ for part in PaperCNN().children() for layer in part]  # type: ignore[attr-defined]
    convolution = ["Conv2d", "ReLU", "BatchNorm2d"]
    pooled = ["MaxPool2d", "Dropout"]
    assert layers == [
        *(convolution * 2 + pooled) * 2,
        *("Flatten", "Linear", "ReLU", "Dropout", "Linear"),
    ]
    shapes = [tuple(p.shape) for name, p in PaperCNN().named_parameters() if p.ndim > 1]
    assert shapes == [(64, 3, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3), (512, 4608), (10, 512)]
    assert {layer.p for layer in PaperCNN().modules() if isinstance(layer, nn.Dropout)} == {0.25}
    assert sum(p.numel() for p in PaperCNN(16).parameters()) < sum(p.numel() for p in PaperCNN().parameters()) / 15


def test_images_are_cropped_centred_and_scaled() -> None:
    task = cifar10(devices=10, width=2)
    raw = made_up_images()
    cropped = raw.train_images[:, :, 4:28, 4:28].astype(np.float64)
    inputs, targets = zip(*(task.device_data(device) for device in range(10)), strict=True)
    assert torch.cat(inputs).shape == (IMAGES, 3, 24, 24)
    assert torch.cat(inputs).double().mean(dim=0).abs().max() < 1e-5, "the mean image is taken off"
    assert sorted(torch.cat(targets).tolist()) == sorted(raw.train_labels.tolist())
    part = task.data.parts[3]  # type: ignore[union-attr]
    expected = (cropped[part] - cropped.mean(axis=0)) / 128
    assert np.abs(inputs[3].numpy() - expected).max() < 1e-6
    assert task.test is not None
    assert np.abs(task.test[0].numpy() - (raw.test_images[:, :, 4:28, 4:28] - cropped.mean(axis=0)) / 128).max() < 1e-6


@pytest.mark.parametrize("as_", ["text", "authors"])
def test_the_local_step_is_the_one_written_by_hand(as_: As) -> None:
    """Plain PyTorch on the same batches, on one thread: gradient, weight decay and proximal pull, all taken at x."""
    reading = CIFAR[as_]
    values = reading.common | reading.fedasync
    gamma, rho, decay = values["gamma"], values["rho"], values.get("weight_decay", 0.0)
    task = cifar10(devices=2, width=2).with_settings(gamma=gamma, rho=rho, weight_decay=decay)
    steps = 2  # enough for the pull to count; rounding differs between processors, and grows with every step
    task = task.with_settings(batch_size=500 // steps)
    x, work = start(task, 3), Work(1, 5, 3)
    update = solve(task, x, work)
    module = PaperCNN(2)
    names = dict(module.named_parameters())
    with torch.no_grad():
        for name, tensor in (names | dict(module.named_buffers())).items():
            if name in x:
                tensor.copy_(torch.tensor(np.asarray(x[name])))
    x_tau = {name: parameter.detach().clone() for name, parameter in names.items()}
    inputs, targets = task.device_data(1)
    rng = work.rng()
    torch.manual_seed(int(rng.integers(2**63)))
    rng.integers(2**32, size=4, dtype=np.uint32)  # numpy's global generator is seeded from the same stream
    module.train()
    torch.set_num_threads(1)
    for batch in np.split(rng.permutation(500), steps):
        loss = nn.functional.cross_entropy(module(inputs[batch]), targets[batch])
        gradients = torch.autograd.grad(loss, list(names.values()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(names.items(), gradients, strict=True):
                step = gradient + decay * parameter + rho * (parameter - x_tau[name])
                parameter.sub_(gamma * step)
    assert update.trained.gradients == steps
    for name, parameter in names.items():
        found = torch.from_numpy(update.x_new[name].copy())
        assert torch.allclose(found, parameter, atol=2e-6), (name, float((found - parameter.detach()).abs().max()))


def test_gradients_are_counted_as_the_paper_counts_them() -> None:
    """100 devices of 500 images, batch 50: 10 per epoch of FedAsync, 100 per group of FedAvg."""
    task = cifar10(devices=100, width=1)
    ten = task.solver.iterations(500)
    assert ten == 10
    small = cifar10(devices=20, width=1, test_max=10).with_settings(batch_size=5)  # 50 images each: again 10
    run = offbeat.simulate(small, device_model="sampled:4", epochs=3, executor="inline", evaluate_every=1)
    assert [point.gradients for point in run.metrics] == [0, 10, 20, 30]
    run = offbeat.simulate(small, rule="fedavg:10", in_flight_max=10, epochs=2, executor="inline", evaluate_every=1)
    assert [point.gradients for point in run.metrics] == [0, 100, 200]


def test_hinge_and_constant_are_one_run_where_no_staleness_exceeds_b() -> None:
    task = cifar10(devices=20, width=1, test_max=10).with_settings(batch_size=25)
    ends = {
        fn: offbeat.simulate(task, device_model="sampled:4", staleness_fn=fn, alpha=0.9, epochs=8, executor="inline")
        for fn in ("hinge:10,4", "constant", "polynomial:0.5")
    }
    hashes = {fn: run.summary["x_sha256"] for fn, run in ends.items()}
    assert hashes["hinge:10,4"] == hashes["constant"] != hashes["polynomial:0.5"]


def test_a_warm_up_trains_x_0_and_nothing_else() -> None:
    task = cifar10(devices=4, width=1)
    warm = task.with_settings(warm_up="2,1,0.01")
    assert warm.warm_up == WarmUp((2,), 1, 0.01)
    cold, hot, again = start(task, 1), start(warm, 1), start(warm, 1)
    assert not np.array_equal(cold.vector, hot.vector)
    assert np.array_equal(hot.vector, again.vector)
    assert warm.iterations(Work(0)) == task.iterations(Work(0))
    with pytest.raises(InvalidValue, match="use all"):
        warm.pooled(4)
    with pytest.raises(InvalidValue, match="DEVICE,PASSES,GAMMA"):
        task.with_settings(warm_up="first")


@pytest.mark.parametrize(("name", "value"), [("width", 0), ("test_max", 0)])
def test_a_size_that_cannot_be_is_refused(name: str, value: int) -> None:
    makers: list[Callable[..., Task]] = [cifar10, wikitext2]
    for make in makers:
        with pytest.raises(InvalidValue, match=f"{name} is 0"):
            make(**{name: value})


# --- wikitext2 -------------------------------------------------------------------------------------------------------


def test_chunks_follow_the_text_down_their_columns() -> None:
    words = np.arange(20 * 70 + 5, dtype=np.int32)
    inputs, targets = chunks(words)
    assert inputs.shape == targets.shape == (2, 35, 20)
    assert np.array_equal(targets, inputs + 1), "the target of a word is the word that follows it"
    assert inputs[0, :, 0].tolist() == list(range(35))
    assert inputs[1, :, 0].tolist() == list(range(35, 70))
    assert inputs[0, 0].tolist() == list(range(0, 1400, 70))
    with pytest.raises(InvalidValue, match="too few"):
        chunks(words[:600])


def test_chunks_are_dealt_out_in_turn() -> None:
    task = wikitext2(devices=6, width=4)
    everything, _ = chunks(made_up_text().train)
    for device in range(6):
        assert torch.equal(task.device_data(device)[0], torch.from_numpy(everything[device::6]))
    assert task.iterations(Work(0)) == len(everything[0::6])


def test_the_hidden_state_is_carried_within_a_task_and_forgotten_between_two() -> None:
    module = LanguageModel(WORDS, 8).eval()
    batch = torch.arange(35 * 20).reshape(1, 35, 20) % WORDS
    first, second = module(batch), module(batch)
    assert not torch.allclose(first, second)
    module.begin()
    assert torch.equal(module(batch), first)
    task = wikitext2(devices=6, width=4)
    x = start(task, 0)
    once, again = (solve(task, x, Work(2, 1)).x_new.vector for _ in range(2))
    assert np.array_equal(once, again)


def test_the_words_are_scored_with_the_embedding() -> None:
    module = LanguageModel(WORDS, 8)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes["embedding.weight"] == (WORDS, 8)
    assert sum(WORDS in shape for shape in shapes.values()) == 2, "one matrix and one bias: the weights are tied"
    assert sum(name.startswith("lstm.weight") for name in shapes) == 4
    assert module.lstm.dropout == module.dropout.p == 0.2


def test_perplexity_is_that_of_the_whole_test_text() -> None:
    task = wikitext2(devices=6, width=4)
    metrics = task.evaluate(start(task, 0))
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["perplexity"] == pytest.approx(WORDS, rel=0.05), "a model that knows nothing"


@pytest.mark.parametrize("as_", ["text", "authors"])
def test_a_local_step_on_text_is_the_one_written_by_hand(as_: As) -> None:
    """Clipping by the norm of the whole gradient, the hidden state carried over, rho as the reading has it."""
    values = WIKITEXT[as_].common | WIKITEXT[as_].fedasync
    gamma, rho = values["gamma"], values["rho"]
    task = _without_dropout(wikitext2(devices=6, width=4)).with_settings(gamma=gamma, rho=rho)
    x, work = start(task, 3), Work(1, 4, 3)
    update = solve(task, x, work)
    module = LanguageModel(WORDS, 4)
    _loaded(module, x)
    module.lstm.dropout = module.dropout.p = 0.0
    names = dict(module.named_parameters())
    x_tau = {name: parameter.detach().clone() for name, parameter in names.items()}
    inputs, targets = task.device_data(1)
    rng = work.rng()
    rng.integers(2**63)
    rng.integers(2**32, size=4, dtype=np.uint32)
    for chunk in rng.permutation(len(inputs)):
        loss = wikitext2_module.word_loss(module(inputs[[chunk]]), targets[[chunk]])
        gradients = torch.autograd.grad(loss, list(names.values()))
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        with torch.no_grad():
            for (name, parameter), gradient in zip(names.items(), gradients, strict=True):
                parameter.sub_(gamma * (gradient * min(1.0, 0.25 / norm) + rho * (parameter - x_tau[name])))
    for name, parameter in names.items():
        assert torch.allclose(torch.from_numpy(update.x_new[name].copy()), parameter, atol=2e-4), name


def _without_dropout(task: Task) -> Task:
    def model() -> nn.Module:
        module = LanguageModel(WORDS, 4)
        module.lstm.dropout = module.dropout.p = 0.0
        return module

    return Task(**{**task._arguments, "model": model})


def _loaded(module: nn.Module, x: Model) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.tensor(np.asarray(x[name])))


def test_text_is_dealt_out_in_turn_only() -> None:
    with pytest.raises(InvalidValue, match="text has no labels"):
        wikitext2(partition="dirichlet:0.3")
    with pytest.raises(InvalidValue, match=r"so 1\.\.42 devices"):
        wikitext2(devices=10_000)


def test_the_tasks_are_built_in(tmp_path: Path) -> None:
    summary: dict[str, Any] = offbeat.simulate(
        "cifar10", devices=10, width=1, epochs=2, device_model="sampled:4", test_max=20, executor="inline", dir=tmp_path
    ).summary
    assert summary["gradients"] == 2 * 2
    assert summary["settings"]["width"] == 1
    summary = offbeat.simulate(
        "wikitext2", rule="sgd", devices=9, width=4, vocabulary=20, local_iterations=5, epochs=2
    ).summary
    assert summary["gradients"] == 10
