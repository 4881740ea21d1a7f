"""Owns what is measured while a soak goes on: how quickly the server answers, and what it takes of the machine.

Rules kept here:
- A waiting time counts only if the server was up from the request to the answer: one that was killed cannot answer.
- A server that is up and does not answer for `HUNG_S` hangs.
"""

import http.client
import json
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

HUNG_S = 30.0
EVERY_S = 0.1
READMIT_EVERY = 30
PATHS = ("/v1/health", "/v1/status")
PROC = Path("/proc")
KIB = 1024


class Answer(NamedTuple):
    """One answer that was waited for."""

    at: float
    path: str
    seconds: float


class Life:
    """One process of the server, from when it was ready until it was killed."""

    def __init__(self, pid: int) -> None:
        self.pid, self.over = pid, threading.Event()


class Probe:
    """Asks the server on a thread of its own, while there is one."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.answers: list[Answer] = []
        self.failed: list[str] = []
        """What went wrong although the server was up."""
        self.readmitted = 0
        self.life: Life | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(2 * HUNG_S)

    def _run(self) -> None:
        number = 0
        while not self._stopped.wait(EVERY_S):
            life = self.life
            if life is not None and not life.over.is_set():
                self._ask(life, PATHS[number % len(PATHS)])
                number += 1
                if number % READMIT_EVERY == 0:
                    with suppress(OSError, ValueError, http.client.HTTPException):  # it was killed meanwhile
                        self._readmit()

    def _readmit(self) -> None:
        """An administrator who believes every excuse: else the liars would be quarantined for good."""
        for worker in json.loads(self._call("GET", "/v1/workers")[1])["workers"]:
            if worker["state"] == "quarantined":
                self._call("POST", f"/v1/workers/{worker['worker']}/readmit")
                self.readmitted += 1

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=HUNG_S)) as line:
            line.request(method, path)
            answer = line.getresponse()
            return answer.status, answer.read()

    def _ask(self, life: Life, path: str) -> None:
        begun = time.monotonic()
        try:
            status = self._call("GET", path)[0]
            wrong = None if status == 200 else f"{path} answered {status}"
        except (OSError, http.client.HTTPException) as error:
            wrong = f"{path} was not answered within {time.monotonic() - begun:.1f} s: {error!r}"
        ended = time.monotonic()
        if life.over.is_set():
            return
        if wrong is None:
            self.answers.append(Answer(ended, path, ended - begun))
        else:
            self.failed.append(wrong)


class Taken(NamedTuple):
    """What a process takes of the machine."""

    memory_bytes: int
    descriptors: int


def taken(pid: int) -> Taken | None:
    """None where there is no such process any more."""
    with suppress(OSError, ValueError, IndexError):
        lines = (PROC / str(pid) / "status").read_text().splitlines()
        rss = next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0)
        return Taken(KIB * rss, len(list((PROC / str(pid) / "fd").iterdir())))
    return None


def size_of(folder: Path) -> int:
    """Bytes of the files below a folder; those that go away meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def quantile(values: list[float], share: float) -> float | None:
    """The smallest value that at least this share of all does not exceed.

    >>> quantile([3.0, 1.0, 2.0], 0.5), quantile([3.0, 1.0, 2.0], 0.99), quantile([], 0.5)
    (2.0, 3.0, None)
    """
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else None
