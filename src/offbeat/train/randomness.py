"""Owns the keyed randomness and the single thread of one training.

numpy's and torch's global generators, which dropout and user code draw from, are seeded for the training and restored
after it; so is the number of torch's threads. Nothing that a training draws depends on what ran before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from offbeat.task import Work


@contextmanager
def keyed(work: Work) -> Iterator[np.random.Generator]:
    """The random stream of one training, with the global generators seeded from it, on one thread."""
    rng = work.rng()
    with seeded(rng), one_thread():
        yield rng


@contextmanager
def seeded(rng: np.random.Generator) -> Iterator[None]:
    """Seed the global generators of torch and numpy from this stream, and restore them afterwards."""
    before = np.random.get_state()  # noqa: NPY002 (it belongs to the user's code)
    with torch.random.fork_rng():
        torch.manual_seed(int(rng.integers(2**63)))
        np.random.seed(rng.integers(2**32, size=4, dtype=np.uint32))  # noqa: NPY002 (see above)
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: results do not depend on the cores, and trainings do not compete for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
