"""Owns a set of workers from which one is taken at random in constant time: those that wait for a task.

Workers are small whole numbers, so two flat arrays are enough for a million of them.
"""

from array import array

NOWHERE = -1


class WorkerSet:
    """A set of worker numbers with constant-time add, discard and indexing."""

    def __init__(self) -> None:
        self._members = array("q")
        self._place = array("q")

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, worker: int) -> bool:
        return worker < len(self._place) and self._place[worker] != NOWHERE

    def __getitem__(self, index: int) -> int:
        return self._members[index]

    def add(self, worker: int) -> None:
        """Put a worker in; one that is in stays."""
        if worker >= len(self._place):
            self._place.extend([NOWHERE] * (worker + 1 - len(self._place)))
        if self._place[worker] == NOWHERE:
            self._place[worker] = len(self._members)
            self._members.append(worker)

    def discard(self, worker: int) -> None:
        """Take a worker out; one that is out stays out. The last member moves into the gap."""
        if worker not in self:
            return
        gap, last = self._place[worker], self._members.pop()
        if last != worker:
            self._members[gap] = last
            self._place[last] = gap
        self._place[worker] = NOWHERE

    def members(self) -> list[int]:
        """All members in the order of their indexes, which a snapshot must keep."""
        return self._members.tolist()
