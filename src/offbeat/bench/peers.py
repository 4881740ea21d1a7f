"""Owns the peers' columns: the same work on Flower and APPFL, in environments of their own, beside ours.

Rules kept here:
- The scripts lie in the repository, under benchmarks/peers, and are no part of the package.
- A peer has a time limit. One that fails or takes longer is left out, and why is said; the rest goes on.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from offbeat.bench.bars import MB
from offbeat.bench.machine import ROOT
from offbeat.bench.results import Results
from offbeat.bench.scale import Scale
from offbeat.bench.turns import Contestant, Tell, take_turns
from offbeat.errors import OffbeatError

SCRIPTS = ROOT / "benchmarks" / "peers"
INSTALL_S = 1800.0
TASKS = 400
NET_MB = 10
NAMES = {"appfl": "APPFL", "flower": "Flower"}
SIMULATIONS = {
    "APPFL, its virtual-time simulator": ("appfl", "appfl_sim.py", str(TASKS)),
    "Flower, FedAsync by hand": ("flower", "flower_sim.py", "async", str(TASKS)),
    "Flower, its own FedAvg": ("flower", "flower_sim.py", "fedavg", str(TASKS)),
}


class PeerFailed(OffbeatError):
    """A peer did not do its work; the benchmark goes on without it."""


def run(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    """What the parts that are run have peers for."""
    if not (SCRIPTS / "environments.py").is_file():
        raise OffbeatError("--peers needs the scripts in benchmarks/peers; run it from a clone of the repository")
    pythons = {peer: python for peer in NAMES if (python := _environment(results, peer, folder / "peers", tell))}
    if "sim" in results.parts:
        _simulations(results, scale, tell, pythons)
    if "net" in results.parts:
        _network(results, scale, tell, pythons, folder)


def _environment(results: Results, peer: str, folder: Path, tell: Tell) -> str | None:
    tell(f"{NAMES[peer]}: the first time, it is installed")
    try:
        return _said([sys.executable, str(SCRIPTS / "environments.py"), peer, str(folder)], INSTALL_S)
    except PeerFailed as error:
        results.skip(f"{NAMES[peer]} could not be installed: {error}")
        return None


# --- simulation ------------------------------------------------------------------------------------------------------


def _simulations(results: Results, scale: Scale, tell: Tell, pythons: dict[str, str]) -> None:
    from offbeat.bench.plain import PlainLoop
    from offbeat.tasks.digits import digits

    plain = PlainLoop(digits())
    for name, (peer, script, *arguments) in SIMULATIONS.items():
        if peer not in pythons:
            continue
        command = [pythons[peer], "-W", "ignore", str(SCRIPTS / script), *arguments]
        contestants: dict[str, Contestant] = {
            "plain": lambda: plain.rate(scale.sim_plain_tasks),
            name: partial(_figure, command, "tasks_per_s", scale.peer_s),
        }
        with _left_out(results, name):
            turns = take_turns(contestants, scale.peer_turns, tell, "peers, sim S")
            results.note_turns(f"peers, sim S, {name}, against the plain loop", "tasks/s", turns, name, "plain")


# --- network ---------------------------------------------------------------------------------------------------------


def _network(results: Results, scale: Scale, tell: Tell, pythons: dict[str, str], folder: Path) -> None:
    from offbeat.bench.served import BYTES, ours

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
        found: list[dict[str, Any]] = []
        contestants: dict[str, Contestant] = {
            "ours": partial(in_folder, of_ours),
            peer: partial(in_folder, partial(_exchange, peer, python, scale, found)),
        }
        with _left_out(results, f"{NAMES[peer]}'s network", f"net_10mb_{peer}"):
            turns = take_turns(contestants, scale.peer_turns, tell, f"peers, net, {NET_MB} MB")
            results.put_turns(f"net_10mb_{peer}", turns, "ours", peer)
            what = f"peers, net, {NET_MB} MB, {NAMES[peer]}"
            results.note(f"{what}, updates", turns.median(peer), "updates/s")
            results.note(f"{what}, server's processor time per update", 1e3 * found[-1]["server_cpu_s"], "ms")
            results.note(f"{what}, server's peak memory", found[-1]["server_peak_mb"], "MB")


def _exchange(peer: str, python: str, scale: Scale, found: list[dict[str, Any]], place: Path) -> float:
    """Updates per second; everything that was found is left in `found`."""
    place.mkdir(parents=True)
    role = ("run",) if peer == "appfl" else ()
    arguments = (python, str(NET_MB), str(scale.peer_net_s), str(place.resolve()))
    said = _said([sys.executable, str(SCRIPTS / f"{peer}_net.py"), *role, *arguments], scale.peer_s + scale.peer_net_s)
    found.append(json.loads(said))
    if not found[-1]["updates_per_s"]:
        raise PeerFailed(f"no update came in {scale.peer_net_s:g} s")
    return float(found[-1]["updates_per_s"])


# --- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def _left_out(results: Results, name: str, *keys: str) -> Iterator[None]:
    """A peer that fails is left out, with a word."""
    try:
        yield
    except PeerFailed as error:
        results.skip(f"{name}: {error}", *keys)


def _figure(command: Sequence[str], name: str, limit_s: float) -> float:
    return float(json.loads(_said(command, limit_s))[name])


def _said(command: Sequence[str], limit_s: float) -> str:
    """The last line that a program prints."""
    try:
        done = subprocess.run(  # noqa: S603 (our own scripts)
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"it took longer than {limit_s:g} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise PeerFailed((done.stderr.strip() or "it said nothing")[-300:])
    return lines[-1]
