"""Least squares in eight numbers: the task of the recorded runs beside this file.

Rules kept here:
- This file never changes: a run's folder knows its task by the digest of these bytes.
- Every operation is elementwise and exact to one rounding, so that the bits are the same on every machine.
"""

import os
import time
from collections.abc import Mapping
from math import fsum
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat import Trained, Work

Vector = npt.NDArray[np.float32]
DEVICES, STEP = 6, np.float32(0.125)
TRAINING_S = float(os.environ.get("LINE_TRAINING_S", "0"))
"""What a training takes, so that a served run can be interrupted in its middle."""


def drawn(*key: int) -> Vector:
    """Eight multiples of 1/64 between -1 and 1, the same ones for the same key."""
    rng = np.random.default_rng(np.random.SeedSequence(7, spawn_key=key))
    return (rng.integers(-64, 65, 8) / 64).astype(np.float32)


class Line:
    """Device i wants slope_i * x = aim_i, and every task of its own a little beside that."""

    devices = DEVICES

    def initial(self, seed: int) -> Mapping[str, Vector]:
        return {"x": drawn(0, seed)[:6], "y": drawn(0, seed)[6:].reshape(2, 1)}

    def train(self, model: Any, work: Work) -> Trained:
        time.sleep(TRAINING_S)
        noise = work.rng().integers(-64, 65, 8).astype(np.float32) / np.float32(1024)
        steps = work.local_iterations or 3
        for step in range(steps):
            device = self.device(work, step)
            slope, aim = drawn(1, device), drawn(2, device) + noise
            model["x"][:] -= STEP * slope[:6] * (slope[:6] * model["x"] - aim[:6])
            model["y"][:, 0] -= STEP * slope[6:] * (slope[6:] * model["y"][:, 0] - aim[6:])
        return Trained(samples=10 + work.device, gradients=steps)

    def device(self, work: Work, _step: int) -> int:
        """Whose data a step is taken on."""
        return work.device

    def evaluate(self, model: Any) -> Mapping[str, float]:
        x = np.concatenate([model["x"], model["y"][:, 0]])
        wrong = [drawn(1, device) * x - drawn(2, device) for device in range(DEVICES)]
        return {"loss": fsum(float(part) ** 2 for parts in wrong for part in parts) / DEVICES}

    def pooled(self, _devices: int | None) -> "Line":
        """Everybody's data on one machine."""
        return Pooled()


class Pooled(Line):
    """One machine that takes its steps on the devices' data in turn."""

    devices = 1

    def device(self, work: Work, step: int) -> int:
        return (work.number + step) % DEVICES


task = Line()
