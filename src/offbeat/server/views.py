"""Owns what can be looked at: status, workers, events, health, metrics, and the API document."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from typing import Any, TypeVar

from aiohttp import web

from offbeat.errors import MissingExtra, OffbeatError
from offbeat.protocol.coordinator import Coordinator
from offbeat.server.context import NUMBER_DIGITS_MAX, PROTOCOL, VERSION, ServerContext, context_of, hello, identity_of
from offbeat.server.descriptors import is_shortage, no_descriptors
from offbeat.server.event_feed import EventPage
from offbeat.server.refusals import Refusal, answer
from offbeat.server.slow_readers import write_within
from offbeat.storage.json_file import plain

KEEP_ALIVE_S = 15.0
API = "openapi.json"
T = TypeVar("T")


async def status(request: web.Request) -> web.Response:
    return answer(await status_of(context_of(request)))


async def status_of(service: ServerContext) -> dict[str, Any]:
    """The status as an object; while the ledger cannot be written, of the moment before."""
    run = service.run
    facts: dict[str, Any] = counts(run.coordinator) if run.driver.trouble is not None else await service.ask(counts)
    facts |= {
        **service.metrics.staleness(),
        "run": service.run_id,
        "task": service.task,
        "devices": service.devices,
        "workers": sum(1 for session in service.sessions.all() if session.digest),
        "waiting": len(service.long_poll),
        "disk_bytes": await service.off_loop(run.disk_bytes),
        "disk_bytes_max": service.limits.updates_bytes_max,
        "trouble": service.troubles.text,
        "head": run.ledger.head.hex(),
        "version": VERSION,
    }
    return dict(plain(facts))


def counts(c: Coordinator) -> dict[str, Any]:
    newest = c.evaluations[-1] if c.evaluations else None
    return {
        "t": c.t,
        "epochs": c.plan.epochs,
        "applied": c.applied,
        "gradients": c.gradients,
        "finished": c.finished,
        "reason": c.end_reason or None,
        "in_flight": len(c.leases),
        "queued": c.queued,
        "rejected": c.judge.decisions - c.applied,
        "duplicates": c.judge.duplicates,
        "quarantined": len(c.quarantined),
        "silent": len(c.silent),
        "paused": c.dispatcher.paused,
        "metrics": {} if newest is None else dict(newest.metrics),
        "metrics_t": None if newest is None else newest.t,
        "result_t": c.outcome.result_t,
        "best_t": c.outcome.best_t,
        "at_s": c.at,
    }


async def workers(request: web.Request) -> web.Response:
    service = context_of(request)
    found = await service.ask(lambda c: [_worker(c, session) for session in service.sessions.all()])
    return answer({"workers": found})


def _worker(c: Coordinator, session: Any) -> dict[str, Any]:
    lease, why = c.book.of_worker(session.worker), c.quarantined.get(session.worker)
    return {
        "worker": session.worker,
        "name": session.name,
        "device": session.device,
        "state": _state(c, session),
        "task": lease.task if lease else None,
        "tau": lease.tau if lease else None,
        "progress": session.progress if lease else None,
        "mass": c.contribution.mass.get(session.device, 0.0),
        "why": why,
    }


def _state(c: Coordinator, session: Any) -> str:
    if session.worker in c.quarantined:
        return "quarantined"
    if c.book.of_worker(session.worker):
        return "working"
    if c.book.silent_of(session.worker):
        return "silent"
    return "idle" if session.asking else "away"


async def health(request: web.Request) -> web.Response:
    service = context_of(request)
    if service.run.driver.failure is not None:
        raise Refusal("not_now", f"the server has failed: {service.run.driver.failure}", retry_after_s=5)
    state = "finished" if service.finished else "running"
    return answer({"state": state, "version": VERSION, "protocol": PROTOCOL})


async def api(_request: web.Request) -> web.Response:
    text = (resources.files("offbeat.server") / API).read_text()
    return web.Response(text=text, content_type="application/json")


# --- metrics ---------------------------------------------------------------------------------------------------------


async def metrics(request: web.Request) -> web.Response:
    service = context_of(request)
    if service.tokens is None and not service.limits.private:
        do = "Start the server with --access (see `offbeat init`), and scrape with a viewer's token."
        raise Refusal("not_allowed", "without tokens, metrics are shown on loopback only", do=do)
    facts = await status_of(service)
    try:
        exposed = service.metrics.text(facts, request.headers.get("Accept", ""))
    except MissingExtra as error:
        raise Refusal("not_installed", str(error)) from error
    return web.Response(body=exposed.body, headers={"Content-Type": exposed.content_type})


# --- events ----------------------------------------------------------------------------------------------------------


async def events(request: web.Request) -> web.StreamResponse:
    """What happens, row by row of the ledger, as it is committed."""
    service = context_of(request)
    after = _whole("Last-Event-ID", request.headers.get("Last-Event-ID"), 0)
    limit = _whole("limit", request.query.get("limit"), 1)
    with service.listeners.held(identity_of(request)):
        committed = service.committed
        if after is None:
            after = await _read(service, service.events.newest, committed)
        headers = {**hello(), "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        first = await _read(service, service.events.page, after, committed)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        with suppress(ConnectionError):  # the listener has gone
            await _follow(request, response, first, committed, limit)
    return response


async def _read(service: ServerContext, read: Callable[..., T], *arguments: Any) -> T:
    """Read the ledger off the event loop; what stands in the way of that may pass."""
    try:
        return await service.off_loop(read, *arguments)
    except OffbeatError as error:
        raise no_descriptors() if is_shortage(error) else Refusal("not_now", str(error), retry_after_s=5) from error


async def _follow(
    request: web.Request, response: web.StreamResponse, page: EventPage, committed: asyncio.Event, limit: int | None
) -> None:
    service, sent = context_of(request), 0
    while True:
        told = page.events if limit is None else page.events[: limit - sent]
        sent += len(told)
        if told:
            await write_within(request, response, b"".join(told), service.limits.stall_s)
        if service.long_poll.stopping or (limit is not None and sent >= limit):
            return
        if not page.more:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await committed.wait()
            except TimeoutError:
                await write_within(request, response, b": still here\n\n", service.limits.stall_s)
        committed = service.committed
        page = await service.off_loop(service.events.page, page.last, committed)


def _whole(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX) or int(text) < least:
        raise Refusal("bad_request", f"{name} is {text[:40]!r} but must be a whole number >= {least}")
    return int(text)
