"""Owns the metrics that workers measured on the model that they received: what there is without test data here.

Rules kept here:
- A report belongs to its tau; those of `every` epochs make one bucket, and its means weigh every sample alike.
- A bucket is given out once, when the versions that its reports are about are well past. Later ones are too late.
- Late reports, values that are not finite, and names and buckets beyond the limits are dropped and counted.
- Memory is bounded: buckets and names are limited, and a mean takes no more memory than its name.
- With every bucket goes how the worst-served tenth of devices do: by the newest report of each device, whatever its tau
  and however late. What was measured while training (`training_...`) is not about the model that was received.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite

from offbeat.errors import InvalidValue
from offbeat.protocol.worst_served import WORST_TENTH, worst_served

BUCKETS_MAX = 64
NAMES_MAX = 64
DEVICES_MAX = 4_096
"""Devices whose newest report is kept: those that reported last."""
TRAINING = "training_"
COUNT = "reports"
"""The name under which it is said how many reports there were."""

Due = list[tuple[int, dict[str, float]]]
"""The largest tau of each bucket, and its metrics."""


@dataclass(slots=True)
class Mean:
    """A weighted mean that is kept up to date; it never leaves the range of what it is the mean of.

    >>> mean = Mean()
    >>> mean.add(0.5, 10)
    >>> mean.add(0.8, 20)
    >>> round(mean.value, 12)
    0.7
    """

    value: float = 0.0
    samples: int = 0

    def add(self, value: float, samples: int) -> None:
        self.samples += samples
        share = samples / self.samples
        low, high = (value, value) if share == 1.0 else sorted((self.value, value))
        between = self.value * (1.0 - share) + value * share
        self.value = min(max(between, low), high)


@dataclass(slots=True)
class Bucket:
    tau: int = 0
    """The largest."""
    count: int = 0
    means: dict[str, Mean] = field(default_factory=dict)


class Reports:
    """Collects reports, and gives out the means of each bucket when it is complete."""

    def __init__(
        self,
        every: int,
        *,
        buckets_max: int = BUCKETS_MAX,
        names_max: int = NAMES_MAX,
        devices_max: int = DEVICES_MAX,
    ) -> None:
        limits = {"every": every, "buckets_max": buckets_max, "names_max": names_max, "devices_max": devices_max}
        for name, limit in limits.items():
            if limit < 1:
                raise InvalidValue(f"{name} is {limit} but must be a whole number >= 1")
        self.every, self.buckets_max, self.names_max, self.devices_max = limits.values()
        self.dropped: Counter[str] = Counter()
        """Reports that came `late` or whose bucket made way (`overflowed`), and values `not_finite` or `nameless`."""
        self._buckets: dict[int, Bucket] = {}
        self._newest: dict[int, dict[str, float]] = {}
        """The newest report of each device, the oldest of them first."""
        self._open_from = 0
        self._finished = False

    def add(self, tau: int, samples: int, metrics: Mapping[str, float], device: int | None = None) -> None:
        """Add what a worker measured of x_tau on its samples; empty metrics are no report."""
        if tau < 0 or samples < 1:
            raise InvalidValue(f"a report of tau {tau} on {samples} samples; tau must be >= 0, and samples >= 1")
        if not metrics:
            return
        if device is not None and not self._finished:
            self._keep_newest(device, metrics)
        bucket = self._bucket(tau // self.every)
        if bucket is None:
            self.dropped["late"] += 1
            return
        bucket.tau, bucket.count = max(bucket.tau, tau), bucket.count + 1
        for name, value in metrics.items():
            self._note(bucket, name, value, samples)

    def due(self, t: int) -> Due:
        """x_t is published: the means of the buckets that are complete by now, the oldest first."""
        self._open_from = max(self._open_from, t // self.every - 1)
        return self._given([number for number in self._buckets if number < self._open_from])

    def finish(self) -> Due:
        """The run is over: the means of the buckets that are left."""
        self._finished = True
        return self._given(list(self._buckets))

    def _keep_newest(self, device: int, metrics: Mapping[str, float]) -> None:
        measured = (one for one in metrics.items() if _finite(one[1]) and not one[0].startswith(TRAINING))
        self._newest.pop(device, None)
        self._newest[device] = {name: float(value) for name, value in islice(measured, self.names_max)}
        if len(self._newest) > self.devices_max:
            del self._newest[next(iter(self._newest))]

    def _bucket(self, number: int) -> Bucket | None:
        """Where reports of these epochs go; None where it is too late for them."""
        if self._finished or number < self._open_from:
            return None
        self._buckets.setdefault(number, Bucket())
        while len(self._buckets) > self.buckets_max:
            oldest = min(self._buckets)
            self.dropped["overflowed"] += self._buckets.pop(oldest).count
            self._open_from = max(self._open_from, oldest + 1)
        return self._buckets.get(number)

    def _note(self, bucket: Bucket, name: str, value: float, samples: int) -> None:
        if not _finite(value):
            self.dropped["not_finite"] += 1
        elif name in bucket.means or len(bucket.means) < self.names_max:
            bucket.means.setdefault(name, Mean()).add(float(value), samples)
        else:
            self.dropped["nameless"] += 1

    def _given(self, numbers: list[int]) -> Due:
        buckets = [self._buckets.pop(number) for number in sorted(numbers)]
        worst = worst_served(self._newest.values()) if buckets else {}
        return [(bucket.tau, _said(bucket, worst)) for bucket in buckets]


def _said(bucket: Bucket, worst: Mapping[str, float]) -> dict[str, float]:
    means = {name: mean.value for name, mean in bucket.means.items()}
    tenths = {name: value for name, value in worst.items() if name.removesuffix(WORST_TENTH) in means}
    return {**means, **tenths, COUNT: float(bucket.count)}


def _finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # a whole number that is no float
        return False
