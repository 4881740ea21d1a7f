"""Owns what the handlers of the HTTP API share: the run, its workers, the limits; and how a request is read."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import version
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from aiohttp import web

from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Command
from offbeat.server.access import Role, TokenBook, TokenEntry
from offbeat.server.asked_work import AskedWork
from offbeat.server.body_receiver import UploadMemory
from offbeat.server.client_connection import ClientConnection
from offbeat.server.driver import Happened
from offbeat.server.event_feed import EventFeed
from offbeat.server.folder import Begun, heartbeat_s_of
from offbeat.server.listener import address_of
from offbeat.server.long_poll import LongPoll, answered, done
from offbeat.server.metrics import Metrics
from offbeat.server.places import Places, identity_of_address, identity_of_token
from offbeat.server.push_answers import PushAnswers
from offbeat.server.refusals import Refusal
from offbeat.server.reports import Reports
from offbeat.server.request_body import json_in, read_body
from offbeat.server.served_run import ServedRun
from offbeat.server.sessions import WorkerSession, WorkerSessions
from offbeat.server.settings import ServerSettings
from offbeat.settings import Settings

VERSION = version("offbeat")
PROTOCOL = 1
"""The version of the API; a worker of another one is refused."""
JSON_BYTES_MAX = 64 << 10
SECONDS_MAX = 1e9
NUMBER_DIGITS_MAX = 15
T = TypeVar("T")


class ServerContext:
    def __init__(
        self,
        run: ServedRun,
        begun: Begun,
        long_poll: LongPoll,
        sessions: WorkerSessions,
        tokens: TokenBook | None,
        metrics: Metrics,
        limits: ServerSettings,
        settings: Settings,
    ) -> None:
        self.run, self.long_poll, self.sessions, self.tokens = run, long_poll, sessions, tokens
        self.metrics, self.limits, self.settings = metrics, limits, settings
        self.task, self.about = begun.task.now, begun.about
        """What the task is called, with the digest of its file; and what it says about itself."""
        self.run_id, self.devices = begun.run_id, begun.method.devices
        self.metrics_known = bool(begun.about.metrics)
        """Does the server evaluate? Else the workers' reports are gathered."""
        self.asked = AskedWork.of(begun.about, settings, limits.gradients_max)
        self.reports = Reports(begun.method.plan.evaluate_every)
        self.heartbeat_s = heartbeat_s_of(begun.method.plan)
        self.committed = asyncio.Event()
        self.joining: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Two processes under one name join one after the other."""
        self.disk_pool = ThreadPoolExecutor(8, "disk")
        self.upload_memory = UploadMemory(run.updates.size)
        self.finished = run.coordinator.finished
        self.troubles = run.troubles
        """What an administrator should look at, until it is over."""
        self.push_answers = PushAnswers(run.troubles)
        self.events = EventFeed(run.ledger.path)
        self.listeners = Places("listeners to events", limits.listeners_max, limits.listeners_share)
        self.forwarded = Places("requests under way", limits.connections_max, limits.connections_share)
        """Requests that a proxy forwards, by the client that they come from."""
        self.backing_up = asyncio.Lock()

    async def tell(self, happened: Happened) -> list[Command]:
        """Tell the driver what happened; answered when it is on the disk."""
        return await answered(lambda: self.run.driver.tell(happened))

    async def ask(self, question: Callable[[Coordinator], Any]) -> Any:
        """Look at the coordinator between two events; answered when what it shows is on the disk."""
        return await answered(lambda: self.run.driver.ask(question))

    async def off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what blocks (hashing, writing, fsync) on another thread.

        A caller that is cancelled meanwhile waits until it is done: two threads never write one file.
        """
        work = self.disk_pool.submit(function, *arguments)
        try:
            await done(work)
        except asyncio.CancelledError:
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await done(work)
            raise
        return work.result()

    def say_committed(self) -> None:
        """Rows were added to the ledger: wake those who follow it."""
        self.committed.set()
        self.committed = asyncio.Event()


CONTEXT = web.AppKey("context", ServerContext)
TOKEN = web.RequestKey("token", TokenEntry)
"""Whose token came with a request, where tokens are asked for."""


def context_of(request: web.Request) -> ServerContext:
    return request.app[CONTEXT]


def identity_of(request: web.Request) -> str:
    """Whose request it is, for limits of what one client may take: its token's or, without one, its address'."""
    entry = request.get(TOKEN)
    if entry is not None:
        return identity_of_token(entry.name)
    if isinstance(request.protocol, ClientConnection) and request.protocol.identity is not None:
        return request.protocol.identity
    return identity_of_address(address_of(request, behind_proxy=context_of(request).limits.behind_proxy))


def counted(request: web.Request) -> AbstractContextManager[None]:
    """While a request is answered, its connection is this client's; where a proxy forwards it, the request itself."""
    connection = request.protocol
    if isinstance(connection, ClientConnection):
        if connection.identity is None:
            return context_of(request).forwarded.held(identity_of(request))
        if TOKEN in request:
            connection.belongs_to(identity_of(request))
    return nullcontext()


# --- reading requests ------------------------------------------------------------------------------------------------


def session_of(request: web.Request, worker: int | None = None) -> WorkerSession:
    """The worker that sends this, known by its secret."""
    secret = request.headers.get("Offbeat-Session", "")
    context = context_of(request)
    found = context.sessions.find(secret)
    if found is None and context.sessions.named_in(secret) is not None:  # genuine or not: only the refusal differs
        raise Refusal("replaced", "another process has joined under the name of this worker")
    if found is None:
        raise Refusal("unknown_session", "this session is not known")
    if worker is not None and worker != found.worker:
        raise Refusal("not_yours", f"this session is that of worker {found.worker}, not of worker {worker}")
    entry = request.get(TOKEN)
    if entry is not None and entry.role is Role.WORKER and entry.name != found.name:
        raise Refusal("not_yours", f"this session is that of {found.name}, and the token that of {entry.name}")
    return found


def number_in_path(request: web.Request, name: str) -> int:
    return whole(name, request.match_info[name])


def number_in_head(request: web.Request, name: str, least: int, default: int | None = None) -> int:
    text = request.headers.get(name)
    return default if text is None and default is not None else whole(f"the header {name}", text, least)


def whole(name: str, text: str | None, least: int = 0) -> int:
    digits = text if text and text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX else "-1"
    if int(digits) < least:
        raise Refusal("bad_request", f"{name} is {text!r:.60} but must be a whole number >= {least}")
    return int(digits)


def seconds(name: str, text: str, most: float = SECONDS_MAX) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= most:
        raise Refusal("bad_request", f"{name} is {text!r:.60} but must be a number of seconds in 0..{most:g}")
    return found


async def json_of(request: web.Request, known: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The JSON object in the body, with only known names of known types; an empty body is an empty object."""
    if request.can_read_body and request.content_type != "application/json":
        raise Refusal("media_type", f"the body is {request.content_type}, not application/json")
    try:
        text = await read_body(request, context_of(request).limits.head_s)
        body = json_in(text) if text else {}
    except ValueError as error:
        raise Refusal("bad_request", f"the body is not JSON: {str(error)[:100]}") from error
    if not isinstance(body, dict):
        raise Refusal("bad_request", "the body must be a JSON object")
    for name, value in body.items():
        kinds = known.get(name)
        if kinds is None:
            raise Refusal("bad_request", f"the body has an unknown field {name[:60]!r}; use {', '.join(known)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise Refusal("bad_request", f"{name} is {value!r:.60}; the API document says another type")
    return body


def hello() -> dict[str, str]:
    return {"Offbeat-Protocol": str(PROTOCOL), "Offbeat-Version": VERSION}
