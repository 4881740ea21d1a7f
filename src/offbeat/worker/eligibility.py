"""Owns whether a device may train now: conditions, and a command (the gate) that the owner of the device gives.

Rules kept here:
- Nothing here waits without a limit. Whatever fails or takes too long is a reason not to train, in one line.
- idle: other processes leave the processor alone. There is no portable way to ask whether a person uses the screen;
  where that matters, a gate asks.
- plugged-in: on mains power, or without a battery.
- unmetered: no link that NetworkManager calls metered. Without NetworkManager every link counts as unmetered; where
  that matters, a gate asks.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, Any, cast

from offbeat.errors import InvalidValue, MissingExtra

GATE_S, NMCLI_S, MEASURE_S, REAP_S = 30.0, 5.0, 1.0, 5.0
BUSY_MAX = 20.0
"""Percent of all processors that other processes may use while the device counts as idle."""
SAID_MAX, LINE_MAX = 4096, 200
"""Bytes that are read of a gate's output, and characters that are shown of its first line."""


POWER = {
    True: None,
    False: "the device runs on battery",
    None: "the battery does not tell whether it is plugged in; leave plugged-in out, or ask with a gate",
}
"""What speaks against training, by whether the device is plugged in."""
CONDITIONS = ("plugged-in", "unmetered", "idle")
"""What may have to hold before a device trains; the conditions that are quickly asked stand first."""


def conditions_of(text: str) -> frozenset[str]:
    """Conditions from the text of `--only-when`.

    >>> sorted(conditions_of("idle, plugged-in"))
    ['idle', 'plugged-in']
    """
    names = frozenset(name.strip() for name in text.split(",")) if text.strip() else frozenset()
    for name in names.difference(CONDITIONS):
        listed = ", ".join(sorted(CONDITIONS))
        raise InvalidValue(f"{name!r} is no condition; use some of {listed}, with commas between them")
    return names


class Eligibility:
    """May this device train now? Every call looks again."""

    def __init__(self, conditions: Iterable[str] = (), gate: str | None = None) -> None:
        """`gate` is a command without a shell. A missing psutil is an error now, not when the device is first asked."""
        self.conditions = frozenset(conditions)
        self.gate = None if gate is None else _split(gate)
        if self.conditions - {"unmetered"}:
            _psutil()

    def why_not(self) -> str | None:
        """None when the device is eligible, else the first reason against it, in one line. Blocks, within limits."""
        for condition in CONDITIONS:
            if condition in self.conditions and (reason := _against(condition)):
                return reason
        return None if self.gate is None else _refused(self.gate)


def _against(condition: str) -> str | None:
    try:
        match condition:
            case "plugged-in":
                return POWER[plugged_in()]
            case "unmetered":
                return "the network is metered" if metered() else None
            case _:
                load = busy()
                over = f"other processes use {load:.0f} % of the processors, above {BUSY_MAX:g} %"
                return over if load > BUSY_MAX else None
    except (OSError, RuntimeError) as error:
        return f"cannot tell whether the device is {condition}: {error}; leave it out, or ask with a gate"


# --- the system; psutil answers everything but `metered` -------------------------------------------------------------


def busy() -> float:
    """Percent of all processors that other processes use, measured over `MEASURE_S`."""
    own, at = time.process_time(), time.perf_counter()
    everyone = float(_psutil().cpu_percent(interval=MEASURE_S))
    own, took = time.process_time() - own, time.perf_counter() - at
    return max(0.0, everyone - 100.0 * own / took / (os.cpu_count() or 1))


def plugged_in() -> bool | None:
    """On mains power, as is a device without a battery; None where the battery does not tell."""
    ask = getattr(_psutil(), "sensors_battery", None)
    try:
        battery = ask() if ask else None
    except FileNotFoundError:  # a container that shows no power supplies
        battery = None
    return True if battery is None else battery.power_plugged


def metered() -> bool:
    """Does some link cost by the byte, as NetworkManager says or guesses? False where it does not answer."""
    nmcli = shutil.which("nmcli")
    if nmcli is None:
        return False
    command = [nmcli, "-t", "-f", "GENERAL.METERED", "dev", "show"]
    words = {**os.environ, "LC_ALL": "C"}  # otherwise "yes" is translated
    try:
        said = subprocess.run(command, capture_output=True, timeout=NMCLI_S, env=words, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return False
    return any(line.startswith(b"GENERAL.METERED:yes") for line in said.stdout.splitlines())


def _psutil() -> Any:
    try:
        import psutil
    except ImportError as error:
        raise MissingExtra("psutil", "work") from error
    return psutil


# --- the gate --------------------------------------------------------------------------------------------------------


def _split(gate: str) -> list[str]:
    """The words of the command. One that cannot run is refused now: the worker would never train."""
    try:
        command = shlex.split(gate)
    except ValueError as error:
        raise InvalidValue(f"the gate {gate!r} cannot be split into words: {error}; mind its quotes") from None
    if not command or shutil.which(command[0]) is None:
        raise InvalidValue(f"the gate {gate!r} names no program that can be run; give its path, and make it executable")
    return command


def _refused(command: list[str]) -> str | None:
    """Why the gate says no. Its output is read when it has ended, so it may print no more than a pipe holds."""
    try:
        process = subprocess.Popen(  # noqa: S603 (the owner of the device chose it; no shell)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"the gate {command[0]} cannot be run: {error.strerror}"
    try:
        status = process.wait(GATE_S)
    except subprocess.TimeoutExpired:
        return f"the gate {command[0]} took longer than {GATE_S:g} s" + _first_line(process)
    else:
        return None if status == 0 else f"the gate {command[0]} said no (status {status})" + _first_line(process)
    finally:
        _end(process)


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """Without waiting: a process that the gate left behind may hold its output open."""
    said, output = b"", cast(IO[bytes], process.stdout).fileno()
    os.set_blocking(output, False)
    with suppress(BlockingIOError):
        said = os.read(output, SAID_MAX)
    lines = said.decode(errors="replace").split("\n")
    return next((f": {line.strip()[:LINE_MAX]}" for line in lines if line.strip()), "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a gate that took too long, with everything that it started: they are one session."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: it is left to itself
            process.wait(REAP_S)
    if process.stdout is not None:
        process.stdout.close()
