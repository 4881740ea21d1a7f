"""Owns the benchmark of idle workers: how many a server holds at once, and how much memory each costs.

They are plain connections from one process; each has joined and waits for a task that does not come.
"""

import asyncio
import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.bars import BARS
from benchmarks.process_tree import memory
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.served import Served, serving
from benchmarks.turns import Tell
from offbeat.errors import OffbeatError

AT_A_TIME = 100
"""Connections that are opened at the same time."""
POLL_S = 120
HOLD_S = 3.0
JOIN_S = 240.0
FILES_BESIDE = 200
KB = 1_000
REFUSAL_MAX = 500


class RefusedByServer(OffbeatError):
    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"the server refused: {said}")
        self.status = status


class Line(NamedTuple):
    """A connection to the server, for one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, method: str, path: str, head: str = "", body: bytes = b"") -> None:
        first = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        self.writer.write(f"{first}{head}\r\n".encode() + body)
        await self.writer.drain()

    async def answer(self) -> bytes:
        """The body of the next answer; a refusal is an error."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next((int(text.partition(":")[2]) for text in lines if text.startswith("content-length:")), 0)
        body = await self.reader.readexactly(length)
        if first.split()[1][0] != "2":
            raise RefusedByServer(int(first.split()[1]), body[:REFUSAL_MAX].decode(errors="replace"))
        return body

    async def request(self, method: str, path: str, head: str = "", body: bytes = b"") -> bytes:
        await self.send(method, path, head, body)
        return await self.answer()


class Crowd:
    """Workers of one server, connected from this process."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self.host, self.port = where.hostname or "", where.port or 0
        self.lines: list[Line] = []

    async def joined(self, number: int) -> tuple[Line, dict[str, Any]]:
        """Connect a worker, which joins; what the server said."""
        line = Line(*await asyncio.open_connection(self.host, self.port))
        body = json.dumps({"name": f"worker-{number}", "protocol": 1, "device": number}).encode()
        said = json.loads(await line.request("POST", "/v1/workers", "Content-Type: application/json\r\n", body))
        self.lines.append(line)
        return line, said

    async def wait(self, numbers: range) -> None:
        """Connect these workers; each joins, asks for a task, and waits."""
        gate = asyncio.Semaphore(AT_A_TIME)
        await asyncio.gather(*(self._wait(number, gate) for number in numbers))

    async def _wait(self, number: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            line, said = await self.joined(number)
            await line.send("POST", f"/v1/workers/{said['worker']}/ask", f"Offbeat-Session: {said['session']}\r\n")

    async def held(self) -> int:
        """How many workers are still connected after some time."""
        done, waiting = await asyncio.wait(
            [asyncio.create_task(line.reader.read(1)) for line in self.lines], timeout=HOLD_S
        )
        for task in waiting:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting, return_exceptions=True)
        return len(self.lines) - sum(1 for task in done if not task.exception() and task.result() == b"")

    def disconnect(self) -> None:
        for line in self.lines:
            line.writer.transport.abort()


def run(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    """Connect the workers, wait, and count those that are still connected."""
    tell(f"idle workers: {scale.idle_workers} come")
    count, place = scale.idle_workers, folder / "idle"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < count + FILES_BESIDE:
        why = f"idle workers: this system allows {hard} open files, {count + FILES_BESIDE} are needed (ulimit -Hn)"
        results.skip(why, "idle_held", "idle_memory")
        return
    place.mkdir()
    try:
        with files_allowed(count + FILES_BESIDE):
            held, bytes_each = _measure(place, count)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if count < BARS["idle_held"].bar:
        results.skip(f"idle workers: {count:,} were asked to come, which says nothing about the bar", "idle_held")
        results.note("idle workers held, of those that came", held, "workers", count)
    else:
        results.put("idle_held", held)
    results.put("idle_memory", bytes_each / KB)


def _measure(folder: Path, count: int) -> tuple[int, float]:
    options = ("--in-flight-max", "1", "--poll-s", str(POLL_S), "--devices", str(count))
    with serving(folder, 1000, *options, devices=count) as served:
        return asyncio.run(_crowded(served, count))


async def _crowded(served: Served, count: int) -> tuple[int, float]:
    crowd = Crowd(served.url)
    try:
        first = min(AT_A_TIME, count // 2)
        await asyncio.wait_for(crowd.wait(range(first)), JOIN_S)  # memory that the server takes once is taken
        before = memory(served.process.pid).own
        await asyncio.wait_for(crowd.wait(range(first, count)), JOIN_S)
        held = await crowd.held()
        return held, (memory(served.process.pid).own - before) / (count - first)
    finally:
        crowd.disconnect()


@contextmanager
def files_allowed(wanted: int) -> Iterator[None]:
    """Allow this process, and those that it starts, this many open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
