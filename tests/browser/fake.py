"""A server with the page's own files and canned JSON twins, in a thread of the test's own process.

It keeps the policy that the real one keeps (nothing inline but styles, nothing from elsewhere), so that the page can be
tried in a browser by itself: with any numbers, with 5,000 workers, with a connection that breaks when the test says so.

By hand: python -m tests.browser.fake [ui]
"""

import asyncio
import json
import math
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from offbeat.web.asynchrony import spent_in_all
from offbeat.web.pages import HEADERS, STATIC, plotly_path

PATIENCE_S = 20.0
ADMIN, VIEWER = "ob_admin", "ob_viewer"
ALPHA = 0.6
SPENT = {"download": 0.1, "train": 0.6, "upload": 0.2}
OUTCOMES = ("applied",) * 17 + ("too_stale", "too_stale", "not_finite")

Json = Any
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# --- what is told ----------------------------------------------------------------------------------------------------


def weight(staleness: int) -> float:
    """alpha * (1 + staleness)^-0.5"""
    return float(ALPHA * (1 + staleness) ** -0.5)


class Story:
    """A run that was never run: its twins, all from one seed."""

    def __init__(
        self, workers: int = 12, updates: int = 400, *, state: str = "running", name: str = "digits-7"
    ) -> None:
        self.draw = random.Random(workers + updates)  # noqa: S311 (not for secrets)
        self.name, self.state, self.epochs = name, state, updates * 2
        self.health: dict[str, str] = {"level": "good", "sentence": "healthy: updates arrive and are mixed"}
        self.people = [self._worker(i) for i in range(workers)]
        self.updates: list[dict[str, Json]] = []
        self.t = 0
        self.at_s = 0.0
        for _ in range(updates):
            self.step()

    def _worker(self, i: int) -> dict[str, Json]:
        fast = self.draw.uniform(0.4, 6)
        names = ("kitchen-pi", "phone", "lab-gpu", "tablet", "laptop", "gateway")
        state = ("working", "working", "working", "idle", "away")[i % 5]
        return {
            "worker": i,
            "name": f"{names[i % 6]}-{i}",
            "device": i,
            "state": state,
            "tasks": 0,
            "applied": 0,
            "refused": {},
            "mass": 0.0,
            "seconds": fast,
            "last_seen_s": 0.0,
            "why": None,
            "free_s": 0.0,
        }

    def step(self) -> None:
        """One more update arrives."""
        worker = min(self.draw.sample(self.people, min(6, len(self.people))), key=lambda one: one["free_s"])
        took = worker["seconds"] * self.draw.uniform(0.7, 1.4)
        leased, arrived = worker["free_s"], worker["free_s"] + took
        waited = self.draw.expovariate(12)
        staleness = int(took * self.draw.uniform(0.3, 1) * min(len(self.people), 12) / 3)
        outcome = self.draw.choice(OUTCOMES)
        applied = outcome == "applied"
        self.t += applied
        self.at_s = max(self.at_s, arrived + waited)
        worker["free_s"], worker["last_seen_s"] = arrived + self.draw.uniform(0, 0.6), arrived
        worker["tasks"] += 1
        worker["applied"] += applied
        worker["mass"] += weight(staleness) if applied else 0
        if not applied:
            worker["refused"][outcome] = worker["refused"].get(outcome, 0) + 1
        task = len(self.updates) + 1
        self.updates.append(
            {
                "sequence": 4 * task,
                "task": task,
                "worker": worker["worker"],
                "name": worker["name"],
                "device": worker["device"],
                "tau": max(0, self.t - staleness),
                "t": self.t,
                "staleness": staleness,
                "alpha_t": weight(staleness) if applied else None,
                "outcome": outcome,
                "leased_s": leased,
                "arrived_s": arrived,
                "mixed_s": arrived + waited if applied else None,
                "samples": 80,
                "gradients": 10,
                "spent": {f"{name}_s": part * (arrived - leased) for name, part in SPENT.items()},
            }
        )

    def point(self, share: float) -> dict[str, Json]:
        """One point of the curve."""
        t = round(share * self.t)
        accuracy = 0.1 + 0.85 * (1 - math.exp(-t / 90)) + 0.01 * math.sin(t)
        metrics = {"accuracy": accuracy, "loss": 2.3 * math.exp(-t / 110) + 0.12}
        return {"t": t, "gradients": t * 10, "at_s": share * self.at_s, "metrics": metrics}

    def overview(self, _query: Mapping[str, str]) -> Json:
        applied = [update for update in self.updates if update["outcome"] == "applied"]
        rejected: dict[str, int] = {}
        for update in self.updates:
            if update["outcome"] != "applied":
                rejected[update["outcome"]] = rejected.get(update["outcome"], 0) + 1
        points = min(200, self.t)
        curve = [self.point(i / points) for i in range(points + 1)] if points else []
        rule = "fedasync(alpha=0.6, s=polynomial(0.5))"
        running = self.state == "running"
        return {
            "run": {
                "name": self.name,
                "dir": f"runs/{self.name}",
                "task": "digits",
                "rule": rule,
                "state": self.state,
                "served": True,
            },
            "health": self.health,
            "t": self.t,
            "epochs": self.epochs,
            "applied": len(applied),
            "gradients": 10 * len(applied),
            "in_flight": 7 if running else 0,
            "queued": 2 if running else 0,
            "workers": len(self.people),
            "rejected": rejected,
            "duplicates": 3,
            "updates_per_minute": 60 * len(applied) / max(self.at_s, 1),
            "eta_s": self.at_s * (self.epochs / max(self.t, 1) - 1) if running else None,
            "at_s": self.at_s,
            "staleness_mean": sum(update["staleness"] for update in applied) / max(1, len(applied)),
            "staleness_largest": max((update["staleness"] for update in applied), default=None),
            "metrics": curve[-1]["metrics"] if curve else {},
            "metrics_t": self.t if curve else None,
            "curve": curve,
            "sequence": 4 * len(self.updates),
        }

    def asynchrony(self, _query: Mapping[str, str]) -> Json:
        applied = [update for update in self.updates if update["outcome"] == "applied"]
        counts: dict[int, int] = {}
        for update in applied:
            counts[update["staleness"]] = counts.get(update["staleness"], 0) + 1
        largest = max(counts, default=0)
        latest = self.updates[-1500:]
        lines = list({update["worker"]: update["name"] for update in reversed(latest)}.items())[:60]
        keys = ("task", "worker", "leased_s", "arrived_s", "mixed_s", "staleness", "outcome", "spent")
        known = {worker for worker, _ in lines}
        tasks = [{key: update[key] for key in keys} for update in latest if update["worker"] in known]
        nothing = {"arrived_s": None, "mixed_s": None, "staleness": None, "outcome": None, "spent": None}
        opened = [worker for worker in self.people if worker["worker"] in known and worker["state"] == "working"]
        tasks += [
            {"task": 10_000 + worker["worker"], "worker": worker["worker"], "leased_s": worker["free_s"], **nothing}
            for worker in opened
            if worker["free_s"] < self.at_s
        ]
        return {
            "staleness": [{"from": i, "to": i + 1, "count": counts.get(i, 0)} for i in range(largest + 1)],
            "weights": [{"staleness": s, "alpha_t": weight(s), "count": n} for s, n in sorted(counts.items())],
            "function": [{"staleness": s, "alpha_t": weight(s)} for s in range(largest + 3)],
            "timeline": {
                "from_s": min((task["leased_s"] for task in tasks), default=0.0),
                "to_s": self.at_s,
                "workers": [{"worker": worker, "name": name} for worker, name in lines],
                "tasks": tasks,
                "spent": spent_in_all(tasks),
            },
            "in_flight": [
                {"at_s": i * self.at_s / 300, "in_flight": round(7 + 3 * math.sin(i / 9) + i % 3)}
                for i in range(301 if self.updates else 0)
            ],
        }

    def workers(self, query: Mapping[str, str]) -> Json:
        text, state = query.get("text", ""), query.get("state", "")
        found = [w for w in self.people if text in w["name"] and state in ("", w["state"])]
        sort = query.get("sort", "worker")
        found.sort(key=lambda w: sum(w[sort].values()) if sort == "refused" else w[sort])
        if query.get("order") == "desc":
            found.reverse()
        page, size = int(query.get("page", 1)), int(query.get("size", 50))
        shown = found[(page - 1) * size : page * size]
        hidden = ("free_s",)
        rows = [{key: value for key, value in worker.items() if key not in hidden} for worker in shown]
        return {"total": len(found), "page": page, "size": size, "at_s": self.at_s, "workers": rows}

    def ledger(self, query: Mapping[str, str]) -> Json:
        worker, outcome, before = query.get("worker", ""), query.get("outcome", ""), int(query.get("before", 2**53))
        size, found = int(query.get("size", 100)), []
        for update in reversed(self.updates):
            fits = worker in ("", update["name"], str(update["worker"])) and outcome in ("", update["outcome"])
            if fits and update["sequence"] < before:
                found.append(update)
            if len(found) > size:
                break
        more = len(found) > size
        return {"updates": found[:size], "next_before": found[size - 1]["sequence"] if more else None}

    def story(self, task: str) -> Json:
        if not task.isdecimal() or not 0 < int(task) <= len(self.updates):
            return None
        u = self.updates[int(task) - 1]
        who = {"worker": u["worker"], "device": u["device"], "tau": u["tau"], "deadline": u["leased_s"] + 60}
        judged = {key: u[key] for key in ("outcome", "t", "staleness", "alpha_t")}
        lines = [
            {"at_s": u["leased_s"], "kind": "leased", "facts": who},
            {"at_s": u["arrived_s"], "kind": "arrived", "facts": {"samples": 80, "gradients": 10, "finite": True}},
            {"at_s": u["arrived_s"] + 0.001, "kind": "decided", "facts": judged},
        ]
        if u["mixed_s"] is not None:
            lines.append({"at_s": u["mixed_s"], "kind": "published", "facts": {"t": u["t"]}})
        return {"task": int(task), "story": lines}


# --- the server ------------------------------------------------------------------------------------------------------


class Fake:
    """Serves one run, or a folder of runs, until it is stopped; can be started again at the same address."""

    def __init__(self, *runs: Story, ui: bool = False, tokens: bool = False) -> None:
        self.runs = {run.name: run for run in runs}
        self.ui, self.tokens = ui, tokens
        self.session: dict[str, Json] = {
            "role": None if tokens else "admin",
            "open": not tokens,
            "csrf": None,
            "ui": ui,
        }
        self.session["csrf"] = None if tokens else "csrf-1"
        self.asked: list[str] = []
        self.orders: list[tuple[str, str]] = []
        self.port = 0
        self._streams: set[asyncio.Queue[int | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def run(self) -> Story:
        """The served run, or the first."""
        return next(iter(self.runs.values()))

    def __enter__(self) -> "Fake":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self.stop()

    def start(self) -> None:
        """Listens; the second time at the same port."""
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        if not ready.wait(PATIENCE_S):
            raise TimeoutError("the fake server did not start")

    def stop(self) -> None:
        """Breaks all connections."""
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._thread = None

    def move(self) -> None:
        """An update arrives, and whoever watches is told."""
        assert self._loop is not None
        self.run.step()
        self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        for stream in self._streams:
            stream.put_nowait(len(self.run.updates))

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._guarded])
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        ready.set()
        await self._ended.wait()
        for stream in self._streams:
            stream.put_nowait(None)
        await self._runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        answer = await handler(request)
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    async def _get(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        if path == "/session.json":
            return web.json_response(self.session)
        shut = not self.session["open"] and not self.session["role"]
        if path.endswith("/events"):
            return await self._events(request)
        if not path.endswith(".json"):
            return _static("index.html")
        if shut:
            return web.json_response({"error": "no_token", "message": "log in first"}, status=401)
        told = self._twin(path, request)
        if told is None:
            return web.json_response({"error": "not_found", "message": f"there is no {path}"}, status=404)
        return web.json_response(told)

    def _twin(self, path: str, request: web.Request) -> Json:
        if self.ui and path == "/runs.json":
            return {"runs": [_listed(run) for run in self.runs.values()]}
        if self.ui and path == "/compare.json":
            return _compared([self.runs[name] for name in request.query.getall("run") if name in self.runs])
        parts = path.strip("/").split("/")
        run = self.runs.get(parts[1]) if self.ui and parts[0] == "runs" else None if self.ui else self.run
        rest = "/".join(parts[2:] if self.ui else parts)
        if run is None:
            return None
        if rest.startswith("updates/"):
            return run.story(rest.removeprefix("updates/").removesuffix(".json"))
        views = {"overview": run.overview, "asynchrony": run.asynchrony, "workers": run.workers, "updates": run.ledger}
        view = views.get(rest.removesuffix(".json"))
        return None if view is None else view(request.query)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/login":
            token = str((await request.post()).get("token", ""))
            if token not in (ADMIN, VIEWER):
                return web.json_response({"error": "bad_token", "message": "this token is not known"}, status=401)
            self.session |= {"role": "admin" if token == ADMIN else "viewer", "csrf": "csrf-2"}
            raise web.HTTPSeeOther("/")
        if request.path == "/logout":
            self.session |= {"role": None, "csrf": None}
            return web.Response()
        csrf = request.headers.get("X-CSRF-Token", "")
        if self.session["role"] != "admin" or csrf != self.session["csrf"]:
            return web.json_response({"error": "not_allowed", "message": "only an admin may do this"}, status=403)
        _, number, what = request.path.strip("/").split("/")
        self.orders.append((number, what))
        state = {"quarantine": ("quarantined", "by hand"), "readmit": ("idle", None)}[what]
        self.run.people[int(number)] |= {"state": state[0], "why": state[1]}
        return web.json_response({})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await answer.prepare(request)
        stream: asyncio.Queue[int | None] = asyncio.Queue()
        self._streams.add(stream)
        try:
            await answer.write(b"retry: 500\n\n")
            while (sequence := await stream.get()) is not None:
                told = json.dumps({"sequence": sequence, "t": self.run.t})
                await answer.write(f"id: {sequence}\nevent: moved\ndata: {told}\n\n".encode())
        finally:
            self._streams.discard(stream)
        if request.transport is not None:
            request.transport.abort()
        return answer


def _static(name: str) -> web.Response:
    where = plotly_path() if name == "plotly.min.js" else STATIC / name
    if where is None or not where.is_file():
        return web.Response(status=404)
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    return web.Response(body=where.read_bytes(), content_type=kinds[where.suffix], charset="utf-8")


def _listed(run: Story) -> Json:
    told = run.overview({})
    return {"name": run.name, "state": run.state, **{key: told["run"][key] for key in ("task", "rule")}, "t": run.t} | {
        "metrics": told["metrics"]
    }


def _compared(runs: list[Story]) -> Json:
    told = {run.name: run.overview({}) for run in runs}
    return {
        "runs": list(told),
        "settings": [
            {"name": "staleness_function", "values": {name: f"polynomial({i / 2})" for i, name in enumerate(told)}},
            {"name": "in_flight_max", "values": {name: 10 * (i + 1) for i, name in enumerate(told)}},
        ],
        "results": [
            {"name": key, "values": {name: one[key] for name, one in told.items()}}
            for key in ("t", "gradients", "at_s", "staleness_mean")
        ],
        "curves": {name: one["curve"] for name, one in told.items()},
    }


def main() -> None:
    """Serves until interrupted, with an update every half second."""
    ui = "ui" in sys.argv[1:]
    runs = [Story(name="digits-7"), Story(30, 900, name="digits-8", state="finished"), Story(5, 60, name="slow")]
    if "big" in sys.argv[1:]:
        runs = [Story(5000, 100_000, name="big")]
    with Fake(*(runs if ui else runs[:1]), ui=ui) as fake:
        print(fake.url, flush=True)  # noqa: T201 (it tells where)
        while not threading.Event().wait(0.5):
            fake.move()


if __name__ == "__main__":
    main()
