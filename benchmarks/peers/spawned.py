"""A peer's server and its workers as processes: started, watched for some seconds, and ended, each by its own id.

This runs in Offbeat's own environment; the processes run in the peer's.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[2]))  # this is run as a script, whose folder alone is on the path
from benchmarks.process_tree import cpu_s, family, memory

HOST = "127.0.0.1"
START_S = 180.0
END_S = 10.0
LOOK_S = 0.2
UPDATES_MIN, WINDOWS_MAX = 16, 5


class Cast:
    """Processes that are ended when this is left, with all that they have started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()

    def __enter__(self) -> "Cast":
        return self

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> int:
        """Start a process with its output in a file; returns its id."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(  # noqa: S603 (a program of the peer's)
                command, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **(environment or {})}
            )
        return self.processes[name].pid

    def wait(self, holds: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
        """Wait until this holds; ends the program when it does not happen in time."""
        until = time.monotonic() + limit_s
        while not holds():
            self.check()
            if time.monotonic() > until:
                raise SystemExit(f"{what} did not happen in {limit_s:g} s")
            time.sleep(LOOK_S)

    def check(self) -> None:
        """End the program when one of the processes has failed."""
        for name, process in self.processes.items():
            if process.poll():
                said = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
                raise SystemExit(f"{name} ended with {process.returncode}: {(said or ['it printed nothing'])[-1]}")

    def __exit__(self, *_: object) -> None:
        running = [process for process in self.processes.values() if process.poll() is None]
        started = [one for process in running for one in family(process.pid)]
        for process in reversed(running):
            process.terminate()
        _, left = psutil.wait_procs(started, END_S)
        for one in left:  # a process in a session of its own does not get its parent's signals
            with suppress(psutil.NoSuchProcess):
                one.kill()
        for process in running:
            process.wait()


def watched(cast: Cast, server: int, applied: Callable[[], int], seconds: float) -> dict[str, Any]:
    """Updates per second, the server's processor time for each, and the most memory it had.

    Where updates are slow to come, it takes a few times as long.
    """
    before, cpu, begun = applied(), cpu_s(server), time.monotonic()
    for _ in range(WINDOWS_MAX):
        time.sleep(seconds)
        cast.check()
        if applied() - before >= UPDATES_MIN:
            break
    count, took = applied() - before, time.monotonic() - begun
    return {
        "updates": count,
        "updates_per_s": count / took,
        "server_cpu_s": (cpu_s(server) - cpu) / max(1, count),
        "server_peak_mb": memory(server).peak / 1e6,
    }


def lines(paths: Sequence[Path]) -> int:
    """The number of updates that workers or server noted, one line each."""
    return sum(path.read_bytes().count(b"\n") for path in paths if path.is_file())


def listens(port: int) -> bool:
    """Does a process listen on this port?"""
    with socket.socket() as line:
        return line.connect_ex((HOST, port)) == 0


def free_ports(count: int) -> list[int]:
    """Ports that are free at the moment."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def tell(found: dict[str, Any]) -> None:
    """Print the result as the last line."""
    print(json.dumps(found))
