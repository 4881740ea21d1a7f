"""Owns the benchmark of large fleets: memory and waiting times of a server with a thousand to ten thousand workers.

    python -m benchmarks.crowd [--workers 1000 --workers 10000] [--seconds 20] [--json FILE] [--picture FILE]

All workers join, then they ask for tasks, and they stay connected all the time. A fifth of them have a task at any
moment: such a worker pulls the model, pushes it back as its update, and asks again; the others wait. They are
connections of one process, on the machine that the server runs on, so the two share its cores. The window begins when
as many updates were acknowledged as there are tasks at a time; what ends in it counts.
"""

import asyncio
import hashlib
import json
import resource
import shutil
import tempfile
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any, NamedTuple

import click

from benchmarks.idle import AT_A_TIME, FILES_BESIDE, Crowd, Line, RefusedByServer, files_allowed
from benchmarks.process_tree import cpu_s, memory
from benchmarks.served import Served, serving
from offbeat.errors import OffbeatError

SIZES = (1_000, 2_000, 5_000, 10_000)
FLOATS = 2_500
"""Parameters of the model: ten kilobytes."""
BUSY = 5
"""One worker in so many has a task."""
POLL_S, JOIN_S, SETTLE_S, LOOK_S = 120, 240.0, 60.0, 0.2
MB = 1e6
GONE = 410


class FleetMeasured(NamedTuple):
    workers: int
    busy: int
    updates_per_s: float
    pull_p50_ms: float
    pull_p99_ms: float
    push_p50_ms: float
    push_p99_ms: float
    server_ms: float
    """Processor time of the server per update."""
    memory_mb: float
    held: int
    """Workers that were still connected at the end."""
    join_s: float
    """Until the last one had joined."""
    gone_per_update: float
    """Tasks that were handed back, since their version was no longer in memory when it was pulled."""


class Laps:
    """Waiting times of the updates that were acknowledged in the window that is measured."""

    def __init__(self) -> None:
        self.open, self.acknowledged, self.gone = False, 0, 0
        """Is it open now; how many there were since the start; and pulls in the window that came too late."""
        self.pulls: list[float] = []
        self.pushes: list[float] = []


async def _work(line: Line, joined: dict[str, Any], asked: dict[str, Any], laps: Laps) -> None:
    """Live as a worker that has asked for its first task, until the connection is cut."""
    session, answer = f"Offbeat-Session: {joined['session']}\r\n", asked
    while True:
        if answer.get("state") == "working":
            lease, begun = answer["lease"], perf_counter()
            try:
                model = await line.request("GET", lease["model"], session)
            except RefusedByServer as refused:
                if refused.status != GONE:
                    raise
                laps.gone += laps.open
                await line.request("DELETE", f"/v1/tasks/{lease['task']}", session)
                answer = json.loads(await line.request("POST", f"/v1/workers/{joined['worker']}/ask", session))
                continue
            pulled = perf_counter()
            head = (
                f"{session}Content-Type: application/octet-stream\r\nOffbeat-Samples: 1\r\nOffbeat-Gradients: 1\r\n"
                f"Offbeat-Digest: {hashlib.sha256(model).hexdigest()}\r\n"
            )
            ready = perf_counter()
            await line.request("PUT", f"/v1/tasks/{lease['task']}/update", head, model)
            laps.acknowledged += 1
            if laps.open:
                laps.pulls.append(pulled - begun)
                laps.pushes.append(perf_counter() - ready)
        answer = json.loads(await line.request("POST", f"/v1/workers/{joined['worker']}/ask", session))


async def _measured(served: Served, workers: int, seconds: float) -> FleetMeasured:
    crowd, laps, alive = Crowd(served.url), Laps(), list[asyncio.Task[None]]()
    gate, all_there = asyncio.Semaphore(AT_A_TIME), asyncio.Event()

    async def live(number: int) -> None:
        async with gate:
            line, joined = await crowd.joined(number)
        await all_there.wait()
        asked = json.loads(
            await line.request(
                "POST", f"/v1/workers/{joined['worker']}/ask", f"Offbeat-Session: {joined['session']}\r\n"
            )
        )
        await _work(line, joined, asked, laps)

    try:
        alive += [asyncio.create_task(live(number)) for number in range(workers)]
        begun = perf_counter()
        while len(crowd.lines) < workers:
            await asyncio.sleep(LOOK_S)
            _raise_first(alive)
            if perf_counter() - begun > JOIN_S:
                raise OffbeatError(f"only {len(crowd.lines)} of {workers} workers joined within {JOIN_S:g} s")
        join_s = perf_counter() - begun
        all_there.set()
        await _settled(laps, workers // BUSY)
        used, first = cpu_s(served.process.pid), perf_counter()
        laps.open = True
        await asyncio.sleep(seconds)
        laps.open = False
        took, used = perf_counter() - first, cpu_s(served.process.pid) - used
        _raise_first(alive)
        pulls, pushes, count = _percentiles(laps.pulls), _percentiles(laps.pushes), len(laps.pushes)
        held = sum(not task.done() for task in alive)
        each, grown = max(count, 1), memory(served.process.pid).own / MB
        waits, cost = (*pulls, *pushes), used / each * 1e3
        return FleetMeasured(
            *(workers, workers // BUSY, count / took, *waits, cost, grown, held, join_s, laps.gone / each)
        )
    finally:
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
        crowd.disconnect()


async def _settled(laps: Laps, updates: int) -> None:
    """Wait until so many were acknowledged, or for a minute."""
    begun = perf_counter()
    while laps.acknowledged < updates and perf_counter() - begun < SETTLE_S:
        await asyncio.sleep(LOOK_S)


def _raise_first(alive: list[asyncio.Task[None]]) -> None:
    for task in alive:
        if task.done() and (error := task.exception()) is not None:
            raise OffbeatError(f"a worker failed: {error!r}") from error


def _percentiles(seconds: list[float]) -> tuple[float, float]:
    cuts = quantiles(seconds, n=100) if len(seconds) > 1 else [0.0] * 99
    return cuts[49] * 1e3, cuts[98] * 1e3


def measure(workers: int, seconds: float) -> FleetMeasured:
    place = Path(tempfile.mkdtemp())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < workers + FILES_BESIDE:
        raise OffbeatError(f"this system allows {hard} open files, {workers + FILES_BESIDE} are needed (ulimit -Hn)")
    busy = str(workers // BUSY)
    alone = ("--connections-share", "1", "--uploads-share", "1")  # all of them come from one address
    options = ("--devices", str(workers), "--in-flight-max", busy, *alone, "--poll-s", str(POLL_S))
    try:
        with files_allowed(workers + FILES_BESIDE), serving(place, FLOATS, *options, devices=workers) as served:
            return asyncio.run(_measured(served, workers, seconds))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def draw(found: list[FleetMeasured], path: Path) -> None:
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(9, 3.4), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    workers = [one.workers for one in found]
    left.plot(workers, [one.memory_mb for one in found], "o-")
    left.set(xlabel="workers", ylabel="memory of the server, MB", ylim=(0, None), xlim=(0, None))
    for name in ("pull_p50_ms", "pull_p99_ms", "push_p50_ms", "push_p99_ms"):
        what, cut, _ = name.split("_")
        right.plot(workers, [getattr(one, name) for one in found], "o-", label=f"{what}, {cut}")
    right.set(xlabel="workers", ylabel="ms", ylim=(0, None), xlim=(0, None))
    right.legend(frameon=False)
    figure.savefig(path)


@click.command()
@click.option("--workers", type=click.IntRange(BUSY), multiple=True, default=SIZES, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="Length of the window.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures to a file.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw them to a file.")
def main(workers: tuple[int, ...], seconds: float, path: Path | None, picture: Path | None) -> None:
    """Measure fleets of these sizes."""
    found = []
    click.echo(
        "workers  busy  updates/s  pull p50  p99  push p50  p99 ms  server ms/update  memory MB  held  joined s  gone"
    )
    for count in workers:
        one = measure(count, seconds)
        found.append(one)
        click.echo(
            f"{one.workers:7,} {one.busy:5,} {one.updates_per_s:10.1f} {one.pull_p50_ms:9.0f} {one.pull_p99_ms:4.0f}"
            f" {one.push_p50_ms:9.0f} {one.push_p99_ms:7.0f} {one.server_ms:17.2f} {one.memory_mb:10.0f} {one.held:5,}"
            f" {one.join_s:9.1f} {one.gone_per_update:5.2f}"
        )
    if path is not None:
        path.write_text(json.dumps([one._asdict() for one in found], indent=2))
    if picture is not None:
        draw(found, picture)


if __name__ == "__main__":
    main()
