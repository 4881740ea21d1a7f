"""Owns what a simulated device is like: how fast it computes, its links, when it is there, whether it gets lost.

Rules kept here:
- Everything is asked for by device (and task number) and keyed by them and the seed: only the latest are remembered, so
  a million devices cost nothing, and adding one changes no other.
- A device's speed is drawn once and stays (`constant`, `lognormal`, `uniform`, `pareto`); `exponential` is memoryless
  and drawn anew for every task. One second is what a task of ordinary size takes on an ordinary device.
- A distribution is its inverse and its range, so a value can be checked before any is drawn.
- Availability is computed when asked. A task whose device goes away before it is done is lost.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

from offbeat.core import draws
from offbeat.errors import InvalidValue
from offbeat.sim.traces import Day, Traces, read_traces

SPEED, LINK, READY, RISK = 0x7370_6565, 0x6C69_6E6B, 0x7265_6164, 0x7269_736B
BYTES_PER_MEGABIT = 125_000
DAY_S = 86_400.0
ALLOWED = "a number, uniform:LO,HI, lognormal:S, pareto:A or exponential[:M], and FACTOR* before any of them"
EXPONENT_MAX = 50.0
remembered = lru_cache(1 << 16)
"""For what is drawn once per device: to look it up is several times as fast. A fleet of millions needs no more room."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A value for every u in (0, 1), between `low` and `high`."""

    inverse: Callable[[float], float]
    low: float
    high: float

    def times(self, factor: float) -> "Distribution":
        return Distribution(lambda u: factor * self.inverse(u), factor * self.low, factor * self.high)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What the simulator asks about devices; where nothing is said they are always there, with immediate links."""

    compute_s: Callable[[int, int], float]
    """Seconds that the device's task of this number computes, if it is of ordinary size."""
    link: Callable[[int], tuple[float, float]] = lambda _device: (math.inf, math.inf)
    """Bytes per second, down and up."""
    dropout: Callable[[int], float] = lambda _device: 0.0
    """The chance that a task is lost on this device."""
    day: Callable[[int], tuple[Day, float]] | None = None
    """When the device is there, over and over, and the moment of its day at which it begins."""

    def available_until(self, device: int, at: float) -> float:
        """Until when the device is there, if it is there at this moment; `at` itself or earlier if not."""
        if self.day is None:
            return math.inf
        day, shift = self.day(device)
        return day.ready_until(at + shift) - shift

    def available_from(self, device: int, at: float) -> float:
        """The first moment, from `at` on, at which the device is there."""
        if self.day is None:
            return at
        day, shift = self.day(device)
        return max(at, day.ready_from(at + shift) - shift)


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
    is_trace = spec.startswith("trace:")
    model = traced(read_traces(spec.partition(":")[2]), seed) if is_trace else _distributed(spec, seed)
    if availability_period_s <= 0:
        raise InvalidValue(f"availability_period_s is {availability_period_s!r} but must be > 0 seconds")
    down, up = _rate("down_mbps", down_mbps), _rate("up_mbps", up_mbps)
    share = _within("availability", availability, 1e-9, 1.0, "lie in (0, 1]")
    risk = _within("dropout", dropout, 0.0, 1 - 1e-9, "lie in [0, 1)")
    if down is not None or up is not None:
        model = replace(model, link=_links(model.link, down, up, seed))
    if share is not None:
        model = replace(model, day=_shares(share, availability_period_s, seed))
    if risk is not None:
        model = replace(model, dropout=remembered(lambda device: risk.inverse(draws.uniform(seed, RISK, device))))
    return model


def traced(traces: Traces, seed: int) -> DeviceModel:
    """Devices that behave like recorded phones; which phone's speed, link and day go together is drawn by the seed."""
    seconds, links, days = traces

    @remembered
    def day(device: int) -> tuple[Day, float]:
        """The recorded days repeat; each device starts somewhere in its own."""
        found = days[draws.below(len(days), seed, READY, device)]
        return found, draws.uniform(seed, READY, device, 1) * found.length

    speed = remembered(lambda device: seconds[draws.below(len(seconds), seed, SPEED, device)])
    link = remembered(lambda device: links[draws.below(len(links), seed, LINK, device)])
    return DeviceModel(lambda device, _number: speed(device), link, day=day)


def _links(
    base: Callable[[int], tuple[float, float]], down: Distribution | None, up: Distribution | None, seed: int
) -> Callable[[int], tuple[float, float]]:
    @remembered
    def link(device: int) -> tuple[float, float]:
        """One draw for both ways: a device with a good network has it down and up."""
        u, (base_down, base_up) = draws.uniform(seed, LINK, device), base(device)
        return (down.inverse(u) if down else base_down), (up.inverse(u) if up else base_up)

    return link


def _shares(share: Distribution, period_s: float, seed: int) -> Callable[[int], tuple[Day, float]]:
    @remembered
    def day(device: int) -> tuple[Day, float]:
        """There for its share of every period, which begins at a moment of its own."""
        there_s = share.inverse(draws.uniform(seed, READY, device)) * period_s
        return Day(period_s, (0.0,), (there_s,)), draws.uniform(seed, READY, device, 1) * period_s

    return day


def _rate(name: str, megabits: float | str | None) -> Distribution | None:
    if isinstance(megabits, int | float) and not 0 < megabits < math.inf:
        raise InvalidValue(f"{name} is {megabits!r} but must be > 0 Mbit/s")
    found = _within(name, megabits, 0.0, math.inf, "be > 0 Mbit/s")
    if found is None:
        return None
    if not found.high * BYTES_PER_MEGABIT > 1.0:
        raise InvalidValue(f"{name} is {megabits!r} but must be > 0 Mbit/s, and at least a byte per second")
    return found.times(BYTES_PER_MEGABIT)


def _within(name: str, spec: float | str | None, low: float, high: float, meaning: str) -> Distribution | None:
    """The distribution of a setting, all values of which must lie between `low` and `high`."""
    try:
        found = None if spec is None else distribution(spec)
    except ValueError:
        raise InvalidValue(f"{name} is {spec!r} but must be {ALLOWED}") from None
    if found is not None and not low <= found.low <= found.high <= high:
        raise InvalidValue(f"{name} is {spec!r} but must {meaning} on every device")
    return found


def _distributed(spec: str, seed: int) -> DeviceModel:
    name = spec.rpartition("*")[2].partition(":")[0]
    try:
        seconds = distribution(spec)
        if name in _NAMED and (seconds.low > 0 or seconds.high == math.inf):
            inverse = seconds.inverse
            if name == "exponential":
                return DeviceModel(lambda device, number: inverse(draws.uniform(seed, SPEED, device, number + 1)))
            speed = remembered(lambda device: inverse(draws.uniform(seed, SPEED, device)))
            return DeviceModel(lambda device, _number: speed(device))
    except ValueError:
        pass
    raise InvalidValue(
        f"device_model {spec!r} is unknown; use constant, lognormal:S (S >= 0), exponential, uniform:LO,HI "
        "(0 < LO <= HI), pareto:A (A > 0), trace:FILE or sampled:K (K >= 1)"
    )


# --- distributions ---------------------------------------------------------------------------------------------------


def distribution(spec: float | str) -> Distribution:
    """The distribution that a number or a text names; a ValueError where it names none.

    >>> distribution("10*uniform:1,3").inverse(0.5), distribution(7.0).inverse(0.2)
    (20.0, 7.0)
    """
    if not isinstance(spec, str):
        return _constant(spec)
    factor, star, rest = spec.rpartition("*")
    if star:
        return distribution(rest).times(_positive(float(factor)))
    name, _, numbers = rest.partition(":")
    if name not in _NAMED:
        return _constant(float(rest))
    try:
        return _NAMED[name](*(float(number) for number in numbers.split(",") if numbers))
    except TypeError:
        raise ValueError(f"{name} takes other numbers") from None


def _constant(value: float = 1.0) -> Distribution:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    return Distribution(lambda _: value, value, value)


def _lognormal(sigma: float) -> Distribution:
    _positive(sigma, or_zero=True)
    return Distribution(lambda u: _exp(sigma * _NORMAL.inv_cdf(u)), 0.0, math.inf)


def _exponential(mean: float = 1.0) -> Distribution:
    _positive(mean)
    return Distribution(lambda u: -mean * math.log(u), 0.0, math.inf)


def _uniform(low: float, high: float) -> Distribution:
    _positive(low, or_zero=True)
    _positive(high - low, or_zero=True)
    return Distribution(lambda u: low + (high - low) * u, low, high)


def _pareto(shape: float) -> Distribution:
    _positive(shape)
    return Distribution(lambda u: _exp(-math.log(u) / shape), 1.0, math.inf)


def _exp(number: float) -> float:
    """Within what a clock can count: from a nanosecond to longer than the universe is old."""
    return math.exp(max(-EXPONENT_MAX, min(EXPONENT_MAX, number)))


def _positive(number: float, *, or_zero: bool = False) -> float:
    if not (math.isfinite(number) and (number > 0 or (or_zero and number == 0))):
        raise ValueError(f"{number} is not > 0")
    return number


_NAMED: dict[str, Callable[..., Distribution]] = {
    "constant": _constant,
    "lognormal": _lognormal,
    "exponential": _exponential,
    "uniform": _uniform,
    "pareto": _pareto,
}
