"""A peer's server and its workers as processes: started, watched for some seconds, and ended, each by its own number.

This runs in Offbeat's own environment; what it starts runs in the peer's.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offbeat.bench.process_tree import cpu_s, memory

START_S = 240.0
END_S = 10.0
LOOK_S = 0.2


class Cast:
    """Processes that are ended when this is left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()

    def __enter__(self) -> "Cast":
        return self

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> int:
        """One more; what it says goes to a file."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 (a program of the peer's)
                command, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **(environment or {})}
            )
        self.processes.append(process)
        return process.pid

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Until this is so."""
        until = time.monotonic() + START_S
        while not holds():
            if time.monotonic() > until or any(process.poll() for process in self.processes):
                logs = {path.name: path.read_text(errors="replace")[-300:] for path in self.folder.glob("*.log")}
                raise SystemExit(f"{what} did not happen: {logs}")
            time.sleep(LOOK_S)

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def watched(server: Sequence[int], applied: Callable[[], int], seconds: float) -> dict[str, Any]:
    """Updates per second, the server's processor time for each, and the most memory it had."""
    before, cpu, begun = applied(), sum(map(cpu_s, server)), time.monotonic()
    time.sleep(seconds)
    count, took = applied() - before, time.monotonic() - begun
    return {
        "updates_per_s": count / took,
        "server_cpu_s": (sum(map(cpu_s, server)) - cpu) / max(1, count),
        "server_peak_mb": sum(memory(number).peak for number in server) / 1e6,
    }


def lines(paths: Sequence[Path]) -> int:
    """How many updates the workers, or the server, noted: one line for each."""
    return sum(path.read_bytes().count(b"\n") for path in paths if path.is_file())


def tell(found: dict[str, Any]) -> None:
    """The result, on the last line."""
    print(json.dumps(found))
