"""Functions that APPFL loads by name from this file, which it executes again each time; `work` is executed once."""

from typing import Any

import work
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Loss(nn.Module):
    """Cross-entropy."""

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean over a batch."""
        return nn.functional.cross_entropy(scores, targets)


def accuracy(targets: Any, scores: Any) -> float:
    return float((scores.argmax(axis=1) == targets).mean())


def dataset(device: int) -> tuple[Any, Any]:
    """One device's data, and none to validate on."""
    return TensorDataset(*work.digits()[device]), None


def perceptron() -> nn.Module:
    """The model of sim S."""
    return work.perceptron()


def untrained(mb: int) -> nn.Module:
    """A model of this many megabytes."""
    return work.Untrained(mb)
