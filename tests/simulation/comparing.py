"""A task in a file, and a comparison of it, for the tests of comparisons; the task does what files beside it say."""

from pathlib import Path

TASK = """
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from offbeat import Trained

HERE = Path(__file__).parent


def is_told(what, seed):
    return (HERE / f"{what}-{seed}").exists()


class Pull:
    devices = 6

    def initial(self, seed):
        if is_told("fail-at-first", seed):
            raise ValueError("no beginning")
        self.seed = seed
        return {"x": np.full(3, seed, np.float32)}

    def train(self, model, work):
        if (HERE / "slow").exists():
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(0.05)
        if is_told("hang", work.seed):
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(1000)
        if is_told("fail", work.seed):
            raise ValueError("no\\nluck")
        if is_told("interrupt", work.seed):
            raise KeyboardInterrupt
        if is_told("die", work.seed) and "pytest" not in sys.modules:
            os.kill(os.getpid(), signal.SIGKILL)
        model["x"][:] = (model["x"] + np.float32(10)) / 2
        return Trained(samples=1, gradients=2)

    def evaluate(self, model):
        if (HERE / "fail-evaluating").exists():
            raise ValueError("cannot tell")
        if (HERE / "diverge").exists():
            return {"x": float("inf")}
        return {"x": float(model["x"][0])}

    def pooled(self, devices):
        return self


class Many(Pull):
    def batchable(self):
        return None

    def train_many(self, jobs):
        copies = [x_tau.copy() for x_tau, _ in jobs]
        return [(model, self.train(model, work)) for model, (_, work) in zip(copies, jobs)], 1


task = Pull()
many = Many()


def seeded(seed=0):
    return Pull()
"""
SPEC = """
task = "{task}"
seeds = [1, 2, 3]
metric = "x"
reach = "slow"

[settings]
device_model = "lognormal:1"
in_flight_max = 3

[methods.fast]
rule = "fedasync"
epochs = 30

[methods.slow]
rule = "fedavg:3"
epochs = 4
"""


def written(folder: Path, part: str = "") -> Path:
    """Write task and spec to a folder; `part` names what the task's file holds (`:many` can be batched)."""
    (folder / "pull.py").write_text(TASK)
    path = folder / "spec.toml"
    path.write_text(SPEC.format(task=f"{folder / 'pull.py'}{part}"))
    return path


def change(path: Path, *changes: tuple[str, str]) -> None:
    """Replace text in a spec; what is replaced must be there."""
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
