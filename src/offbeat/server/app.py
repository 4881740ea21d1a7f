"""Owns the HTTP application: which path leads where, who may go there, and that every refusal looks alike.

Rules kept here:
- A request for another host, or from a page of another site, is refused before anything else is looked at.
- Access is decided next, from the token alone.
- An error in a handler becomes one JSON refusal; the log has the rest.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from offbeat.errors import InvalidValue
from offbeat.server import backup_stream, calls, claims, pulls, pushes, trouble_watch, uploads, views
from offbeat.server.access import Right, bearer
from offbeat.server.context import CONTEXT, JSON_BYTES_MAX, PROTOCOL, TOKEN, ServerContext, context_of, counted, hello
from offbeat.server.descriptors import is_known, refusal_of
from offbeat.server.http_connection import HEAD_TOO
from offbeat.server.own_names import OWN_NAMES, OwnNames
from offbeat.server.refusals import Refusal, of_http
from offbeat.server.slow_readers import has_gone

log = logging.getLogger("offbeat.server")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ApiRoute(NamedTuple):
    method: str
    path: str
    handler: Handler
    right: Right | None
    """None is open to everybody."""


ROUTES = (
    ApiRoute("POST", "/v1/workers", calls.join, Right.WORK),
    ApiRoute("GET", "/v1/workers", views.workers, Right.WATCH),
    ApiRoute("DELETE", "/v1/workers/{worker}", calls.leave, Right.WORK),
    ApiRoute("POST", "/v1/workers/{worker}/declare", claims.declare, Right.WORK),
    ApiRoute("POST", "/v1/workers/{worker}/ask", calls.ask, Right.WORK),
    ApiRoute("POST", "/v1/workers/{worker}/quarantine", calls.bar, Right.MANAGE),
    ApiRoute("POST", "/v1/workers/{worker}/readmit", calls.readmit, Right.MANAGE),
    ApiRoute("POST", "/v1/pause", calls.pause, Right.MANAGE),
    ApiRoute("POST", "/v1/resume", calls.resume, Right.MANAGE),
    ApiRoute("GET", "/v1/backup", backup_stream.send_backup, Right.MANAGE),
    ApiRoute("GET", "/v1/models/{t}", pulls.pull, Right.MODELS),
    ApiRoute("GET", "/v1/runs/{run}/models/{t}", pulls.pull_of_run, Right.MODELS),
    ApiRoute("GET", "/v1/allowed/models", pulls.allowed, Right.MODELS),
    ApiRoute("DELETE", "/v1/tasks/{task}", calls.hand_back, Right.WORK),
    ApiRoute("POST", "/v1/tasks/{task}/heartbeat", calls.heartbeat, Right.WORK),
    ApiRoute("GET", "/v1/tasks/{task}/update", pushes.offset, Right.WORK),
    ApiRoute("PUT", "/v1/tasks/{task}/update", pushes.push, Right.WORK),
    ApiRoute("GET", "/v1/status", views.status, Right.WATCH),
    ApiRoute("GET", "/v1/events", views.events, Right.WATCH),
    ApiRoute("GET", "/v1/metrics", views.metrics, Right.WATCH),
    ApiRoute("GET", "/v1/health", views.health, None),
    ApiRoute("GET", "/v1/openapi.json", views.api, None),
)
_RIGHT_OF = {route.handler: route.right for route in ROUTES}


def make_app(context: ServerContext, names: OwnNames | None = None) -> web.Application:
    app = web.Application(client_max_size=JSON_BYTES_MAX, middlewares=[refusing, admitting])
    app[CONTEXT], app[OWN_NAMES] = context, names or OwnNames.of(context.limits)
    app[uploads.UPLOADS] = uploads.Uploads(context.limits, context.run.coordinator.plan.in_flight_max)
    for route in ROUTES:
        for method in (route.method, *HEAD_TOO.get(route.method, ())):
            app.router.add_route(method, route.path, route.handler, expect_handler=expecting)
    app.router.add_get("/metrics", views.metrics, expect_handler=expecting)  # where Prometheus looks by itself
    return app


async def expecting(request: web.Request) -> None:
    """The small calls may send their body at once; a push is looked at first."""
    if request.match_info.handler is not pushes.push:
        await uploads.say_continue(request)


@web.middleware
async def refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    refusal: Refusal | None = None
    try:
        response = await handler(request)
    except Refusal as error:
        refusal = error
    except web.HTTPException as error:
        refusal = of_http(error)
    except InvalidValue as error:
        refusal = Refusal("bad_request", str(error))
    except RequestPayloadError as error:
        refusal = Refusal("bad_request", f"the body cannot be read: {error}")
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        refusal = _unexpected(request, error)
    trouble_watch.note_answer(context_of(request), refusal, pushing=request.match_info.handler is pushes.push)
    if refusal is not None:
        context_of(request).metrics.refused(refusal.error)
        response = refusal.response()
    if not response.prepared:
        response.headers.update(hello())
        unread = request.can_read_body and not request.content.at_eof()
        if unread or getattr(request.protocol, "turned_away", False):
            response.force_close()  # the body will not be read, and may not even be sent; or there is no place for it
    return response


def _unexpected(request: web.Request, error: Exception) -> Refusal:
    """What the system refused is told in words; the rest is a mistake of ours, unless the client has gone."""
    if has_gone(request, error):
        raise ConnectionResetError(str(error)) from error
    if isinstance(error, OSError):
        log.warning("%s %s failed: %s", request.method, request.path, error, exc_info=not is_known(error))
        return refusal_of("do this", error)
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return Refusal("internal", "something went wrong in the server")


@web.middleware
async def admitting(request: web.Request, handler: Handler) -> web.StreamResponse:
    request.app[OWN_NAMES].check(request)
    theirs = request.headers.get("Offbeat-Protocol", str(PROTOCOL))
    if theirs != str(PROTOCOL):
        raise Refusal("wrong_version", f"the request is of protocol {theirs[:20]!r}; this server speaks {PROTOCOL}")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Refusal("media_type", "a body must not be compressed")
    if request.headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise Refusal("bad_request", "a body comes as it is, or chunked; no other Transfer-Encoding is known")
    right, book = _RIGHT_OF.get(request.match_info.handler), context_of(request).tokens
    if right is not None and book is not None:
        token = bearer(request.headers.get("Authorization"))
        if token is None:
            raise Refusal("no_token", "this server wants a token")
        try:
            entry = book.check(token)
        except InvalidValue as error:
            trouble_watch.note_unreadable_tokens(context_of(request).troubles, book, error)
            raise Refusal("not_now", "the server cannot read its tokens", retry_after_s=5) from error
        if entry is None:
            raise Refusal("bad_token", "this token is not known, or was revoked")
        if not entry.role.may(right):
            raise Refusal("not_allowed", f"a token of role {entry.role.value} may not do this")
        request[TOKEN] = entry
    with counted(request):
        return await handler(request)
