"""Owns the tasks that simulations are measured with; their data are random, for only speed counts."""

from functools import partial

import numpy as np
from torch import Tensor, nn

from offbeat.tasks.cifar10 import SIDE, PaperCNN
from offbeat.tasks.wikitext2 import COLUMNS, ROWS, LanguageModel, word_loss
from offbeat.train.task import Task

DEVICES = 16
CLASSES = 10
WORDS = 33_278
WIDTH = 200


class SmallCNN(nn.Module):
    """Two convolutions and two layers on images of 28 x 28: about a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(64 * 7 * 7, 312), nn.ReLU(), nn.Linear(312, CLASSES)),
        )

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores


def small_cnn(iterations: int = 10, batch_size: int = 20) -> Task:
    """M: a convolutional network of about a million parameters."""
    return _images(SmallCNN, (1, 28, 28), batch_size, iterations)


def paper_cnn(iterations: int = 10, batch_size: int = 50) -> Task:
    """L: the paper's network, on images of the paper's size."""
    return _images(PaperCNN, (3, SIDE, SIDE), batch_size, iterations)


def lstm(iterations: int = 4, words: int = WORDS, width: int = WIDTH) -> Task:
    """T: the paper's language model; a batch is one chunk of 35 rows and 20 columns."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, words, (DEVICES, iterations, ROWS, COLUMNS))
    return Task(
        model=partial(LanguageModel, words, width),
        loss=word_loss,
        data=[(chunks, np.roll(chunks, -1, axis=1)) for chunks in text],
        gamma=20.0,
        rho=0.0001,
        clip=0.25,
        batch_size=1,
        local_iterations=iterations,
        metrics={},
    )


def _images(model: type[nn.Module], shape: tuple[int, ...], batch_size: int, iterations: int) -> Task:
    rng = np.random.default_rng(0)
    samples = 2 * batch_size
    return Task(
        model=model,
        loss=nn.functional.cross_entropy,
        data=[
            (rng.standard_normal((samples, *shape), np.float32), rng.integers(0, CLASSES, samples))
            for _ in range(DEVICES)
        ],
        gamma=0.01,
        rho=0.005,
        batch_size=batch_size,
        local_iterations=iterations,
    )
