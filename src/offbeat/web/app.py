"""Owns the page's paths: which leads where, who may go there, and how a refusal looks to people and to programs.

Rules kept here:
- Every path says what right it needs. Open to all are the login form, the files of the page, and `/session.json`.
- What changes something needs the CSRF token of the session, unless it comes with a token of its own.
- Every answer carries the headers of `pages`, those of paths that do not exist included.
- No answer says where the page is: below whichever prefix a proxy puts it, it leads the way from there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.protocol.messages import RunPaused, RunResumed, WorkerBarred, WorkerReadmitted
from offbeat.server.access import Right, Role, TokenBook
from offbeat.server.descriptors import is_shortage, no_descriptors, refusal_of
from offbeat.server.http_connection import HEAD_TOO
from offbeat.server.own_names import OWN_NAMES, OwnNames
from offbeat.server.places import Places
from offbeat.server.refusals import Refusal, of_http
from offbeat.server.slow_readers import has_gone
from offbeat.web.login import PageAccess
from offbeat.web.pages import HEADERS, STATIC, Assets, refused_page, root_of, to
from offbeat.web.run_reader import RunReader
from offbeat.web.run_watch import Committed
from offbeat.web.runs import One, Runs
from offbeat.web.site import BODY_S, Act, Site

if TYPE_CHECKING:
    from offbeat.server.server import Server

API = "/v1"
BODY_BYTES_MAX = 64 << 10
BY_HAND = "an administrator said so"
WITHOUT_TOKENS = Refusal(
    "not_allowed",
    "the page is not shown here: without tokens, anyone who reaches this address could look and act",
    do="Start the server with --access (see `offbeat init`), or look on its own machine: offbeat ui DIR.",
)
log = logging.getLogger("offbeat.web")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageRoute(NamedTuple):
    method: str
    path: str
    handler: Callable[[Site, web.Request], Awaitable[web.StreamResponse]]
    right: Right | None = Right.WATCH
    """None is open to all."""
    page: bool = False
    """Is it for people? Then they are led to the form, and told in HTML what went wrong."""
    guarded: bool = False
    """Does it need the CSRF token?"""


OF_SITE = (
    PageRoute("GET", "/static/{name:.+}", Site.static, None),
    PageRoute("GET", "/session.json", Site.session, None),
    PageRoute("GET", "/login", Site.page, None, page=True),
    PageRoute("POST", "/login", Site.login, None, page=True),
    PageRoute("POST", "/logout", Site.logout, None, page=True, guarded=True),
    PageRoute("GET", "/runs.json", Site.listed),
    PageRoute("GET", "/compare", Site.page, page=True),
    PageRoute("GET", "/compare.json", Site.compare),
)
OF_RUN = (
    PageRoute("GET", "/", Site.page, page=True),
    PageRoute("GET", "/asynchrony", Site.page, page=True),
    PageRoute("GET", "/workers", Site.page, page=True),
    PageRoute("GET", "/updates", Site.page, page=True),
    PageRoute("GET", r"/updates/{task:\d+}", Site.page, page=True),
    PageRoute("GET", "/overview.json", Site.overview),
    PageRoute("GET", "/asynchrony.json", Site.asynchrony),
    PageRoute("GET", "/workers.json", Site.workers),
    PageRoute("GET", "/updates.json", Site.updates),
    PageRoute("GET", r"/updates/{task:\d+}.json", Site.story),
    PageRoute("GET", "/events", Site.events),
    PageRoute("POST", r"/workers/{worker:\d+}/{what:quarantine|readmit}", Site.step_in, Right.MANAGE, guarded=True),
    PageRoute("POST", "/{what:pause|resume}", Site.step_in, Right.MANAGE, guarded=True),
)
OF_FOLDER = (
    PageRoute("GET", "/", Site.page, page=True),
    PageRoute("GET", "/runs/{run}", Site.into, page=True),
)


def mount(
    app: web.Application,
    reading: RunReader,
    *,
    tokens: TokenBook | None = None,
    tls: bool = False,
    behind_proxy: bool = False,
    act: Act | None = None,
    committed: Committed | None = None,
    listeners: Places | None = None,
    body_s: float = BODY_S,
    static: Path = STATIC,
) -> Site:
    """Add the page of one run to an application that has not started; with `tokens`, visitors must have one.

    `act` does what an administrator wants; `committed` gives an event that is set when rows are added to the ledger.
    `listeners` are the places of those who follow events, which a server shares out to its API as well.
    """
    door = PageAccess(tokens, tls=tls, behind_proxy=behind_proxy, open_role=Role.ADMIN if act else Role.VIEWER)
    site = Site(
        *(One(reading), door, Assets(static)),
        many=False,
        act=act,
        committed=committed,
        listeners=listeners,
        body_s=body_s,
    )
    return _furnished(app, site, [("", OF_SITE), ("", OF_RUN)])


def mount_runs(app: web.Application, runs: Runs, *, static: Path = STATIC) -> Site:
    """Add the pages of a folder of runs, open to all who can connect."""
    site = Site(runs, PageAccess(None, open_role=Role.VIEWER), Assets(static), many=True)
    return _furnished(app, site, [("", OF_SITE), ("", OF_FOLDER), ("/runs/{run}", OF_RUN)])


def furnish(server: "Server") -> None:
    """Add the page to a server that has not opened yet; all that it shows comes from the run's folder."""
    if server.tokens is None and not server.options.limits.private:
        _mount_nothing(server.app, WITHOUT_TOKENS)
        return
    context = server.context

    async def act(what: str, worker: int | None) -> None:
        if worker is None:
            await context.tell(RunPaused if what == "pause" else RunResumed)
            return
        if context.sessions.of(worker) is None:
            raise Refusal("not_found", f"there is no worker {worker}", do="Look at the list of workers.")
        if what == "readmit":
            await context.tell(lambda at: WorkerReadmitted(at, worker))
        else:
            await context.tell(lambda at: WorkerBarred(at, worker, BY_HAND))

    reading = RunReader(server.options.folder, trouble=lambda: context.troubles.text)
    mount(
        server.app,
        reading,
        tokens=server.tokens,
        tls=server.tls is not None,
        behind_proxy=server.options.limits.behind_proxy,
        act=act,
        committed=lambda: context.committed,
        listeners=context.listeners,
        body_s=context.limits.head_s,
    )


def _mount_nothing(app: web.Application, refusal: Refusal) -> None:
    """Say at every path of the page why it is not there."""
    for route in (*OF_SITE, *OF_RUN):

        async def refuse(request: web.Request, page: bool = route.page) -> web.StreamResponse:
            return _said_no(request, refusal, page=page)

        for method in _methods(route):
            app.router.add_route(method, route.path, refuse)
    app.on_response_prepare.append(_add_headers)


def make_app(names: OwnNames | None = None) -> web.Application:
    """An application for the page alone; it is for this machine, unless there are other names for it."""
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_refusing])
    app[OWN_NAMES] = names or OwnNames()
    return app


def _furnished(app: web.Application, site: Site, routes: list[tuple[str, tuple[PageRoute, ...]]]) -> Site:
    for prefix, some in routes:
        for route in some:
            for method in _methods(route):
                app.router.add_route(method, prefix + route.path, _handler(site, route))
    app.on_response_prepare.append(_add_headers)
    app.on_shutdown.append(site.stop)
    app.on_cleanup.append(site.close)
    return site


def _methods(route: PageRoute) -> tuple[str, ...]:
    return (route.method, *HEAD_TOO.get(route.method, ()))


def _handler(site: Site, route: PageRoute) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            if route.right is not None:
                site.door.admit(request, route.right)
            if route.guarded:
                site.door.check_csrf(request, site.door.visitor(request))
            return await route.handler(site, request)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            if has_gone(request, error):
                raise ConnectionResetError(str(error)) from error
            return _said_no(request, _refusal(request, error), page=route.page)

    return handle


def _refusal(request: web.Request, error: Exception) -> Refusal:
    match error:
        case Refusal():
            return error
        case web.HTTPException():
            return of_http(error)
        case RequestPayloadError():
            return Refusal("bad_request", f"the body cannot be read: {error}")
        case OffbeatError() if is_shortage(error):
            return no_descriptors()
        case InvalidValue():
            return Refusal("bad_request", str(error), do="Change what is asked for.")
        case OSError():
            return refusal_of("do this", error)
        case OffbeatError():
            return Refusal("not_now", str(error), retry_after_s=5)
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return Refusal("internal", "something went wrong in the server")


def _said_no(request: web.Request, refusal: Refusal, *, page: bool) -> web.Response:
    if not page or "application/json" in request.headers.get("Accept", ""):
        return refusal.response()
    if refusal.status == 401 and request.method in ("GET", "HEAD"):
        return to(request, f"/login?next={quote(request.path_qs, safe='')}")
    return refused_page(refusal, root_of(request))


@web.middleware
async def _refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers for another host or site, for paths that do not exist, and for methods that a path does not have."""
    try:
        request.app[OWN_NAMES].check(request)
        return await handler(request)
    except Refusal as error:
        return error.response()
    except web.HTTPException as error:
        refusal = Refusal(
            of_http(error).error, f"{request.path[:100]} is not here, or not for this", do="Go to the start."
        )
        return _said_no(request, refusal, page="text/html" in request.headers.get("Accept", ""))


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    if not request.path.startswith(f"{API}/"):
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
