"""Owns the text of the task that the workers of a soak train: numpy alone, so that a worker starts quickly."""

TEXT = '''"""x follows the mean of what the devices hold; a training takes a random time."""
import time
import numpy as np
from offbeat import Trained

PARAMETERS, TRAINING_S = {parameters}, {training_s}


class Line:
    devices = {devices}

    def initial(self, seed):
        return {{"x": np.zeros(PARAMETERS, np.float32), "y": np.zeros((2, 2), np.float32)}}

    def train(self, model, work):
        rng = work.rng()
        time.sleep(min(rng.exponential(TRAINING_S), 20 * TRAINING_S))
        model["x"][:] += np.float32(0.1) * (np.float32(work.device) - model["x"])
        model["y"][:] += rng.standard_normal((2, 2)).astype(np.float32)
        return Trained(samples=10 + work.device, gradients=3)

    def evaluate(self, model):
        return {{"distance": float(np.abs(model["x"]).mean())}}


task = Line()
'''


def text(parameters: int, training_s: float, devices: int) -> str:
    return TEXT.format(parameters=parameters, training_s=training_s, devices=devices)
