"""Real processes, killed at random moments: whatever was acknowledged is there, once, and training goes on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.server.independent import replay
from tests.server.serving import TASK

WORKERS, KILLS, EPOCHS = 4, 20, 400
START_S, END_S = 60.0, 240.0
LOOK_S = 0.05
Process = subprocess.Popen[bytes]


def offbeat(log: Path, *arguments: str) -> Process:
    with log.open("ab") as out:
        return subprocess.Popen([sys.executable, "-m", "offbeat", *arguments], stdout=out, stderr=out)


class Fleet:
    """A server and its workers, each started again whenever it is gone."""

    def __init__(self, folder: Path, *server: str) -> None:
        self.folder, self.run = folder, folder / "run"
        self.task = folder / "line.py"
        self.task.write_text(TASK.replace("model[", "import time; time.sleep(0.02)\n        model[", 1))
        self.port = str(20_000 + random.SystemRandom().randrange(20_000))
        self.options = server
        self.server = self.start_server()
        self.workers = [self.start_worker(number) for number in range(WORKERS)]

    def start_server(self) -> Process:
        where = ("--dir", str(self.run), "--port", self.port, "--keep-updates", "all")
        return offbeat(self.folder / "server.log", "serve", str(self.task), *where, *self.options)

    def start_worker(self, number: int) -> Process:
        own = ("--dir", str(self.folder / f"w{number}"), "--name", f"w{number}", "--device", str(number))
        journal = ("--journal", str(self.folder / f"journal-{number}.jsonl"))
        url = f"http://127.0.0.1:{self.port}"
        log = self.folder / f"worker-{number}.log"
        return offbeat(log, "work", str(self.task), "--server", url, *own, *journal)

    def up(self) -> bool:
        """Can the server be reached?"""
        with suppress(OSError, ValueError):
            where = json.loads((self.run / "server.json").read_text())
            return bool(where["pid"] == self.server.pid)
        return False

    def journals(self) -> dict[int, str]:
        """Every acknowledged update, by task."""
        found: dict[int, str] = {}
        for number in range(WORKERS):
            file = self.folder / f"journal-{number}.jsonl"
            for line in file.read_text().splitlines() if file.exists() else ():
                entry = json.loads(line)
                if entry["outcome"] == "applied":
                    assert found.get(entry["task"], entry["digest"]) == entry["digest"]
                    found[entry["task"]] = entry["digest"]
        return found


@contextmanager
def fleet(folder: Path, *server: str) -> Iterator[Fleet]:
    made = Fleet(folder, *server)
    try:
        yield made
    finally:
        for process in (made.server, *made.workers):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def wait_until(true: Any, seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, what
        time.sleep(LOOK_S)


def kill(process: Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def status(run: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", "status", str(run), "--json"], capture_output=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_twenty_kills_of_the_server_and_of_workers_lose_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)  # noqa: S311 (chosen moments)
    with fleet(tmp_path, "--epochs", str(EPOCHS), "--checkpoint-every", "20", "--lease-s", "5") as made:
        wait_until(made.up, START_S, "the server did not start")
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.0, 0.4))  # a random moment is the point
            number = chance.randrange(WORKERS)
            kill(made.workers[number])
            made.workers[number] = made.start_worker(number)
            time.sleep(chance.uniform(0.0, 1.2))
            kill(made.server)
            made.server = made.start_server()
            if chance.random() < 0.7:  # else it is killed while it starts
                wait_until(made.up, START_S, "the server did not start again")
        wait_until((made.run / "summary.json").exists, END_S, "training did not finish")
        for worker in made.workers:
            worker.wait(END_S)
        made.server.terminate()
        assert made.server.wait(END_S) == 0
        journals = made.journals()
    x_sha256, applied = replay(made.run)
    assert journals.items() <= applied.items(), "acknowledged, and not applied"
    done = subprocess.run([sys.executable, "-m", "offbeat", "verify", str(made.run), "--json"], capture_output=True)
    facts = json.loads(done.stdout)
    assert facts["agrees"]
    assert facts["x_sha256"] == x_sha256
    assert facts["applied"] == len(applied) == facts["t"] == EPOCHS
    assert len(journals) > EPOCHS / 2, "most acknowledgements reached their worker"
    assert status(made.run)["finished"]
