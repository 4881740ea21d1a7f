"""Logistic regression in plain numpy: a task without a framework, and its devices' data as CSV files.

It is the server's side of `examples/worker.mjs`, a worker in plain JavaScript. Both know the same model: `weights`,
one number per feature, and `bias`, one number. Workers of both kinds can train in one run.

A device measures only every second feature, so no device can learn the whole model from its own data: alone, it stays
at an accuracy of 80 %.

    python examples/logistic.py data          writes data/device-0.csv to data/device-3.csv
    offbeat serve examples/logistic.py --dir run --target 'accuracy>=0.95' --evaluate-every 1
    node examples/worker.mjs http://127.0.0.1:7733 data/device-0.csv 0
    offbeat work examples/logistic.py --server http://127.0.0.1:7733 --device 1
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import offbeat

Vector = npt.NDArray[np.float64]
TRUTH = np.array([2.0, -1.0, 1.5, -2.0])
"""The weights that made the labels; the bias is 1."""
ROWS, TEST_ROWS = 200, 1000


def device_data(device: int) -> tuple[Vector, Vector]:
    """Features and labels of one device; a feature that it does not measure is 0."""
    features = np.random.default_rng((15, device)).normal(size=(ROWS, len(TRUTH)))
    features[:, 1 - device % 2 :: 2] = 0.0
    return features, labels_of(features)


def test_data() -> tuple[Vector, Vector]:
    """Features and labels that no device has."""
    features = np.random.default_rng(15).normal(size=(TEST_ROWS, len(TRUTH)))
    return features, labels_of(features)


def labels_of(features: Vector) -> Vector:
    """1 on one side of a plane, 0 on the other."""
    labels: Vector = (features @ TRUTH + 1.0 > 0.0).astype(np.float64)
    return labels


@dataclass
class Logistic:
    """The task. Its settings are fields, so that `offbeat serve --gamma 0.3` can change them."""

    devices: int = 4
    gamma: float = 0.2
    rho: float = 0.01
    batch_size: int = 20
    local_passes: int = 1
    local_iterations: int | None = None

    def with_settings(self, **changes: Any) -> "Logistic":
        """This task with settings of the run."""
        if "local_passes" in changes:
            changes = {"local_iterations": None, **changes}
        return replace(self, **changes)

    def initial(self, seed: int) -> Mapping[str, npt.NDArray[np.float32]]:  # noqa: ARG002 (every run starts from 0)
        """x_0."""
        return {"weights": np.zeros(len(TRUTH), np.float32), "bias": np.zeros(1, np.float32)}

    def samples(self, device: int) -> int:  # noqa: ARG002 (all have as many)
        """How many samples a device holds."""
        return ROWS

    def train(self, model: Mapping[str, Any], work: offbeat.Work) -> offbeat.Trained:
        """A few steps of SGD on the loss of the device plus rho/2 ||x - x_tau||^2."""
        features, labels = device_data(work.device)
        gamma = self.gamma if work.gamma is None else work.gamma
        weights, bias = model["weights"], model["bias"]
        begun = weights.copy(), bias.copy()
        iterations = work.local_iterations or self.local_iterations or self.local_passes * ceil(ROWS / self.batch_size)
        for batch, _ in zip(self._batches(work), range(iterations), strict=False):
            error = 1.0 / (1.0 + np.exp(-(features[batch] @ weights + bias))) - labels[batch]
            weights -= (gamma * (error @ features[batch] / len(batch) + self.rho * (weights - begun[0]))).astype("f4")
            bias -= (gamma * (error.mean() + self.rho * (bias - begun[1]))).astype("f4")
        return offbeat.Trained(samples=ROWS, gradients=iterations)

    def _batches(self, work: offbeat.Work) -> Iterator[npt.NDArray[np.int64]]:
        rng = work.rng()
        while True:
            order = rng.permutation(ROWS)
            yield from (order[start : start + self.batch_size] for start in range(0, ROWS, self.batch_size))

    def evaluate(self, model: Mapping[str, Any]) -> Mapping[str, float]:
        """How often a model is right."""
        features, labels = test_data()
        return {"accuracy": float(((features @ model["weights"] + model["bias"] > 0.0) == labels).mean())}


task = Logistic()


def write(folder: Path) -> None:
    """The data of every device as a CSV file: features, and the label last."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ",".join(f"feature_{number}" for number in range(len(TRUTH)))
    for device in range(task.devices):
        table = np.column_stack(device_data(device))
        np.savetxt(folder / f"device-{device}.csv", table, "%.17g", ",", header=f"{names},label", comments="")
    print(f"wrote the data of {task.devices} devices to {folder}")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
