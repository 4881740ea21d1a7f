"""Owns the result of `FedAsync.start`: that of Flower's strategies, and the history of mixed updates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result as FlowerResult

from offbeat.protocol.messages import AnswerPush


class Applied(NamedTuple):
    t: int
    """The epoch that it went into."""
    node: int
    tau: int
    staleness: int
    alpha_t: float
    """The weight of its x_new."""
    at: float
    """Seconds on the run's own clock."""


@dataclass(repr=False)
class Result(FlowerResult):  # type: ignore[misc]  # user code may ask for its type; Flower is not there to be checked
    """Flower's result, its dictionaries keyed by epoch t instead of round."""

    history: list[Applied] = field(default_factory=list)
    """Every mixed update in order, including those before a resume."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """The content of summary.json."""


class TrainMetrics:
    """The metrics that nodes reported with their updates, by the epoch that the update went into."""

    def __init__(self) -> None:
        self.by_epoch: dict[int, MetricRecord] = {}
        self._group: list[tuple[int, MetricRecord]] = []

    def take(self, answer: AnswerPush, metrics: MetricRecord) -> None:
        """Keep the metrics of an applied update; where several make one epoch, their mean weighted by samples."""
        decision = answer.decision
        if decision is None or decision.mix is None or answer.repeated:
            return
        self._group.append((decision.samples, metrics))
        if decision.mix.publish:
            self.by_epoch[decision.t] = metrics if len(self._group) == 1 else _mean(self._group)
            self._group = []


def _mean(group: list[tuple[int, MetricRecord]]) -> MetricRecord:
    """Of the metrics that all of them report as one number."""
    total = sum(samples for samples, _ in group)
    names = [name for name, value in group[0][1].items() if not isinstance(value, list)]
    shared = [name for name in names if all(isinstance(metrics.get(name), int | float) for _, metrics in group)]
    return MetricRecord({n: sum(samples * metrics[n] for samples, metrics in group) / total for n in shared})
