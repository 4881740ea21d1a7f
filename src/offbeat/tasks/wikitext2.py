"""Owns the built-in task `wikitext2`: a language model of two LSTM layers on WikiText-2, word by word.

The text is cut into 20 columns and every 35 rows of them make one chunk, which is one batch; chunk i belongs to device
i modulo the number of devices. The hidden state is zero when a task begins and is carried from chunk to chunk.
"""

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from offbeat.data import wikitext2 as data
from offbeat.errors import InvalidValue
from offbeat.tasks.cifar10 import at_least_1, xavier
from offbeat.train.task import Task

COLUMNS, ROWS = 20, 35
LAYERS, DROPOUT = 2, 0.2


def wikitext2(
    devices: int = 100, partition: str = "iid", width: int = 200, vocabulary: int | None = None, test_max: int = 10_000
) -> Task:
    """The paper's LSTM (`width` 200, all 33,278 words) on 2,088,628 words, dealt out chunk by chunk."""
    at_least_1("width", width)
    at_least_1("test_max", test_max)
    if partition != "iid":
        raise InvalidValue(f"partition is {partition!r}, but text has no labels to deal it out by; use iid")
    text = data(vocabulary=vocabulary)
    inputs, targets = chunks(text.train)
    if not 1 <= devices <= len(inputs):
        raise InvalidValue(f"devices is {devices} but wikitext2 has {len(inputs)} chunks, so 1..{len(inputs)} devices")
    test = tuple(part[:test_max] for part in chunks(text.test))
    words = len(text.vocabulary)
    return Task(
        model=lambda: LanguageModel(words, width),
        loss=word_loss,
        data=[(inputs[device::devices], targets[device::devices]) for device in range(devices)],
        test=(test[0], test[1]),
        gamma=20.0,
        rho=0.0001,
        clip=0.25,
        batch_size=1,
        local_passes=1,
        metrics={},
        derived={"perplexity": perplexity},
        evaluation_batch=1,
    )


def chunks(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chunks of words, and of the word after each, (chunk, row, column); words that fill no chunk are dropped."""
    length = (len(tokens) - 1) // COLUMNS // ROWS * ROWS
    if not length:
        raise InvalidValue(f"the text has {len(tokens)} words, too few for a chunk of {ROWS} x {COLUMNS}")

    def cut(start: int) -> np.ndarray:
        columns = tokens[start : start + COLUMNS * length].astype(np.int64).reshape(COLUMNS, length)
        return np.ascontiguousarray(columns.T).reshape(-1, ROWS, COLUMNS)

    return cut(0), cut(1)


class LanguageModel(nn.Module):
    """Embedding, two LSTM layers, and the embedding again to score the words (tied weights)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.lstm = nn.LSTM(width, width, LAYERS, dropout=DROPOUT)
        self.scores_bias = nn.Parameter(self.embedding.weight.new_zeros(words))
        self._hidden: tuple[Tensor, Tensor] | None = None
        xavier(self)

    def begin(self) -> None:
        self._hidden = None

    def forward(self, batch: Tensor) -> Tensor:
        """Scores of the next word, (rows, columns, words), for a batch of one chunk."""
        words = batch.flatten(0, 1)
        carried, hidden = self.lstm(self.dropout(self.embedding(words)), self._hidden)
        self._hidden = (hidden[0].detach(), hidden[1].detach())
        return nn.functional.linear(self.dropout(carried), self.embedding.weight, self.scores_bias)


def word_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def perplexity(means: Mapping[str, float]) -> float:
    """exp of the mean loss; infinite where that overflows."""
    try:
        return math.exp(means["loss"])
    except OverflowError:
        return math.inf
