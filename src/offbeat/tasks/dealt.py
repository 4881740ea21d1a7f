"""Owns data that are dealt out to devices, and prepared when a device's part is read."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from offbeat.errors import InvalidValue
from offbeat.partition import Indices

Pair = tuple[Any, Any]


class Dealt(Sequence[Pair]):
    """(inputs, targets) of every device; `prepare` turns raw inputs into the model's."""

    def __init__(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        parts: Sequence[Indices],
        prepare: Callable[[np.ndarray], np.ndarray] = lambda raw: raw,
    ) -> None:
        self.inputs, self.targets, self.parts, self.prepare = inputs, targets, parts, prepare

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, device: int) -> Pair: ...
    @overload
    def __getitem__(self, device: slice) -> Sequence[Pair]: ...
    def __getitem__(self, device: int | slice) -> Pair | Sequence[Pair]:
        if isinstance(device, slice):
            return [self[i] for i in range(len(self))[device]]
        part = self.parts[device]
        return self.prepare(self.inputs[part]), self.targets[part]


def at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidValue(f"{name} is {value} but must be a whole number >= {least}")
