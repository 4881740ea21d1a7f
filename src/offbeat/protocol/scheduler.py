"""Owns when to trigger workers, and with how much work: the policies inside the coordinator.

Rules kept here:
- `trigger_every_s` = 0 triggers as soon as there is room; otherwise all waiting workers are triggered together, and
  then none for that long.
- Groups make it synchronous: k tasks (or more, with over-selection) start from one version and the next ones only
  when it is followed by another. FedAvg is this and the rule `fedavg(k)`.
- How much one task trains is part of its lease: gamma may follow t and past evaluations, H the speed of the device.
- A schedule of gamma is a pure function of t and the evaluations so far, so a replay gives the same rates. A server
  does not remember all of them, so a schedule that it has counts them one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import ceil, inf
from typing import Any, NamedTuple, get_args

from offbeat.errors import InvalidValue
from offbeat.protocol.idle import Choice
from offbeat.protocol.messages import Evaluated, Lease

GammaSchedule = Callable[[int, Sequence[Evaluated]], float]
"""gamma from t and the evaluations so far."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    choice: Choice = "random"
    trigger_every_s: float = 0.0
    group: int = 0
    """Tasks that make one synchronous group; 0 is asynchronous."""
    over_selection: float = 1.0
    """Tasks started per group, as a multiple of `group`; the latecomers are refused."""
    group_deadline_s: float | None = None
    """A group is published with what has arrived by then."""
    gamma: GammaSchedule | None = None
    local_iterations_min: int | None = None
    local_iterations_max: int | None = None
    """Where set, the fastest device does the most local iterations and slower ones fewer, down to the minimum."""

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise InvalidValue(f"scheduler is {self.choice!r}; use one of {', '.join(get_args(Choice))}")
        if not self.trigger_every_s >= 0:
            raise InvalidValue(f"trigger_every_s is {self.trigger_every_s!r} but must be >= 0")
        if self.group < 0:
            raise InvalidValue(f"group is {self.group} but must be >= 0; 0 is asynchronous")
        if not 1 <= self.over_selection < inf:
            raise InvalidValue(f"over_selection is {self.over_selection!r} but must be >= 1; 1.3 is usual")
        if self.group_deadline_s is not None and not self.group_deadline_s > 0:
            raise InvalidValue(f"group_deadline_s is {self.group_deadline_s!r} but must be > 0")
        low, high = self.local_iterations_min, self.local_iterations_max
        if (low is None) != (high is None) or (low is not None and high is not None and not 1 <= low <= high):
            raise InvalidValue("give local_iterations_min and local_iterations_max together, 1 <= min <= max")

    @property
    def quota(self) -> int:
        return ceil(self.group * self.over_selection - 1e-9)

    def local_iterations(self, seconds: float | None, fastest: float | None) -> int | None:
        """H for a device that takes `seconds` per iteration, where the fastest one takes `fastest`."""
        low, high = self.local_iterations_min, self.local_iterations_max
        if low is None or high is None:
            return None
        if not seconds or not fastest:
            return high
        return max(low, min(high, round(high * fastest / seconds)))


class Speeds:
    """The newest speed of every device, and the fastest ever seen."""

    def __init__(self) -> None:
        self.fastest = inf
        self._seconds: dict[int, float] = {}

    def learn(self, lease: Lease, at: float, gradients: int) -> None:
        """An update arrived; a task that took no time, or did nothing, tells nothing."""
        if gradients and at > lease.granted_at:
            seconds = (at - lease.granted_at) / gradients
            self._seconds[lease.device] = seconds
            self.fastest = min(self.fastest, seconds)

    def of(self, device: int) -> float | None:
        return self._seconds.get(device)

    def state(self) -> list[Any]:
        return [None if self.fastest == inf else self.fastest, list(self._seconds.items())]

    def restore(self, state: list[Any]) -> None:
        fastest, seconds = state
        self.fastest, self._seconds = inf if fastest is None else fastest, dict(seconds)


@dataclass(frozen=True, slots=True)
class Step:
    """gamma until version `epoch`, and `factor` times that from there on.

    >>> Step(0.1, 800, 0.5)(799, []), Step(0.1, 800, 0.5)(800, [])
    (0.1, 0.05)
    """

    gamma: float
    epoch: int
    factor: float
    uses_evaluations = False

    def __call__(self, t: int, evaluations: Sequence[Evaluated]) -> float:  # noqa: ARG002 (t is enough)
        return self.gamma * (self.factor if t >= self.epoch else 1.0)


@dataclass(frozen=True, slots=True)
class Plateau:
    """gamma, and `factor` times as much after every evaluation at which the metric was not lower than ever before."""

    gamma: float
    metric: str
    factor: float
    uses_evaluations = True

    @property
    def start(self) -> "PlateauSoFar":
        return PlateauSoFar(inf, self.gamma)

    def after(self, so_far: "PlateauSoFar", evaluation: Evaluated) -> "PlateauSoFar":
        """One evaluation later."""
        best, gamma = so_far
        value = evaluation.metrics[self.metric]
        return PlateauSoFar(min(best, value), gamma if value < best else gamma * self.factor)

    def __call__(self, t: int, evaluations: Sequence[Evaluated]) -> float:  # noqa: ARG002 (the metrics decide)
        return reduce(self.after, evaluations, self.start).gamma


class PlateauSoFar(NamedTuple):
    """What a plateau needs of all evaluations so far."""

    best: float
    gamma: float


def gamma_schedule(spec: str, gamma: float | None) -> GammaSchedule | None:
    """The schedule that a settings string names; None where gamma stays.

    >>> gamma_schedule("plateau:loss,0.25", 20.0)
    Plateau(gamma=20.0, metric='loss', factor=0.25)
    """
    name, _, rest = spec.partition(":")
    if name == "constant" and not rest:
        return None
    if gamma is None:
        raise InvalidValue(f"gamma_schedule {spec!r} needs gamma: this task does not tell its own")
    what, _, number = rest.rpartition(",")
    try:
        factor = float(number)
        if name == "step" and 0 < factor < inf:
            return Step(gamma, int(what), factor)
        if name == "plateau" and what and 0 < factor <= 1:
            return Plateau(gamma, what, factor)
    except ValueError:
        pass
    raise InvalidValue(f"gamma_schedule {spec!r} is unknown; use constant, step:T,F or plateau:METRIC,F (0 < F <= 1)")
