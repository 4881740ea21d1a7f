"""Owns what a simulated device is like: how fast it computes, its links, when it is there, whether it gets lost.

Rules kept here:
- Everything is asked for by device (and task number) and keyed by them and the seed: nothing is stored per device, so
  a million devices cost nothing, and adding one changes no other.
- A device's speed is drawn once and stays (`constant`, `lognormal`, `uniform`, `pareto`); `exponential` is memoryless
  and drawn anew for every task. One second is what a task of ordinary size takes on an ordinary device.
- Availability is computed when asked. A task whose device goes away before it is done is lost.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from offbeat.core import draws
from offbeat.errors import InvalidValue
from offbeat.sim.distributions import NAMES, Distribution, distribution, within
from offbeat.sim.traces import Day, traced

SPEED, LINK, READY, RISK = 0x7370_6565, 0x6C69_6E6B, 0x7265_6164, 0x7269_736B
BYTES_PER_MEGABIT = 125_000
DAY_S = 86_400.0


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

    def dropout(self, device: int) -> float:
        """The chance that a task is lost on this device."""
        ...


@dataclass(frozen=True, slots=True)
class Distributed:
    """Devices whose speed follows a distribution; always there, with links that take no time."""

    spec: str
    seconds: Distribution
    seed: int
    each_task: bool = False

    def compute_s(self, device: int, number: int) -> float:
        return self.seconds.inverse(draws.uniform(self.seed, SPEED, device, number + 1 if self.each_task else 0))

    def link(self, device: int) -> tuple[float, float]:  # noqa: ARG002 (all links are alike)
        return math.inf, math.inf

    def available_until(self, device: int, at: float) -> float:  # noqa: ARG002 (all are always there)
        return math.inf

    def available_from(self, device: int, at: float) -> float:  # noqa: ARG002
        return at

    def dropout(self, device: int) -> float:  # noqa: ARG002
        return 0.0


@dataclass(frozen=True, slots=True)
class Adjusted:
    """Devices of a model, with links, availability or dropout of their own where those are set."""

    base: DeviceModel
    seed: int
    down: Distribution | None = None
    up: Distribution | None = None
    availability: Distribution | None = None
    period_s: float = DAY_S
    risk: Distribution | None = None

    def compute_s(self, device: int, number: int) -> float:
        return self.base.compute_s(device, number)

    def link(self, device: int) -> tuple[float, float]:
        """One draw for both ways: a device with a good network has it down and up."""
        down, up = self.base.link(device)
        u = draws.uniform(self.seed, LINK, device)
        return (self.down.inverse(u) if self.down else down), (self.up.inverse(u) if self.up else up)

    def available_until(self, device: int, at: float) -> float:
        """There for its share of every period, which begins at a moment of its own."""
        if self.availability is None:
            return self.base.available_until(device, at)
        day, shift = self._day(device, self.availability)
        return day.ready_until(at + shift) - shift

    def available_from(self, device: int, at: float) -> float:
        """At once, or when its next share begins."""
        if self.availability is None:
            return self.base.available_from(device, at)
        day, shift = self._day(device, self.availability)
        return max(at, day.ready_from(at + shift) - shift)

    def dropout(self, device: int) -> float:
        return self.risk.inverse(draws.uniform(self.seed, RISK, device)) if self.risk else self.base.dropout(device)

    def _day(self, device: int, availability: Distribution) -> tuple[Day, float]:
        share = availability.inverse(draws.uniform(self.seed, READY, device))
        shift = draws.uniform(self.seed, READY, device, 1) * self.period_s
        return Day(self.period_s, (0.0,), (share * self.period_s,)), shift


def device_model(
    spec: str,
    seed: int,
    *,
    down_mbps: float | str | None = None,
    up_mbps: float | str | None = None,
    availability: float | str | None = None,
    availability_period_s: float = DAY_S,
    dropout: float | str | None = None,
) -> DeviceModel:
    """The device model that a settings string names; what else is given takes the place of the model's own."""
    base = traced(spec.partition(":")[2], seed) if spec.startswith("trace:") else _distributed(spec, seed)
    if availability_period_s <= 0:
        raise InvalidValue(f"availability_period_s is {availability_period_s!r} but must be > 0 seconds")
    own = {
        "down": _rate("down_mbps", down_mbps),
        "up": _rate("up_mbps", up_mbps),
        "availability": _share("availability", availability, 1e-9, 1.0, "lie in (0, 1]"),
        "risk": _share("dropout", dropout, 0.0, 1 - 1e-9, "lie in [0, 1)"),
    }
    if all(part is None for part in own.values()):
        return base
    return Adjusted(base, seed, period_s=availability_period_s, **own)


def _rate(name: str, megabits: float | str | None) -> Distribution | None:
    """Bytes per second."""
    if megabits is None:
        return None
    if not isinstance(megabits, str) and not 0 < megabits < math.inf:
        raise InvalidValue(f"{name} is {megabits!r} but must be > 0 Mbit/s")
    found = within(name, megabits, 0.0, math.inf, "be > 0 Mbit/s")
    if not found.high * BYTES_PER_MEGABIT > 1.0:
        raise InvalidValue(f"{name} is {megabits!r} but must be > 0 Mbit/s, and at least a byte per second")
    return found.times(BYTES_PER_MEGABIT)


def _share(name: str, spec: float | str | None, low: float, high: float, meaning: str) -> Distribution | None:
    return None if spec is None else within(name, spec, low, high, meaning)


def _distributed(spec: str, seed: int) -> Distributed:
    name = spec.rpartition("*")[2].partition(":")[0]
    try:
        seconds = distribution(spec)
        if name in NAMES and (seconds.low > 0 or seconds.high == math.inf):
            return Distributed(spec, seconds, seed, each_task=name == "exponential")
    except ValueError:
        pass
    raise InvalidValue(
        f"device_model {spec!r} is unknown; use constant, lognormal:S (S >= 0), exponential, uniform:LO,HI "
        "(0 < LO <= HI), pareto:A (A > 0), trace:FILE or sampled:K (K >= 1)"
    )
