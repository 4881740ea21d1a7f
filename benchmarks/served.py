"""Owns the two exchanges that are measured: our server and workers, and the raw exchange of the same bytes."""

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.exchange import LOOK_S, WORKERS, Measured, Process, end, notes_of, pause, started, wait_for, window
from benchmarks.raw import RECORD, RECORDS
from offbeat.errors import OffbeatError
from offbeat.server.access import TOKENS, Role, TokenBook
from offbeat.server.certificates import CA_CERT, make
from offbeat.storage.json_file import read_json
from offbeat.worker.http_client import HttpClient
from offbeat.worker.settings import Address, Timeouts, trusted

BYTES = 4
WARM_S = 120.0
TASK = """
import numpy as np
from offbeat import Trained


class Untrained:
    devices = {devices}

    def initial(self, seed):
        return {{"x": np.random.default_rng(seed).standard_normal({size}, np.float32)}}

    def train(self, model, work):
        model["x"][:1] += 1
        return Trained(samples=1, gradients=1)

    def evaluate(self, model):
        return {{}}


task = Untrained()
"""


@dataclass(frozen=True, slots=True)
class Access:
    """Options and token for a server with TLS; without TLS there are none."""

    server: tuple[str, ...] = ()
    workers: tuple[tuple[str, ...], ...] = ((),) * WORKERS
    """The options of every worker: each has a token of its own."""
    token: str | None = None
    context: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    process: Process
    url: str
    task: Path
    http: HttpClient

    def applied(self) -> int:
        """Updates that the server says it has applied."""
        return int(self.http.call("GET", "/v1/status")["applied"])


@contextmanager
def serving(
    folder: Path, size: int, *options: str, devices: int = WORKERS, durable: bool = True, access: Access | None = None
) -> Iterator[Served]:
    """Run `offbeat serve` with a model of `size` parameters that is not trained."""
    access = access or Access()
    task, log, where = folder / "task.py", folder / "server.log", folder / "run" / "server.json"
    task.write_text(TASK.format(size=size, devices=devices))
    arguments = ("offbeat", "serve", str(task), "--dir", str(folder / "run"), "--port", "0", "--epochs", "1000000000")
    with started(log, *arguments, *access.server, *options, durable=durable) as process:
        wait_for(where, process, log)
        url = str(read_json(where)["url"])
        headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
        http = HttpClient(Address.of(url), headers, access.context, Timeouts())
        try:
            yield Served(process, url, task, http)
        finally:
            http.close()


def ours(folder: Path, size: int, seconds: float, *, durable: bool = True, tls: bool = False) -> Measured:
    """Measure our server and eight of our workers."""
    folder.mkdir()
    access = _access(folder / "access") if tls else Access()
    notes = [folder / f"notes-{number}.json" for number in range(WORKERS)]
    with serving(folder, size, durable=durable, access=access) as served:
        with ExitStack() as stack:
            each = zip(notes, access.workers, strict=True)
            workers = [_worker(stack, served, path, options, durable=durable) for path, options in each]
            _until(served.process, lambda: served.applied() >= WORKERS)
            when, cpu, most = window(served.process, seconds, served.applied)
            end(workers)
        found = when.measured(notes_of(notes), cpu, most)
        if served.applied() < found.updates:
            raise OffbeatError("more updates were acknowledged than applied; this must not happen")
    return found


def raw(folder: Path, size: int, seconds: float, *, durable: bool = True, outbox: bool = False) -> Measured:
    """Measure the raw exchange of as many bytes; with `outbox`, workers sync their updates to the disk, too."""
    folder.mkdir()
    module, log, port, stop = "benchmarks.raw", folder / "server.log", folder / "port", folder / "stop"
    notes = [folder / f"notes-{number}.json" for number in range(WORKERS)]
    length = str(size * BYTES)
    sync = () if durable else ("--no-sync",)
    with ExitStack() as stack:
        server = stack.enter_context(started(log, module, "server", length, str(port), *sync))
        found = wait_for(port, server, log)
        workers: list[Process] = []
        for path in notes:
            kept = ("--outbox", str(path.with_suffix(".update"))) if outbox else ()
            arguments = ("worker", length, str(path), "--port", found, "--stop", str(stop), *kept)
            workers.append(stack.enter_context(started(path.with_suffix(".log"), module, *arguments)))

        def applied() -> int:
            return (folder / RECORDS).stat().st_size // len(RECORD)

        _until(server, lambda: applied() >= WORKERS)
        when, cpu, most = window(server, seconds, applied)
        stop.touch()
        for worker in workers:
            pause(worker, WARM_S)
    return when.measured(notes_of(notes), cpu, most)


def _worker(stack: ExitStack, served: Served, notes: Path, options: tuple[str, ...], *, durable: bool) -> Process:
    name = notes.stem
    arguments = (str(served.task), served.url, str(notes.with_suffix(".outbox")), str(notes), name, *options)
    log = notes.with_suffix(".log")
    return stack.enter_context(started(log, "benchmarks.timed_worker", *arguments, durable=durable))


def _access(folder: Path) -> Access:
    """Certificates and tokens, as `offbeat init` makes them."""
    make(folder, [])
    ca = folder / CA_CERT
    names = [f"worker-{number}" for number in range(WORKERS)]
    tokens = TokenBook.begin(folder / TOKENS).add_all(dict.fromkeys(names, Role.WORKER) | {"bench": Role.ADMIN})
    workers = tuple(("--token", tokens[name], "--ca", str(ca)) for name in names)
    return Access(("--access", str(folder)), workers, tokens["bench"], trusted(ca))


def _until(process: Process, holds: Callable[[], bool]) -> None:
    left = WARM_S
    while not holds():
        if process.poll() is not None or left <= 0:
            raise OffbeatError(f"not every worker of the benchmark had an update accepted in {WARM_S:g} s")
        pause(process, LOOK_S)
        left -= LOOK_S
