"""Owns the benchmark of simulations: small models beside the plain loop, alone and as a comparison of seeds.

S is 100 devices, all in flight, a 64-32-10 perceptron on digits, batch 10, H = 10.
"""

from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks import events, large
from benchmarks.plain import PlainLoop
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.turns import Contestant, Tell, take_turns
from offbeat.core.layout import Array, Model
from offbeat.sim.api import simulate
from offbeat.sim.compare import compare
from offbeat.sim.executors import Inline
from offbeat.sim.spec import Spec
from offbeat.task import Task as AnyTask
from offbeat.task import Trained, Work
from offbeat.tasks.digits import digits
from offbeat.train.task import Task

DEVICES = 100
DEVICE_MODELS = {"uniform": "uniform:0.5,1.5", "lognormal": "lognormal:1.5"}
NEVER = 10**9
"""Epochs between evaluations: the plain loop does none either."""


class Untrained:
    """A task as large as the perceptron that trains nothing: its run time is that of the simulator itself."""

    devices = DEVICES

    def initial(self, seed: int) -> dict[str, Array]:
        return {"x": np.zeros(64 * 32 + 32 + 32 * 10 + 10 + 0 * seed, np.float32)}

    def train(self, model: Model, work: Work) -> Trained:  # noqa: ARG002 (nothing is trained)
        return Trained(samples=10, gradients=10)

    def evaluate(self, model: Model) -> dict[str, float]:  # noqa: ARG002
        return {}


def run(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    """Measure small models, large models, and events without training."""
    _small(results, scale, tell, folder)
    _averaged(results, scale, tell)
    large.run(results, scale, tell)
    events.run(results, scale, tell, folder)


def _small(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    task, lanes = digits(DEVICES), dict.fromkeys(DEVICE_MODELS, 1.0)
    plain, numbers = PlainLoop(task), count()
    contestants: dict[str, Contestant] = {
        "plain": lambda: plain.rate(scale.sim_plain_tasks),
        "plain, 2 threads": lambda: plain.rate(scale.sim_plain_tasks // 4, 2),
        **{name: partial(simulated, task, name, scale.sim_epochs, lanes) for name in DEVICE_MODELS},
        "comparison": lambda: compared(scale, folder / f"compare-{next(numbers)}"),
        "untrained": lambda: simulated(Untrained(), "lognormal", scale.sim_epochs, {}),
    }
    plain.rate(1)
    simulated(task, "uniform", DEVICES, {})  # compiles and loads once, before anything is measured
    turns = take_turns(contestants, scale.turns, tell, "sim S")
    for name in (*DEVICE_MODELS, "comparison"):
        results.put_turns(f"sim_s_{name}", turns, name, "plain")
    for name, mean in lanes.items():
        results.note(f"sim S, {DEVICE_MODELS[name]}, trainings at once, mean", mean, "lanes")
    results.note("sim S, overhead per task, training nothing", 1e6 / turns.median("untrained"), "us")
    results.note_turns("sim S, plain loop, two threads against one", "tasks/s", turns, "plain, 2 threads", "plain")


def _averaged(results: Results, scale: Scale, tell: Tell) -> None:
    """Weights by participation and an averaged model beside neither, in processor time, which others disturb less."""
    task, both = digits(DEVICES), {"weights": "participation", "average": "poly:8"}
    contestants: dict[str, Contestant] = {
        "without": lambda: per_processor_second(task, scale.sim_epochs, {}),
        "with": lambda: per_processor_second(task, scale.sim_epochs, both),
    }
    turns = take_turns(contestants, 2 * scale.turns, tell, "sim S, averaged")
    results.put_turns("sim_s_averaged", turns, "with", "without")


def per_processor_second(task: AnyTask, epochs: int, more: dict[str, str]) -> float:
    """Tasks per second of processor time of one run."""
    settings: dict[str, Any] = {"in_flight_max": DEVICES, "epochs": epochs, "evaluate_every": NEVER, **more}
    begun = process_time()
    summary = simulate(task, device_model=DEVICE_MODELS["uniform"], **settings).summary
    return float(summary["applied"] / (process_time() - begun))


def simulated(task: AnyTask, name: str, epochs: int, lanes: dict[str, float]) -> float:
    """Tasks per second of one run; the mean number of trainings at once is put into `lanes`."""
    settings: dict[str, Any] = {"in_flight_max": DEVICES, "epochs": epochs, "evaluate_every": NEVER}
    executor = "auto" if isinstance(task, Task) else Inline.name
    summary = simulate(task, device_model=DEVICE_MODELS[name], executor=executor, **settings).summary
    lanes[name] = summary.get("lanes_mean", 1.0)
    return float(summary["applied"] / summary["wall_s"])


def compared(scale: Scale, folder: Path) -> float:
    """Tasks per second of a comparison of seeds, the start of its processes included."""
    method = {
        "device_model": DEVICE_MODELS["lognormal"],
        "devices": DEVICES,
        "in_flight_max": DEVICES,
        "epochs": scale.sim_epochs,
        "evaluate_every": NEVER,
    }
    spec = Spec(task="digits", seeds=[*range(scale.sim_seeds)], methods={"FedAsync": method})
    begun = perf_counter()
    compare(spec, folder, pictures=False)
    return scale.sim_seeds * scale.sim_epochs / (perf_counter() - begun)
