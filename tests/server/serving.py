"""A real server in a thread of the test's own process, a tiny task, and a worker that the test drives by hand."""

import asyncio
import hashlib
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from offbeat.core.layout import Model
from offbeat.server.server import ServeOptions, Server, _serve
from offbeat.server.settings import AccessSettings, ServerSettings
from offbeat.settings import Settings
from offbeat.wire import body_of, header_of, unpack

PATIENCE_S = 30.0
TASK = '''
"""x follows the mean of what the devices hold."""
import numpy as np
from offbeat import Trained


class Line:
    devices = 8

    def initial(self, seed):
        return {"x": np.zeros(6, np.float32), "y": np.zeros((2, 2), np.float32)}

    def train(self, model, work):
        model["x"][:] += work.rng().standard_normal(6).astype(np.float32)
        return Trained(samples=10 + work.device, gradients=3)

    def evaluate(self, model):
        return {"size": float(np.abs(model["x"]).sum())}


task = Line()
'''

BEFORE_THE_CHAIN = """
DROP VIEW everything;
INSERT INTO events SELECT * FROM chatter;
DROP TABLE chatter;
DROP TABLE commits;
DROP TABLE chatter_checks;
ALTER TABLE events DROP COLUMN asked_at;
DELETE FROM events WHERE kind = 'group_closed';
UPDATE meta SET value = '1' WHERE name = 'schema';
"""
"""Makes a ledger of one of before there was a chain."""


@dataclass
class Answered:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Running:
    """A server that runs, and where."""

    server: Server
    folder: Path
    url: str

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, timeout: float = 30
    ) -> Answered:
        """One request on a connection of its own."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        kind = {"Content-Type": "application/json"} if isinstance(body, dict | list) else {}
        try:
            connection.request(method, path, data, {**kind, **(headers or {})})
            answer = connection.getresponse()
            return Answered(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def status(self) -> Any:
        return self.call("GET", "/v1/status").json

    @property
    def x(self) -> bytes:
        """The newest version's bits."""
        return self.server.run.mixer.x.vector.tobytes()


class Worker:
    """A worker whose every request the test makes."""

    def __init__(self, running: Running, name: str = "w", **facts: Any) -> None:
        self.running = running
        self.joined = running.call("POST", "/v1/workers", {"name": name, "protocol": 1, **facts}).json
        self.number = self.joined["worker"]
        self.session = {"Offbeat-Session": self.joined["session"]}

    def ask(self, wait_s: float = 5.0) -> Any:
        return self.running.call("POST", f"/v1/workers/{self.number}/ask?wait_s={wait_s}", headers=self.session).json

    def lease(self) -> Any:
        answer = self.ask()
        assert answer["state"] == "working", answer
        return answer["lease"]

    def pull(self, lease: Any) -> Model:
        answer = self.running.call("GET", lease["model"])
        assert answer.status == 200, answer
        return unpack(answer.body, self.running.server.run.layout)

    def head(self, data: bytes, **changes: Any) -> dict[str, str]:
        digest = hashlib.sha256(data).hexdigest()
        head = {"Offbeat-Digest": digest, "Offbeat-Samples": "5", "Offbeat-Gradients": "2"}
        head |= {"Content-Type": "application/octet-stream", **self.session}
        return head | {name.replace("_", "-"): str(value) for name, value in changes.items()}

    def push(self, task: int, data: bytes, **changes: Any) -> Answered:
        return self.running.call("PUT", f"/v1/tasks/{task}/update", data, self.head(data, **changes))

    def train(self, lease: Any, step: float = 1.0) -> bytes:
        """An update: every number is larger by `step`."""
        model = self.pull(lease).copy()
        model.vector[:] += np.float32(step)
        return packed(model)

    def work(self, step: float = 1.0) -> Answered:
        """One whole task."""
        lease = self.lease()
        return self.push(lease["task"], self.train(lease, step))


def without_head(acknowledged: dict[str, Any]) -> dict[str, Any]:
    """What stays the same when a push is answered again: the ledger has gone on."""
    return {name: value for name, value in acknowledged.items() if name != "head"}


def packed(model: Model) -> bytes:
    """A model as bytes on the wire."""
    return header_of(model.layout) + b"".join(bytes(part) for part in body_of(model))


@contextmanager
def serving(
    folder: Path,
    settings: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    *,
    task: str = TASK,
    access: AccessSettings | None = None,
    drop_damaged: bool = False,
    accept_loss: bool = False,
    log_events: str | None = None,
    exit_when_finished: bool = False,
    accept_changed_task: bool = False,
) -> Iterator[Running]:
    """A server of a task whose text is given; the run is in folder/run, and a second time it goes on."""
    file = folder / "line.py"
    if not file.exists():
        file.write_text(task)
    options = ServeOptions(
        str(file),
        folder / "run",
        Settings.of({"epochs": 1000, **(settings or {})}),
        ServerSettings(**{"port": 0, **(limits or {})}),
        access or AccessSettings(),
        drop_damaged=drop_damaged,
        log_events=log_events,
        accept_loss=accept_loss,
        exit_when_finished=exit_when_finished,
        accept_changed_task=accept_changed_task,
    )
    loop = asyncio.new_event_loop()
    try:
        server = Server(options, loop)
    except BaseException:
        loop.close()
        raise
    ready = threading.Event()
    failure: list[BaseException] = []

    def live() -> None:
        try:
            loop.run_until_complete(_serve(server, lambda _: ready.set()))
        except BaseException as error:
            failure.append(error)
            ready.set()

    thread = threading.Thread(target=live, name="server")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        if failure:
            raise failure[0]
        yield Running(server, folder / "run", server.url)
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(server.stopped.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not stop"
        loop.close()
    if failure:
        raise failure[0]
