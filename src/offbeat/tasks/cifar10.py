"""Owns the built-in task `cifar10`: the paper's CNN on CIFAR-10, prepared as the authors' code prepares it.

Images are cropped to their middle 24 x 24 pixels; the mean image of the training data is subtracted, and the result is
divided by 128. There is no augmentation.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.core.layout import Array
from offbeat.data import cifar10 as data
from offbeat.errors import InvalidValue
from offbeat.partition import Indices
from offbeat.partition import partition as deal
from offbeat.train.task import Task

CROP = slice(4, 28)
SIDE = 24
SCALE = 128.0
SPLIT_SEED = 0
CLASSES = 10
DROPOUT = 0.25

Pair = tuple[Any, Any]


def cifar10(
    devices: int = 100,
    partition: str = "iid",
    partition_sizes: str | None = None,
    width: int = 64,
    test_max: int = 10_000,
) -> Task:
    """The paper's CNN (`width` 64; 16 is a quarter of it) on 50,000 images, dealt out to the devices."""
    at_least_1("width", width)
    at_least_1("test_max", test_max)
    images = data()
    train, test = images.train_images[:, :, CROP, CROP], images.test_images[:test_max, :, CROP, CROP]
    parts = deal(images.train_labels, devices, partition, seed=SPLIT_SEED, sizes=partition_sizes)
    dealt = DealtImages(train, images.train_labels, parts)
    return Task(
        model=lambda: PaperCNN(width),
        loss=nn.functional.cross_entropy,
        data=dealt,
        test=(dealt.prepared(test), images.test_labels[:test_max]),
        gamma=0.1,
        rho=0.005,
        batch_size=50,
        local_passes=1,
    )


class DealtImages(Sequence[Pair]):
    """(inputs, targets) of every device; inputs are prepared when they are read, because floats take more memory."""

    def __init__(self, images: Array, labels: Array, parts: Sequence[Indices]) -> None:
        self.images, self.labels, self.parts = images, labels, parts
        self.mean = images.mean(axis=0, dtype=np.float64).astype(np.float32)

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, device: int) -> Pair: ...
    @overload
    def __getitem__(self, device: slice) -> Sequence[Pair]: ...
    def __getitem__(self, device: int | slice) -> Pair | Sequence[Pair]:
        if isinstance(device, slice):
            return [self[i] for i in range(len(self))[device]]
        part = self.parts[device]
        return self.prepared(self.images[part]), self.labels[part]

    def prepared(self, images: Array) -> Array:
        prepared: Array = (images.astype(np.float32) - self.mean) / np.float32(SCALE)
        return prepared


class PaperCNN(nn.Module):
    """The network in the paper's appendix: each convolution is followed by ReLU and then by BatchNorm."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(3, width),
            *_convolution(width, width),
            nn.MaxPool2d(2),
            nn.Dropout(DROPOUT),
            *_convolution(width, 2 * width),
            *_convolution(2 * width, 2 * width),
            nn.MaxPool2d(2),
            nn.Dropout(DROPOUT),
        )
        self.classes = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * width * (SIDE // 4) ** 2, 8 * width),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(8 * width, CLASSES),
        )
        xavier(self)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classes(self.features(images))
        return scores


def _convolution(channels: int, out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(out)


def xavier(module: nn.Module) -> None:
    """Start as MXNet does by default, and so the authors: Xavier-uniform matrices, biases 0, BatchNorm unchanged."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
            elif name.rpartition(".")[2].startswith("bias"):
                nn.init.zeros_(parameter)


def at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise InvalidValue(f"{name} is {value} but must be a whole number >= 1")
