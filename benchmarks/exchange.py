"""Owns one measured exchange of models: a server and eight worker processes, ours or raw, for some seconds.

Rules kept here:
- Server and workers are processes on the loopback interface; every process that was started is ended in all cases.
- Updates count by their acknowledgements, from when every worker has had its first to the end of the window.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from time import monotonic
from typing import NamedTuple

from benchmarks.machine import ROOT
from benchmarks.process_tree import Memory, cpu_s, memory
from offbeat.errors import OffbeatError

WORKERS = 8
START_S, END_S = 120.0, 60.0
LOOK_S = 0.05
UPDATES_MIN, WINDOWS_MAX = 16, 5
UNSYNCED = "benchmarks.unsynced"
"""Runs another module without durability."""
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""So that a started process finds the modules of the benchmark from any folder."""


class Measured(NamedTuple):
    """The figures of one exchange."""

    updates_per_s: float
    server_cpu_s: float
    """Per update."""
    memory: Memory
    p50_s: float
    p99_s: float
    updates: int


@dataclass(frozen=True, slots=True)
class Window:
    """The time in which updates count."""

    begun: float
    ended: float

    def measured(self, notes: Sequence[tuple[float, float]], cpu: float, most: Memory) -> Measured:
        """The figures of the window, from the workers' notes and the server's processor time and memory."""
        waits = [seconds for moment, seconds in notes if self.begun <= moment < self.ended]
        if len(waits) < 2:
            raise OffbeatError(f"{len(waits)} updates were acknowledged in {self.ended - self.begun:.0f} s: too few")
        cuts = quantiles(waits, n=100, method="inclusive")
        speed = len(waits) / (self.ended - self.begun)
        return Measured(speed, cpu / len(waits), most, cuts[49], cuts[98], len(waits))


Process = subprocess.Popen[bytes]


@contextmanager
def started(log: Path, *arguments: str, durable: bool = True) -> Iterator[Process]:
    """Run a Python module in a process of its own; with `durable` False, without any fsync."""
    with log.open("wb") as out:
        command = [sys.executable, "-m", *(() if durable else (UNSYNCED,)), *arguments]
        process = subprocess.Popen(  # noqa: S603 (our own)
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": PYTHONPATH}
        )
    try:
        yield process
    finally:
        end([process])


def end(processes: Sequence[Process]) -> None:
    """Terminate processes, and kill those that do not end."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(path: Path, process: Process, log: Path) -> str:
    """The content of a file, once it exists."""
    until = monotonic() + START_S
    while not path.is_file():
        if process.poll() is not None or monotonic() > until:
            raise OffbeatError(f"a process of the benchmark did not start: {log.read_text().strip()[-500:]}")
        pause(process, LOOK_S)
    return path.read_text()


def pause(process: Process, seconds: float) -> None:
    """Wait, but not longer than the process runs."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def window(server: Process, seconds: float, applied: Callable[[], int]) -> tuple[Window, float, Memory]:
    """Wait for some seconds, or up to five times as long where few updates come.

    Returns the window, the processor time of the server in it, and its memory.
    """
    cpu, begun, before = cpu_s(server.pid), monotonic(), applied()
    for _ in range(WINDOWS_MAX):
        pause(server, seconds)
        if server.poll() is not None:
            raise OffbeatError("the server of the benchmark ended before its time")
        if applied() - before >= UPDATES_MIN:
            break
    return Window(begun, monotonic()), cpu_s(server.pid) - cpu, memory(server.pid)


def notes_of(paths: Sequence[Path]) -> list[tuple[float, float]]:
    """The notes of all workers: when each update was acknowledged, and after how many seconds."""
    return [(moment, seconds) for path in paths if path.is_file() for moment, seconds in json.loads(path.read_text())]
