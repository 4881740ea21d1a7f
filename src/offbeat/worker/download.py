"""Owns how a model comes in: straight to where it stays, and on after a cut.

Rules kept here:
- After a cut only the rest is asked for, and only of the very same version: its ETag must be what it was. Where the
  connection brought something, that is done at once; otherwise after a wait.
- The flat vector is read into its place; there is no second copy of it.
- Nothing is kept that the layout does not ask for: sizes are checked before there is memory for them.
"""

from collections.abc import Callable

import numpy as np

from offbeat.core.layout import Layout, Model, Vector, aligned
from offbeat.errors import OffbeatError
from offbeat.wire import (
    LENGTH_BYTES,
    BadPayload,
    ExpectedHeader,
    Header,
    HeaderReader,
    check_fit,
    is_flat,
    tensors_of,
    unpack,
)
from offbeat.worker.api_answers import RequestRefused, Unreachable
from offbeat.worker.http_client import HttpClient

STARTS_MAX = 5
"""Times that a model is read from its beginning."""
PROGRESS = 1 << 16
"""Bytes that a connection must have moved for another one to be opened at once."""

Patience = Callable[[Unreachable | RequestRefused], None]
"""Called when it may help to try again: waits, or raises what it was given."""
Fill = Callable[[memoryview], None]
Memory = Callable[[], Vector]
"""Gives a vector of the layout's size, with arbitrary contents."""


class Changed(OffbeatError):
    """The server has another model there than the one that was begun to be read."""


def pull(http: HttpClient, path: str, layout: Layout, patience: Patience, memory: Memory | None = None) -> Model:
    """The model at this path, however often the connection is cut, in memory that nobody else uses."""
    for _ in range(STARTS_MAX):
        try:
            return read_model(Download(http, path, patience).fill, layout, memory)
        except Changed:
            continue
    raise Unreachable(f"{http.address}{path} is another model whenever it is asked for")


class Download:
    def __init__(self, http: HttpClient, path: str, patience: Patience) -> None:
        self.at = self._begun_at = 0
        self._http, self._path, self._patience = http, path, patience
        self._etag: str | None = None
        self._opened = False

    def fill(self, view: memoryview) -> None:
        while len(view):
            try:
                count = self._some(view)
            except (Unreachable, RequestRefused) as error:
                if isinstance(error, RequestRefused) and not error.temporary:
                    raise
                self._opened = False
                if self.at - self._begun_at < PROGRESS:
                    self._patience(error)
            else:
                self.at += count
                view = view[count:]

    def _some(self, view: memoryview) -> int:
        if not self._opened:
            self._begun_at = self.at
            (self._resume if self.at else self._begin)()
            self._opened = True
        count = self._http.readinto(view)
        if not count:
            raise Unreachable(f"{self._http.address} sent less of the model than its header announces")
        return count

    def _begin(self) -> None:
        status, headers = self._http.open(self._path)
        if status != 200:
            raise Unreachable(f"{self._http.address} sent a part of the model, although all of it was asked for")
        self._etag = headers.get("etag")

    def _resume(self) -> None:
        if not self._etag:
            raise Changed("without an ETag it cannot be told whether it is the same")
        try:
            status, headers = self._http.open(self._path, {"Range": f"bytes={self.at}-", "If-Range": self._etag})
        except RequestRefused as refused:
            raise Changed(str(refused)) if refused.status == 416 else refused from refused
        begins = headers.get("content-range", "").startswith(f"bytes {self.at}-")
        if status != 206 or not begins or headers.get("etag", self._etag) != self._etag:
            raise Changed("it was changed meanwhile")


def read_model(fill: Fill, layout: Layout, memory: Memory | None = None) -> Model:
    """The model in these bytes; `LayoutMismatch` where it does not fit."""
    reader = HeaderReader(ExpectedHeader.of(layout))
    length = _next(fill, LENGTH_BYTES)
    reader.feed(length)  # refuses one that is too long
    head = _next(fill, int.from_bytes(length, "little"))
    header = reader.feed(head)
    if header is None:
        raise BadPayload("the header ends before its end")
    check_fit(header, layout)
    if is_flat(header, layout):
        return _flat(fill, layout, memory() if memory is not None else aligned(layout.size))
    return _other(fill, layout, header, bytes(length + head))


def _flat(fill: Fill, layout: Layout, vector: Vector) -> Model:
    fill(vector.data.cast("B"))
    carried = {}
    for tensor in tensors_of(layout)[len(layout.slots) :]:
        data = _next(fill, tensor.end - tensor.begin)
        carried[tensor.name] = np.frombuffer(data, tensor.dtype).reshape(tensor.shape).copy()
    return Model(layout, vector, carried)


def _other(fill: Fill, layout: Layout, header: Header, head: bytes) -> Model:
    """Another writer's order: the whole file, then a copy."""
    whole = bytearray(header.size)
    whole[: len(head)] = head
    fill(memoryview(whole)[len(head) :])
    return unpack(memoryview(whole), layout)


def _next(fill: Fill, size: int) -> bytearray:
    data = bytearray(size)
    fill(memoryview(data))
    return data
