"""Tasks per second of the batched executor, the plain torch loop that a user would write, and the inline executor.

All three take turns in one process on one thread, so that a busy machine slows them alike; the figures are medians over
the turns, and the ratios are medians of the ratios within a turn. Run: python benchmarks/sim_batched.py [turns]
"""

import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import nn

from offbeat.core.layout import Model
from offbeat.sim.batched import Batched
from offbeat.sim.executors import Executor, Inline
from offbeat.task import Work, start
from offbeat.tasks.digits import digits, perceptron
from offbeat.train.task import Task

DEVICES = 100
JOBS = (1, 7, 16, 32, 62, 100)
TASKS_A_TURN = 100


def plain(task: Task, x: Model, works: list[Work]) -> None:
    """Client by client: load the state, SGD over freshly drawn batches with the proximal term, keep the new state."""
    module, rng, solver = perceptron(32), np.random.default_rng(0), task.solver
    state = {name: torch.tensor(array) for name, array in x.items()}
    for work in works:
        module.load_state_dict(state)
        optimizer = torch.optim.SGD(module.parameters(), lr=solver.gamma)
        inputs, targets = task.device_data(work.device)
        for _ in range(solver.local_iterations or 1):
            batch = torch.from_numpy(rng.choice(len(inputs), solver.batch_size, replace=False))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for parameter, start_ in zip(module.parameters(), state.values(), strict=True):
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter - start_, alpha=solver.rho)
            optimizer.step()
        {name: tensor.clone() for name, tensor in module.state_dict().items()}


def executed(executor: Executor, x: Model, works: list[Work], jobs: int) -> None:
    """As the engine does: submit so many, then ask for the first."""
    for lo in range(0, len(works), jobs):
        submitted = [executor.submit(x, work) for work in works[lo : lo + jobs]]
        executor.finish(submitted)


def rate(run: Callable[[], None], tasks: int) -> float:
    """Tasks per second of one turn."""
    begun = perf_counter()
    run()
    return tasks / (perf_counter() - begun)


def main(turns: int) -> None:
    """Measure and print a table."""
    torch.set_num_threads(1)
    task = digits(DEVICES)
    x, batched, inline = start(task, 0), Batched(task), Inline(task)
    executed(batched, x, [Work(device) for device in range(DEVICES)], DEVICES)
    print(f"{'jobs':>5} {'plain/s':>9} {'inline/s':>9} {'batched/s':>10} {'x plain':>8} {'x inline':>9}")
    for jobs in JOBS:
        works = [Work(n % DEVICES, n) for n in range(max(TASKS_A_TURN // jobs, 1) * jobs)]
        some = works[:40]
        seen = [
            (
                rate(lambda: plain(task, x, some), len(some)),  # noqa: B023 (called at once)
                rate(lambda: executed(inline, x, some, 1), len(some)),  # noqa: B023
                rate(lambda: executed(batched, x, works, jobs), len(works)),  # noqa: B023
            )
            for _ in range(turns)
        ]
        columns = [median(column) for column in zip(*seen, strict=True)]
        ratios = [median(turn[2] / turn[other] for turn in seen) for other in (0, 1)]
        print("{:>5} {:>9.0f} {:>9.0f} {:>10.0f} {:>8.1f} {:>9.1f}".format(jobs, *columns, *ratios))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
