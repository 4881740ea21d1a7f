"""Owns a worker that lies: a process that takes tasks as others do, and pushes what it should not.

It writes a line of JSON for every push that was answered: what it tried, and what the server said. What was
acknowledged goes to a journal as well, like that of an honest worker. `Audit` judges both.

Rules kept here:
- It imports nothing of ours: what it sends is not what our own worker could send.
- A server that is away is waited for; a session that is not known any more is renewed.
"""

import argparse
import hashlib
import http.client
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

AWAY_S, QUARANTINED_S = 0.3, 1.0
POLL_S = 5
TIMEOUT_S = 60.0


class Said(NamedTuple):
    """What the server answered."""

    status: int
    body: dict[str, Any]

    @property
    def applied(self) -> bool:
        return self.status == 200 and self.body.get("outcome") == "applied"


class Liar:
    def __init__(self, url: str, folder: Path, number: int, seed: int) -> None:
        self.where, self.name, self.device = urlsplit(url), f"liar{number}", number
        self.chance = random.Random(seed)  # noqa: S311 (chosen lies)
        self.lies = _appended(folder / f"lies-{number}.jsonl")
        self.journal = _appended(folder / f"journal-{number}.jsonl")
        self.session: dict[str, str] = {}
        self.worker, self.run = -1, ""

    # --- speaking ----------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: bytes = b"", head: dict[str, str] | None = None) -> Said:
        line = http.client.HTTPConnection(self.where.hostname or "", self.where.port, timeout=TIMEOUT_S)
        try:
            line.request(method, path, body, {**self.session, **(head or {})})
            answer = line.getresponse()
            text = answer.read()
        finally:
            line.close()
        found = json.loads(text) if answer.getheader("Content-Type", "").startswith("application/json") else {}
        return Said(answer.status, found)

    def join(self) -> None:
        body = json.dumps({"name": self.name, "protocol": 1, "device": self.device}).encode()
        self.session = {}
        said = self.call("POST", "/v1/workers", body, {"Content-Type": "application/json"})
        if said.status != 201:
            raise ConnectionError(f"joining: {said}")
        self.worker, self.run = said.body["worker"], said.body["run"]
        self.session = {"Offbeat-Session": said.body["session"]}

    def push(self, task: int, data: bytes, **changes: str) -> Said:
        return self.call("PUT", f"/v1/tasks/{task}/update", data, _head(data, **changes))

    def cut(self, task: int, data: bytes) -> None:
        """Announce the whole update, send half of it, and hang up."""
        line = http.client.HTTPConnection(self.where.hostname or "", self.where.port, timeout=TIMEOUT_S)
        try:
            line.putrequest("PUT", f"/v1/tasks/{task}/update")
            for name, value in {**self.session, **_head(data), "Content-Length": str(len(data))}.items():
                line.putheader(name, value)
            line.endheaders()
            line.send(data[: len(data) // 2])
        finally:
            line.close()

    # --- one task ----------------------------------------------------------------------------------------------------

    def once(self) -> None:
        """Take a task and do something with it."""
        said = self.call("POST", f"/v1/workers/{self.worker}/ask?wait_s={POLL_S}")
        if said.status == 401:
            self.join()
        elif said.body.get("state") == "quarantined" or said.body.get("error") == "quarantined":
            time.sleep(QUARANTINED_S)
        elif said.status in (429, 503):
            time.sleep(AWAY_S)
        elif said.body.get("state") == "working":
            self._lie(said.body["lease"])

    def _lie(self, lease: dict[str, Any]) -> None:
        task = int(lease["task"])
        data = self._model(lease)
        if data is not None:
            name = self.chance.choice(sorted(LIES))
            LIES[name](self, name, task, data)

    def _model(self, lease: dict[str, Any]) -> bytes | None:
        """The model that was leased, with a step: a good update."""
        line = http.client.HTTPConnection(self.where.hostname or "", self.where.port, timeout=TIMEOUT_S)
        try:
            line.request("GET", lease["model"], headers=self.session)
            answer = line.getresponse()
            data = bytearray(answer.read())
        finally:
            line.close()
        if answer.status != 200:
            return None
        body = np.frombuffer(data, np.float32, offset=_begin(data))
        body += np.float32(0.1)
        return bytes(data)

    def told(self, lie: str, task: int, data: bytes, said: Said) -> None:
        """Note what came of it; what was acknowledged is noted as an honest worker does."""
        digest = hashlib.sha256(data).hexdigest()
        entry = {"lie": lie, "worker": self.worker, "task": task, "digest": digest, "status": said.status}
        entry |= {"error": said.body.get("error"), "applied": said.applied, "repeated": said.body.get("repeated")}
        _note(self.lies, entry)
        if said.applied and not said.body["repeated"]:
            _note(self.journal, {"run": self.run, "task": task, "digest": digest, "outcome": "applied"})


# --- lies ------------------------------------------------------------------------------------------------------------


def _honest(liar: Liar, name: str, task: int, data: bytes) -> None:
    liar.told(name, task, data, liar.push(task, data))


def _changed(change: Callable[[Liar, bytes], bytes]) -> Callable[[Liar, str, int, bytes], None]:
    def push(liar: Liar, name: str, task: int, data: bytes) -> None:
        made = change(liar, data)
        liar.told(name, task, made, liar.push(task, made))

    return push


def _spoilt(value: float) -> Callable[[Liar, bytes], bytes]:
    def change(liar: Liar, data: bytes) -> bytes:
        made = bytearray(data)
        body = np.frombuffer(made, np.float32, offset=_begin(data))
        body[liar.chance.randrange(len(body))] = value
        return bytes(made)

    return change


def _other_shape(_liar: Liar, data: bytes) -> bytes:
    begin = _begin(data)
    entries = json.loads(data[8:begin])
    for entry in entries.values():
        if isinstance(entry.get("shape"), list):
            entry["shape"] = [1, *entry["shape"]]
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data[begin:]


def _garbage(liar: Liar, data: bytes) -> bytes:
    return liar.chance.randbytes(len(data))


def _wrong_digest(liar: Liar, name: str, task: int, data: bytes) -> None:
    digest = hashlib.sha256(b"something else").hexdigest()
    liar.told(name, task, data, liar.push(task, data, Offbeat_Digest=digest))


def _again(liar: Liar, name: str, task: int, data: bytes) -> None:
    _honest(liar, "honest", task, data)
    for _ in range(liar.chance.randrange(1, 4)):
        liar.told(name, task, data, liar.push(task, data))


def _again_with_other_bytes(liar: Liar, name: str, task: int, data: bytes) -> None:
    _honest(liar, "honest", task, data)
    other = _spoilt(3.0)(liar, data)
    liar.told(name, task, other, liar.push(task, other))


def _of_others(liar: Liar, name: str, task: int, data: bytes) -> None:
    other = abs(task + liar.chance.choice([-40, -9, -3, -2, -1, 1, 2, 3, 1000]))
    liar.told(name, other, data, liar.push(other, data))


def _cut(liar: Liar, name: str, task: int, data: bytes) -> None:
    for _ in range(liar.chance.randrange(1, 3)):
        liar.cut(task, data)
    liar.told(name, task, data, Said(0, {}))
    if liar.chance.random() < 0.5:
        _honest(liar, "honest", task, data)


def _nothing(liar: Liar, name: str, task: int, data: bytes) -> None:
    """Keep the task, and never push."""
    liar.told(name, task, data, Said(0, {}))
    time.sleep(liar.chance.uniform(0.0, 2.0))


LIES: dict[str, Callable[[Liar, str, int, bytes], None]] = {
    "honest": _honest,
    "nan": _changed(_spoilt(float("nan"))),
    "infinity": _changed(_spoilt(float("inf"))),
    "shape": _changed(_other_shape),
    "garbage": _changed(_garbage),
    "digest": _wrong_digest,
    "again": _again,
    "other bytes": _again_with_other_bytes,
    "task of another": _of_others,
    "cut": _cut,
    "nothing": _nothing,
}
NEVER_APPLIED = ("nan", "infinity", "shape", "garbage", "digest", "cut", "nothing")
ONLY_REPEATED = ("again", "other bytes")
"""A push that was answered before is answered again. But a server that was killed before it had the first one on its
disk has never heard of it."""


def _head(data: bytes, **changes: str) -> dict[str, str]:
    digest = hashlib.sha256(data).hexdigest()
    head = {"Offbeat-Digest": digest, "Offbeat-Samples": "5", "Offbeat-Gradients": "2"}
    head |= {"Content-Type": "application/octet-stream"}
    return head | {name.replace("_", "-"): value for name, value in changes.items()}


def _begin(data: bytes | bytearray) -> int:
    """Where the body of a safetensors file begins."""
    return 8 + int.from_bytes(data[:8], "little")


def _appended(path: Path) -> int:
    """A file to whose end whole lines are written; half a line, which a kill may have left, is ended."""
    found = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
        os.write(found, b"\n")
    return found


def _note(file: int, entry: dict[str, Any]) -> None:
    os.write(file, json.dumps(entry).encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("seed", type=int)
    given = parser.parse_args()
    liar = Liar(given.url, given.folder, given.number, given.seed)
    while True:
        try:
            if not liar.session:
                liar.join()
            liar.once()
        except (OSError, http.client.HTTPException):
            time.sleep(AWAY_S)


if __name__ == "__main__":
    main()
