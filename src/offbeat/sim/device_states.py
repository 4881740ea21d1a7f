"""Owns what the devices of a simulated run keep between their tasks.

Rules kept here:
- A training starts from the state of its device. The state that it brings becomes the device's with the decision that
  applies its update; a refused or lost update leaves the state as it was.
- A state is committed only onto the one that it started from. Otherwise it is dropped, and the update still applies.
"""

from collections.abc import Mapping

from offbeat.task import DeviceState, Task, keeps_state

COMMITTED, STARTED = "state ", "start "
"""What the names in a checkpoint begin with: a device's state, and the state that a task started from."""
NOTHING_KEPT = DeviceState()
NO_STATES: Mapping[str, DeviceState] = {}


class DeviceStates:
    """The committed state of every device; of none where the task keeps no state."""

    def __init__(self, task: Task) -> None:
        self._are_kept = keeps_state(task)
        self._committed: dict[int, DeviceState] = {}

    def of(self, device: int) -> DeviceState | None:
        return self._committed.get(device, NOTHING_KEPT) if self._are_kept else None

    def commit(self, device: int, started: DeviceState, brought: DeviceState) -> None:
        """The update that brought this state is applied; `started` is the state that its training was given."""
        if self._committed.get(device, NOTHING_KEPT).number == started.number:
            self._committed[device] = brought

    def saved(self, started: Mapping[int, tuple[int, DeviceState]]) -> dict[str, DeviceState]:
        """The states of a checkpoint, by name; `started` has the device and the state of every task in flight.

        A task whose update is decided on and not yet mixed started from a state that is no longer its device's.
        """
        committed = {f"{COMMITTED}{device}": state for device, state in self._committed.items()}
        others = {task: state for task, (device, state) in started.items() if state is not self.of(device)}
        return committed | {f"{STARTED}{task}": state for task, state in others.items()}

    def restore(self, saved: Mapping[str, DeviceState]) -> dict[int, DeviceState]:
        """Go on with what `saved` gave; returns the states of the tasks that started from others than these."""
        self._committed = _numbered(saved, COMMITTED)
        return _numbered(saved, STARTED)


def _numbered(saved: Mapping[str, DeviceState], kind: str) -> dict[int, DeviceState]:
    return {int(name.removeprefix(kind)): state for name, state in saved.items() if name.startswith(kind)}
