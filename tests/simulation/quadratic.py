"""A quadratic task in plain numpy whose local solution is known in closed form, as a numpy user would write it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.core.layout import Array, Model
from offbeat.task import Trained, Work


@dataclass(frozen=True)
class Quadratic:
    """Device i pulls every coordinate towards its centre: x_new = c_i + m_i (x_tau - c_i) + noise."""

    centres: Sequence[float]
    shrink: Sequence[float]
    """m_i: what one task leaves of the distance to the centre."""
    size: int = 1
    start: float = 1.0
    noise: float = 0.0

    @property
    def devices(self) -> int:
        return len(self.centres)

    def initial(self, seed: int) -> Mapping[str, Array]:  # noqa: ARG002 (x_0 is given)
        return {"x": np.full(self.size, self.start, np.float32)}

    def train(self, model: Model, work: Work) -> Trained:
        centre, shrink = np.float32(self.centres[work.device]), np.float32(self.shrink[work.device])
        x = centre + shrink * (model["x"] - centre)
        if self.noise:
            x += np.float32(self.noise) * work.rng().standard_normal(self.size, dtype=np.float32)
        model["x"][:] = x
        return Trained(samples=1, gradients=1)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        return {"x": float(model["x"].mean(dtype=np.float64))}
