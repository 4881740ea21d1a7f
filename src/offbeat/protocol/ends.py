"""Owns what ends a run, and whether another end may take its place.

Rules kept here:
- An end that is reached already is no end to go on to: it is refused, and says what is reached.
- A run that failed is not gone on with: it would fail again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Evaluated, RunExtended
from offbeat.protocol.plan import Plan, Target

if TYPE_CHECKING:
    from offbeat.protocol.coordinator import Coordinator

UNITS = {"epochs": "epochs", "gradients": "gradients", "until_s": "s"}


class Ends(NamedTuple):
    """What ends a run, whichever comes first; None is no such end."""

    epochs: int | None = None
    gradients: int | None = None
    until_s: float | None = None
    target: str | None = None

    @classmethod
    def of(cls, plan: Plan) -> Self:
        until_s = None if plan.until_s == inf else plan.until_s
        return cls(plan.epochs, plan.gradients, until_s, None if plan.target is None else str(plan.target))

    @classmethod
    def said_by(cls, event: RunExtended) -> Self:
        return cls(event.epochs, event.gradients, event.until_s, event.target)

    def event(self, at: float, handled: int | None = None) -> RunExtended:
        return RunExtended(at, *self, handled)

    def put_into(self, plan: Plan) -> Plan:
        """The plan with these ends and no others."""
        return replace(
            plan,
            epochs=self.epochs,
            gradients=self.gradients,
            until_s=inf if self.until_s is None else self.until_s,
            target=None if self.target is None else Target.parse(self.target),
        )

    def __str__(self) -> str:
        found: dict[str, Any] = {name: value for name, value in self._asdict().items() if value is not None}
        words = [
            f"{value:g} s" if name == "until_s" else f"{value} {UNITS[name]}"
            for name, value in found.items()
            if name in UNITS
        ]
        return " or ".join([*words, *([f"target {self.target}"] if self.target is not None else [])])


@dataclass(slots=True)
class RunOutcome:
    """What a run has come to: one object, for at 30 attributes Python reads all of a coordinator's more slowly."""

    failed: bool = False
    """The run ends without having learnt: it diverged, stands still, or had all its updates refused."""
    result_t: int | None = None
    """The version that reached the target, where that ends the run; the newest may be a later one."""
    best: Evaluated | None = None
    """The best evaluation so far, where the plan says by which metric."""
    extended: bool = False
    """The ends in the coordinator's plan are not those that the run began with."""

    @property
    def kept(self) -> set[int]:
        """Versions that are wanted although newer ones are there."""
        return {t for t in (self.result_t, self.best_t) if t is not None}

    @property
    def best_t(self) -> int | None:
        return None if self.best is None else self.best.t


def refuse_reached(
    c: "Coordinator", ends: Ends, at: float, evaluations: Callable[[], Iterable[Evaluated]] | None = None
) -> None:
    """Refuse ends with which this run, which has come to this moment, would not go on.

    `evaluations` gives all of them, where the coordinator does not remember all.
    """
    if c.outcome.failed:
        raise InvalidValue(f"the run has failed ({c.end_reason}) and cannot be extended; begin another in a new folder")
    wanted = ends.put_into(c.plan)
    for name, reached in (("epochs", c.t_decided), ("gradients", c.gradients), ("until_s", at)):
        asked = getattr(wanted, name)
        if asked is not None and asked <= reached:
            flag, unit = f"--{name.replace('_', '-')}", UNITS[name]
            raise InvalidValue(
                f"{flag} is {asked:g}, and the run has reached {reached:g} {unit}; give more to extend the run"
            )
    all_of_them = c.evaluations if evaluations is None or wanted.target is None else evaluations()
    met = None if wanted.target is None else next((e for e in all_of_them if wanted.target.reached(e.metrics)), None)
    if met is not None:
        raise InvalidValue(
            f"--target is {wanted.target}, and version {met.t} has reached it; "
            "give another target, or none, to extend the run"
        )
