"""A server in a process of its own, and a probe in another, which asks /v1/health all the time and notes what it takes.

Both are processes, so that neither the fuzzer's work nor pytest's delays what is measured.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.server.serving import TASK, Running
from tests.server.speaking import until

PROBE = r"""
import json, select, socket, sys, time
host, port = sys.argv[1], int(sys.argv[2])
asked = b"GET /v1/health HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (host.encode(), port)
took, refused, line = [], [], socket.create_connection((host, port), 60)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    begun, told = time.monotonic(), b""
    line.sendall(asked)
    while b'"protocol"' not in told and (more := line.recv(65536)):
        told += more
    took.append(time.monotonic() - begun)
    if not told.startswith(b"HTTP/1.1 200"):
        refused.append(told[:200].decode("latin-1"))
        line = socket.create_connection((host, port), 60)
print(json.dumps([took, refused]))
"""


@dataclass
class Latencies:
    """Seconds that /v1/health took, in order, and answers that were none."""

    took: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def p99(self) -> float:
        return sorted(self.took)[int(0.99 * len(self.took))]

    @property
    def largest(self) -> float:
        return max(self.took)

    def __str__(self) -> str:
        return f"{len(self.took)} requests, p99 {1000 * self.p99:.0f} ms, largest {1000 * self.largest:.0f} ms"


@contextmanager
def probing(url: str) -> Iterator[Latencies]:
    """Ask for the server's health until the block ends; then what that took is there."""
    where, found = urlsplit(url), Latencies()
    command = [sys.executable, "-c", PROBE, where.hostname or "", str(where.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        assert probe.stdin is not None
        try:
            assert probe.stdout.readline() == "ready\n"
            yield found
            probe.stdin.close()
            found.took, found.refused = json.loads(probe.stdout.read())
            assert probe.wait(60) == 0
        finally:
            probe.kill()


@contextmanager
def server_process(folder: Path, *options: str, task: str = TASK) -> Iterator[Running]:
    """`offbeat serve` as a user starts it; it must end well."""
    (folder / "line.py").write_text(task)
    arguments = ("serve", str(folder / "line.py"), "--dir", str(folder / "run"), "--port", "0", *options)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "offbeat", *arguments], stdout=log, stderr=log)
        try:
            where = folder / "run" / "server.json"
            until(lambda: process.poll() is not None or where.exists())
            assert process.poll() is None, (folder / "log").read_text()
            nothing: Any = None
            yield Running(nothing, folder / "run", json.loads(where.read_text())["url"])
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    assert "Traceback" not in (folder / "log").read_text(), (folder / "log").read_text()
