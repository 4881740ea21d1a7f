"""What this checkout costs beside an earlier one, in processor time: the two take turns on the same machine.

    python -m benchmarks.alternating --before REV [--turns 10] [--json FILE]
    python -m benchmarks.alternating --before-dir CHECKOUT

Rules kept here:
- Both run the same Python, libraries and driver. Only `offbeat.simulate`, `python -m offbeat serve` and HTTP are used,
  which every version has, so their insides may differ.
- Processor time of the process and its children, not seconds: others may use the machine meanwhile. Every measurement
  is a fresh process. A first turn is not counted: it compiles and fills caches.
- It tells and does not judge: the exit status is 0, whatever the ratios are. What cannot be measured is said.
"""

import argparse
import hashlib
import http.client
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil
from blake3 import blake3

HERE = Path(__file__).resolve().parents[1]
SIMULATED_S, START_S, ANSWER_S, LOOK_S = 120.0, 60.0, 60.0, 0.02
CLIENTS = 4
TASK = """
import numpy as np
from offbeat import Trained


class Small:
    devices = {devices}

    def initial(self, seed):
        return {{"x": np.zeros({size}, np.float32)}}

    def train(self, model, work):
        model["x"][:1] += 1
        return Trained(samples=1, gradients=1)

    def evaluate(self, model):
        return {{}}


task = Small()
"""
DRIVER = """
import json, resource, sqlite3, sys
from pathlib import Path
sys.modules["matplotlib"] = None  # no pictures are drawn of a run's folder
import offbeat

def spent():
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)

task, folder, settings = json.loads(sys.argv[1])
offbeat.simulate(task, **settings | {"epochs": 20})
before = spent()
run = offbeat.simulate(task, dir=folder, **settings)
told = {"cpu_s": spent() - before, "tasks": run.summary["applied"], "offbeat": offbeat.__file__}
if folder is not None:
    ledger = sqlite3.connect(Path(folder) / "ledger.sqlite")
    told["events"] = ledger.execute("SELECT count(*) FROM events").fetchone()[0]
print(json.dumps(told))
"""


class CannotMeasure(Exception):
    """A figure that this version does not give; the reason is said."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """One of the two versions."""

    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.path / "src")}


@dataclass(slots=True)
class Figure:
    """Something that is measured: microseconds of processor time for one of its units."""

    name: str
    measure: Callable[[Checkout, Path], float] = field(repr=False)
    before: list[float] = field(default_factory=list)
    now: list[float] = field(default_factory=list)
    trouble: str | None = None

    @property
    def ratios(self) -> list[float]:
        """Now by before, turn by turn."""
        return [now / before for now, before in zip(self.now, self.before, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"name": self.name, "before_us": self.before, "now_us": self.now}
        if self.ratios:
            found |= {"ratio": median(self.ratios), "lowest": min(self.ratios), "highest": max(self.ratios)}
        return found | {"trouble": self.trouble}


# --- simulated -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulation in a process of its own, after a short one that warms it up."""

    settings: dict[str, Any]
    per: str = "tasks"
    devices: int = 100
    kept: bool = False
    """In a folder, with its ledger?"""
    task: str | None = None
    """A built-in one; else a tiny one in numpy."""

    def __call__(self, checkout: Checkout, folder: Path) -> float:
        (folder / "small.py").write_text(TASK.format(devices=self.devices, size=8))
        asked = [self.task or "small.py", str(folder / "run") if self.kept else None, self.settings]
        told = _told([sys.executable, "-c", DRIVER, json.dumps(asked)], checkout, folder)
        if not Path(told["offbeat"]).is_relative_to(checkout.path):
            raise CannotMeasure(f"{told['offbeat']} was imported, not what is in {checkout.path}")
        return float(told["cpu_s"]) / int(told[self.per]) * 1e6


def _told(command: list[str], checkout: Checkout, folder: Path) -> dict[str, Any]:
    done = subprocess.run(  # noqa: S603 (ours)
        command, cwd=folder, env=checkout.environment, capture_output=True, text=True, timeout=SIMULATED_S, check=False
    )
    if done.returncode:
        raise CannotMeasure(done.stderr.strip().rpartition("\n")[2])
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


# --- served ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A real server, and clients that pull and push without training: what an update costs the server."""

    parameters: int
    updates: int

    def __call__(self, checkout: Checkout, folder: Path) -> float:
        with _serving(checkout, folder, self.parameters) as (server, url):
            clients = [Client(url, number) for number in range(CLIENTS)]
            _exchange(clients, 1)
            before, each = _cpu_s(server), self.updates // CLIENTS
            _exchange(clients, each)
            return (_cpu_s(server) - before) / (each * CLIENTS) * 1e6


@contextmanager
def _serving(checkout: Checkout, folder: Path, parameters: int) -> Iterator[tuple[psutil.Process, str]]:
    (folder / "small.py").write_text(TASK.format(devices=CLIENTS, size=parameters))
    command = [
        sys.executable,
        "-m",
        "offbeat",
        "serve",
        "small.py",
        "--dir",
        "run",
        "--port",
        "0",
        "--epochs",
        "1000000",
    ]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(command, cwd=folder, env=checkout.environment, stdout=log, stderr=log)  # noqa: S603
    try:
        yield psutil.Process(child.pid), _url(child, folder)
    finally:
        child.terminate()
        try:
            child.wait(START_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _url(child: "subprocess.Popen[bytes]", folder: Path) -> str:
    where, end = folder / "run" / "server.json", time.monotonic() + START_S
    while not where.exists():
        if child.poll() is not None or time.monotonic() > end:
            raise CannotMeasure((folder / "log").read_text().strip().rpartition("\n")[2])
        time.sleep(LOOK_S)
    return str(json.loads(where.read_text())["url"])


def _cpu_s(server: psutil.Process) -> float:
    """Of the server and its children, those that have ended included."""
    each = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in each))


class Client:
    """A worker that speaks HTTP and trains nothing."""

    def __init__(self, url: str, number: int) -> None:
        where = urlsplit(url)
        self.connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ANSWER_S)
        joined = json.loads(self.call("POST", "/v1/workers", json.dumps({"name": f"c{number}", "protocol": 1})))
        self.number, self.session = joined["worker"], {"Offbeat-Session": joined["session"]}
        self.digests = joined.get("digests", [])
        self.update = b""
        self.head: dict[str, str] = {}

    def call(self, method: str, path: str, body: bytes | str = b"", headers: dict[str, str] | None = None) -> bytes:
        kind = {"Content-Type": "application/json"} if isinstance(body, str) else {}
        self.connection.request(method, path, body, kind | (headers or {}))
        answer = self.connection.getresponse()
        data = answer.read()
        if answer.status >= 400:
            raise CannotMeasure(f"{method} {path}: {answer.status} {data[:200].decode(errors='replace')}")
        return data

    def work(self, updates: int) -> None:
        for _ in range(updates):
            asked = json.loads(self.call("POST", f"/v1/workers/{self.number}/ask?wait_s=20", headers=self.session))
            lease = asked["lease"]
            model = self.call("GET", lease["model"])
            self.update = self.update or self.made_of(model)
            self.call("PUT", f"/v1/tasks/{lease['task']}/update", self.update, self.head)

    def made_of(self, model: bytes) -> bytes:
        """The first model as it came, to be pushed again and again."""
        facts = {"Offbeat-Digest": self.digest_of(model), "Offbeat-Samples": "1", "Offbeat-Gradients": "1"}
        self.head = {"Content-Type": "application/octet-stream", **facts, **self.session}
        return model

    def digest_of(self, model: bytes) -> str:
        """Of the kind that a worker of the server's version would use."""
        return f"blake3:{blake3(model).hexdigest()}" if "blake3" in self.digests else hashlib.sha256(model).hexdigest()


def _exchange(clients: list[Client], updates: int) -> None:
    """All at once, each so many."""
    troubles: list[BaseException] = []

    def work(client: Client) -> None:
        try:
            client.work(updates)
        except (CannotMeasure, OSError, http.client.HTTPException, KeyError, ValueError) as error:
            troubles.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if troubles:
        raise CannotMeasure(str(troubles[0]))


# --- turns -----------------------------------------------------------------------------------------------------------


def figures() -> list[Figure]:
    plain = {"executor": "inline", "epochs": 8000, "evaluate_every": 10**6}
    fleet = {"executor": "inline", "epochs": 5000, "in_flight_max": 1000, "device_model": "lognormal:1.5"}
    digits = {"epochs": 3000, "evaluate_every": 1000}
    return [
        Figure("simulated task", Simulated(plain)),
        Figure("simulated task, in a folder", Simulated(plain, kept=True)),
        Figure("simulated task of digits", Simulated(digits, task="digits")),
        Figure("event, 20,000 devices", Simulated(fleet | {"evaluate_every": 10**6}, "events", 20_000, kept=True)),
        Figure("served update of 10 KB", Served(2_500, 400)),
        Figure("served update of 1 MB", Served(250_000, 120)),
        Figure("served update of 10 MB", Served(2_500_000, 16)),
    ]


def take_turns(measured: list[Figure], before: Checkout, now: Checkout, turns: int) -> None:
    """The first turn warms up; after it, another one goes first in every turn."""
    for turn in range(turns + 1):
        for figure in measured:
            told = f"turn {turn} of {turns}: {figure.name}" if turn else f"warming up: {figure.name}"
            print(told.ljust(79), end="\r", file=sys.stderr, flush=True)
            sides = {"before": before, "now": now} if turn % 2 else {"now": now, "before": before}
            _turn(figure, sides, counted=turn > 0)
    print(" " * 79, end="\r", file=sys.stderr)


def _turn(figure: Figure, sides: dict[str, Checkout], *, counted: bool) -> None:
    """Both sides of a figure; one that fails is not asked again."""
    if figure.trouble is not None:
        return
    found: dict[str, float] = {}
    for name, checkout in sides.items():
        try:
            with tempfile.TemporaryDirectory(prefix="alternating-") as folder:
                found[name] = figure.measure(checkout, Path(folder).resolve())
        except (CannotMeasure, OSError, subprocess.TimeoutExpired, http.client.HTTPException) as error:
            figure.trouble = f"{name}: {error}"
            return
    if counted:
        figure.before.append(found["before"])
        figure.now.append(found["now"])


def told(figure: Figure) -> str:
    """A line for people."""
    if not figure.ratios:
        return f"{figure.name:<28} not measured: {figure.trouble}"
    before, now, ratios = median(figure.before), median(figure.now), figure.ratios
    words = f" (stopped: {figure.trouble})" if figure.trouble else ""
    return (
        f"{figure.name:<28} {before:>10,.1f} {now:>10,.1f} {median(ratios):>8.3f}"
        f"   {min(ratios):.3f} to {max(ratios):.3f}{words}"
    )


# --- the checkout of before ------------------------------------------------------------------------------------------


@contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """A revision's files in a temporary folder."""
    archive = subprocess.run(["git", "archive", revision], cwd=HERE, capture_output=True, check=False)  # noqa: S603, S607
    if archive.returncode:
        raise SystemExit(archive.stderr.decode().strip())
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        with closing(tarfile.open(fileobj=io.BytesIO(archive.stdout))) as files:
            files.extractall(folder, filter="data")
        yield Path(folder).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--before", metavar="REV", help="a revision of this repository")
    which.add_argument("--before-dir", metavar="PATH", type=Path, help="a checkout that is there already")
    parser.add_argument("--turns", type=int, default=10, help="that are counted; one goes before them [default: 10]")
    parser.add_argument("--only", default="", metavar="WORD", help="measure only figures whose name has this word")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every measurement there, too")
    given = parser.parse_args()
    measured = [figure for figure in figures() if given.only in figure.name]
    with ExitStack() as stack:
        before = given.before_dir.resolve() if given.before_dir else stack.enter_context(checkout_of(given.before))
        if not (before / "src" / "offbeat").is_dir():
            parser.error(f"{before} has no src/offbeat; give a checkout of this repository")
        take_turns(measured, Checkout(before), Checkout(HERE), given.turns)
    print(f"{'microseconds of processor':<28} {'before':>10} {'now':>10} {'ratio':>8}   over {given.turns} turns")
    for figure in measured:
        print(told(figure))
    if given.json:
        results = {"before": given.before or str(given.before_dir), "turns": given.turns}
        given.json.write_text(json.dumps(results | {"figures": [figure.as_dict() for figure in measured]}, indent=1))


if __name__ == "__main__":
    main()
