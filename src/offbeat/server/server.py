"""Owns the life of a server: from a folder to an open port, to the end of the run, to a clean stop.

Rules kept here:
- `server.json` says where the server is, once it has redone what a crash interrupted; it is gone after a clean stop.
- The server process never imports the task: a child makes x_0 and evaluates.
- After the last epoch it goes on answering until it is stopped; workers are told that the run is finished.
"""

import asyncio
import json
import logging
import os
import resource
import signal
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.hosting.task_identity import identity
from offbeat.hosting.task_process import TaskProcess
from offbeat.protocol.ends import Ends
from offbeat.protocol.plan import Plan
from offbeat.server.access import TOKENS, TokenBook
from offbeat.server.app import make_app
from offbeat.server.certificates import names_of, server_context
from offbeat.server.context import ServerContext
from offbeat.server.continuity import legible
from offbeat.server.driver import PublishedVersion, WorkerCommand
from offbeat.server.evaluator import Evaluator
from offbeat.server.event_log import EventLog
from offbeat.server.extension import extension_of
from offbeat.server.folder import WHERE, begin
from offbeat.server.host_names import ANYWHERE
from offbeat.server.http_connection import HttpRunner
from offbeat.server.keeping import VersionKeeper
from offbeat.server.listener import Listener
from offbeat.server.long_poll import LongPoll, call_on, wait_for
from offbeat.server.metrics import Metrics, Timed
from offbeat.server.open_troubles import EVALUATION, KEEPING, RESULTS
from offbeat.server.own_names import OwnNames
from offbeat.server.run_results import write_results
from offbeat.server.served_fold import ServedFold
from offbeat.server.served_run import Observers, ServedRun
from offbeat.server.sessions import WorkerSessions
from offbeat.server.settings import AccessSettings, ServerSettings
from offbeat.server.trouble_watch import watch
from offbeat.settings import Settings
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import sealed
from offbeat.storage.ledger import Observer
from offbeat.storage.rows import task_accepted_row
from offbeat.storage.run_folder import LEDGER

HEARD_AGAIN_S = 0.2
CLOSE_S = 2.0
RETRY_S = 5.0
FEW_CONNECTIONS = 1_000
"""Fewer than that are told at the start, where the settings allow more."""
FILES_MIN = 128
"""Open files that are neither connections nor updates."""
FILES_PER_UPLOAD = 2
"""One that is written, and one that is looked at; besides, every update that waits to be mixed is an open file."""
LINGER_S = 2.0
"""How long the rest of a body that is not wanted is waited for."""


log = logging.getLogger("offbeat.server")
http_log = logging.getLogger("offbeat.server.http")
http_log.setLevel(logging.CRITICAL)  # aiohttp's log of this server: else garbage from the network would fill it


@dataclass(frozen=True)
class ServeOptions:
    """What is to be served, and how."""

    task: str
    folder: Path
    settings: Settings = field(default_factory=Settings)
    limits: ServerSettings = field(default_factory=ServerSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    x_0: Path | None = None
    drop_damaged: bool = False
    exit_when_finished: bool = False
    log_events: str | None = None
    """A file to which every event is logged as a line, or - for stderr."""
    accept_loss: bool = False
    accept_changed_task: bool = False
    """Go on although the task's code is not that with which the run began."""
    extend: Callable[["Server"], None] = lambda _server: None
    """Adds to the application before it opens: the page, say, which is a layer above."""


class Server:
    """A server, from its start to its stop; to the driver it is everything outside the run."""

    def __init__(self, options: ServeOptions, loop: asyncio.AbstractEventLoop) -> None:
        """Begin or find the run, and redo what a crash interrupted; no worker can connect yet."""
        options.access.check(options.limits)
        self.options, self.loop = options, loop
        self.tokens, self.tls = _access(options.access)
        self.process = TaskProcess(options.task, options.settings, threads=options.limits.evaluation_threads)
        self.evaluator: Evaluator | None = None
        observers: list[Observer] = []
        self.stopped = asyncio.Event()
        self.failure: str | None = None
        self.url = ""
        with ExitStack() as undo:
            undo.callback(self.process.close)
            self.begun = begin(
                *(options.folder, options.task, options.settings, self.process, options.x_0),
                accept_changed_task=options.accept_changed_task,
            )
            undo.callback(self.begun.folder.close)
            if options.log_events:
                event_log = EventLog.open(options.log_events, run=self.begun.run_id)
                undo.callback(event_log.close)
                observers.append(event_log.written)
            fold = ServedFold()
            metrics = Metrics(fold)
            with legible(options.folder / LEDGER):
                self.run = self._run(fold, metrics, observers)
            self._accept_task()
            self.extension = extension_of(self.run.coordinator, self.run.ledger, self.begun, options.settings)
            """Where the run goes on to another end than before: what that means, in words."""
            self.keeper = VersionKeeper(self.run, self._note_keeping)
            self.process.remember(replace(self.begun.about, identity=identity(options.task)), self.run.layout)
            self.long_poll = LongPoll(loop, self.run.driver)
            self.context = ServerContext(
                *(self.run, self.begun, self.long_poll, WorkerSessions(fold.workers.state())),
                *(self.tokens, metrics, options.limits, options.settings),
            )
            self._parts = undo.pop_all()
            """Closed in the end, the last first, also where closing another one fails."""
        self._parts.callback((options.folder / WHERE).unlink, missing_ok=True)
        self._parts.callback(self.context.disk_pool.shutdown)
        self._parts.callback(self.run.stop)

    def _run(self, fold: ServedFold, metrics: Metrics, observers: Sequence[Observer]) -> ServedRun:
        on_written = (metrics.written, *observers, self._committed)
        return ServedRun(
            *(self.options.folder, self.begun.method, self.options.limits, self),
            observers=Observers(on_written, on_pass=metrics.mixed, on_synced=metrics.synced),
            fold=fold,
            drop_damaged=self.options.drop_damaged,
            accept_loss=self.options.accept_loss,
            fork=self.begun.fork,
            caches_on_disk=self.begun.room.where == "disk",
        )

    def _accept_task(self) -> None:
        """Record that the run goes on with a changed task, where an operator has just said so."""
        task, c = self.begun.task, self.run.coordinator
        if task.changed:
            log.warning("from epoch %s on the run has a changed task: %s, not %s", c.t, task.now, task.recorded)
            self.run.ledger.add(task_accepted_row(c.at, c.t, task.now))
            self.run.ledger.flush()

    # --- open --------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Let time go on, and let workers in."""
        self._start_evaluator()
        self.run.start()
        if self.extension:
            await self._extend(self.begun.ends)
        certified = names_of(self.options.access.folder) if self.options.access.folder else ()
        self.app = make_app(self.context, OwnNames.of(self.options.limits, certified))
        self.options.extend(self)
        self.runner = HttpRunner(
            self.app,
            count=self.context.metrics.refused,
            handle_signals=False,
            access_log=None,
            logger=http_log,
            handler_cancellation=True,
            shutdown_timeout=CLOSE_S,
            auto_decompress=False,
            lingering_time=LINGER_S,
            keepalive_timeout=self.options.limits.keep_alive_s,
        )
        await self.runner.setup()
        limits = self.options.limits
        beside = _files_beside(limits, self.begun.method.plan)
        most = _raise_file_limit(limits.connections_max, beside)
        if most < min(limits.connections_max, FEW_CONNECTIONS):
            log.warning(
                "only %d connections at a time: this system allows %d open files, and uploads_max and queue_max keep "
                "%d of them; raise the limit (LimitNOFILE in systemd, ulimit -n), or lower these",
                *(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0], beside),
            )
        listener = Listener(self.runner, replace(limits, connections_max=most), self.tls)
        self.listener = await listener.listen()
        self.url = self._url(listener.port)
        self._watching = self.loop.create_task(watch(self.context))
        where = {"url": self.url, "pid": os.getpid(), "run": self.begun.run_id}
        Disk().write_whole(self.options.folder / WHERE, [sealed(json.dumps(where))])
        if self.context.finished:
            self._over(self.run.coordinator.end_reason)

    async def _extend(self, ends: Ends) -> None:
        """Go on to these ends; the results go first: after a crash in between the run is finished, as before."""
        await self.context.off_loop(self.begun.folder.take_back_results)
        await asyncio.wrap_future(self.run.driver.tell(ends.event, must=True))
        self.context.finished = False

    def _start_evaluator(self) -> None:
        """Evaluate here where the task can, and first the version that the run stands at."""
        if not self.context.metrics_known:
            self.process.close()
            return
        process, c = Timed(self.process, self.context.metrics), self.run.coordinator
        folder, layout = self.options.folder, self.run.layout
        told = (self._evaluated, self._not_evaluated)
        self.evaluator = Evaluator(process, folder, layout, *told, died=self._evaluator_died)
        self._parts.callback(self.evaluator.stop)
        if (not c.evaluations or c.evaluations[-1].t != c.t) and (c.t == 0 or c.finished):
            self.evaluate(self.run.driver.newest)

    def _url(self, port: int) -> str:
        host = self.options.limits.host
        host = "localhost" if host in ANYWHERE else host  # which the certificate has, and this machine can reach
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.tls else 'http'}://{shown}:{port}"

    # --- called by the driver, on its thread -------------------------------------------------------------------------

    def deliver(self, worker: int, command: WorkerCommand) -> None:
        self.long_poll.deliver(worker, command)

    def evaluate(self, version: PublishedVersion) -> None:
        if self.evaluator is not None:
            self.evaluator.put(*version, last=bool(self.run.coordinator.end_reason))

    def published(self, t: int) -> None:
        call_on(self.loop, self._published, t)

    def over(self, reason: str) -> None:
        call_on(self.loop, self._over, reason)

    def _committed(self, *_: object) -> None:
        call_on(self.loop, lambda: self.context.say_committed())

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _evaluated(self, t: int, metrics: Mapping[str, float]) -> None:
        self.context.troubles.over(EVALUATION)
        if self.evaluator is not None:
            self.keeper.evaluated(t, metrics, self.evaluator)

    def _not_evaluated(self, t: int, why: str) -> None:
        self.context.metrics.not_evaluated()
        self.context.troubles.note(EVALUATION, f"version {t} could not be evaluated: {why}")

    def _evaluator_died(self, t: int, why: str) -> None:
        what = f"version {t} is not evaluated yet, because the process that evaluates died; it is tried again: {why}"
        self.context.troubles.note(EVALUATION, what)

    def _note_keeping(self, what: str | None) -> None:
        if what is None:
            self.context.troubles.over(KEEPING)
        else:
            self.context.troubles.note(KEEPING, what)

    def _published(self, t: int) -> None:
        self.long_poll.published()
        self.run.versions.cut_off_oldest()
        for tau, metrics in self.context.reports.due(t):
            self.keeper.reported(tau, metrics, self.context.disk_pool)

    # --- the end of the run ------------------------------------------------------------------------------------------

    def _over(self, reason: str) -> None:
        """The run is finished, or the server has failed."""
        self.long_poll.finish()
        if self.run.driver.failure is not None:
            self.failure = reason
            self.stopped.set()
            return
        self.context.finished = True
        for tau, metrics in self.context.reports.finish():
            self.keeper.reported(tau, metrics, self.context.disk_pool)
        self._closing = self.loop.create_task(self._finish())

    async def _finish(self) -> None:
        """Wait for the last evaluation, write the results down, and go on answering, or not."""
        if self.evaluator is not None:
            while not await self.loop.run_in_executor(None, self.evaluator.wait, 1.0):
                pass
        while not self.stopped.is_set():
            try:
                await self.context.off_loop(self._write_results)
                self.context.troubles.over(RESULTS)
                break
            except (OSError, OffbeatError) as error:
                what = f"the results cannot be written; this is tried again: {error}"
                self.context.troubles.note(RESULTS, what)
                await wait_for(self.stopped, RETRY_S)
        log.info("finished: %s", self.run.coordinator.end_reason)
        if self.options.exit_when_finished:
            await self._say_goodbye()
            self.stopped.set()

    async def _say_goodbye(self) -> None:
        """Answer for a while, until all have left: whoever comes, or comes back, hears that the run is finished."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.options.limits.goodbye_s):
                while any(session.digest for session in self.context.sessions.all()):
                    await wait_for(self.context.committed, HEARD_AGAIN_S)  # one of them may have left

    def _write_results(self) -> None:
        about = {"task": self.begun.task.now, "settings": self.begun.folder.settings}
        write_results(self.options.folder, self.run, self.context.metrics.staleness(), about)

    # --- close -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stop cleanly: no request waits, everything is on the disk, the folder is free."""
        self.listener.close()
        self._watching.cancel()
        await asyncio.wait([self._watching])
        self.run.driver.hurry()
        self.long_poll.stop()
        self.context.say_committed()  # those who follow the events hear that they end
        await self.runner.cleanup()
        await self.loop.run_in_executor(None, self._parts.close)


def serve(options: ServeOptions, ready: Callable[[Server], Any] = lambda _: None) -> str | None:
    """Serve until a signal, a failure, or the end; `ready` is called on the event loop once workers can come.

    Why the run failed, if it did.
    """
    loop = _new_loop()
    try:
        server = Server(options, loop)
        loop.run_until_complete(_serve(server, ready))
    finally:
        loop.close()
    if server.failure:
        raise OffbeatError(server.failure)
    return server.run.coordinator.end_reason if server.run.coordinator.outcome.failed else None


async def _serve(server: Server, ready: Callable[[Server], Any]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError, RuntimeError):  # not on the main thread, whose signals we do not get
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
    except ImportError:  # asyncio's own loop does it too, more slowly
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _access(settings: AccessSettings) -> tuple[TokenBook | None, ssl.SSLContext | None]:
    if settings.folder is None:
        return None, None
    book = TokenBook(settings.folder / TOKENS)
    book.entries()  # a damaged one is refused here, not at the first request
    return book, server_context(settings.folder)


def _files_beside(limits: ServerSettings, plan: Plan) -> int:
    """Open files that are kept for others than connections; where `uploads_max` is not set, half of them at most."""
    beside = FILES_MIN + FILES_PER_UPLOAD * limits.uploads_at_once(plan.in_flight_max) + plan.queue_max
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if limits.uploads_max is not None or hard == resource.RLIM_INFINITY:
        return beside
    return min(beside, max(FILES_MIN, hard // 2))


def _raise_file_limit(wanted: int, beside: int) -> int:
    """Every connection is an open file: raise the limit, and answer how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted + beside if hard == resource.RLIM_INFINITY else min(hard, wanted + beside)
    if soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - beside))
