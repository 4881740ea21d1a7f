"""Many, large and slow: what a server must bear, with real processes and bounded in count and time."""

import asyncio
import hashlib
import http.client
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from offbeat.core.layout import Layout, Model
from offbeat.wire import header_of
from tests.server.serving import TASK, Worker, serving

MB = 1 << 20
LARGE = 100_000_000
"""Parameters: 400 MB."""
LARGE_TASK = f"""
import numpy as np
from offbeat import Trained


class Large:
    devices = 8

    def initial(self, seed):
        return {{"x": np.zeros({LARGE}, np.float32)}}

    def train(self, model, work):
        return Trained(1, 1)

    def evaluate(self, model):
        return {{}}


task = Large()
"""


@contextmanager
def server(folder: Path, task: str, *options: str) -> Iterator[tuple[str, int]]:
    """A server of its own; its URL and process number."""
    (folder / "task.py").write_text(task)
    log = (folder / "server.log").open("wb")
    arguments = ("serve", str(folder / "task.py"), "--dir", str(folder / "run"), "--port", "0", *options)
    process = subprocess.Popen([sys.executable, "-m", "offbeat", *arguments], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while not (folder / "run" / "server.json").exists():
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        where = json.loads((folder / "run" / "server.json").read_text())
        yield where["url"], process.pid
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        log.close()


def call(url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    try:
        kind = {"Content-Type": "application/json"} if isinstance(body, dict) else {}
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        connection.request(method, path, data, {**kind, **(headers or {})})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status < 300, (answer.status, text[:300])
        return json.loads(text) if text else None
    finally:
        connection.close()


class Memory:
    """The most anonymous and shared memory that a process had, looked at often."""

    def __init__(self, pid: int) -> None:
        self.peak, self._pid, self._stop = 0, pid, threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def now(self) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))}
        return 1024 * sum(found.values())

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            with suppress(OSError, ProcessLookupError):
                self.peak = max(self.peak, self.now())

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.slow
def test_a_model_of_400_mb_takes_less_than_four_times_its_size(tmp_path: Path) -> None:
    layout = Layout.of({"x": np.zeros(LARGE, np.float32)})
    update = tmp_path / "update.safetensors"
    with update.open("wb") as file:
        file.write(header_of(layout))
        for _ in range(100):
            file.write(np.ones(LARGE // 100, np.float32).data)
    with update.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    size = update.stat().st_size

    def work(url: str, name: str, tasks: int) -> None:
        joined = call(url, "POST", "/v1/workers", {"name": name, "protocol": 1})
        session = {"Offbeat-Session": joined["session"]}
        for _ in range(tasks):
            lease = call(url, "POST", f"/v1/workers/{joined['worker']}/ask", headers=session)["lease"]
            head = {"Offbeat-Digest": digest, "Offbeat-Samples": "1", "Offbeat-Gradients": "1", **session}
            head |= {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            with update.open("rb") as body:
                answer = call(url, "PUT", f"/v1/tasks/{lease['task']}/update", body, head)
            assert answer["outcome"] == "applied"

    with server(tmp_path, LARGE_TASK, "--epochs", "100") as (url, pid), Memory(pid) as memory:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: work(url, f"w{n}", 2), range(8)))
        assert call(url, "GET", "/v1/status")["applied"] == 16
    print(f"peak {memory.peak / MB:.0f} MB of memory for a model of {4 * LARGE / MB:.0f} MB")  # noqa: T201
    assert memory.peak < 4 * 4 * LARGE


@pytest.mark.slow
def test_two_thousand_wait_while_eight_others_train(tmp_path: Path) -> None:
    count, updates = 2008, 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this machine allows {hard} open files; {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    many = TASK.replace("devices = 8", "devices = 4000")
    options = ("--in-flight-max", "8", "--epochs", str(updates), "--devices", str(count), "--poll-s", "20")
    with server(tmp_path, many, *options) as (url, pid), Memory(pid) as memory:
        begun = time.monotonic()
        asyncio.run(asyncio.wait_for(Crowd(url).live(count), 240))
        status = call(url, "GET", "/v1/status")
    took = time.monotonic() - begun
    print(f"{count} workers, 8 at a time: {updates} updates in {took:.0f} s, peak {memory.peak / MB:.0f} MB")  # noqa: T201
    assert status["finished"]
    assert status["applied"] == updates


class Crowd:
    """Workers as bare connections: each joins, waits, pushes what it is asked for, and waits again until the end."""

    def __init__(self, url: str) -> None:
        self.parts = urlsplit(url)
        x = Model.of({"x": np.ones(6, np.float32), "y": np.ones((2, 2), np.float32)})
        self.data = header_of(x.layout) + x.vector.tobytes()
        self.digest = hashlib.sha256(self.data).hexdigest()
        self.all_wait = asyncio.Event()
        self.waiting = 0

    async def live(self, count: int) -> None:
        gate = asyncio.Semaphore(100)
        await asyncio.gather(*(self.work(number, count, gate) for number in range(count)))

    async def work(self, number: int, count: int, gate: asyncio.Semaphore) -> None:
        async with gate:
            line = await asyncio.open_connection(self.parts.hostname, self.parts.port)
            body = json.dumps({"name": f"w{number}", "protocol": 1, "device": number}).encode()
            joined = await self.request(line, "POST", "/v1/workers", "Content-Type: application/json\r\n", body)
        session = f"Offbeat-Session: {joined['session']}\r\n"
        self.waiting += 1
        if self.waiting == count:
            self.all_wait.set()
        try:
            while True:
                answer = await self.request(line, "POST", f"/v1/workers/{joined['worker']}/ask", session)
                if answer["state"] == "finished":
                    return
                if answer["state"] == "working":
                    await self.all_wait.wait()  # nobody's update ends the run before all have come
                    pushed = await self.push(line, answer["lease"]["task"], session)
                    if "error" in pushed:  # refused before its body was read: the server may have hung up
                        line[1].close()
                        line = await asyncio.open_connection(self.parts.hostname, self.parts.port)
        finally:
            line[1].close()

    async def push(self, line: Any, task: int, session: str) -> Any:
        head = f"Offbeat-Digest: {self.digest}\r\nOffbeat-Samples: 1\r\nOffbeat-Gradients: 1\r\n"
        head += f"Content-Type: application/octet-stream\r\n{session}"
        return await self.request(line, "PUT", f"/v1/tasks/{task}/update", head, self.data, codes=("200", "409"))

    async def request(
        self,
        line: Any,
        method: str,
        path: str,
        head: str = "",
        body: bytes = b"",
        codes: tuple[str, ...] = ("200", "201"),
    ) -> Any:
        reader, writer = line
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{head}\r\n".encode() + body
        )
        await writer.drain()
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length"))
        answer = json.loads(await reader.readexactly(length))
        assert lines[0].split()[1] in codes, answer
        return answer


def test_the_slow_and_the_dead_hold_up_nobody(tmp_path: Path) -> None:
    with serving(tmp_path, {"in_flight_max": 8}) as running:
        stalled, reader, silent, good = (Worker(running, name) for name in ("stalled", "reader", "silent", "good"))
        lease = stalled.lease()
        data = stalled.train(lease)
        parts = urlsplit(running.url)
        upload = http.client.HTTPConnection(parts.hostname or "", parts.port)
        upload.putrequest("PUT", f"/v1/tasks/{lease['task']}/update")
        for name, value in {**stalled.head(data), "Content-Length": str(len(data))}.items():
            upload.putheader(name, value)
        upload.endheaders()
        upload.send(data[:50])
        slow = http.client.HTTPConnection(parts.hostname or "", parts.port)
        slow.request("GET", reader.lease()["model"])
        answer = slow.getresponse()
        assert answer.read(1)
        silent.lease()
        for _ in range(20):
            assert good.work().status == 200
        assert running.status()["t"] == 20
        upload.send(data[50:])
        assert json.loads(upload.getresponse().read())["staleness"] == 20
        assert answer.read()
        for connection in (upload, slow):
            connection.close()
