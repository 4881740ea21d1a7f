"""Owns the limit that a server is compared with: the same bytes over plain sockets, and the same syncs to the disk.

One server process with a thread per worker, and as many worker processes as there are workers. A worker pulls x,
pushes as many bytes back, and waits for one byte: by then the bytes are in a synced file, and a small record is in
another. Nothing is checked, parsed, hashed, decided or mixed.
"""

import argparse
import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic

PIECE = 1 << 20
RECORD = b"applied " * 16
RECORDS = "records"
PULL, DONE = b"p", b"d"


class RawServer:
    """Sends x and stores updates."""

    def __init__(self, size: int, folder: Path, *, sync: bool) -> None:
        self.x = memoryview(bytearray(os.urandom(PIECE) * (size // PIECE + 1)))[:size]
        self.folder, self.sync = folder, sync
        self._records = (folder / RECORDS).open("wb")
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket) -> None:
        """Serve with one thread per worker, until the process is ended."""
        number = 0
        while True:
            line, _ = listener.accept()
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._attend, args=(line, number), daemon=True).start()
            number += 1

    def _attend(self, line: socket.socket, number: int) -> None:
        piece = memoryview(bytearray(PIECE))
        with suppress(OSError), line:
            while line.recv(1) == PULL:
                line.sendall(self.x)
                self._take(line, piece, self.folder / f"update-{number}")
                self._record()
                line.sendall(DONE)

    def _take(self, line: socket.socket, piece: memoryview, path: Path) -> None:
        left = len(self.x)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            while left:
                count = line.recv_into(piece, min(left, PIECE), socket.MSG_WAITALL)
                if not count:
                    raise ConnectionError
                os.write(descriptor, piece[:count])
                left -= count
            if self.sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _record(self) -> None:
        with self._lock:
            self._records.write(RECORD)
            self._records.flush()
            if self.sync:
                os.fsync(self._records.fileno())


def work(port: int, size: int, stop: Path, outbox: Path | None) -> list[tuple[float, float]]:
    """Pull and push until the file `stop` exists; returns when each update was acknowledged, and after how long.

    With an outbox, an update is first synced to the worker's own disk, as our workers do.
    """
    noted: list[tuple[float, float]] = []
    model = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not stop.exists():
            line.sendall(PULL)
            at = 0
            while at < size:
                at += line.recv_into(model[at:], min(PIECE, size - at), socket.MSG_WAITALL)
            if outbox is not None:
                _keep(outbox, model)
            begun = monotonic()
            line.sendall(model)
            line.recv(1)
            noted.append((monotonic(), monotonic() - begun))
    return noted


def _keep(path: Path, model: memoryview) -> None:
    with path.open("wb") as file:
        file.write(model)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    """Run a server, which writes its port to the file, or a worker, which writes its notes to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["server", "worker"])
    parser.add_argument("size", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--stop", type=Path)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--outbox", type=Path)
    given = parser.parse_args()
    if given.role == "worker":
        given.file.write_text(json.dumps(work(given.port, given.size, given.stop, given.outbox)))
        return
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        server = RawServer(given.size, given.file.parent, sync=not given.no_sync)
        aside = given.file.with_suffix(".aside")
        aside.write_text(str(listener.getsockname()[1]))
        aside.replace(given.file)
        server.serve(listener)


if __name__ == "__main__":
    main()
