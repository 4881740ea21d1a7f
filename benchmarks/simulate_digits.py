"""How fast `simulate digits` is beside the plain loop that a user would write; ratios in one run, medians.

python benchmarks/simulate_digits.py            # a minute or two
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import offbeat
from offbeat.sim.compare import Spec, compare
from offbeat.tasks.digits import digits, perceptron

SPEC = """
task = "digits"
seeds = {seeds}
[settings]
devices = 100
in_flight_max = 100
epochs = {epochs}
evaluate_every = 1000000
[methods.FedAsync]
device_model = "lognormal:1.5"
"""


def plain_loop(tasks: int) -> float:
    """Tasks per second of a per-client torch loop on one thread: load, H = 10 proximal SGD steps, mix."""
    torch.set_num_threads(1)
    task = digits(100)
    model, loss = perceptron(32), nn.functional.cross_entropy
    x = [p.detach().clone() for p in model.parameters()]
    begun = time.perf_counter()
    for number in range(tasks):
        inputs, targets = task.device_data(number % 100)
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), x, strict=True):
                parameter.copy_(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            batch = torch.randperm(len(inputs))[:10]
            optimizer.zero_grad()
            near = sum(((p - start) ** 2).sum() for p, start in zip(model.parameters(), x, strict=True))
            (loss(model(inputs[batch]), targets[batch]) + 0.0025 * near).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), x, strict=True):
                start.mul_(0.8).add_(parameter, alpha=0.2)
    return tasks / (time.perf_counter() - begun)


def simulated(device_model: str, epochs: int) -> tuple[float, float]:
    """Tasks per second of one run, and the mean lanes per batch."""
    summary = offbeat.simulate(
        digits(100), device_model=device_model, in_flight_max=100, epochs=epochs, evaluate_every=10**6
    ).summary
    return summary["applied"] / summary["wall_s"], summary.get("lanes_mean", 1.0)


def compared(seeds: int, epochs: int) -> float:
    """Tasks per second of a comparison over several seeds, set-up of its processes included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.toml"
        path.write_text(SPEC.format(seeds=list(range(seeds)), epochs=epochs))
        begun = time.perf_counter()
        compare(Spec.read(path), Path(folder) / "out", pictures=False)
        return seeds * epochs / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4000)
    arguments = parser.parse_args()
    plain: list[float] = []
    runs: dict[str, list[float]] = {"uniform:0.5,1.5": [], "lognormal:1.5": []}
    lanes: dict[str, float] = {}
    comparisons: list[float] = []
    for _ in range(arguments.repeats):
        plain.append(plain_loop(400))
        for model, speeds in runs.items():
            speed, lanes[model] = simulated(model, arguments.epochs)
            speeds.append(speed)
        comparisons.append(compared(10, arguments.epochs))
    base = median(plain)
    print(f"plain loop, one thread      {base:8.0f} tasks/s")
    for model, speeds in runs.items():
        rate = median(speeds)
        print(f"simulate {model:<18} {rate:8.0f} tasks/s  {rate / base:5.1f} x  {lanes[model]:.1f} lanes")
    rate = median(comparisons)
    print(f"compare, 10 seeds           {rate:8.0f} tasks/s  {rate / base:5.1f} x")
    print(json.dumps({"load": os.getloadavg(), "repeats": arguments.repeats, "epochs": arguments.epochs}))


if __name__ == "__main__":
    main()
