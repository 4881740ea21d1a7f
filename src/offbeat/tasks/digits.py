"""Owns the built-in task `digits`: handwritten digits of 8x8 pixels, which ship inside scikit-learn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from offbeat.core.layout import Array
from offbeat.errors import InvalidValue, MissingExtra
from offbeat.partition import partition as dealt
from offbeat.train.task import Task

TEST_SAMPLES = 360
SPLIT_SEED = 0
FILE = Path("datasets", "data", "digits.csv.gz")
"""In scikit-learn's folder: 64 pixels and the label in each line."""


def digits(devices: int = 100, partition: str = "iid", partition_sizes: str | None = None, hidden: int = 32) -> Task:
    """A multilayer perceptron on 1,437 training images, dealt out to the devices, and 360 test images."""
    images, labels = load_digits()
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
    return torch.nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def load_digits() -> tuple[Array, Array]:
    """Images and labels of `sklearn.datasets.load_digits`, whose import takes longer than a short run."""
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise MissingExtra("scikit-learn", "digits")
    table = np.loadtxt(Path(found.submodule_search_locations[0]) / FILE, delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)
