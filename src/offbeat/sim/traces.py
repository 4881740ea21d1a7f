"""Owns recorded devices: a trace file of real phones, and the days that they repeat."""

import json
import lzma
import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from offbeat.errors import InvalidValue

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


class Traces(NamedTuple):
    """Phones as they were recorded; their speeds, links and days are not of the same phones."""

    seconds: tuple[float, ...]
    """Of a task, relative to the median."""
    links: tuple[tuple[float, float], ...]
    """Bytes per second, down and up."""
    days: tuple[Day, ...]


def read_traces(path: str) -> Traces:
    """Read a trace file; docs/simulation.md describes its keys."""
    try:
        return _read(Path(path))
    except OSError as error:
        raise InvalidValue(f"device_model trace:{path}: cannot read the file: {error.strerror or error}") from None
    except (AttributeError, KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise InvalidValue(
            f"device_model trace:{path}: not a trace file ({type(error).__name__}: {error}); it needs the keys "
            "availability_flash, flhetbench_training_latency and flash_network_speed"
        ) from None


@lru_cache(4)
def _read(path: Path) -> Traces:
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
    return Traces(tuple(latency / ordinary for latency in known), tuple(links), ready)


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
