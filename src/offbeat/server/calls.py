"""Owns the small calls of workers: join, ask, heartbeat, hand back, leave; and the administrator's, such as readmit.

Rules kept here:
- A worker's number and session are on the disk before it hears of them; a lease likewise.
- An answer to `ask` that cannot be written hands its lease back: no lease goes to a closed connection.
"""

import asyncio
from math import isfinite
from sys import float_info
from typing import Any

from aiohttp import web

from offbeat.digests import known_digests
from offbeat.hosting.loading import OFFERED, OVERRIDES
from offbeat.protocol import messages
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Lease
from offbeat.server import claims
from offbeat.server.access import Role, digest_of
from offbeat.server.context import (
    NUMBER_DIGITS_MAX,
    PROTOCOL,
    TOKEN,
    VERSION,
    ServerContext,
    context_of,
    hello,
    json_of,
    number_in_path,
    seconds,
    session_of,
)
from offbeat.server.long_poll import News, Superseded
from offbeat.server.pulls import address_of
from offbeat.server.refusals import Refusal, answer
from offbeat.server.sessions import WorkerSession, new_secret

NAME_MAX = 100
TASK_MAX = 1000
WHY_MAX = 500
QUARANTINE_RETRY_S = 60.0
JOIN = {
    "name": (str,),
    "protocol": (int,),
    "version": (str,),
    "task": (str,),
    "device": (int, type(None)),
    "holding": (int, type(None)),
    **claims.DECLARATION,
}


# --- joining and leaving ---------------------------------------------------------------------------------------------


async def join(request: web.Request) -> web.Response:
    context = context_of(request)
    body = await json_of(request, JOIN)
    _check_protocol(body)
    name, device = _name(request, body), body.get("device")
    for field, most in (("version", NAME_MAX), ("task", TASK_MAX)):
        if len(body.get(field, "")) > most:
            raise Refusal("bad_request", f"{field} must have at most {most} letters")
    holding = body.get("holding")
    if holding is not None and not 0 <= holding < 10**NUMBER_DIGITS_MAX:
        raise Refusal("bad_request", f"holding is {holding!r:.40} but must be the number of a task")
    if device is not None and not 0 <= device < context.devices:
        raise Refusal("bad_request", f"device is {device} but must lie in 0..{context.devices - 1}")
    declaration = claims.declaration_in(context, body)
    async with context.joining.setdefault(name, asyncio.Lock()):
        secret, session = await _joined(context, name, device, holding)
    await claims.note(context, session, declaration)
    return answer(_about(context, session, secret), status=201)


def _check_protocol(body: dict[str, Any]) -> None:
    for field in ("name", "protocol"):
        if field not in body:
            raise Refusal("bad_request", f"the body needs {field}")
    if body["protocol"] != PROTOCOL:
        theirs = f"{body['protocol']} (Offbeat {body.get('version', 'unknown')!s:.40})"
        raise Refusal(
            "wrong_version",
            f"the worker speaks protocol {theirs}, this server {PROTOCOL} (Offbeat {VERSION})",
        )


def _name(request: web.Request, body: dict[str, Any]) -> str:
    """A worker's token says who it is; others say so themselves."""
    entry, name = request.get(TOKEN), str(body["name"])
    if entry is not None and entry.role is Role.WORKER:
        return str(entry.name)
    if not 1 <= len(name) <= NAME_MAX or not all("!" <= letter <= "~" for letter in name):
        raise Refusal("bad_request", f"name must have 1..{NAME_MAX} letters, digits or signs, and no spaces")
    return name


async def _joined(
    context: ServerContext, name: str, device: int | None, holding: int | None
) -> tuple[str, WorkerSession]:
    sessions = context.sessions
    if not sessions.has_room(name, context.limits.workers_max):
        raise Refusal("not_now", f"workers_max is {context.limits.workers_max}, and they have joined", retry_after_s=60)
    worker = sessions.number(name)
    if device is None:
        device = sessions.device(name, context.devices)
    secret = new_secret(worker)
    facts = (worker, device, name, digest_of(secret))
    with sessions.coming(name, device):
        silent = await _release_other(context, worker, holding)
        await context.tell(lambda at: messages.WorkerJoined(at, *facts))
        if silent is not None:
            await context.tell(lambda at: messages.HeartbeatArrived(at, silent, worker))
        return secret, sessions.take(messages.WorkerJoined(0.0, *facts))


async def _release_other(context: ServerContext, worker: int, holding: int | None) -> int | None:
    """A worker that comes back without the task that it was leased will not do it.

    The task, where it holds one that it was silent about.
    """
    lease, silent = await context.ask(lambda c: (c.book.of_worker(worker), c.book.silent_of(worker)))
    task = (lease or silent).task if lease or silent else None
    if task is not None and task != holding:
        await context.tell(lambda at: messages.LeaseReturned(at, worker, task))
    return task if silent and task == holding else None


def _about(context: ServerContext, session: WorkerSession, secret: str) -> dict[str, Any]:
    chosen = context.settings.as_dict()
    shown = (name for name in (*OFFERED, *OVERRIDES, "gamma_schedule") if name != "task_args" or chosen[name])
    return {
        "worker": session.worker,
        "session": secret,
        "device": session.device,
        "samples": session.samples,
        "run": context.run_id,
        "seed": context.settings.seed,
        "protocol": PROTOCOL,
        "version": VERSION,
        "task": context.task,
        "settings": {name: chosen[name] for name in shown},
        "layout": context.run.layout.fingerprint,
        "update_bytes_max": context.run.updates.size_max,
        "digests": list(known_digests()),
        "poll_s": context.limits.poll_s,
        "heartbeat_s": context.heartbeat_s,
        "state": "finished" if context.finished else "idle",
    }


async def leave(request: web.Request) -> web.Response:
    context = context_of(request)
    session = session_of(request, number_in_path(request, "worker"))
    await context.tell(lambda at: messages.WorkerLeft(at, session.worker))
    context.sessions.left(session.worker)
    return web.Response(status=204)


async def pause(request: web.Request) -> web.Response:
    await context_of(request).tell(messages.RunPaused)
    return web.Response(status=204)


async def resume(request: web.Request) -> web.Response:
    await context_of(request).tell(messages.RunResumed)
    return web.Response(status=204)


async def readmit(request: web.Request) -> web.Response:
    context, worker = context_of(request), _known_worker(request)
    await context.tell(lambda at: messages.WorkerReadmitted(at, worker))
    return web.Response(status=204)


async def bar(request: web.Request) -> web.Response:
    context, body = context_of(request), await json_of(request, {"why": (str,)})
    worker = _known_worker(request)
    why = str(body.get("why") or "an administrator said so")[:WHY_MAX]
    await context.tell(lambda at: messages.WorkerBarred(at, worker, why))
    return web.Response(status=204)


def _known_worker(request: web.Request) -> int:
    worker = number_in_path(request, "worker")
    if context_of(request).sessions.of(worker) is None:
        raise Refusal("not_found", f"there is no worker {worker}")
    return worker


# --- tasks -----------------------------------------------------------------------------------------------------------


async def ask(request: web.Request) -> web.StreamResponse:
    context = context_of(request)
    session = session_of(request, number_in_path(request, "worker"))
    claims.warn_of_unknown_base(context, session)
    session.asking = True
    try:
        news = await context.long_poll.wait(session.worker, _patience(request, context.limits.poll_s))
    finally:
        session.asking = False
    response = answer(_said(context, news), headers=hello())
    try:
        await response.prepare(request)
        await response.write_eof()
    except (ConnectionError, asyncio.CancelledError):
        if isinstance(news, messages.SendTask):
            context.long_poll.hand_back(news.lease)
        raise
    return response


def _patience(request: web.Request, longest: float) -> float:
    text = request.query.get("wait_s")
    return longest if text is None else min(seconds("wait_s", text, float_info.max), longest)


def _said(context: ServerContext, news: News) -> dict[str, Any]:
    match news:
        case messages.SendTask():
            return {"state": "working", "lease": _lease(context, news.lease)}
        case messages.TellFinished():
            return {"state": "finished", "reason": context.run.coordinator.end_reason}
        case messages.TellQuarantined():
            raise Refusal("quarantined", f"this worker is quarantined: {news.why}", retry_after_s=QUARANTINE_RETRY_S)
        case Superseded():
            raise Refusal("superseded", "a newer request of the same worker waits for a task")
    return {"state": "idle"}


def _lease(context: ServerContext, lease: Lease) -> dict[str, Any]:
    lease_s = context.run.coordinator.plan.lease_s
    return {
        "task": lease.task,
        "device": lease.device,
        "number": lease.number,
        "tau": lease.tau,
        "seed": context.settings.seed,
        "local_iterations": lease.local_iterations,
        "gamma": lease.gamma,
        "lease_s": lease_s if isfinite(lease_s) else None,
        "model": address_of(context.run_id, lease.tau),
    }


async def heartbeat(request: web.Request) -> web.Response:
    context, task = context_of(request), number_in_path(request, "task")
    session = session_of(request)
    body = await json_of(request, {"progress": (int, float, type(None))})
    progress = body.get("progress")
    if progress is not None and not 0 <= progress <= 1:
        raise Refusal("bad_request", f"progress is {progress!r} but must lie in 0..1")
    silent = await context.ask(lambda c: _is_silent(c, session.worker, task))
    commands = await context.tell(lambda at: messages.HeartbeatArrived(at, task, session.worker))
    if silent and not any(isinstance(command, messages.EndSilence) and command.resumed for command in commands):
        _, revoked = await context.ask(lambda c: c.book.find(task))
        why = "was given to another worker while this one was silent"
        raise Refusal("revoked" if revoked else "released", f"the place of task {task} {why}")
    session.progress = progress
    lease_s = context.run.coordinator.plan.lease_s
    return answer({"lease_s": lease_s if isfinite(lease_s) else None})


def _is_silent(c: Coordinator, worker: int, task: int) -> bool:
    """Is this the lease of a worker that was silent? One that is over, or another worker's, is refused."""
    lease, revoked = c.book.find(task)
    if lease is None:
        raise Refusal(
            "revoked" if c.end_reason else "released", f"task {task} is not leased; it may have been answered"
        )
    if lease.worker != worker:
        raise Refusal("not_yours", f"task {task} was leased to another worker")
    if task not in c.leases and task not in c.silent:
        raise Refusal("revoked" if revoked else "released", f"the lease of task {task} is over")
    return task in c.silent


async def hand_back(request: web.Request) -> web.Response:
    context, task = context_of(request), number_in_path(request, "task")
    session = session_of(request)
    await context.tell(lambda at: messages.LeaseReturned(at, session.worker, task))
    return web.Response(status=204)
