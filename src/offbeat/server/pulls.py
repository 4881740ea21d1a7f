"""Owns how versions are read: from the one buffer in memory that the mixer made, in slices, never in its way.

Rules kept here:
- A version never changes, so its ETag is the run and its epoch. Under an address that names the run it may be kept for
  ever; the short address means another version when another run is served, so a kept copy must be validated.
- A slow reader holds one version and nothing else. Where too many versions are held, the readers of the oldest are cut
  off; they come back, hear that it is gone, and are leased the newest.
"""

from collections.abc import Iterator
from contextlib import suppress

from aiohttp import web

from offbeat.core.layout import Model
from offbeat.server.context import ServerContext, context_of, hello, whole
from offbeat.server.refusals import Refusal
from offbeat.server.run_results import result_average
from offbeat.server.slow_readers import write_within
from offbeat.wire import body_of

SLICE, TLS_SLICE = 1 << 22, 1 << 20
"""Bytes that are given to a connection at a time: it refers to them; with TLS it has them encrypted in memory."""
NO_HURRY_S = 3600.0
"""For a slice, where no rate is asked for."""
NAMED = ("latest", "result", "best")
AVERAGED = "average"
FOR_EVER = "public, max-age=31536000, immutable"
ASK_FIRST = "no-cache"
"""It may be kept, but not used without asking, by its ETag, whether it is still what is meant."""


def address_of(run: str, t: int) -> str:
    """The address under which a version may be kept for ever."""
    return f"/v1/runs/{run}/models/{t}"


async def pull(request: web.Request) -> web.StreamResponse:
    """A version of the run that is served now, whole or from some byte on."""
    context, text = context_of(request), request.match_info["t"]
    if text == AVERAGED:
        return await _pulled_average(request)
    t = _named(context, text) if text in NAMED else _epoch(context, text)
    return await _pulled(request, t, ASK_FIRST)


def _named(context: ServerContext, text: str) -> int:
    """The version that a word means now."""
    c, outcome = context.run.coordinator, context.run.coordinator.outcome
    if text == "best":
        if outcome.best is None:
            why = "no version has been evaluated yet" if c.plan.keep_best else "no best version is kept"
            raise Refusal("not_found", why, do="Serve the run with --keep-best METRIC, and wait for an evaluation.")
        return outcome.best.t
    if text == "result" and outcome.result_t is not None and context.run.kept.of(outcome.result_t) is not None:
        return outcome.result_t
    return c.t


async def pull_of_run(request: web.Request) -> web.StreamResponse:
    """A version of this run and of no other: it may be kept for ever."""
    context, run = context_of(request), request.match_info["run"]
    if run != context.run_id:
        do = "Ask for a task again: its lease says where its model is."
        raise Refusal("not_found", f"run {context.run_id} is served here, and not {run[:40]!r}", do=do)
    return await _pulled(request, _epoch(context, request.match_info["t"]), FOR_EVER)


async def allowed(_request: web.Request) -> web.Response:
    """For a cache in front of the server: a request that gets here may read models."""
    return web.Response(status=204)


async def _pulled_average(request: web.Request) -> web.StreamResponse:
    """The averaged model of the newest version or, once the run is over, of the one that it is about."""
    context = context_of(request)
    t, mean = result_average(context.run)
    if mean is None:
        do = "Serve the run with --average poly:P or ema:C."
        raise Refusal("not_found", "no averaged model is kept", do=do)
    headers = _headers(f"{context.run_id}-{t}-average", t, ASK_FIRST)
    unchanged = _unchanged(request, headers)
    return await _send(request, mean, headers) if unchanged is None else unchanged


def _headers(etag: str, t: int, lifetime: str) -> dict[str, str]:
    return {
        **hello(),
        "ETag": f'"{etag}"',
        "Accept-Ranges": "bytes",
        "Cache-Control": lifetime,
        "Offbeat-Epoch": str(t),
    }


def _unchanged(request: web.Request, headers: dict[str, str]) -> web.Response | None:
    """The answer to a reader that has it already."""
    known = request.headers.get("If-None-Match", "")
    return web.Response(status=304, headers=headers) if headers["ETag"] in known or known == "*" else None


async def _pulled(request: web.Request, t: int, lifetime: str) -> web.StreamResponse:
    context = context_of(request)
    headers = _headers(f"{context.run_id}-{t}", t, lifetime)
    unchanged = _unchanged(request, headers)
    if unchanged is not None:
        return unchanged
    with context.run.versions.reading(t, lambda: _cut_off(request)) as model:
        model = context.run.kept.of(t) if model is None else model
        if model is None:
            raise Refusal("gone", f"version {t} is gone; the newest is {context.run.coordinator.t}")
        return await _send(request, model, headers)


def _cut_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _epoch(context: ServerContext, text: str) -> int:
    newest, t = (
        context.run.coordinator.t,
        whole("the epoch (or latest, result, best or average, at /v1/models/latest)", text),
    )
    if t > newest:
        raise Refusal("not_found", f"there is no version {t} yet; the newest is {newest}")
    return t


async def _send(request: web.Request, model: Model, headers: dict[str, str]) -> web.StreamResponse:
    parts = [memoryview(context_of(request).run.versions.header), *body_of(model)]
    size = sum(len(part) for part in parts)
    begin, end = _range(request, size, headers["ETag"])
    is_part = (begin, end) != (0, size)
    response = web.StreamResponse(status=206 if is_part else 200, headers=headers)
    response.content_type, response.content_length = "application/octet-stream", end - begin
    if is_part:
        response.headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    limits = context_of(request).limits
    at_once = SLICE if request.transport is None or not request.transport.get_extra_info("sslcontext") else TLS_SLICE
    patience_s = limits.stall_s + (at_once / limits.upload_rate_min if limits.upload_rate_min else NO_HURRY_S)
    with suppress(ConnectionError):  # the reader went away, or was cut off
        for piece in _slices(parts, begin, end, at_once):
            await write_within(request, response, piece, patience_s)
            context_of(request).metrics.sent(len(piece))
        await response.write_eof()
    return response


def _range(request: web.Request, size: int, etag: str) -> tuple[int, int]:
    if "Range" not in request.headers or request.headers.get("If-Range", etag) != etag:
        return 0, size
    try:
        wanted = request.http_range
    except ValueError:
        return 0, size  # what cannot be understood is ignored
    begin, end, _ = wanted.indices(size)
    if begin >= end:
        raise Refusal("no_such_bytes", f"the model has {size} bytes", headers={"Content-Range": f"bytes */{size}"})
    return begin, end


def _slices(parts: list[memoryview], begin: int, end: int, at_once: int) -> Iterator[memoryview]:
    at = 0
    for part in parts:
        low, high = max(begin - at, 0), min(end - at, len(part))
        for start in range(low, high, at_once):
            yield part[start : min(start + at_once, high)]
        at += len(part)
