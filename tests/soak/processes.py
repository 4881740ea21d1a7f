"""Owns the processes of a fleet under attack: one server and its workers, each with a folder and a log of its own.

Rules kept here:
- A process is ended by its own id. Those that are started again keep their name, folder and journal.
- A worker is a slot: the process in it comes and goes, the slot stays.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.05
PORTS = range(20_000, 32_000)
"""Below those that the system gives to outgoing connections."""
Process = subprocess.Popen[bytes]


def started(log: Path, module: str, *arguments: str) -> Process:
    """A Python process whose output goes to the end of a file."""
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=out, stderr=out)


def free_port() -> int:
    """A port that nobody listens on; the server is to have the same one after every restart."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Fleet:
    """A server and its workers; whoever has one starts them again whenever they are gone."""

    def __init__(self, folder: Path, task: str, *server: str) -> None:
        """`task` is the text of the task file, `server` are options of `offbeat serve`."""
        self.folder, self.run = folder, folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        self.task = folder / "line.py"
        self.task.write_text(task)
        self.port = free_port()
        self.options = server
        self.server: Process | None = None
        self.workers: dict[int, Process] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_server(self) -> Process:
        where = ("serve", str(self.task), "--dir", str(self.run), "--port", str(self.port))
        self.server = started(self.folder / "server.log", "offbeat", *where, *self.options)
        return self.server

    def start_worker(self, number: int, *options: str) -> Process:
        own = ("--dir", str(self.folder / f"w{number}"), "--name", f"w{number}", "--device", str(number))
        journal = ("--journal", str(self.journal(number)), *options)
        log = self.folder / f"worker-{number}.log"
        self.workers[number] = started(log, "offbeat", "work", str(self.task), "--server", self.url, *own, *journal)
        return self.workers[number]

    def journal(self, number: int) -> Path:
        """Where a worker notes what the server acknowledged."""
        return self.folder / f"journal-{number}.jsonl"

    def up(self) -> bool:
        """Can the server be reached?"""
        with suppress(OSError, ValueError):
            where = json.loads((self.run / "server.json").read_text())
            return self.server is not None and bool(where["pid"] == self.server.pid)
        return False

    def acknowledged(self) -> dict[int, str]:
        """The digest of every acknowledged update, by task."""
        found: dict[int, str] = {}
        for file in self.folder.glob("journal-*.jsonl"):
            for entry in map(json.loads, file.read_text().splitlines()):
                if entry["outcome"] == "applied":
                    assert found.get(entry["task"], entry["digest"]) == entry["digest"]
                    found[entry["task"]] = entry["digest"]
        return found


@contextmanager
def fleet(folder: Path, task: str, *server: str) -> Iterator[Fleet]:
    """A fleet of which no process is left in the end."""
    made = Fleet(folder, task, *server)
    try:
        yield made
    finally:
        for process in (made.server, *made.workers.values()):
            if process is not None:
                kill(process)


def kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, what
        time.sleep(LOOK_S)


def asked(*arguments: str) -> Any:
    """What a command of ours answers with --json."""
    command = [sys.executable, "-m", "offbeat", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True)
    assert done.stdout, f"{' '.join(arguments)}: {done.stderr.decode()}"
    return json.loads(done.stdout)
