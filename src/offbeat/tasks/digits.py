"""Owns the built-in task `digits`: handwritten digits of 8x8 pixels, which ship inside scikit-learn."""

import numpy as np
import torch
from torch import nn

from offbeat.errors import InvalidValue, MissingExtra
from offbeat.partition import partition as dealt
from offbeat.train.task import Task

TEST_SAMPLES = 360
SPLIT_SEED = 0


def digits(devices: int = 100, partition: str = "iid", partition_sizes: str | None = None, hidden: int = 32) -> Task:
    """A multilayer perceptron on 1,437 training images, dealt out to the devices, and 360 test images."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise MissingExtra("scikit-learn", "digits") from error
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(images))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    if not 1 <= devices <= len(train):
        raise InvalidValue(f"devices is {devices}; digits has {len(train)} training images, so 1..{len(train)} devices")
    parts = dealt(labels[train], devices, partition, seed=SPLIT_SEED, sizes=partition_sizes)
    pixels = (images / 16).astype(np.float32)
    return Task(
        model=lambda: perceptron(hidden),
        loss=nn.functional.cross_entropy,
        data=[(pixels[train[part]], labels[train[part]]) for part in parts],
        test=(pixels[test], labels[test]),
        gamma=0.1,
        rho=0.005,
        batch_size=10,
        local_iterations=10,
    )


def perceptron(hidden: int) -> nn.Module:
    """64 pixels, one hidden layer, ten classes."""
    return torch.nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
