"""Owns the way back into an interrupted run: its ledger is replayed, without training, up to the checkpoint.

The coordinator and the source are deterministic, so their state needs no saving: they are led through the recorded
events again. What cannot be replayed, the vectors, is in the checkpoint.
"""

from collections.abc import Iterator, Mapping

from offbeat.protocol.messages import Decision, Evaluated, Lease, Spent, UpdateArrived
from offbeat.sim.executors import Job, PendingEvaluation


class Replayed:
    """A plane without vectors: it answers what was recorded, and remembers what was under way."""

    def __init__(self, arrivals: Iterator[UpdateArrived], evaluations: Iterator[Evaluated]) -> None:
        self._arrivals, self._evaluations = arrivals, evaluations
        self.leased: dict[int, Lease] = {}
        self.started: dict[int, Lease] = {}
        self.evaluated: dict[int, None] = {}

    def lease(self, lease: Lease) -> None:
        self.leased.setdefault(lease.task, lease)

    def start(self, lease: Lease) -> None:
        self.started[lease.task] = lease

    def awaited_training(self, lease: Lease) -> Job | None:  # noqa: ARG002 (nothing is trained)
        """Nothing has to be waited for."""
        return None

    def arrived(self, lease: Lease, at: float, spent: Spent | None) -> UpdateArrived:  # noqa: ARG002 (it is recorded)
        return next(self._arrivals)

    def mix(self, decision: Decision) -> None:
        """Nothing to mix."""

    def publish(self) -> None:
        """Nothing to publish."""

    def forget(self, task: int) -> None:
        self.leased.pop(task, None)
        self.started.pop(task, None)

    def evaluate(self, t: int) -> None:
        """Remember that this version is evaluated."""
        self.evaluated[t] = None

    def awaited_evaluation(self, t: int) -> PendingEvaluation | None:  # noqa: ARG002 (nothing is evaluated)
        """Nothing has to be waited for."""
        return None

    def metrics(self, t: int) -> Mapping[str, float]:
        del self.evaluated[t]
        return next(self._evaluations).metrics
