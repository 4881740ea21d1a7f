"""Owns whose data count: the weight that every device's updates were given, and what of it survives later mixing.

After x = keep*x + new*x_new, whatever was in x counts `keep` times as much. Shrinking every device's share one by one
would cost a pass over all devices per update; instead one common factor shrinks, and shares are kept relative to it.
"""

RESCALE_BELOW = 1e-100
FORGET_BELOW = 1e-12


class Contribution:
    """Mass (the sum of alpha_t) per device, and the surviving part of it."""

    def __init__(self) -> None:
        self.mass: dict[int, float] = {}
        self._relative: dict[int, float] = {}
        self._factor = 1.0

    def count(self, device: int, keep: float, new: float) -> None:
        """An update of this device was mixed with these coefficients."""
        self.mass[device] = self.mass.get(device, 0.0) + new
        self._factor *= keep
        if self._factor < RESCALE_BELOW:
            self._rescale()
        self._relative[device] = self._relative.get(device, 0.0) + new / self._factor

    def surviving(self) -> dict[int, float]:
        """What is left of every device's mass in the newest model; shares under 1e-12 may be left out."""
        return {device: share * self._factor for device, share in self._relative.items()}

    def _rescale(self) -> None:
        shares = self.surviving()
        self._relative = {device: share for device, share in shares.items() if share >= FORGET_BELOW}
        self._factor = 1.0
