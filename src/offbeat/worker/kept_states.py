"""Owns the files in which a worker keeps the state of its device, in the folder of its outbox.

Rules kept here:
- The state of a device is one file, `RUN-DEVICE.state`. The state that a training brought, `RUN-TASK.brought`, lies
  beside its update until the server has decided on that.
- To commit is to rename: at every moment the device has the old state or the new one, and has it whole.
- The states of the latest STATES_MAX runs and devices stay; the server may go back to a run.
"""

import re
from contextlib import suppress
from pathlib import Path

from offbeat.errors import InvalidValue
from offbeat.storage.disk import Disk
from offbeat.storage.model_file import load_states, states_file
from offbeat.task import DeviceState

BROUGHT, COMMITTED = ".brought", ".state"
NAME = "state"
"""Of the one state in a file."""
STATES_MAX = 16
OF_A_DEVICE = re.compile(r".+-\d+\.state")


class KeptStates:
    """The states in one folder. Where a file is damaged this raises `InvalidValue`, where the disk fails `OSError`."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder, self._disk = folder, disk

    def of(self, path: Path) -> DeviceState:
        """The state of the device that has this file; an empty one where it has kept nothing yet."""
        return _read(path) if path.exists() else DeviceState()

    def write_brought(self, vector: Path, state: DeviceState) -> None:
        """Its name reaches the disk together with that of the update's record, which is written next."""
        self._disk.write_unnamed(vector.with_suffix(BROUGHT), [states_file({NAME: state})])

    def brought(self, vector: Path) -> DeviceState:
        """The state that came with the update in this file."""
        return _read(vector.with_suffix(BROUGHT))

    def commit(self, vector: Path, path: Path) -> None:
        """When this returns, the state that came with the update is the one in the device's file."""
        self._disk.replace(vector.with_suffix(BROUGHT), path)
        self._disk.sync_folder(self._folder)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        found = [file for file in self._folder.iterdir() if OF_A_DEVICE.fullmatch(file.name)]
        for file in sorted(found, key=lambda file: file.stat().st_mtime_ns)[:-STATES_MAX]:
            with suppress(OSError):
                self._disk.remove(file)


def _read(path: Path) -> DeviceState:
    with path.open("rb"):  # one that cannot be read may be whole: that is no damage
        states = load_states(path)
    if NAME not in states:
        raise InvalidValue("it holds no state of a device")
    return states[NAME]
