"""Owns recorded devices: a trace file of real phones, and the days that they repeat.

Rule kept here: speed, link and hours come from different phones in the recordings; which go together is drawn by seed
and device, and so is the moment of its day at which a device begins.
"""

import json
import lzma
import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.core import draws
from offbeat.errors import InvalidValue

SPEED, LINK, READY = 0x7370_6565, 0x6C69_6E6B, 0x7265_6164
BITS_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class Day:
    """When one device is there, over and over: for a phone, idle, charging and on an unmetered network."""

    length: float
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    def ready_until(self, at: float) -> float:
        """The end of the interval around `at`; -inf outside every interval."""
        turns, moment = divmod(at, self.length)
        index = bisect_right(self.starts, moment) - 1
        if index < 0 or moment >= self.ends[index]:
            return -math.inf
        if self.ends[index] < self.length or self.starts[0] > 0:
            return turns * self.length + self.ends[index]
        return math.inf if self.ends[0] >= self.length else (turns + 1) * self.length + self.ends[0]

    def ready_from(self, at: float) -> float:
        """`at` inside an interval; else the start of the next one, today or the day after."""
        if self.ready_until(at) > at:
            return at
        turns, moment = divmod(at, self.length)
        index = bisect_right(self.starts, moment)
        if index < len(self.starts):
            return turns * self.length + self.starts[index]
        return (turns + 1) * self.length + self.starts[0]


@dataclass(frozen=True, slots=True)
class Traced:
    """Devices that behave like recorded phones; which phone's speed, link and day go together is drawn by the seed."""

    seconds: tuple[float, ...]
    links: tuple[tuple[float, float], ...]
    days: tuple[Day, ...]
    seed: int

    def compute_s(self, device: int, number: int) -> float:  # noqa: ARG002 (a phone keeps its speed)
        return self.seconds[draws.below(len(self.seconds), self.seed, SPEED, device)]

    def link(self, device: int) -> tuple[float, float]:
        return self.links[draws.below(len(self.links), self.seed, LINK, device)]

    def available_until(self, device: int, at: float) -> float:
        """The recorded days repeat; each device starts somewhere in its own."""
        day, shift = self._day(device)
        return day.ready_until(at + shift) - shift

    def available_from(self, device: int, at: float) -> float:
        day, shift = self._day(device)
        return max(at, day.ready_from(at + shift) - shift)

    def dropout(self, device: int) -> float:  # noqa: ARG002 (it is lost only by going away)
        return 0.0

    def _day(self, device: int) -> tuple[Day, float]:
        day = self.days[draws.below(len(self.days), self.seed, READY, device)]
        return day, draws.uniform(self.seed, READY, device, 1) * day.length


def traced(path: str, seed: int) -> Traced:
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
    ready: list[tuple[float, float]] = []
    for start, end in sorted((float(start), float(end)) for start, end in inside if end > start):
        if ready and start <= ready[-1][1]:
            ready[-1] = (ready[-1][0], max(end, ready[-1][1]))
        else:
            ready.append((start, end))
    return Day(length, tuple(start for start, _ in ready), tuple(end for _, end in ready))
