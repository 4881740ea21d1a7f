"""Owns `offbeat demo`: a server and six workers on this machine; one worker is killed, and one joins late.

Rules kept here:
- Nothing is simulated: the processes are those that `offbeat serve` and `offbeat work` start, and they speak HTTP.
- Every process that was started is ended, however the demo ends.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from offbeat.cli.options import needs_extra, writing_to
from offbeat.cli.progress import plain_table
from offbeat.cli.remote import call
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision
from offbeat.storage.run_folder import LEDGER, SUMMARY

AT_LEAST_S = (0.2, 0.3, 0.45, 0.7, 1.0, 1.5)
"""Seconds that a task takes at least on each device: the slowest is over seven times as slow as the fastest."""
KILLED, LATE = 4, 5
LATE_AT, KILLED_AT = 25, 50
"""Epochs from which on the late worker is started, and the other worker is killed during a training."""
TARGET = 0.95
LOOK_S = 0.2
START_S, RUN_S, END_S = 60.0, 120.0, 20.0


@dataclass
class DemoProcesses:
    folder: Path
    server: "subprocess.Popen[bytes]"
    url: str
    workers: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)
    killed_at: int | None = None

    def start_worker(self, device: int) -> None:
        at_least = str(AT_LEAST_S[device])
        options = ("--server", self.url, "--device", str(device), "--name", f"device-{device}", "--threads", "1")
        folder = ("--dir", str(self.folder / f"worker-{device}"))
        self.workers[device] = _offbeat(
            self.folder / f"worker-{device}.log", "work", "digits", *options, *folder, "--at-least-s", at_least
        )


def demo(folder: Path, *, as_json: bool) -> None:
    with needs_extra("demo"):
        for package in ("aiohttp", "torch", "sklearn"):
            import_module(package)
    _emptied(folder)
    begun = time.monotonic()
    click.echo(
        f"Six devices share 1,437 images of handwritten digits; a task takes {AT_LEAST_S[0]} s on the fastest and "
        f"{AT_LEAST_S[-1]} s on the slowest.\nOne worker is killed on the way, one joins late; "
        f"training ends at {TARGET:.0%} test accuracy."
    )
    with _processes(folder) as started:
        click.echo(f"Watch it: {started.url}")
        _train(started)
        _wait_for_exits(started)
    facts = _facts(folder, started, time.monotonic() - begun)
    _print_results(facts)
    if as_json:
        click.echo(json.dumps({name: value for name, value in facts.items() if name != "devices"}))


def _emptied(folder: Path) -> None:
    """Remove the files of an earlier demo; a folder with other files is refused."""
    with writing_to(folder):
        if folder.exists() and any(folder.iterdir()):
            if not (folder / "run" / "settings.json").is_file():
                raise InvalidValue(f"{folder} holds other files; give a new or an empty folder with --dir")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)


# --- processes -------------------------------------------------------------------------------------------------------


def _offbeat(log: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    with log.open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "offbeat", *arguments], stdout=out, stderr=out)  # noqa: S603 (our own)


@contextmanager
def _processes(folder: Path) -> Iterator[DemoProcesses]:
    run = folder / "run"
    server = _offbeat(
        folder / "server.log",
        *("serve", "digits", "--dir", str(run), "--port", "0", "--devices", str(len(AT_LEAST_S))),
        *("--local-passes", "1", "--target", f"accuracy>={TARGET}", "--evaluate-every", "5", "--epochs", "2000"),
        *("--lease-s", "6", "--keep-updates", "all", "--exit-when-finished"),
    )
    started = DemoProcesses(folder, server, "")
    try:
        started.url = _url(server, run / "server.json", folder / "server.log")
        yield started
    finally:
        _end([*started.workers.values(), server])


def _url(server: "subprocess.Popen[bytes]", where: Path, log: Path) -> str:
    until = time.monotonic() + START_S
    while not where.is_file():
        if server.poll() is not None or time.monotonic() > until:
            raise OffbeatError(f"the server did not start: {log.read_text().strip()[-500:]}")
        with suppress(subprocess.TimeoutExpired):
            server.wait(LOOK_S)
    return str(read_json(where)["url"])


def _end(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# --- the course of the demo -------------------------------------------------------------------------------------------


def _train(started: DemoProcesses) -> None:
    for device in range(len(AT_LEAST_S)):
        if device != LATE:
            started.start_worker(device)
    console = Console(stderr=True)
    until = time.monotonic() + RUN_S
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while started.server.poll() is None and time.monotonic() < until:
            with suppress(OffbeatError):  # the server does not answer yet, or no more
                status = call(started.url, "GET", "/v1/status", None, None)
                workers = call(started.url, "GET", "/v1/workers", None, None)["workers"]
                _intervene(started, status, workers)
                if console.is_terminal:
                    live.update(_live_table(status, workers, started), refresh=True)
                if status["finished"]:
                    return
            with suppress(subprocess.TimeoutExpired):
                started.server.wait(LOOK_S)


def _intervene(started: DemoProcesses, status: dict[str, Any], workers: list[dict[str, Any]]) -> None:
    """Start the late worker, and kill the other one while it trains, when their epochs have come."""
    if status["t"] >= LATE_AT and LATE not in started.workers:
        started.start_worker(LATE)
    working = {worker["device"] for worker in workers if worker["state"] == "working"}
    if status["t"] >= KILLED_AT and started.killed_at is None and KILLED in working:
        started.workers[KILLED].kill()  # without warning, as a power cut does
        started.killed_at = status["t"]


def _live_table(status: dict[str, Any], workers: list[dict[str, Any]], started: DemoProcesses) -> Table:
    accuracy = float(status["metrics"].get("accuracy", 0.0))
    title = f"epoch {status['t']}   accuracy {accuracy:.1%}   mean staleness {status['staleness_mean']:.1f}"
    table = plain_table("device", "a task takes", "state", "model of epoch", "weight so far", left=(), title=title)
    for worker in sorted(workers, key=lambda worker: int(worker["device"])):
        device = int(worker["device"])
        killed = device == KILLED and started.killed_at is not None
        tau = "" if worker["tau"] is None else str(worker["tau"])
        state = "killed" if killed else worker["state"]
        table.add_row(str(device), f"{AT_LEAST_S[device]:g} s", state, tau, f"{worker['mass']:.1f}")
    return table


def _wait_for_exits(started: DemoProcesses) -> None:
    """Wait until the server and the workers have exited by themselves."""
    for process in (started.server, *started.workers.values()):
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    if not (started.folder / "run" / SUMMARY).is_file():
        raise OffbeatError(f"the demo did not finish in {RUN_S:g} s; look at {started.folder / 'server.log'}")


# --- afterwards ------------------------------------------------------------------------------------------------------


def _facts(folder: Path, started: DemoProcesses, wall_s: float) -> dict[str, Any]:
    summary = read_json(folder / "run" / SUMMARY)
    per_device: dict[int, list[tuple[int, float]]] = {device: [] for device in started.workers}
    with Ledger.open(folder / "run" / LEDGER, read_only=True) as ledger:
        for decision in map(as_decision, ledger.rows("decided")):
            if decision.mix is not None:
                per_device[decision.lease.device].append((decision.staleness, decision.mix.new))
        released = ledger.count("released")
    return {
        "accuracy": summary["accuracy"],
        "t": summary["t"],
        "workers": len(started.workers),
        "killed": int(started.killed_at is not None),
        "killed_at": started.killed_at,
        "released": released,
        "staleness_mean": summary["staleness_mean"],
        "wall_s": round(wall_s, 1),
        "training_s": summary["wall_s"],
        "x_sha256": summary["x_sha256"],
        "dir": str(folder / "run"),
        "devices": per_device,
    }


def _print_results(facts: dict[str, Any]) -> None:
    table = plain_table("device", "a task takes", "updates", "staleness", "alpha_t", "", left=("",))
    for device, updates in sorted(facts["devices"].items()):
        count = max(1, len(updates))
        staleness, weight = (sum(update[i] for update in updates) / count for i in (0, 1))
        word = {KILLED: f"killed at epoch {facts['killed_at']}" if facts["killed"] else "", LATE: "joined late"}
        row = (str(device), f"{AT_LEAST_S[device]:g} s", str(len(updates)), f"{staleness:.1f}", f"{weight:.2f}")
        table.add_row(*row, word.get(device, ""))
    Console(highlight=False).print(table)
    click.echo(
        f"{facts['accuracy']:.1%} test accuracy after {facts['t']} epochs, mean staleness "
        f"{facts['staleness_mean']:.1f}, {facts['wall_s']:.0f} s in all.\n"
        f"Look at it again: offbeat ui {facts['dir']}\nCheck every bit of it: offbeat verify {facts['dir']}"
    )
