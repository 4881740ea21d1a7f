"""Owns the comparison with peers: the same work on Flower and APPFL, in environments of their own, beside ours.

Rules kept here:
- The scripts in benchmarks/peers run in the environment of their peer, which has no Offbeat.
- A peer has a time limit. A peer that fails or takes longer is left out, with a line that says why; the rest goes on.
- Every process that a peer has started is ended with it, by its own id, and its temporary files are removed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import IO

import psutil

from benchmarks.bars import MB
from benchmarks.machine import ROOT
from benchmarks.process_tree import family
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.turns import Contestant, Tell, take_turns
from offbeat.errors import OffbeatError

SCRIPTS = ROOT / "benchmarks" / "peers"
INSTALL_S = 1800.0
SAID_MAX = 300
"""Characters of a failed peer's last line that are shown."""
TASKS, PLAIN_TASKS, WARM_TASKS = 400, 1200, 50
"""Tasks of a peer; of the plain loop, which then takes about as long; and of the plain loop before it is measured."""
NET_MB = 10
NAMES = {"appfl": "APPFL", "flower": "Flower"}
SIMULATIONS = {
    "APPFL, its virtual-time simulator": ("appfl", "appfl_sim.py", str(TASKS)),
    "Flower, FedAsync by hand": ("flower", "flower_sim.py", "async", str(TASKS)),
    "Flower, its own FedAvg": ("flower", "flower_sim.py", "fedavg", str(TASKS)),
}
AROUND = {
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_niceness": "0",
}
"""Peers send no telemetry. Ray's actors get the priority of other processes, or a busy machine would slow Flower alone,
and time to start."""


class PeerFailed(OffbeatError):
    """A peer did not do its work; the benchmark goes on without it."""


def run(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    """Measure the peers of the parts that are run."""
    pythons = {peer: python for peer in NAMES if (python := _environment(results, peer, folder / "peers", tell))}
    if "sim" in results.parts:
        _simulations(results, scale, tell, pythons)
    if "net" in results.parts:
        _network(results, scale, tell, pythons, folder)


def _environment(results: Results, peer: str, folder: Path, tell: Tell) -> str | None:
    tell(f"{NAMES[peer]}: its environment; the first time, it is installed")
    try:
        return _said([sys.executable, str(SCRIPTS / "environments.py"), peer, str(folder)], INSTALL_S)
    except PeerFailed as error:
        results.skip(f"{NAMES[peer]} could not be installed: {error}")
        return None


# --- simulation ------------------------------------------------------------------------------------------------------


def _simulations(results: Results, scale: Scale, tell: Tell, pythons: dict[str, str]) -> None:
    from benchmarks.plain import PlainLoop
    from offbeat.tasks.digits import digits

    plain = PlainLoop(digits())
    plain.rate(WARM_TASKS)  # the first tasks are slower, which would favour one peer
    for name, (peer, script, *arguments) in SIMULATIONS.items():
        if peer not in pythons:
            continue
        command = [pythons[peer], "-W", "ignore", str(SCRIPTS / script), *arguments]
        contestants: dict[str, Contestant] = {
            "plain": lambda: plain.rate(PLAIN_TASKS),
            name: partial(_tasks_per_s, command, scale.peer_s),
        }
        with _left_out(results, name):
            turns = take_turns(contestants, scale.peer_turns, tell, "peers, sim S")
            results.note_turns(f"peers, sim S, {name}, against the plain loop", "tasks/s", turns, name, "plain")


def _tasks_per_s(command: Sequence[str], limit_s: float) -> float:
    return _figures(command, limit_s, "tasks_per_s")["tasks_per_s"]


# --- network ---------------------------------------------------------------------------------------------------------


def _network(results: Results, scale: Scale, tell: Tell, pythons: dict[str, str], folder: Path) -> None:
    from benchmarks.served import BYTES, ours

    numbers = count()

    def in_folder(exchange: Callable[[Path], float]) -> float:
        place = folder / f"peers-net-{next(numbers)}"
        try:
            return exchange(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def of_ours(place: Path) -> float:
        return ours(place, NET_MB * MB // BYTES, scale.net_s).updates_per_s

    for peer, python in pythons.items():
        found: list[dict[str, float]] = []
        contestants: dict[str, Contestant] = {
            "ours": partial(in_folder, of_ours),
            peer: partial(in_folder, partial(_exchange, peer, python, scale, found)),
        }
        with _left_out(results, f"{NAMES[peer]}'s network", f"net_10mb_{peer}"):
            turns = take_turns(contestants, scale.peer_turns, tell, f"peers, net, {NET_MB} MB")
            results.put_turns(f"net_10mb_{peer}", turns, "ours", peer)
            what = f"peers, net, {NET_MB} MB, {NAMES[peer]}"
            results.note(f"{what}, updates", turns.median(peer), "updates/s")
            cpu_s, peak_mb = (median(one[name] for one in found) for name in ("server_cpu_s", "server_peak_mb"))
            results.note(f"{what}, server's processor time per update", 1e3 * cpu_s, "ms")
            results.note(f"{what}, server's peak memory", peak_mb, "MB")


def _exchange(peer: str, python: str, scale: Scale, found: list[dict[str, float]], place: Path) -> float:
    """Updates per second; all figures are added to `found`."""
    place.mkdir(parents=True)
    role = ("run",) if peer == "appfl" else ()
    arguments = (python, str(NET_MB), str(scale.peer_net_s), str(place.resolve()))
    command = [sys.executable, str(SCRIPTS / f"{peer}_net.py"), *role, *arguments]
    found.append(_figures(command, scale.peer_s + scale.peer_net_s, "updates_per_s", "server_cpu_s", "server_peak_mb"))
    if not found[-1]["updates_per_s"]:
        raise PeerFailed(f"no update came in {scale.peer_net_s:g} s")
    return found[-1]["updates_per_s"]


# --- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def _left_out(results: Results, name: str, *keys: str) -> Iterator[None]:
    """Leave out a peer that fails, and record why."""
    try:
        yield
    except PeerFailed as error:
        results.skip(f"{name}: {error}", *keys)


def _figures(command: Sequence[str], limit_s: float, *names: str) -> dict[str, float]:
    """The figures that a script prints as JSON on its last line."""
    said = _said(command, limit_s)
    try:
        found = json.loads(said)
        return {name: float(found[name]) for name in names}
    except (KeyError, TypeError, ValueError):
        raise PeerFailed(f"it printed no figure, but {said[-SAID_MAX:]}") from None


def _said(command: Sequence[str], limit_s: float) -> str:
    """The last line that a program prints."""
    with tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True) as name:
        out, errors, around = Path(name, "out"), Path(name, "errors"), {**os.environ, **AROUND, "TMPDIR": name}
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            process = _started(command, stdout, stderr, around)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"it took longer than {limit_s:g} s") from None
        finally:
            end_all(process)
        said = _lines(out)
        if process.returncode or not said:
            raise PeerFailed((_lines(errors) or ["it printed nothing"])[-1][-SAID_MAX:])
        return said[-1]


def _started(
    command: Sequence[str], stdout: IO[bytes], stderr: IO[bytes], around: dict[str, str]
) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=around)  # noqa: S603 (our own scripts)
    except OSError as error:
        raise PeerFailed(f"{command[0]} cannot be run: {error.strerror}") from error


def end_all(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all that it has started; one that has ended is left alone: its id may belong to another."""
    if process.poll() is not None:
        return
    for one in family(process.pid):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not empty."""
    return [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
