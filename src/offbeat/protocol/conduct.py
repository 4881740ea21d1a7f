"""Owns how workers behave: whose updates were bad so many times in a row that they are quarantined.

Rules kept here:
- Bad is what no honest training brings about: garbage, NaN or infinity, a distance that the gate refuses. To be late
  is not bad. One applied update makes up for everything before it.
- A quarantine belongs to the worker's number: to leave and to join again does not lift it, only to be readmitted does.
"""

from typing import Any


class Conduct:
    """Bad updates in a row of every worker, and who is quarantined for them."""

    def __init__(self, bad_updates_max: int | None) -> None:
        """None is no limit: then nothing is counted."""
        self.quarantined: dict[int, str] = {}
        """Worker, and what was wrong with its latest update."""
        self._bad_updates_max = bad_updates_max
        self._bad: dict[int, int] = {}

    def bad(self, worker: int, why: str) -> bool:
        """One more bad update; true where the worker is quarantined for it now."""
        if self._bad_updates_max is None or worker in self.quarantined:
            return False
        self._bad[worker] = self._bad.get(worker, 0) + 1
        if self._bad[worker] < self._bad_updates_max:
            return False
        self.quarantined[worker] = why
        return True

    def bar(self, worker: int, why: str) -> bool:
        """Quarantine it at once; false where it is quarantined already."""
        if worker in self.quarantined:
            return False
        self.quarantined[worker] = why
        return True

    def good(self, worker: int) -> None:
        """An update was applied: the count begins anew."""
        self._bad.pop(worker, None)

    def readmit(self, worker: int) -> None:
        """The worker may go on, and its count begins anew."""
        self.quarantined.pop(worker, None)
        self._bad.pop(worker, None)

    def state(self) -> dict[str, Any]:
        """Everything, as plain numbers and names."""
        return {"bad": list(self._bad.items()), "quarantined": list(self.quarantined.items())}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state."""
        self._bad, self.quarantined = dict(state["bad"]), dict(state["quarantined"])
