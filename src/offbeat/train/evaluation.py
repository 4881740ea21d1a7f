"""Owns how a global model is evaluated: metrics over the test data, and the statistics that BatchNorm uses for it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from offbeat.train.sgd import Batch

BatchNormPolicy = Literal["mix", "newest", "keep_local", "recompute"]
Metric = Callable[[Tensor, Tensor], Tensor]
Derived = Callable[[Mapping[str, float]], float]

MIXED = ("mix", "newest")
"""Policies under which the statistics travel with the model."""
EVALUATION_BATCH = 1000


def measured(
    module: nn.Module, test: Batch, measures: Mapping[str, Metric], derived: Mapping[str, Derived], batch: int
) -> dict[str, float]:
    """Means of the metrics over the test data, in its order, and the metrics derived from them."""
    totals = dict.fromkeys(measures, 0.0)
    inputs, targets = test
    for part, answers in zip(parts(inputs, batch), parts(targets, batch), strict=True):
        outputs = module(part)
        for name, measure in measures.items():
            totals[name] += float(measure(outputs, answers).double().mean()) * len(part)
    means = {name: total / len(inputs) for name, total in totals.items()}
    return means | {name: derive(means) for name, derive in derived.items()}


@contextmanager
def statistics(
    module: nn.Module, layers: Sequence[_BatchNorm], policy: BatchNormPolicy, calibration: Tensor, batch: int
) -> Iterator[None]:
    """Give BatchNorm the statistics of the policy, and restore its state afterwards."""
    layers = [] if policy in MIXED else layers
    saved = [(layer.momentum, copy.deepcopy(layer.state_dict())) for layer in layers]
    try:
        for layer in layers:
            layer.train()
            layer.momentum = 0.0
        if layers and policy == "recompute":
            _recompute(module, layers, calibration, batch)
        yield
    finally:
        for layer, (momentum, state) in zip(layers, saved, strict=True):
            layer.momentum = momentum
            layer.load_state_dict(state)


def _recompute(module: nn.Module, layers: Sequence[_BatchNorm], inputs: Tensor, batch: int) -> None:
    """Compute the statistics of the global model over the inputs, each with equal weight."""
    seen: dict[_BatchNorm, list[Tensor]] = {layer: [] for layer in layers}

    def note(layer: _BatchNorm, arguments: tuple[Tensor]) -> None:
        channels = arguments[0].transpose(0, 1).flatten(1).double()
        seen[layer].append(
            torch.stack([channels.sum(1), channels.square().sum(1), torch.full_like(channels[:, 0], channels.shape[1])])
        )

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        for part in parts(inputs, batch):
            module(part)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, moments in seen.items():
        layer.eval()
        if not moments:
            continue  # the module does not call it
        total, squares, count = torch.stack(moments).sum(0)
        mean = total / count
        variance = (squares - count * mean.square()) / (count - 1).clamp(min=1)
        layer.load_state_dict({**layer.state_dict(), "running_mean": mean.float(), "running_var": variance.float()})


def parts(tensor: Tensor, batch: int) -> Sequence[Tensor]:
    """Batches of equal size within one sample: none is too short for BatchNorm to take its own statistics."""
    return torch.tensor_split(tensor, -(-len(tensor) // batch))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(dim=1) == targets


def default_metrics(test: Batch) -> Mapping[str, Metric]:
    classes = not test[1].is_floating_point() and test[1].ndim == 1
    return {"accuracy": accuracy} if classes else {}
