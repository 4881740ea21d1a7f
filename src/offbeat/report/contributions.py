"""Owns whose data count: the part of the fold that knows what every device brought, and the table of it in a report.

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

PARTS_MAX = 30


class DevicePart(NamedTuple):
    """What a device has brought, or all others as one."""

    device: int
    updates: int
    mass: float
    share: float
    """Of what all devices have in the newest version."""
    others: int = 0


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
        self.settle = self._version.settle

    def takers(self) -> Mapping[str, Taker]:
        return {"decided": self._decided}

    def parts(self) -> list[DevicePart]:
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


def contributions(devices: DeviceFold) -> dict[str, Any]:
    """The largest parts one by one, and the rest as one."""
    parts = devices.parts()
    if not sum(part.share for part in parts):
        return {"parts": []}
    lines, rest = parts[:PARTS_MAX], parts[PARTS_MAX:]
    if rest:
        _, updates, mass, share, _ = (sum(column) for column in zip(*rest, strict=True))
        lines.append(DevicePart(-1, int(updates), mass, share, len(rest)))
    return {"parts": lines, "half": _half(parts), "part_count": len(parts)}


def _half(parts: list[DevicePart]) -> int:
    """How many of the largest parts make half of all."""
    total, seen = sum(part.share for part in parts), 0.0
    for count, part in enumerate(parts, 1):
        seen += part.share
        if seen >= total / 2:
            return count
    return len(parts)
