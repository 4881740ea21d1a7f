"""Owns the plain loop: the code that a user with torch and no library would write, one task after the other.

It does what a task of Offbeat's does: load x, do H proximal steps of SGD on drawn batches, mix the result into x.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor, nn

from offbeat.train.task import Task

ALPHA = 0.2


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PlainLoop:
    """One model, trained for device after device."""

    def __init__(self, task: Task) -> None:
        self.task, self.number = task, 0
        self.module = task.model() if not isinstance(task.model, nn.Module) else task.model
        self.module.train()
        self.x = [parameter.detach().clone() for parameter in self.module.parameters()]

    def rate(self, tasks: int, thread_count: int = 1) -> float:
        with threads(thread_count):
            begun = perf_counter()
            for _ in range(tasks):
                self.one()
            return tasks / (perf_counter() - begun)

    def one(self) -> None:
        solver, module = self.task.solver, self.module
        inputs, targets = self.task.device_data(self.number % (self.task.devices or 1))
        self.number += 1
        with torch.no_grad():
            for parameter, start in zip(module.parameters(), self.x, strict=True):
                parameter.copy_(start)
        optimizer = torch.optim.SGD(module.parameters(), lr=solver.gamma)
        if callable(begin := getattr(module, "begin", None)):
            begin()
        for _ in range(solver.local_iterations or 1):
            batch = torch.randperm(len(inputs))[: solver.batch_size]
            self._step(optimizer, inputs[batch], targets[batch])
        with torch.no_grad():
            for parameter, start in zip(module.parameters(), self.x, strict=True):
                start.mul_(1 - ALPHA).add_(parameter, alpha=ALPHA)

    def _step(self, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
        solver, module = self.task.solver, self.module
        optimizer.zero_grad()
        self.task.loss(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
        if solver.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), solver.clip)
        with torch.no_grad():
            for parameter, start in zip(module.parameters(), self.x, strict=True):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - start, alpha=solver.rho)
        optimizer.step()
