"""Owns the coordinator's settings: admission, staleness policy, limits, and when a run ends."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, Self, get_args

from offbeat.core.gate import Gate
from offbeat.errors import InvalidValue
from offbeat.protocol.best import BestBy

StalenessPolicy = Literal["weigh", "reject", "pace"]


@dataclass(frozen=True, slots=True)
class Target:
    """A metric and the value that ends the run, such as accuracy>=0.95."""

    metric: str
    sign: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `accuracy>=0.95` or `loss<=0.1`."""
        found = re.fullmatch(r"\s*([\w.]+)\s*(>=|<=)\s*([-+.\deE]+)\s*", text)
        try:
            if found:
                return cls(found[1], found[2], float(found[3]))
        except ValueError:
            pass
        raise InvalidValue(f"target is {text!r}; write it like accuracy>=0.95 or loss<=0.1")

    def reached(self, metrics: Mapping[str, float]) -> bool:
        compare: Callable[[float, float], bool] = operator.ge if self.sign == ">=" else operator.le
        return self.metric in metrics and compare(metrics[self.metric], self.value)

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value:g}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the coordinator may do, and until when. Every limit has its name here."""

    in_flight_max: int = 32
    tasks_per_device: int | None = 1
    """Open leases that one device may have; None is no limit."""
    lease_s: float = 3600.0
    """A lease without a sign of life for this long is released."""
    silent_s: float = inf
    """A worker without a sign of life for this long is silent: others get its place, and it gets its lease back where
    it is heard of within `lease_s` and there is room."""
    queue_max: int = 64
    """Updates decided on and not yet mixed; more are told to come back."""
    retry_after_s: float = 1.0
    """When a worker that met a full queue, or a scheduler that found no worker available, tries again."""
    staleness_policy: StalenessPolicy = "weigh"
    staleness_max: int | None = None
    cancels: bool = False
    """Under `reject`, a lease whose update would be refused is revoked, so that its worker begins anew."""
    starts_in_time: bool = False
    """Under `reject`, no task starts from a version that is too stale already, while newer ones wait to be mixed."""
    pace_wait_s: float = 60.0
    """Under `pace`, a lease that holds others back for longer is revoked."""
    gate: Gate | None = None
    """How far an update may lie from its x_tau; None is any distance."""
    value_max: float = inf
    """The largest absolute value that an update may hold."""
    bad_updates_max: int | None = None
    """Bad updates in a row for which a worker is quarantined; None is never."""
    epochs: int | None = None
    gradients: int | None = None
    until_s: float = inf
    target: Target | None = None
    not_finite_max: int | None = None
    """Updates in a row refused for NaN, infinity or a value above value_max that end the run: training has diverged."""
    refused_max: int | None = None
    """Updates in a row that were refused, whatever for, that end the run: the model stands still."""
    keep_best: BestBy | None = None
    """By which metric the best version is kept; nothing is decided by it."""
    evaluate_every: int = 1
    """Versions between two evaluations."""
    answers_kept: int = 100_000
    """Answered tasks whose answer can be given again; older ones are `unknown_task`, and still never mixed twice."""
    evaluations_kept: int | None = None
    """The newest evaluations that are remembered; None is all, which a schedule of gamma other than ours may need."""
    released_kept: int = 100_000
    """Released leases under which a late push is still judged."""

    def __post_init__(self) -> None:
        for name in ("in_flight_max", "queue_max", "evaluate_every", "answers_kept", "released_kept"):
            self._at_least(name, 1)
        for name in ("tasks_per_device", "bad_updates_max", "epochs", "gradients", "evaluations_kept"):
            self._at_least(name, 1)
        for name in ("not_finite_max", "refused_max"):
            self._at_least(name, 1)
        for name in ("lease_s", "silent_s", "retry_after_s", "pace_wait_s", "until_s"):
            if not getattr(self, name) > 0:
                raise InvalidValue(f"{name} is {getattr(self, name)!r} but must be > 0 seconds")
        if not self.value_max > 0:
            raise InvalidValue(f"value_max is {self.value_max!r} but must be a number > 0; inf is no limit")
        self._check_staleness()

    def _check_staleness(self) -> None:
        if self.staleness_policy not in get_args(StalenessPolicy):
            allowed = ", ".join(get_args(StalenessPolicy))
            raise InvalidValue(f"staleness_policy is {self.staleness_policy!r}; use one of {allowed}")
        if self.staleness_policy != "weigh" and self.staleness_max is None:
            raise InvalidValue(
                f"staleness_policy {self.staleness_policy} needs staleness_max: the most that is accepted"
            )
        if self.staleness_policy != "reject" and (self.cancels or self.starts_in_time):
            raise InvalidValue("cancels and starts_in_time go with staleness_policy reject: nothing else is refused")
        if self.staleness_max is not None and self.staleness_max < 0:
            raise InvalidValue(f"staleness_max is {self.staleness_max} but must be >= 0")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise InvalidValue(f"{name} is {value!r} but must be a whole number >= {least}")

    @property
    def hold_s(self) -> float:
        """How long a lease keeps its place without a sign of life."""
        return min(self.silent_s, self.lease_s)

    def excess(self, largest: float) -> float | None:
        """The largest absolute value of an update, where the coordinator must know of it: above value_max."""
        return largest if self.value_max < largest < inf else None

    def bound(self) -> float:
        """The largest staleness that is accepted."""
        if self.staleness_policy == "weigh" or self.staleness_max is None:
            return inf
        return self.staleness_max

    def end(self, t: int, gradients: int, at: float) -> str:
        """Why a run that has come so far ends; empty where it goes on. A target is looked at when it is evaluated."""
        if self.epochs is not None and t >= self.epochs:
            return f"{self.epochs} epochs"
        if self.gradients is not None and gradients >= self.gradients:
            return f"{self.gradients} gradients"
        if at >= self.until_s:
            return f"{self.until_s:g} s"
        return ""

    def failure(self, t: int, not_finite: int, refused: int) -> str:
        """Why a run with so many bad or refused updates in a row cannot go on; empty where it can."""
        if self.not_finite_max is not None and not_finite >= self.not_finite_max:
            return f"diverged: the last {not_finite} updates were NaN, infinite or above value_max"
        if self.refused_max is not None and refused >= self.refused_max:
            return f"stuck: the last {refused} updates were refused, and the model has not changed since epoch {t}"
        return ""
