"""FedAsync in one file: Algorithm 1 of "Asynchronous Federated Optimization" (Xie, Koyejo, Gupta; OPT2020), to be read.

Read it beside the paper: a text in "quotes" is a line of Algorithm 1, and the code under or beside it does that line.

- The server's two threads and the workers are events of one virtual clock, a heap of (at, sequence, event): every run
  is the same, and nobody waits for a slow device.
- Epoch t mixes into x_{t-1}, so the freshest update has tau = t-1. Staleness counts the versions
  published in between, (t-1) - tau, so that fresh is 0 and s(0) = 1.
- Models are flat float32 vectors. alpha_t and 1 - alpha_t are computed in float64 and rounded once; the sum is taken
  in float32. The library does the same operations in the same order: its tests compare the two bit for bit.

Run it: python examples/fedasync_one_file.py
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
Vector = npt.NDArray[np.float32]
StalenessFn = Callable[[int], float]
Gradient = Callable[[Vector, "Data"], Vector]  # grad f(x; z)


# --- s(staleness): the weight of an update ---------------------------------------------------------------------------


def constant() -> StalenessFn:
    """FedAsync+Const."""
    return lambda _: 1.0


def polynomial(a: float) -> StalenessFn:
    """FedAsync+Poly."""
    return lambda staleness: float((staleness + 1.0) ** -a)


def hinge(a: float, b: float) -> StalenessFn:
    """FedAsync+Hinge."""
    return lambda staleness: 1.0 if staleness <= b else 1.0 / (a * (staleness - b) + 1.0)


# --- Thread Updater, one epoch ---------------------------------------------------------------------------------------


def updater(x: Vector, x_new: Vector, tau: int, t: int, alpha: float, s: StalenessFn) -> tuple[Vector, float]:
    """Mix the pair (x_new, tau) into x = x_{t-1}; returns x_t and alpha_t."""
    # "Optional: alpha_t <- alpha * s(t - tau)"
    alpha_t = alpha * s((t - 1) - tau)
    # "x_t <- (1 - alpha_t) x_{t-1} + alpha_t x_new"
    keep, new = np.float32(1.0 - alpha_t), np.float32(alpha_t)
    if new == 0.0:  # a coefficient of 0 skips its term
        return keep * x, alpha_t
    if keep == 0.0:
        return new * x_new, alpha_t
    return keep * x + new * x_new, alpha_t


# --- Process Worker, one task ----------------------------------------------------------------------------------------


class Data(NamedTuple):
    """D^i, the samples of one device; a minibatch z of them looks the same."""

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def sample(self, rng: Rng, batch_size: int) -> "Data":
        z = rng.choice(len(self.labels), min(batch_size, len(self.labels)), replace=False)
        return Data(self.inputs[z], self.labels[z])


class Local(NamedTuple):
    """The settings of the local problem."""

    gamma: float = 0.1
    rho: float = 0.1
    local_iterations: int = 10
    batch_size: int = 10


def worker(x_tau: Vector, data: Data, grad_f: Gradient, local: Local, rng: Rng) -> Vector:
    """Solve the local problem by SGD on g(x; z) = f(x; z) + rho/2 ||x - x_tau||^2, starting from x_tau."""
    gamma, pull = np.float32(local.gamma), np.float32(local.gamma * local.rho)
    x = x_tau  # "tau <- t, x_{tau,0} <- x_t"
    for _ in range(local.local_iterations):  # "for local iteration h in [H]"
        z = data.sample(rng, local.batch_size)  # "Randomly sample z_{tau,h} ~ D^i"
        # "x_{tau,h} <- x_{tau,h-1} - gamma grad g(x_{tau,h-1}; z_{tau,h})", where grad g = grad f + rho (x - x_tau):
        gradient = grad_f(x, z)
        x = x + pull * (x_tau - x)  # first back towards x_tau,
        x = x - gamma * gradient  # then down the slope of f, which was taken before the pull
    return x  # "Push (x_{tau,H}, tau) to the server"


# --- Devices: each has its own speed, and no task takes quite as long as the last -------------------------------------


class Device(NamedTuple):
    """The owner of some data, and how fast its worker is."""

    data: Data
    task_s: float  # median duration of a task here, in seconds of virtual time
    rng: Rng  # the device's own random stream

    def duration_s(self) -> float:
        return self.task_s * float(self.rng.lognormal(0.0, 0.3))


# --- Process Server --------------------------------------------------------------------------------------------------


class Pushed(NamedTuple):
    """A worker is done. Its training runs when this event comes up, from the model that it was sent when triggered."""

    device: int
    tau: int
    x_tau: Vector


class Epoch(NamedTuple):
    """One epoch: the update and the model that it made."""

    t: int
    at: float
    tau: int
    alpha_t: float
    x_new: Vector
    x: Vector

    @property
    def staleness(self) -> int:
        return (self.t - 1) - self.tau


def server(
    x: Vector,
    devices: Sequence[Device],
    grad_f: Gradient,
    local: Local,
    rng: Rng,
    *,
    alpha: float,
    s: StalenessFn,
    epochs: int,
    period_s: float = 0.1,
    in_flight_max: int = 10,
) -> Iterator[Epoch]:
    """Both threads of the server, as events in the order of the virtual clock; yields every epoch."""
    # "Initialize x_0, alpha_t <- alpha": they were given
    t = 0
    idle = list(range(len(devices)))
    sequence = count()  # of two events at the same time, the one that was entered first comes first
    # "Run Scheduler() thread and Updater() thread asynchronously in parallel"
    events: list[tuple[float, int, Pushed | None]] = [(0.0, next(sequence), None)]
    while t < epochs:
        at, _, pushed = heappop(events)
        if pushed is None:
            # Thread Scheduler. "Periodically trigger training tasks on some workers, and send the global model ..."
            if idle and len(devices) - len(idle) < in_flight_max:
                i = idle.pop(int(rng.integers(len(idle))))
                done_at = at + devices[i].duration_s()
                heappush(events, (done_at, next(sequence), Pushed(i, t, x)))  # "... with time stamp"
            heappush(events, (at + period_s, next(sequence), None))
        else:
            # Thread Updater. "for epoch t in [T]: Receive the pair (x_new, tau) from any worker"
            t += 1
            device = devices[pushed.device]
            x_new = worker(pushed.x_tau, device.data, grad_f, local, device.rng)
            x, alpha_t = updater(x, x_new, pushed.tau, t, alpha, s)
            idle.append(pushed.device)
            yield Epoch(t, at, pushed.tau, alpha_t, x_new, x)


# --- What FedAsync is compared with ----------------------------------------------------------------------------------


def fedavg(
    x: Vector, devices: Sequence[Device], grad_f: Gradient, local: Local, rng: Rng, k: int, until_s: float
) -> tuple[Vector, int]:
    """FedAvg: every epoch sends x to k devices, waits for the slowest and takes the mean, until a virtual time."""
    at, t = 0.0, 0
    while True:
        chosen = [devices[i] for i in rng.choice(len(devices), k, replace=False)]
        at += max(device.duration_s() for device in chosen)
        if at > until_s:
            return x, t
        pushed = [worker(x, device.data, grad_f, local, device.rng) for device in chosen]
        x, t = np.mean(pushed, axis=0, dtype=np.float32), t + 1


# --- A small problem: softmax regression, where every device knows only two of the five classes -----------------------

FEATURES, CLASSES, SAMPLES = 10, 5, 60


def make_devices(n: int, seed: int) -> list[Device]:
    """n devices; the same seed gives the same data, speeds and random streams."""
    rng, *streams = np.random.default_rng(seed).spawn(1 + n)
    centres = rng.normal(0.0, 1.0, (CLASSES, FEATURES))
    devices = []
    for i, stream in enumerate(streams):
        labels = np.array([i, i + 1])[stream.integers(2, size=SAMPLES)] % CLASSES
        inputs = (centres[labels] + stream.normal(0.0, 1.0, (SAMPLES, FEATURES))).astype(np.float32)
        devices.append(Device(Data(inputs, labels), float(stream.lognormal(0.0, 1.0)), stream))
    return devices


def log_probabilities(x: Vector, inputs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    logits = inputs @ x.reshape(FEATURES, CLASSES)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def grad_f(x: Vector, z: Data) -> Vector:
    error = np.exp(log_probabilities(x, z.inputs))
    error[np.arange(len(z.labels)), z.labels] -= 1
    return (z.inputs.T @ error / np.float32(len(z.labels))).ravel()


def objective(x: Vector, devices: Sequence[Device]) -> float:
    """F(x) = 1/n sum_i E f(x; z^i), over all of every device's data."""
    seen = [log_probabilities(x, d.data.inputs)[np.arange(SAMPLES), d.data.labels].mean() for d in devices]
    return -float(np.mean(seen))


def main(seed: int = 1, n: int = 30, epochs: int = 500, alpha: float = 0.6, k: int = 10) -> None:
    x_0, local, s = np.zeros(FEATURES * CLASSES, np.float32), Local(), polynomial(0.5)
    devices = make_devices(n, seed)
    print(f"{n} devices, at most {k} of them at work; F(x_0) = {objective(x_0, devices):.4f}")
    print("epoch  virtual_s  staleness  alpha_t    loss")
    rng = np.random.default_rng(seed)
    for epoch in server(x_0, devices, grad_f, local, rng, alpha=alpha, s=s, epochs=epochs, in_flight_max=k):
        if epoch.t in (1, 2, 5, 10, 20, 50, 100, 200, epochs):
            loss = objective(epoch.x, devices)
            print(f"{epoch.t:5}  {epoch.at:9.2f}  {epoch.staleness:9}  {epoch.alpha_t:7.4f}  {loss:6.4f}")
    devices = make_devices(n, seed)
    x, t = fedavg(x_0, devices, grad_f, local._replace(rho=0.0), np.random.default_rng(seed), k, epoch.at)
    print(f"at {epoch.at:.2f} s of virtual time:")
    print(f"FedAsync, waits for nobody:     {epochs:4} updates, loss {objective(epoch.x, devices):.4f}")
    print(f"FedAvg, waits for the slowest:  {t * k:4} updates, loss {objective(x, devices):.4f}")


if __name__ == "__main__":
    main()
