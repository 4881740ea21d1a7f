"""Owns what a simulated device is like: how fast it computes, its links, when it is there, whether it gets lost.

Rules kept here:
- Everything is asked for by device (and task number) and keyed by them and the seed: nothing is stored per device, so
  a million devices cost nothing, and adding one changes no other.
- A device's speed is drawn once and stays (`constant`, `lognormal`, `uniform`, `pareto`); `exponential` is memoryless
  and drawn anew for every task. One second is what a task of ordinary size takes on an ordinary device.
- Availability is computed when asked. A task whose device goes away before it is done is lost.
"""

import json
import lzma
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, median
from typing import Any, Protocol

from offbeat.core import draws
from offbeat.errors import InvalidValue

SPEED, LINK, READY = 0x7370_6565, 0x6C69_6E6B, 0x7265_6164
BITS_PER_BYTE = 8
_NORMAL = NormalDist()


class DeviceModel(Protocol):
    """What the simulator asks about devices."""

    def compute_s(self, device: int, number: int) -> float:
        """Seconds that the device's task of this number computes, if it is of ordinary size."""
        ...

    def link(self, device: int) -> tuple[float, float]:
        """Bytes per second, down and up."""
        ...

    def available_until(self, device: int, at: float) -> float:
        """Until when the device is there, if it is there at this moment; `at` itself or earlier if not."""
        ...

    def available_from(self, device: int, at: float) -> float:
        """The first moment, from `at` on, at which the device is there."""
        ...


@dataclass(frozen=True, slots=True)
class Distributed:
    """Devices whose speed follows a distribution; always there, with links that are all alike."""

    spec: str
    inverse: Callable[[float], float]
    seed: int
    each_task: bool = False
    speeds: tuple[float, float] = (math.inf, math.inf)

    def compute_s(self, device: int, number: int) -> float:
        """Drawn once per device, or once per task."""
        return self.inverse(draws.uniform(self.seed, SPEED, device, number + 1 if self.each_task else 0))

    def link(self, device: int) -> tuple[float, float]:  # noqa: ARG002 (all links are alike)
        """The same for all."""
        return self.speeds

    def available_until(self, device: int, at: float) -> float:  # noqa: ARG002 (all are always there)
        """For ever."""
        return math.inf

    def available_from(self, device: int, at: float) -> float:  # noqa: ARG002
        """At once."""
        return at


@dataclass(frozen=True, slots=True)
class Traced:
    """Devices that behave like recorded phones; which phone's speed, link and day go together is drawn by the seed."""

    seconds: tuple[float, ...]
    links: tuple[tuple[float, float], ...]
    days: tuple["Day", ...]
    seed: int

    def compute_s(self, device: int, number: int) -> float:  # noqa: ARG002 (a phone keeps its speed)
        """The training latency of a phone, relative to the median phone."""
        return self.seconds[draws.below(len(self.seconds), self.seed, SPEED, device)]

    def link(self, device: int) -> tuple[float, float]:
        """The mean speeds of a phone's network."""
        return self.links[draws.below(len(self.links), self.seed, LINK, device)]

    def available_until(self, device: int, at: float) -> float:
        """The recorded days repeat; each device starts somewhere in its own."""
        day, shift = self._day(device)
        return day.ready_until(at + shift) - shift

    def available_from(self, device: int, at: float) -> float:
        """The beginning of its next interval, if it is not in one."""
        day, shift = self._day(device)
        return max(at, day.ready_from(at + shift) - shift)

    def _day(self, device: int) -> tuple["Day", float]:
        day = self.days[draws.below(len(self.days), self.seed, READY, device)]
        return day, draws.uniform(self.seed, READY, device, 1) * day.length


@dataclass(frozen=True, slots=True)
class Day:
    """When one phone was idle, charging and on an unmetered network, over and over."""

    length: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    def ready_until(self, at: float) -> float:
        """The end of the interval around `at`; -inf outside every interval."""
        turns, moment = divmod(at, self.length)
        index = bisect_right(self.starts, moment) - 1
        if index < 0 or moment >= self.ends[index]:
            return -math.inf
        return turns * self.length + self.ends[index]

    def ready_from(self, at: float) -> float:
        """`at` inside an interval; else the start of the next one, today or the day after."""
        if self.ready_until(at) > at:
            return at
        turns, moment = divmod(at, self.length)
        index = bisect_right(self.starts, moment)
        if index < len(self.starts):
            return turns * self.length + self.starts[index]
        return (turns + 1) * self.length + self.starts[0]


def device_model(spec: str, seed: int, *, link: tuple[float, float] = (math.inf, math.inf)) -> DeviceModel:
    """The device model that a settings string names; `link` is bytes per second, down and up, where it has none."""
    name, _, rest = spec.partition(":")
    if name == "trace":
        return _traced(rest, seed)
    try:
        numbers = [float(part) for part in rest.split(",")] if rest else []
        return replace(_distributed(spec, name, numbers, seed), speeds=link)
    except (TypeError, ValueError, KeyError):
        raise InvalidValue(
            f"device_model {spec!r} is unknown; use constant, lognormal:S (S >= 0), exponential, uniform:LO,HI "
            "(0 < LO <= HI), pareto:A (A > 0), trace:FILE or sampled:K (K >= 1)"
        ) from None


def _distributed(spec: str, name: str, numbers: list[float], seed: int) -> Distributed:
    inverses: dict[str, Callable[..., Callable[[float], float]]] = {
        "constant": _constant,
        "lognormal": _lognormal,
        "exponential": _exponential,
        "uniform": _uniform,
        "pareto": _pareto,
    }
    return Distributed(spec, inverses[name](*numbers), seed, each_task=name == "exponential")


def _constant(seconds: float = 1.0) -> Callable[[float], float]:
    _positive(seconds)
    return lambda _: seconds


def _lognormal(sigma: float) -> Callable[[float], float]:
    _positive(sigma, or_zero=True)
    return lambda u: math.exp(sigma * _NORMAL.inv_cdf(u))


def _exponential(mean: float = 1.0) -> Callable[[float], float]:
    _positive(mean)
    return lambda u: -mean * math.log(u)


def _uniform(low: float, high: float) -> Callable[[float], float]:
    _positive(low)
    _positive(high - low, or_zero=True)
    return lambda u: low + (high - low) * u


def _pareto(shape: float) -> Callable[[float], float]:
    _positive(shape)
    return lambda u: u ** (-1.0 / shape)


def _positive(number: float, *, or_zero: bool = False) -> None:
    if not (math.isfinite(number) and (number > 0 or (or_zero and number == 0))):
        raise ValueError


def _traced(path: str, seed: int) -> Traced:
    """Read a trace file; docs/simulation.md describes its keys."""
    try:
        return _read_traces(Path(path), seed)
    except OSError as error:
        raise InvalidValue(f"device_model trace:{path}: cannot read the file: {error.strerror or error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise InvalidValue(
            f"device_model trace:{path}: not a trace file ({type(error).__name__}: {error}); it needs the keys "
            "availability_flash, flhetbench_training_latency and flash_network_speed"
        ) from None


@lru_cache(4)
def _read_traces(path: Path, seed: int) -> Traced:
    raw = path.read_bytes()
    traces: dict[str, Any] = json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
    latencies = [row["ResNet Latency"] for row in traces["flhetbench_training_latency"]]
    known = [latency for latency in latencies if latency > 0]  # 0 means that it was not measured
    ordinary = median(known)
    kilobits = 1000 / BITS_PER_BYTE
    links = [(row["down_u"] * kilobits, row["up_u"] * kilobits) for row in traces["flash_network_speed"].values()]
    days = [_day(row) for row in traces["availability_flash"].values()]
    ready = tuple(day for day in days if day.starts and day.length > 0)
    if not ready or not links or min(min(link) for link in links) <= 0:
        raise ValueError("no phone in it is ever ready, or one has no network speed")
    return Traced(tuple(latency / ordinary for latency in known), tuple(links), ready, seed)


def _day(row: dict[str, Any]) -> Day:
    """A recording, with what lies outside of it cut off."""
    begin, length = row["start"], float(row["end"] - row["start"])
    inside = ((max(start - begin, 0.0), min(end - begin, length)) for start, end in row["ready"])
    ready = sorted((float(start), float(end)) for start, end in inside if end > start)
    return Day(length, tuple(start for start, _ in ready), tuple(end for _, end in ready))
