"""Owns whose data count: the weight that every device's updates got, and what of it survives later mixing.

Rules kept here:
- An update counts when its version is published, with the weight it has in that version: alpha_t under FedAsync, its
  share of the mean under FedAvg, whatever place it had in the running mean.
- After x = keep*x + new*x_new, whatever was in x counts `keep` times as much. Where a rule adds differences
  (`keep` = 1) nothing fades, and all that was ever counted survives.
- Shrinking every device's share one by one would cost a pass over all devices per update; instead one common factor
  shrinks, and shares are kept relative to it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

RESCALE_BELOW = 1e-100
FORGET_BELOW = 1e-12


class Contribution:
    """Mass (the sum of alpha_t) per device, and the surviving part of it."""

    def __init__(self) -> None:
        self.mass: dict[int, float] = {}
        self._relative: dict[int, float] = {}
        self._factor = 1.0
        self._unpublished: list[tuple[int, float, float]] = []

    def count(self, device: int, keep: float, new: float) -> None:
        """An update of this device was mixed with these coefficients."""
        self._unpublished.append((device, keep, new))

    def publish(self) -> None:
        """What was mixed since the last version is in the next one."""
        for device, weight in weights_in_version(self._unpublished):
            self.mass[device] = self.mass.get(device, 0.0) + weight
        for device, keep, new in self._unpublished:
            self._shrink(keep)
            self._relative[device] = self._relative.get(device, 0.0) + new / self._factor
        self._unpublished.clear()

    def surviving(self) -> dict[int, float]:
        """What is left of every device's mass in the newest version; shares under 1e-12 may be left out."""
        return {device: share * self._factor for device, share in self._relative.items()}

    def state(self) -> dict[str, Any]:
        return {
            "mass": list(self.mass.items()),
            "relative": list(self._relative.items()),
            "factor": self._factor,
            "unpublished": self._unpublished.copy(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.mass, self._relative = dict(state["mass"]), dict(state["relative"])
        self._factor = state["factor"]
        self._unpublished = [(device, keep, new) for device, keep, new in state["unpublished"]]

    def _shrink(self, keep: float) -> None:
        self._factor *= keep
        if self._factor < RESCALE_BELOW:
            shares = self.surviving()
            self._relative = {device: share for device, share in shares.items() if share >= FORGET_BELOW}
            self._factor = 1.0


def weights_in_version(mixed: Sequence[tuple[Any, float, float]]) -> Iterator[tuple[Any, float]]:
    """What each update weighs in its version, the last one first; given as (whose, keep, new) in the order of mixing.

    >>> list(weights_in_version([("a", 0.0, 1.0), ("b", 0.75, 0.25)]))
    [('b', 0.25), ('a', 0.75)]
    """
    left = 1.0
    for whose, keep, new in reversed(mixed):
        yield whose, new * left
        left *= keep
