"""Owns the profile of a training with a large model: which share of its time convolutions, products, normalisation,
the solver's step and Python take.

    python -m benchmarks.bounds [m|l|t] [inline|compiled-torch|channels-last] [--trainings N]

Rules kept here:
- It is one process with one thread, like each of those that train in a simulation; start it with the environment of
  `offbeat.hosting.child.CHILD_ENVIRONMENT` to have their memory allocation, too.
- A share is of the time that torch's profiler saw, an operation's own time without what it called. Python is what no
  operation accounts for.
"""

import argparse
from collections import defaultdict
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.large import MAKE
from offbeat.task import Work, start

KINDS = {
    "convolutions": ("convolution", "weight_gradient"),
    "matrix products": ("::mm", "addmm", "bmm", "linear"),
    "LSTM cells": ("rnn_layer", "lstm"),
    "softmax and loss": ("softmax", "nll_loss"),
    "BatchNorm": ("batch_norm",),
    "max pooling": ("max_pool",),
    "dropout": ("bernoulli", "dropout"),
    "the solver's step": ("lerp_", "aten::zero_", "linalg_vector_norm"),
    "fused by the compiler": ("CompiledFxGraph",),
}
"""By what an operation's name contains; the first that fits counts."""
OTHER, PYTHON = "other operations", "Python, and between operations"
ITERATIONS = {"m": 10, "l": 5, "t": 2}


def kind_of(name: str) -> str:
    """The kind of an operation.

    >>> kind_of("aten::convolution_backward"), kind_of("aten::mm"), kind_of("aten::cat")
    ('convolutions', 'matrix products', 'other operations')
    """
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def profiled(name: str, program: str, trainings: int) -> tuple[float, dict[str, float]]:
    """Seconds of one local iteration, and the share of every kind."""
    task = MAKE[name](ITERATIONS[name])
    x_0 = start(task, 0)
    if program != "inline":
        task.train_by(program)
    task.train(x_0.copy(), Work(0))
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        begun = perf_counter()
        for number in range(trainings):
            task.train(x_0.copy(), Work(number))
        took = perf_counter() - begun
    shares: dict[str, float] = defaultdict(float)
    for event in seen.key_averages():
        shares[kind_of(event.key)] += event.self_cpu_time_total / 1e6 / took
    shares[PYTHON] = max(0.0, 1.0 - sum(shares.values()))
    return took / (trainings * ITERATIONS[name]), shares


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bounds", description="What bounds a large model.")
    parser.add_argument("model", choices=sorted(MAKE), help="m: small CNN, l: the paper's CNN, t: LSTM")
    parser.add_argument("program", nargs="?", default="inline", choices=("inline", "compiled-torch", "channels-last"))
    parser.add_argument("--trainings", type=int, default=4, help="how many are profiled [default: 4]")
    asked = parser.parse_args()
    seconds, shares = profiled(asked.model, asked.program, asked.trainings)
    print(f"sim {asked.model.upper()}, {asked.program}: {seconds * 1e3:.0f} ms per iteration")
    for kind, share in sorted(shares.items(), key=lambda share: -share[1]):
        print(f"{share:6.1%}  {kind}")


if __name__ == "__main__":
    main()
