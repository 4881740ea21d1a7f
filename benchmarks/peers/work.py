"""The work that every peer does: a small perceptron on digits, or a model that is sent to and fro and never trained.

It is the work that `python -m benchmarks` measures, written once more: a peer's environment has no Offbeat.
"""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

DEVICES, TEST_SAMPLES = 100, 360
GAMMA, RHO, BATCH, ITERATIONS = 0.1, 0.005, 10, 10
PARTS = 10
"""Tensors that an untrained model consists of."""


def perceptron() -> nn.Module:
    """64 pixels, 32 hidden units, ten classes."""
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def digits() -> list[tuple[Tensor, Tensor]]:
    """Images and labels of every device."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[TEST_SAMPLES:]
    pixels, classes = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return [(pixels[part], classes[part]) for part in order.tensor_split(DEVICES)]


def train(module: nn.Module, data: tuple[Tensor, Tensor]) -> None:
    """H proximal steps of SGD on drawn batches."""
    inputs, targets = data
    start = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=GAMMA)
    for _ in range(ITERATIONS):
        batch = torch.randperm(len(inputs))[:BATCH]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter, x_tau in zip(module.parameters(), start, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - x_tau, alpha=RHO)
        optimizer.step()


class Untrained(nn.Module):
    """A model of this many megabytes that is never trained."""

    def __init__(self, mb: int = 10) -> None:
        super().__init__()
        size = mb * 250_000 // PARTS
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(size)) for _ in range(PARTS)])

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs: no output is needed."""
        return inputs
