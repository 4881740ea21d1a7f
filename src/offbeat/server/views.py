"""Owns what can be looked at: status, workers, events, health, metrics, and the API document."""

import asyncio
import json
from contextlib import closing, suppress
from importlib import resources
from typing import Any

from aiohttp import web

from offbeat.errors import MissingExtra
from offbeat.protocol.coordinator import Coordinator
from offbeat.server.context import NUMBER_DIGITS_MAX, PROTOCOL, VERSION, ServerContext, context_of, hello
from offbeat.server.refusals import Refusal, answer
from offbeat.storage.json_file import number, plain
from offbeat.storage.ledger import CHATTER, Ledger
from offbeat.storage.rows import Row

EVENTS_AT_ONCE = 500
KEEP_ALIVE_S = 15.0
API = "openapi.json"


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
        "trouble": run.driver.trouble or service.trouble,
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
    state = "quarantined" if why is not None else "working" if lease else "idle" if session.asking else "away"
    return {
        "worker": session.worker,
        "name": session.name,
        "device": session.device,
        "state": state,
        "task": lease.task if lease else None,
        "tau": lease.tau if lease else None,
        "progress": session.progress if lease else None,
        "mass": c.contribution.mass.get(session.device, 0.0),
        "why": why,
    }


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
    headers = {**hello(), "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    ledger = await service.off_loop(lambda: Ledger.open(service.run.ledger.path, read_only=True))
    with closing(ledger):
        if after is None:
            after = await service.off_loop(ledger.newest)
        await response.prepare(request)
        with suppress(ConnectionError):  # the listener has gone
            await _follow(service, ledger, response, after, limit)
    return response


async def _follow(
    service: ServerContext, ledger: Ledger, response: web.StreamResponse, after: int, limit: int | None
) -> None:
    sent = 0
    while not service.long_poll.stopping and (limit is None or sent < limit):
        committed = service.committed
        rows = await service.off_loop(lambda: list(ledger.rows(after=after, limit=EVENTS_AT_ONCE)))  # noqa: B023
        for row in rows[: None if limit is None else limit - sent]:
            after = row.sequence
            if row.kind not in CHATTER:
                sent += 1
                await response.write(_event(row))
        if not rows:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await committed.wait()
            except TimeoutError:
                await response.write(b": still here\n\n")


def _event(row: Row) -> bytes:
    facts = {name: value for name, value in row._asdict().items() if value is not None and name != "sequence"}
    facts = {name: number(value) if isinstance(value, float) else value for name, value in facts.items()}
    if row.kind == "joined" and row.detail:  # the digest of a secret stays here
        facts["detail"] = json.dumps({"name": json.loads(row.detail).get("name")})
    return f"id: {row.sequence}\nevent: {row.kind}\ndata: {answer(facts).text}\n\n".encode()


def _whole(name: str, text: str | None, least: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= NUMBER_DIGITS_MAX) or int(text) < least:
        raise Refusal("bad_request", f"{name} is {text[:40]!r} but must be a whole number >= {least}")
    return int(text)
