"""Owns the verbs of the API: join, declare, ask, pull, push, heartbeat, hand back, leave.

Rules kept here:
- One worker, one session, however many threads speak for it: when one of them joins again, all use the new session.
- A push that was cut goes on where the server stands; one whose bytes went wrong starts over, a few times.
- Data never leave the device: the update, the numbers of samples and gradients, and the metrics are all that is sent.
"""

import json
import threading
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from offbeat.core.buffer_pool import BufferPool
from offbeat.core.layout import Layout, Model
from offbeat.core.model_base import ModelBase
from offbeat.digests import SHA256, chosen_digest, kind_of
from offbeat.worker.api_answers import (
    Acknowledgement,
    AskAnswer,
    Joined,
    LeasedTask,
    RequestRefused,
    Unreachable,
    answer_of,
    read,
)
from offbeat.worker.download import PROGRESS, Patience, pull
from offbeat.worker.http_client import HttpClient
from offbeat.worker.outbox import Finished

PROTOCOL = 1
OFFSETS_MAX = 5
"""Times that one push is told to go on from another offset."""
FROZEN_MAX = 500
DECLARATION_BYTES_MAX = 48 << 10
"""Frozen arrays, and bytes, of a declaration that lists them."""
METRICS_MAX = 4000
"""Letters of the metrics that are sent with an update."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a worker says of itself when it joins."""

    name: str
    task: str
    """The name of its task file, with its digest."""
    device: int | None = None


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What a worker says of its model and data, once its task is loaded."""

    samples: int | None
    """How many samples its device holds; None where the task says that only with a training."""
    base: ModelBase

    def as_json(self) -> dict[str, Any]:
        """With the digest of every frozen array, so that the server can name one, unless that would be long."""
        body = {"samples": self.samples, "base": self.base.digest, "frozen": self.base.frozen}
        short = len(self.base.frozen) <= FROZEN_MAX and len(json.dumps(body)) <= DECLARATION_BYTES_MAX
        return body if short else {**body, "frozen": None}


def common_headers(token: str | None) -> dict[str, str]:
    ours = version("offbeat")
    known = {"Authorization": f"Bearer {token}"} if token else {}
    return {"User-Agent": f"offbeat/{ours}", "Offbeat-Protocol": str(PROTOCOL), "Offbeat-Version": ours, **known}


class OtherRun(Exception):
    """The server has another run by now, to which the task that was begun does not belong."""


class Membership:
    """The session, which all connections of one worker share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.joined: Joined | None = None
        self.own: OwnModel | None = None
        """What was declared to the run that this worker has joined."""


class ApiClient:
    """Speaks for one worker over one connection."""

    def __init__(self, http: HttpClient, hello: Hello, membership: Membership | None = None) -> None:
        self.http, self.hello = http, hello
        self._membership = membership or Membership()
        self._pool: BufferPool | None = None
        """Memory of models that were pulled and are not used any more."""

    def beside(self) -> "ApiClient":
        """The same worker over another connection, for another thread."""
        return ApiClient(self.http.another(), self.hello, self._membership)

    @property
    def joined(self) -> Joined:
        if self._membership.joined is None:
            raise AssertionError("join first")
        return self._membership.joined

    @property
    def session(self) -> str:
        """The secret that the server gave; empty before the worker has joined."""
        return self._membership.joined.session if self._membership.joined else ""

    @property
    def digest_kind(self) -> str:
        """The kind of digest for updates: the fastest that both ends know."""
        return chosen_digest(self._taken_kinds())

    def takes(self, digest: str) -> bool:
        """Does the server take a digest of this kind?"""
        return kind_of(digest) in self._taken_kinds()

    def _taken_kinds(self) -> list[str]:
        told = self._membership.joined.digests if self._membership.joined else None
        return [SHA256, *(kind for kind in told or () if isinstance(kind, str))]

    # --- the worker --------------------------------------------------------------------------------------------------

    def join(self, holding: int | None = None) -> Joined:
        """Join, or join again; of its open leases only that of the task `holding` stays."""
        with self._membership.lock:
            self._membership.joined, self._membership.own = self._join(holding), None
            return self._membership.joined

    def rejoin(self, stale: str, holding: int | None = None) -> Joined:
        """Join again because the server does not know this session, unless another thread has done so."""
        with self._membership.lock:
            before = self.joined
            if before.session != stale:
                return before
            joined = self._join(holding)
            if joined.run != before.run:
                raise OtherRun
            self._membership.joined = joined
            if self._membership.own is not None:
                self._declare(self._membership.own)
            return joined

    def declare(self, own: OwnModel) -> None:
        """Say what this worker's model and data are; the server refuses another base than its own."""
        self._declare(own)
        self._membership.own = own

    def _declare(self, own: OwnModel) -> None:
        try:
            self.http.call("POST", f"/v1/workers/{self.joined.worker}/declare", own.as_json(), headers=self._session())
        except RequestRefused as refused:
            if refused.status not in (404, 405):  # a server of the version before has no such call
                raise

    def _join(self, holding: int | None) -> Joined:
        hello = self.hello
        body = {"name": hello.name, "protocol": PROTOCOL, "version": version("offbeat"), "task": hello.task[:1000]}
        return read(Joined, self.http.call("POST", "/v1/workers", body | {"device": hello.device, "holding": holding}))

    def leave(self) -> None:
        self.http.call("DELETE", f"/v1/workers/{self.joined.worker}", headers=self._session())

    # --- tasks -------------------------------------------------------------------------------------------------------

    def ask(self) -> AskAnswer:
        """Wait for a task, for as long as the server lets a worker wait."""
        path = f"/v1/workers/{self.joined.worker}/ask"
        return answer_of(self.http.call("POST", path, headers=self._session(), wait_s=min(self.joined.poll_s, 3600.0)))

    def pull(self, lease: LeasedTask, layout: Layout, patience: Patience) -> Model:
        """The model of a lease, in memory that is the caller's own."""
        if not lease.model.startswith("/v1/"):
            raise Unreachable(f"the server leased a task with model = {lease.model!r:.60}, which is no path of its own")
        if self._pool is None or self._pool.size != layout.size:
            self._pool = BufferPool(layout.size)
        return pull(self.http, lease.model, layout, patience, self._pool.take)

    def heartbeat(self, task: int) -> None:
        """Say that the task is still being done: its lease is extended."""
        self.http.call("POST", f"/v1/tasks/{task}/heartbeat", headers=self._session())

    def hand_back(self, task: int) -> None:
        self.http.call("DELETE", f"/v1/tasks/{task}", headers=self._session())

    def push(self, finished: Finished, *, resume: bool = False) -> Acknowledgement:
        """Send an update; `resume` where the server may have a part of it already."""
        offset = self._offset(finished) if resume else 0
        while True:
            try:
                return self._pushed(finished, offset)
            except Unreachable:
                before, offset = offset, self._offset(finished)
                if offset < before + PROGRESS:  # otherwise the connection moved something, and so may the next one
                    raise

    def _pushed(self, finished: Finished, offset: int) -> Acknowledgement:
        for _ in range(OFFSETS_MAX):
            try:
                return self._put(finished, offset)
            except RequestRefused as refused:
                offset, last = _offset_after(refused, finished), refused
        raise last

    def _offset(self, finished: Finished) -> int:
        try:
            body = self.http.call("GET", f"/v1/tasks/{finished.task}/update", headers=self._session())
        except RequestRefused as refused:
            if refused.status == 404:
                return 0
            raise
        offset = body.get("offset")
        return offset if isinstance(offset, int) and 0 <= offset <= finished.size else 0

    def _put(self, finished: Finished, offset: int) -> Acknowledgement:
        metrics = json.dumps(dict(finished.metrics))
        headers = {
            **self._session(),
            "Offbeat-Run": finished.run,
            "Offbeat-Digest": finished.digest,
            "Offbeat-Samples": str(finished.samples),
            "Offbeat-Gradients": str(finished.gradients),
            "Offbeat-Download-S": f"{finished.download_s:.6f}",
            "Offbeat-Train-S": f"{finished.train_s:.6f}",
            "Offbeat-Layout": finished.layout,
            "Offbeat-Size": str(finished.size),
            "Offbeat-Offset": str(offset),
            "Offbeat-Encoding": "float32",
            "Offbeat-Metrics": metrics if len(metrics) <= METRICS_MAX else "{}",
        }
        with finished.opened(offset) as file:
            path = f"/v1/tasks/{finished.task}/update"
            return read(Acknowledgement, self.http.put(path, file, finished.size - offset, headers))

    def _session(self) -> dict[str, str]:
        return {"Offbeat-Session": self.session}


def _offset_after(refused: RequestRefused, finished: Finished) -> int:
    """Where to go on, after a refusal that says so; other refusals are raised again."""
    if refused.error == "wrong_offset" and refused.offset is not None:
        return refused.offset if refused.offset <= finished.size else 0
    if refused.error == "digest":
        return 0
    raise refused
