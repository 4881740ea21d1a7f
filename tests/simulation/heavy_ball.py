"""A task that keeps state, as a numpy user would write it: local steps with a momentum that outlives a training."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offbeat.core.layout import Array, Model
from offbeat.task import DeviceState, Trained, Work


@dataclass(frozen=True)
class HeavyBall:
    """Device i pulls x towards i; `visits` counts the trainings whose updates were applied."""

    devices: int = 4
    size: int = 20
    keeps_state: bool = True

    def initial(self, seed: int) -> Mapping[str, Array]:  # noqa: ARG002 (x_0 is given)
        return {"x": np.full(self.size, 9.0, np.float32)}

    def train(self, model: Model, work: Work, state: DeviceState) -> tuple[Trained, Mapping[str, Array]]:
        x, momentum = model["x"], np.array(state.get("momentum", np.zeros(self.size)))
        noise = work.rng().standard_normal(self.size)
        for _ in range(3):
            momentum = 0.5 * momentum + (x - work.device) + 0.1 * noise
            x -= (0.1 * momentum).astype(np.float32)
        visits = int(state.get("visits", np.array(0))) + 1
        return Trained(1, 3), {"momentum": momentum, "visits": np.array(visits, np.int32)}

    def evaluate(self, model: Model) -> Mapping[str, float]:
        return {"x": float(model["x"].mean(dtype=np.float64))}
