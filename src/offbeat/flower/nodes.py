"""Owns which node is which worker: Flower's nodes have long numbers and come and go, workers are 0, 1, 2...

Rules kept here:
- A node keeps its worker's number for ever, over restarts: the ledger has it.
- A worker serves the device of its own number: a Flower node is both.
"""

from collections.abc import Iterable

from offbeat.protocol.messages import WorkerJoined


class Nodes:
    """All nodes that were ever connected, and those that are connected now."""

    def __init__(self, history: Iterable[WorkerJoined] = ()) -> None:
        self._worker: dict[int, int] = {}
        self._node: dict[int, int] = {}
        self.present: set[int] = set()
        """Workers whose node is connected."""
        for event in history:
            self._know(int(event.name), event.worker)

    def worker(self, node: int) -> int:
        """The worker of a node; a new node gets the next number."""
        if node not in self._worker:
            self._know(node, len(self._worker))
        return self._worker[node]

    def node(self, worker: int) -> int:
        return self._node[worker]

    def look(self, connected: Iterable[int]) -> tuple[list[int], list[int]]:
        """Note which nodes are connected; returns the workers that came, and those that left."""
        now = {self.worker(node) for node in sorted(connected)}
        came, left = sorted(now - self.present), sorted(self.present - now)
        self.present = now
        return came, left

    def _know(self, node: int, worker: int) -> None:
        self._worker[node], self._node[worker] = worker, node
