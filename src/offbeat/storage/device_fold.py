"""Owns the part of the fold that knows whose data count: what every device brought, and what of it is left.

Rules kept here:
- A weight is what the update has in its version: alpha_t under FedAsync, its share of the mean under FedAvg.
- An update that was lost afterwards was decided on, but is in no version: it has no weight and no part.
- What is kept grows with devices and with different weights to three digits, never with updates.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from offbeat.protocol.contribution import Contribution, weights_in_version
from offbeat.storage.fold import Rows, Taker, VersionUpdates


class DevicePart(NamedTuple):
    """What a device has brought."""

    device: int
    updates: int
    mass: float
    share: float
    """Of what all devices have in the newest version."""


class DeviceFold:
    """All devices that ever brought an update."""

    def __init__(self, lost: Collection[int] = ()) -> None:
        """`lost` are the decisions whose updates were lost."""
        self.updates: Counter[int] = Counter()
        """Applied, by device."""
        self.weights: Counter[tuple[int, float]] = Counter()
        """How many updates of a staleness got a weight, to three digits."""
        self._lost = lost
        self._contribution = Contribution()
        self._version = VersionUpdates(self._complete)

    def takers(self) -> Mapping[str, Taker]:
        return {"decided": self._decided}

    def settle(self, t: int) -> None:
        self._version.settle(t)

    def parts(self) -> list[DevicePart]:
        """All devices, the largest part first."""
        mass, surviving = self._contribution.mass, self._contribution.surviving()
        total = sum(surviving.values()) or 1.0
        parts = [
            DevicePart(device, count, mass.get(device, 0.0), surviving.get(device, 0.0) / total)
            for device, count in self.updates.items()
        ]
        return sorted(parts, key=lambda part: (-part.share, part.device))

    def _decided(self, rows: Rows) -> None:
        for t, staleness, _, keep, new, publish, _, decision, device, *_ in rows:
            if keep is not None:
                self.updates[device] += 1
                update = None if decision in self._lost else (device, staleness)
                self._version.add(update, t, keep, new, publish=publish)

    def _complete(self, version: Sequence[tuple[Any, float, float]]) -> None:
        for (_, staleness), weight in weights_in_version(version):
            self.weights[staleness, float(f"{weight:.3g}")] += 1
        for (device, _), keep, new in version:
            self._contribution.count(device, keep, new)
        self._contribution.publish()
