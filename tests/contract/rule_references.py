"""The rules of the library as they stand in the papers: numpy in float64, a few lines each, nothing of Offbeat's.

A reference is told x, x_tau and one update, and answers with the step to the next version, or None where there is none
yet. What it remembers is in `memory`, which is its own.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]


class Update(NamedTuple):
    x_new: Doubles
    tau: int
    device: int
    samples: int
    staleness: int
    weight: float


Memory = dict[str, Any]
Reference = Callable[[Doubles, Doubles, Update, Memory], Doubles | None]
Finish = Callable[[Doubles, int, Memory], Doubles]
"""A step, the largest staleness of its updates, memory; what is added in place of the step."""


def versions(
    reference: Reference,
    published: Sequence[Doubles],
    updates: Sequence[Update],
    trained: int,
    finishes: Sequence[Finish] = (),
) -> list[Doubles]:
    """What must follow every published version; finishes are for the first `trained` elements alone.

    x and x_tau are those that were published: so rounding is not carried from version to version.
    """
    made, memory, largest = [published[0]], Memory(), 0
    own = [Memory() for _ in finishes]
    for update in updates:
        x, x_tau = published[len(made) - 1], published[update.tau]
        step, largest = reference(x, x_tau, update, memory), max(largest, update.staleness)
        if step is not None:
            for finish, remembered in zip(finishes, own, strict=True):
                step = np.concatenate([finish(step[:trained], largest, remembered), step[trained:]])
            made.append(x + step)
            largest = 0
    return made


# --- weights ---------------------------------------------------------------------------------------------------------


def participations(devices: Sequence[int], cap: float) -> list[float]:
    """(k/n)/count_i, at most cap."""
    before = [devices[: k + 1] for k in range(len(devices))]
    return [min(cap, len(b) / len(set(b)) / b.count(b[-1])) for b in before]


def delay_adaptive(stalenesses: Sequence[int], free: float) -> list[float]:
    return [min(1.0, free / max(s, 1e-9)) for s in stalenesses]


# --- a version with every update -------------------------------------------------------------------------------------


def fedasync(alpha: float, a: float) -> Reference:
    def step(x: Doubles, _: Doubles, u: Update, __: Memory) -> Doubles:
        return np.asarray(min(1.0, alpha * (1 + u.staleness) ** -a * u.weight) * (u.x_new - x))

    return step


def delta(alpha: float, a: float = 0.0, beta: float = 0.0) -> Reference:
    def step(x: Doubles, x_tau: Doubles, u: Update, _: Memory) -> Doubles:
        alpha_t = alpha * (1 + u.staleness) ** -a * u.weight
        alpha_t = min(1.0, alpha_t) if beta else alpha_t
        return np.asarray(alpha_t * (u.x_new - x_tau + beta * (x_tau - x)))

    return step


def dcasgd(alpha: float, lambda_: float) -> Reference:
    def step(x: Doubles, x_tau: Doubles, u: Update, _: Memory) -> Doubles:
        d = u.x_new - x_tau
        return alpha * u.weight * (d - lambda_ * d * d * (x - x_tau))

    return step


def asyncfeded(rate: float, eps: float) -> Reference:
    def step(x: Doubles, x_tau: Doubles, u: Update, _: Memory) -> Doubles:
        d = u.x_new - x_tau
        gamma = np.linalg.norm(x - x_tau) / np.linalg.norm(d)
        return np.asarray(rate / (gamma + eps) * u.weight * d)

    return step


# --- several updates, one version ------------------------------------------------------------------------------------


def fedbuff(k: int, eta: float, a: float) -> Reference:
    def step(_: Doubles, x_tau: Doubles, u: Update, memory: Memory) -> Doubles | None:
        buffer = memory.setdefault("buffer", [])
        buffer.append((1 + u.staleness) ** -a * u.weight * (u.x_new - x_tau))
        if len(buffer) < k:
            return None
        memory["buffer"] = []
        return np.asarray(eta * sum(buffer) / k)

    return step


def fedavg(k: int) -> Reference:
    def step(x: Doubles, _: Doubles, u: Update, memory: Memory) -> Doubles | None:
        group = memory.setdefault("group", [])
        group.append((u.samples * u.weight, u.x_new))
        if len(group) < k:
            return None
        memory["group"] = []
        return np.average([m for _, m in group], axis=0, weights=[n for n, _ in group]) - x

    return step


def nesterov(n: int, eta: float, beta: float) -> Reference:
    def step(_: Doubles, x_tau: Doubles, u: Update, memory: Memory) -> Doubles:
        gathered = memory.setdefault("gathered", [])
        gathered.append(u.weight * (u.x_new - x_tau))
        g = eta * gathered[-1] / n
        if len(gathered) == n:
            memory["m"] = beta * memory.get("m", 0.0) + np.mean(gathered, axis=0)
            memory["gathered"], g = [], g + eta * beta * memory["m"]
        return np.asarray(g)

    return step


# --- a vector per device ---------------------------------------------------------------------------------------------


def ca2fl(m: int, eta: float, devices: int = 0, groups: int = 0) -> Reference:
    def step(x: Doubles, x_tau: Doubles, u: Update, memory: Memory) -> Doubles | None:
        own = memory.setdefault("own", {})
        h = memory.setdefault("h", np.zeros_like(x))  # from before this buffer
        d, i = u.x_new - x_tau, u.device % groups if groups else u.device
        memory.setdefault("buffer", []).append(u.weight * (d - own.get(i, 0.0)))
        own[i] = d
        if len(memory["buffer"]) < m:
            return None
        v = h + sum(memory.pop("buffer")) / m
        memory["h"] = sum(own.values()) / (devices or len(own))
        return np.asarray(eta * v)

    return step


def ace(eta: float, devices: int = 0, groups: int = 0) -> Reference:
    def step(_: Doubles, x_tau: Doubles, u: Update, memory: Memory) -> Doubles:
        own = memory.setdefault("own", {})
        own[u.device % groups if groups else u.device] = u.x_new - x_tau
        return np.asarray(eta * u.weight * sum(own.values()) / (devices or len(own)))

    return step


# --- finishes --------------------------------------------------------------------------------------------------------


def momentum(beta: float) -> Finish:
    def finish(g: Doubles, _: int, memory: Memory) -> Doubles:
        memory["m"] = beta * memory.get("m", 0.0) + g
        return np.asarray(memory["m"])

    return finish


def adam(eta: float, b1: float, b2: float, eps: float) -> Finish:
    def finish(g: Doubles, _: int, memory: Memory) -> Doubles:
        memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
        memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g**2
        return np.asarray(eta * memory["m"] / (np.sqrt(memory["v"]) + eps))

    return finish


def amsgrad(eta: float, free: float, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-8) -> Finish:
    """With Adam's bias correction, and eta divided by the largest staleness above `free`, as the code of FADAS has."""

    def finish(g: Doubles, staleness: int, memory: Memory) -> Doubles:
        memory["count"] = count = memory.get("count", 0) + 1
        memory["m"] = b1 * memory.get("m", 0.0) + (1 - b1) * g
        memory["v"] = b2 * memory.get("v", 0.0) + (1 - b2) * g**2
        memory["largest"] = np.maximum(memory.get("largest", 0.0), memory["v"])
        m, v = memory["m"] / (1 - b1**count), memory["largest"] / (1 - b2**count)
        return np.asarray((eta if staleness <= free else eta / staleness) * m / (np.sqrt(v) + eps))

    return finish


# --- averages --------------------------------------------------------------------------------------------------------


def poly(xs: Sequence[Doubles], p: int) -> Doubles:
    """Version i = 1..t weighs i (i + 1) ... (i + p - 1): about i^p."""
    weights = [np.prod([float(i + j) for j in range(p)]) for i in range(1, len(xs))]
    return np.average(xs[1:], axis=0, weights=weights)


def ema(xs: Sequence[Doubles], c: float) -> Doubles:
    """x_0 has what the others leave of 1."""
    t = len(xs) - 1
    shares = defaultdict(float, {i: c * (1 - c) ** (t - i) for i in range(1, t + 1)})
    shares[0] = (1 - c) ** t
    return np.asarray(sum(share * xs[i] for i, share in shares.items()))
