"""Owns which workers are quarantined: those whose updates were bad too often in a row, and those that were barred.

Rules kept here:
- Bad is what no honest training produces: garbage, NaN or infinity, a distance that the gate refuses. A late update
  is not bad. One applied update makes up for every bad one before it.
- A quarantine belongs to the worker's number: leaving and joining again does not lift it; only a readmission does.
"""

from typing import Any


class QuarantinedWorkers:
    """Who is quarantined and why, and the bad updates in a row of all others."""

    def __init__(self, bad_updates_max: int | None) -> None:
        """None is no limit: then nothing is counted."""
        self.reasons: dict[int, str] = {}
        """Worker, and why it is quarantined."""
        self._bad_updates_max = bad_updates_max
        self._bad: dict[int, int] = {}

    def count_bad(self, worker: int, why: str) -> bool:
        """One more bad update; true where the worker is quarantined for it now."""
        if self._bad_updates_max is None or worker in self.reasons:
            return False
        self._bad[worker] = self._bad.get(worker, 0) + 1
        return self._bad[worker] >= self._bad_updates_max and self.bar(worker, why)

    def bar(self, worker: int, why: str) -> bool:
        """Quarantine the worker at once; false where it is quarantined already."""
        if worker in self.reasons:
            return False
        self.reasons[worker] = why
        return True

    def forgive(self, worker: int) -> None:
        """An update of the worker was applied: its count begins anew."""
        self._bad.pop(worker, None)

    def readmit(self, worker: int) -> None:
        """The worker may go on, and its count begins anew."""
        self.reasons.pop(worker, None)
        self._bad.pop(worker, None)

    def state(self) -> dict[str, Any]:
        """Everything, as plain numbers and names."""
        return {"bad": list(self._bad.items()), "quarantined": list(self.reasons.items())}

    def restore(self, state: dict[str, Any]) -> None:
        self._bad, self.reasons = dict(state["bad"]), dict(state["quarantined"])
