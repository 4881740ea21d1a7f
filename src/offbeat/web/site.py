"""Owns what stands behind the paths of `app`: pages, their JSON twins, and what a visitor can do."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web

from offbeat.errors import InvalidValue
from offbeat.server.access import Right
from offbeat.server.places import Places
from offbeat.server.refusals import Refusal, answer
from offbeat.server.request_body import json_in, read_body
from offbeat.web import asynchrony, overview, runs, update_list, workers
from offbeat.web.json_twins import NUMBER_MAX, whole
from offbeat.web.login import PageAccess
from offbeat.web.pages import PAGE, Assets, packed, root_of, sent, to
from offbeat.web.run_reader import RunReader
from offbeat.web.run_watch import LISTENERS_MAX, THREADS, Committed, PackedJson, RunWatch, follow

BODY_S = 20.0
"""Seconds for the body of a form to come."""
FIELDS_MAX = 20
Act = Callable[[str, int | None], Awaitable[None]]
"""Does what an administrator wants: "quarantine" or "readmit" with a worker's number, "pause" or "resume" with None.

It may raise `Refusal`."""


class Site:
    def __init__(
        self,
        shelf: runs.Runs | runs.One,
        door: PageAccess,
        assets: Assets,
        *,
        many: bool,
        act: Act | None = None,
        committed: Committed | None = None,
        listeners: Places | None = None,
        body_s: float = BODY_S,
    ) -> None:
        """`many`: a folder of runs, each below /runs/NAME/; else one run, at /."""
        self.listeners = Places("listeners to events", LISTENERS_MAX) if listeners is None else listeners
        self._body_s = body_s
        self.runs, self.door, self.assets, self.many = shelf, door, assets, many
        self.act, self._committed = act, committed
        self.pool = ThreadPoolExecutor(THREADS, "web")
        self._watches: OrderedDict[str, RunWatch] = OrderedDict()

    async def off_loop(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def warm(self, name: str = "") -> None:
        """Count what a run has so far: its page is on its way, and loads its script first.

        Not before somebody opens a page: a server with a long history must start at once, and has no use for it.
        """

        def count() -> None:
            reading = self.runs.get(name)
            if reading is not None:
                reading.refresh()

        self.pool.submit(count)

    async def stop(self, _: web.Application) -> None:
        for watch in self._watches.values():
            watch.stop()
            watch.reading.closing = True
        only = None if self.many else self.runs.get("")
        if only is not None:
            only.closing = True

    async def close(self, _: web.Application) -> None:
        for watch in self._watches.values():
            await watch.ended()
        await asyncio.get_running_loop().run_in_executor(None, self.pool.shutdown)

    # --- runs --------------------------------------------------------------------------------------------------------

    async def watch(self, request: web.Request) -> RunWatch:
        """The run that is asked for, and the word that it has moved."""
        name = request.match_info.get("run", "")
        reading = await self.off_loop(lambda: self.runs.get(name))
        if reading is None:
            raise Refusal("not_found", f"there is no run {name[:100]!r}", do="Look at the list of runs at /.")
        watch = self._watches.pop(name, None)
        if watch is None or (watch.reading is not reading and not watch.listeners):
            watch = RunWatch(reading, self.pool, self._committed)
        self._watches[name] = watch
        self._forget_old()
        return watch

    def _forget_old(self) -> None:
        for name, watch in list(self._watches.items()):
            if len(self._watches) > runs.READINGS_MAX and not watch.listeners:
                del self._watches[name]

    async def _twin(self, request: web.Request, key: Any, make: Callable[[RunReader], Any]) -> web.Response:
        return _json(request, await (await self.watch(request)).answer(key, make))

    # --- one run -----------------------------------------------------------------------------------------------------

    async def overview(self, request: web.Request) -> web.Response:
        return await self._twin(request, "overview", overview.overview)

    async def asynchrony(self, request: web.Request) -> web.Response:
        return await self._twin(request, "asynchrony", asynchrony.asynchrony)

    async def workers(self, request: web.Request) -> web.Response:
        wanted = workers.WorkerQuery.of(request.query)
        return await self._twin(request, wanted, lambda reading: workers.workers(reading, wanted))

    async def updates(self, request: web.Request) -> web.Response:
        wanted = update_list.UpdateQuery.of(request.query)
        return await self._twin(request, wanted, lambda reading: update_list.updates(reading, wanted))

    async def story(self, request: web.Request) -> web.Response:
        task = whole(request.match_info, "task", 0, NUMBER_MAX, 0)
        watch = await self.watch(request)
        found = await watch.answer(("story", task), lambda reading: update_list.story(reading, task))
        if b'"story":[]' in found.body:
            raise Refusal("not_found", f"no task {task} was leased so far", do="Look at the list of updates.")
        return _json(request, found)

    async def events(self, request: web.Request) -> web.StreamResponse:
        watch = await self.watch(request)
        with self.listeners.held(self.door.identity(request)):
            return await follow(request, watch, lambda: self._may_look(request))

    def _may_look(self, request: web.Request) -> bool:
        with suppress(Refusal):
            self.door.admit(request, Right.WATCH)
            return True
        return False

    # --- several runs ------------------------------------------------------------------------------------------------

    async def listed(self, request: web.Request) -> web.Response:
        return _json(request, await self.off_loop(lambda: PackedJson.of(self.runs.listed())))

    async def compare(self, request: web.Request) -> web.Response:
        names = list(dict.fromkeys(request.query.getall("run", [])))
        if len(names) > runs.COMPARED_MAX:
            raise InvalidValue(f"{len(names)} runs are asked for; compare at most {runs.COMPARED_MAX}")
        return _json(request, await self.off_loop(lambda: PackedJson.of(self._compared(names))))

    def _compared(self, names: list[str]) -> dict[str, Any]:
        parts = {}
        for name in names:
            reading = self.runs.get(name)
            if reading is None:
                raise Refusal("not_found", f"there is no run {name[:100]!r}", do="Look at the list of runs at /.")
            with reading.lock:
                reading.refresh()
                parts[name] = runs.part(reading, len(names))
        return runs.comparison(parts)

    async def into(self, request: web.Request) -> web.Response:
        return to(request, f"{request.rel_url.raw_path}/")

    # --- files -------------------------------------------------------------------------------------------------------

    async def page(self, request: web.Request) -> web.Response:
        """The one page: its script shows what the path means."""
        name = request.match_info.get("run", "")
        if name or not (self.many or request.path == "/login"):
            self.warm(name)
        return sent(await self.off_loop(lambda: self.assets.load(PAGE, root_of(request))), request)

    async def static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return sent(await self.off_loop(lambda: self.assets.load(name)), request)

    # --- who looks ---------------------------------------------------------------------------------------------------

    async def session(self, request: web.Request) -> web.Response:
        visitor = self.door.visitor(request)
        role = visitor.role.value if visitor.role else None
        return answer({"role": role, "open": self.door.tokens is None, "csrf": visitor.csrf, "ui": self.many})

    async def login(self, request: web.Request) -> web.Response:
        response = to(request, "/")
        self.door.log_in(request, await _token(request, self._body_s), response)
        return response

    async def logout(self, request: web.Request) -> web.Response:
        response = to(request, "/login")
        self.door.log_out(request, response)
        return response

    async def step_in(self, request: web.Request) -> web.Response:
        if self.act is None:
            raise Refusal("not_found", "this run is not served here", do="Use the page of its server.")
        worker = whole(request.match_info, "worker", 0, NUMBER_MAX, 0) if "worker" in request.match_info else None
        await self.act(request.match_info["what"], worker)
        watch = await self.watch(request)
        await self.off_loop(lambda: watch.reading.refresh(least_s=0.0))  # the administrator looks at the result next
        return web.Response(status=204)


def _json(request: web.Request, found: PackedJson) -> web.Response:
    return packed(request, found.body, found.packed, "application/json")


async def _token(request: web.Request, within_s: float) -> str:
    try:
        text = await read_body(request, within_s)
        if request.content_type == "application/json":
            body = json_in(text)
            token = body.get("token") if isinstance(body, dict) else None
        else:
            token = dict(parse_qsl(text.decode(), max_num_fields=FIELDS_MAX)).get("token")
    except ValueError as error:
        raise InvalidValue(
            "the body can be read neither as a form (application/x-www-form-urlencoded) nor as JSON"
        ) from error
    if not isinstance(token, str) or not token.strip():
        raise InvalidValue("the body needs a token")
    return token.strip()
