"""Owns the life of a server: from a folder to an open port, to the end of the run, to a clean stop.

Rules kept here:
- `server.json` says where the server is, once it has redone what a crash interrupted; it is gone after a clean stop.
- The server process never imports the task: a child makes x_0 and evaluates.
- After the last epoch it goes on answering until it is stopped; workers are told that the run is finished.
"""

import asyncio
import hashlib
import json
import logging
import os
import resource
import signal
import ssl
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import web

from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.protocol.messages import Evaluated, WorkerJoined, WorkerLeft
from offbeat.server.access import TOKENS, TokenBook
from offbeat.server.app import make_app
from offbeat.server.certificates import server_context
from offbeat.server.desk import Desk
from offbeat.server.evaluator import Evaluator
from offbeat.server.event_log import EventLog
from offbeat.server.folder import WHERE, Begun, begin
from offbeat.server.guard import Guard
from offbeat.server.metrics import Metrics, Timed
from offbeat.server.pulls import READERS
from offbeat.server.reports import Reports
from offbeat.server.run import ServedRun
from offbeat.server.service import Service
from offbeat.server.sessions import Session, Sessions
from offbeat.server.settings import Door, ServerSettings
from offbeat.server.task_process import TaskProcess
from offbeat.server.views import counts
from offbeat.settings import Settings
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import plain, write_json
from offbeat.storage.rows import NewRow, as_event
from offbeat.storage.run_folder import FINAL, SUMMARY
from offbeat.wire import body_of, header_of

ANYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 (compared with, not bound to)
HEARTBEAT_MAX_S = 30.0
HEARTBEATS_PER_LEASE = 3
GOODBYE_S = 10.0
"""With --exit-when-finished: how long workers have to hear that the run is finished."""
CLOSE_S = 2.0
RETRY_S = 5.0
KEEP_ALIVE_S = 75.0
"""How long a connection may be idle between two requests."""
FILES_MIN = 256
"""Open files that are not connections."""
LINGER_S = 2.0
"""How long the rest of a body that is not wanted is waited for."""

log = logging.getLogger("offbeat.server")


@dataclass(frozen=True)
class Order:
    """What is to be served, and how."""

    task: str
    folder: Path
    settings: Settings = field(default_factory=Settings)
    limits: ServerSettings = field(default_factory=ServerSettings)
    door: Door = field(default_factory=Door)
    x_0: Path | None = None
    drop_damaged: bool = False
    exit_when_finished: bool = False
    log_events: str | None = None
    """A file to which every event is logged as a line, or - for stderr."""
    extend: Callable[["Server"], None] = lambda _server: None
    """Adds to the application before it opens: the page, say, which is a layer above."""


class Server:
    """A server, from its start to its stop."""

    def __init__(self, order: Order, loop: asyncio.AbstractEventLoop) -> None:
        """Begin or find the run, and redo what a crash interrupted; nobody can connect yet."""
        order.door.check(order.limits)
        self.order, self.loop = order, loop
        self.tokens, self.tls = _access(order.door)
        self.process = TaskProcess(order.task, order.settings, threads=order.limits.evaluation_threads)
        self.stopped = asyncio.Event()
        self.failure: str | None = None
        self.url = ""
        try:
            self.begun = begin(order.folder, order.task, order.settings, self.process, order.x_0)
        except BaseException:
            self.process.close()
            raise
        try:
            self.event_log = EventLog.open(order.log_events, run=self.begun.run_id) if order.log_events else None
            self.desk = Desk(loop)
            self.run = self._run(self.begun)
            self.process.remember(self.begun.about, self.run.layout)
            self.service = self._service(self.begun)
        except BaseException:
            self.process.close()
            self.begun.folder.close()
            raise

    def _run(self, begun: Begun) -> ServedRun:
        limits, chosen = self.order.limits, begun.method
        return ServedRun(
            self.order.folder,
            chosen.rule,
            chosen.plan,
            chosen.scheduler,
            self.desk,
            seed=self.order.settings.seed,
            threads=limits.updater_threads,
            checkpoint_every=limits.checkpoint_every,
            updates_bytes_max=limits.updates_bytes_max,
            versions_bytes_max=limits.versions_bytes_max,
            keep_updates=limits.keep_updates == "all",
            drop_damaged=self.order.drop_damaged,
        )

    def _service(self, begun: Begun) -> Service:
        kinds = ("joined", "left")
        rows = sorted((row for kind in kinds for row in self.run.ledger.rows(kind)), key=lambda row: row.sequence)
        events = map(as_event, rows)
        history = [event for event in events if isinstance(event, WorkerJoined | WorkerLeft)]
        plan = begun.method.plan
        heartbeat_s = plan.lease_s / HEARTBEATS_PER_LEASE if isfinite(plan.lease_s) else HEARTBEAT_MAX_S
        return Service(
            run=self.run,
            desk=self.desk,
            sessions=Sessions(history),
            limits=self.order.limits,
            settings=self.order.settings,
            task=begun.about.identity,
            run_id=begun.run_id,
            devices=begun.method.devices,
            tokens=self.tokens,
            metrics_known=bool(begun.about.metrics),
            reports=Reports(plan.evaluate_every),
            heartbeat_s=min(HEARTBEAT_MAX_S, heartbeat_s),
            metrics=Metrics(self.run.ledger.path),
            finished=self.run.coordinator.finished,
        )

    # --- open --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Let time go on, and let workers in."""
        self._wire()
        self.run.start()
        self.app = make_app(self.service)
        self.order.extend(self)
        self.runner = web.AppRunner(
            self.app,
            handle_signals=False,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_S,
            auto_decompress=False,
            lingering_time=LINGER_S,
            keepalive_timeout=KEEP_ALIVE_S,
        )
        await self.runner.setup()
        most = _raise_file_limit(self.order.limits.connections_max)
        guard = Guard(self.runner, self.loop, replace(self.order.limits, connections_max=most))
        self.listener = await guard.listen(self.tls)
        self.url = self._url(guard.port)
        where = {"url": self.url, "pid": os.getpid(), "run": self.begun.run_id}
        Disk().write_whole(self.order.folder / WHERE, [json.dumps(where).encode()])
        if self.service.finished:
            self._over(self.run.coordinator.ending)

    def _wire(self) -> None:
        """Connect the parts that must hear of each other."""
        desk, run = self.desk, self.run
        desk.hub, desk.on_over, desk.on_published = run.hub, self._over, self._published
        before: Callable[[], None] = run.ledger.on_commit

        def committed() -> None:
            before()
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self.service.say_committed)

        run.ledger.on_commit, run.ledger.on_written = committed, self._written
        run.mixer.on_pass, run.updates.on_synced = self.service.metrics.mixed, self.service.metrics.synced
        self.evaluator: Evaluator | None = None
        if self.service.metrics_known:
            folder, process = self.order.folder, Timed(self.process, self.service.metrics)
            self.evaluator = Evaluator(process, folder, run.layout, self._evaluated, self._not_evaluated)
            desk.on_evaluate = self._evaluate
            c = run.coordinator
            x = run.versions.pull(c.t)
            if x is not None and (not c.evaluations or c.evaluations[-1].t != c.t) and (c.t == 0 or c.finished):
                self._evaluate(c.t, x)
        else:
            self.process.close()

    def _written(self, rows: list[NewRow], last: int, seconds: float) -> None:
        """On the hub's thread: rows are in the ledger."""
        self.service.metrics.written(rows, last, seconds)
        if self.event_log is not None:
            self.event_log.written(rows, last)

    def _url(self, port: int) -> str:
        host = self.order.limits.host
        host = "localhost" if host in ANYWHERE else host  # which the certificate has, and this machine can reach
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.tls else 'http'}://{shown}:{port}"

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluate(self, t: int, x: Model) -> None:
        """On the hub's thread."""
        if self.evaluator is not None:
            self.evaluator.put(t, x, last=bool(self.run.coordinator.ending))

    def _evaluated(self, t: int, metrics: Mapping[str, float]) -> None:
        with suppress(OffbeatError):  # the hub has failed, which is known elsewhere
            self.run.hub.tell(lambda at: Evaluated(at, t, metrics), must=True).result()

    def _not_evaluated(self, t: int, why: str) -> None:
        self.service.metrics.not_evaluated()
        self.service.trouble = f"version {t} could not be evaluated: {why}"
        log.warning(self.service.trouble)

    def _published(self, t: int) -> None:
        """On the event loop: a version can be read."""
        for old in self.run.versions.crowding():
            self.app[READERS].cut(old)
        for tau, metrics in self.service.reports.due(t):
            self._report(tau, metrics)

    def _report(self, tau: int, metrics: Mapping[str, float]) -> None:
        self.run.hub.tell(lambda at: Evaluated(at, tau, metrics), must=True)

    # --- the end of the run ------------------------------------------------------------------------------------------

    def _over(self, reason: str) -> None:
        """On the event loop: the run is finished, or the server has failed."""
        if self.run.hub.failure is not None:
            self.failure = reason
            self.stopped.set()
            return
        self.service.finished = True
        for tau, metrics in self.service.reports.finish():
            self._report(tau, metrics)
        self._closing = self.loop.create_task(self._finish())

    async def _finish(self) -> None:
        """Wait for the last evaluation, write the results down, and go on answering, or not."""
        if self.evaluator is not None:
            while not await self.loop.run_in_executor(None, self.evaluator.wait, 1.0):
                pass
        while not self.stopped.is_set():
            try:
                await self.service.off_loop(self._write_results)
                break
            except (OSError, OffbeatError) as error:
                self.service.trouble = f"the results cannot be written: {error}"
                log.warning(self.service.trouble)
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self.stopped.wait()
        log.info("finished: %s", self.run.coordinator.ending)
        if self.order.exit_when_finished:
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    while any(map(self._is_there, self.service.sessions.all())):
                        await self._pause()
            self.stopped.set()

    def _is_there(self, session: Session) -> bool:
        """A worker that has not left, and was heard of before it would be taken for dead."""
        return bool(session.digest) and (session.asking or monotonic() - session.heard_at < self._lease_s)

    @property
    def _lease_s(self) -> float:
        return self.begun.method.plan.lease_s

    async def _pause(self) -> None:
        """Until something is committed, such as that a worker has left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await self.service.committed.wait()

    def _write_results(self) -> None:
        if (self.order.folder / SUMMARY).exists():
            return
        facts, x = self.run.hub.ask(lambda c: (self._summary(counts(c)), self.run.mixer.x)).result()
        header = header_of(self.run.layout, {"t": str(facts["t"])})
        Disk().write_whole(self.order.folder / FINAL, [header, *body_of(x)])
        write_json(self.order.folder / SUMMARY, facts)

    def _summary(self, facts: dict[str, Any]) -> dict[str, Any]:
        run, known = self.run, ("t", "epochs", "applied", "gradients", "rejected", "duplicates")
        x_sha256 = hashlib.sha256(run.mixer.x.vector.data).hexdigest()
        results = {name: facts[name] for name in known} | {"wall_s": round(facts["at_s"], 3)}
        results |= self.service.metrics.staleness()
        results |= {**facts["metrics"], "x_sha256": x_sha256, "ended": facts["reason"], "dir": str(self.order.folder)}
        return dict(
            plain(results | {"task": self.begun.about.identity, "settings": self.begun.folder.settings}, "summary")
        )

    # --- close -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop cleanly: nobody waits, everything is on the disk, the folder is free."""
        self.listener.close()
        self.run.hub.hurry()
        self.desk.stopping = True
        self.service.say_committed()  # whoever follows the events hears that they end
        await self.desk.stop()
        await self.runner.cleanup()
        await self.loop.run_in_executor(None, self._close_rest)

    def _close_rest(self) -> None:
        """All of it, whatever goes wrong with one."""
        with ExitStack() as last_first:
            last_first.callback(self.begun.folder.close)
            if self.event_log is not None:
                last_first.callback(self.event_log.close)
            last_first.callback((self.order.folder / WHERE).unlink, missing_ok=True)
            last_first.callback(self.service.disk_pool.shutdown)
            last_first.callback(self.process.close)
            last_first.callback(self.run.stop)
            if self.evaluator is not None:
                last_first.callback(self.evaluator.stop)


def serve(order: Order, ready: Callable[[Server], Any] = lambda _: None) -> None:
    """Serve until a signal, a failure, or the end; `ready` hears of it once workers can come, on the event loop."""
    loop = _new_loop()
    try:
        server = Server(order, loop)
        loop.run_until_complete(_serve(server, ready))
    finally:
        loop.close()
    if server.failure:
        raise OffbeatError(server.failure)


async def _serve(server: Server, ready: Callable[[Server], Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError, RuntimeError):  # not on the main thread: whoever started us stops us otherwise
            server.loop.add_signal_handler(number, server.stopped.set)
    await server.open()
    shown = ready(server)
    try:
        await server.stopped.wait()
    finally:
        if isinstance(shown, asyncio.Task):
            shown.cancel()
        await server.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # where there is none, asyncio's own does it more slowly
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _access(door: Door) -> tuple[TokenBook | None, ssl.SSLContext | None]:
    if door.access is None:
        return None, None
    book = TokenBook(door.access / TOKENS)
    book.entries()  # a damaged one is refused here, not at the first request
    return book, server_context(door.access)


def _raise_file_limit(wanted: int) -> int:
    """Every connection is an open file: allow as many as may be; how many connections that makes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted + FILES_MIN if hard == resource.RLIM_INFINITY else min(hard, wanted + FILES_MIN)
    if soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - FILES_MIN))
