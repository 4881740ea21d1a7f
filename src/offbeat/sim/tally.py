"""Owns the counting of a simulated run: bytes, staleness, gradients and the curve, event by event."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offbeat.protocol.messages import (
    Command,
    Decision,
    Evaluated,
    EvaluateModel,
    Event,
    MixUpdate,
    PublishVersion,
    SendTask,
    UpdateArrived,
    VersionPublished,
)
from offbeat.sim.curve import Point

NOTHING: Mapping[str, float] = {}


@dataclass
class Tally:
    """What a summary needs to know, counted as it happens."""

    model_bytes: int
    sent: int = 0
    arrived: int = 0
    staleness_sum: int = 0
    staleness_largest: int = 0
    gradients: int = 0
    """In the newest published version."""
    decisions: list[Decision] | None = None
    """Every applied decision, where they are kept."""
    curve: list[Point] = field(default_factory=list)
    _mixed: int = 0
    _in_version: dict[int, int] = field(default_factory=dict)
    _evaluating: dict[int, Point] = field(default_factory=dict)

    def staleness_mean(self, applied: int) -> float:
        """Over all applied updates."""
        return self.staleness_sum / applied if applied else 0.0

    def count(self, event: Event, commands: Iterable[Command]) -> None:
        """Take note of one event and what it led to."""
        if isinstance(event, UpdateArrived):
            self.arrived += 1
        elif isinstance(event, VersionPublished):
            self.gradients = self._in_version.pop(event.t)
        elif isinstance(event, Evaluated):
            point = self._evaluating.pop(event.t, None) or self._point(event.t, event.at)
            self.curve.append(point._replace(metrics=event.metrics))
        for command in commands:
            self._obeyed(command, event.at)

    def _obeyed(self, command: Command, at: float) -> None:
        match command:
            case SendTask():
                self.sent += 1
            case MixUpdate():
                self._mix(command.decision)
            case PublishVersion():
                self._in_version[command.t] = self._mixed
            case EvaluateModel():
                self._evaluating[command.t] = self._point(command.t, at)

    def _mix(self, decision: Decision) -> None:
        self.staleness_sum += decision.staleness
        self.staleness_largest = max(self.staleness_largest, decision.staleness)
        self._mixed += decision.gradients
        if decision.mix is not None and decision.mix.publish:
            self._in_version[decision.t] = self._mixed
        if self.decisions is not None:
            self.decisions.append(decision)

    def _point(self, t: int, at: float) -> Point:
        return Point(t, at, self.gradients, (self.sent + self.arrived) * self.model_bytes, NOTHING)
