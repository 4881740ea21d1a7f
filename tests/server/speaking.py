"""HTTP by hand: a connection whose every byte the test sends, and what must hold after a refusal."""

import hashlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from tests.server.serving import PATIENCE_S, Answered, Running, Worker

Arrays = Mapping[str, npt.NDArray[Any]]
DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int32": "I32"}


class Line:
    """One connection to a server."""

    def __init__(self, running: Running, data: bytes = b"", *, tls: ssl.SSLContext | None = None) -> None:
        where = urlsplit(running.url)
        self.socket = socket.create_connection((where.hostname or "", where.port or 0), PATIENCE_S)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=where.hostname)
        self.reader = self.socket.makefile("rb")
        self.send(data)

    def send(self, data: bytes) -> Self:
        """These bytes, and no others."""
        self.socket.sendall(data)
        return self

    def head(self) -> tuple[int, dict[str, str]]:
        """The status and the headers of what the server says next."""
        status = int(self.reader.readline().split(b" ")[1])
        headers: dict[str, str] = {}
        while (text := self.reader.readline().strip()) != b"":
            name, _, value = text.decode().partition(": ")
            headers[name] = value
        return status, headers

    def answer(self) -> Answered:
        """A whole answer."""
        status, headers = self.head()
        return Answered(status, headers, self.reader.read(int(headers.get("Content-Length", 0))))

    def ended(self) -> Self:
        """Nothing more will be sent; the answer can still be read."""
        self.socket.shutdown(socket.SHUT_WR)
        return self

    def is_closed(self) -> bool:
        """Has the server hung up, with nothing more to say? Waits for either."""
        try:
            return self.reader.read(1) == b""
        except (ConnectionError, ssl.SSLError):
            return True

    def cut(self) -> None:
        """Hang up at once."""
        self.reader.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cut()


def head(method: str, path: str, headers: Mapping[str, Any] | None = None, *, close: bool = False) -> bytes:
    """The first lines of a request."""
    fields = {"Host": "localhost", **({"Connection": "close"} if close else {}), **(headers or {})}
    return "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]).encode(
        "latin-1"
    )


def put(worker: Worker, task: int, data: bytes, length: Any = None, **changes: Any) -> bytes:
    """The first lines of a push."""
    facts = {"Content-Length": len(data) if length is None else length, **worker.head(data, **changes)}
    return head("PUT", f"/v1/tasks/{task}/update", facts)


# --- updates ---------------------------------------------------------------------------------------------------------


def file_of(arrays: Arrays) -> bytes:
    """Arrays as safetensors, in this order, written without any code of ours."""
    entries, at = {}, 0
    for name, array in arrays.items():
        offsets = [at, at := at + array.nbytes]
        entries[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
    return described(entries, b"".join(array.tobytes() for array in arrays.values()))


def described(entries: Any, body: bytes) -> bytes:
    """A body behind a header that says this."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + body


def ones(**changes: npt.NDArray[Any] | None) -> dict[str, npt.NDArray[Any]]:
    """The arrays of the tiny task's model, all 1, and what is changed about them."""
    arrays: dict[str, npt.NDArray[Any] | None] = {"x": np.ones(6, np.float32), "y": np.ones((2, 2), np.float32)}
    return {name: array for name, array in (arrays | changes).items() if array is not None}


# --- what must hold --------------------------------------------------------------------------------------------------


def settled(running: Running) -> Any:
    """The status, once everything that was decided is mixed."""
    return until(running.status, lambda status: not status["queued"])


def until(look: Callable[[], Any], holds: Callable[[Any], bool] = bool) -> Any:
    """Look again and again until what is seen will do."""
    end, never = monotonic() + PATIENCE_S, threading.Event()
    while not holds(seen := look()):
        assert monotonic() < end, f"this never came about; the last that was seen is {seen!r}"
        never.wait(0.001)  # the server's threads must have their turn
    return seen


@contextmanager
def untouched(running: Running) -> Iterator[None]:
    """Not a bit of x_t changes meanwhile, and nothing is applied."""
    before = settled(running)
    x = running.x
    yield
    after = settled(running)
    assert running.x == x
    assert (after["t"], after["applied"]) == (before["t"], before["applied"])


def refused(answer: Answered, status: int, error: str) -> Any:
    """This is the refusal that was expected, and it says what to do."""
    assert answer.status == status, answer
    body = answer.json
    assert body["error"] == error, body
    assert body["message"], body
    assert body["do"].endswith("."), body
    assert "Traceback" not in body["message"]
    assert "/updates/" not in body["message"], "where the server keeps its files is nobody's business"
    if status in (429, 503, 507):
        assert int(answer.headers["Retry-After"]) >= body["retry_after_s"] > 0
    return body


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
