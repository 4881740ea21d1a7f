"""Owns a soak: real processes are killed, stalled and lied to for a while, and nothing acknowledged may be lost.

Rules kept here:
- Everything that happens to a process is drawn by `plan.py` from the seed.
- Safety first: an audit goes on all the time. Then liveness: the blows stop, every worker must have another update
  acknowledged, and every process must end when it is told to.
- The first thing that does not hold ends the soak; the folder stays.
"""

import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tests.soak import task
from tests.soak.audit import Audit
from tests.soak.plan import LEASE_S, SERVER, Blow, Deed, server_blows, worker_blows
from tests.soak.probe import Life, Probe, size_of, taken
from tests.soak.processes import Fleet, Process, asked, kill, started, wait_until

START_S, END_S, CALM_S = 120.0, 60.0, 120.0
TICK_S, SAMPLE_S, AUDIT_S = 0.02, 1.0, 1.0
ORPHAN_S = 10.0
EPOCHS = 10**9
"""More than any soak reaches: the run must not finish."""


@dataclass(frozen=True, slots=True)
class SoakSettings:
    seconds: float
    seed: int
    workers: int = 10
    liars: int = 2
    parameters: int = 100
    training_s: float = 0.25
    checkpoint_every: int = 200

    @property
    def slots(self) -> int:
        return self.workers + self.liars

    def server_options(self) -> tuple[str, ...]:
        every = ("--checkpoint-every", str(self.checkpoint_every), "--evaluate-every", "500")
        return ("--epochs", str(EPOCHS), "--lease-s", str(LEASE_S), "--devices", str(self.slots), *every)


@dataclass
class Record:
    """What was seen, with moments in seconds from the beginning."""

    blows: list[tuple[float, str, str]] = field(default_factory=list)
    """(moment, server | worker, what was done)"""
    ready_s: list[tuple[float, float]] = field(default_factory=list)
    """(moment, how long a start of the server took)"""
    samples: list[dict[str, float]] = field(default_factory=list)

    def count(self, who: str, deed: str) -> int:
        return sum(1 for _, whom, done in self.blows if (whom, done) == (who, deed))


class Soak:
    def __init__(self, folder: Path, settings: SoakSettings, tell: Callable[[str], None]) -> None:
        self.settings, self.tell = settings, tell
        text = task.text(settings.parameters, settings.training_s, settings.slots)
        self.fleet = Fleet(folder, text, *settings.server_options())
        self.audit, self.probe = Audit(folder, self.fleet.run), Probe(self.fleet.port)
        self.record, self.began = Record(), time.monotonic()
        self.struck_s = 0.0
        """How long processes were killed."""
        self.failure: list[str] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        """What is to be done at which moment: a worker comes back, a stalled one goes on."""
        self._stalled: set[int] = set()
        self._server_blow: Blow | None = None
        self._server_blows = server_blows(settings.seed)
        self._starting: tuple[float, Process] | None = None
        self._early_at: float | None = None
        """When the server that starts is killed, before it is ready."""
        self._down = False
        self._children: list[psutil.Process] = []
        self._auditing = threading.Event()

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    # --- from beginning to end ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """All of it; `failure` says in the end what did not hold."""
        auditor = threading.Thread(target=self._audit, name="audit", daemon=True)
        try:
            server = self.fleet.start_server()
            wait_until(self.fleet.up, START_S, f"the server was not ready within {START_S:g} s; see server.log")
            self._starting, self.began = (-self.now, server), time.monotonic()
            for number in range(self.settings.slots):
                self._start_slot(number)
            self.probe.start()
            auditor.start()
            self._strike()
            self.struck_s = self.now
            self._calm()
        except AssertionError as error:
            self.failure.append(str(error))
        finally:
            self.struck_s = self.struck_s or self.now
            self._auditing.set()
            self._end_all()
            if self.probe.life is not None:
                self.probe.life.over.set()
            self.probe.stop()
            auditor.join(END_S)

    def _strike(self) -> None:
        """The time in which processes are killed."""
        blows = worker_blows(self.settings.seed, self.settings.slots)
        blow, sampled, told = next(blows), 0.0, 0
        while self.now < self.settings.seconds:
            self._look()
            while blow.at_s <= self.now:
                self._hit(blow)
                blow = next(blows)
            if self.now - sampled >= SAMPLE_S:
                sampled = self.now
                self._sample()
            if int(self.now // 60) > told:
                told = int(self.now // 60)
                self.tell(self.line())
            time.sleep(TICK_S)

    def _look(self) -> None:
        """See to the server, and do what is due; raises where something does not hold."""
        assert not self.failure, self.failure[0]
        assert not self.probe.failed, f"although the server was up, {self.probe.failed[0]}"
        for due in [one for one in self._due if one[0] <= self.now]:
            self._due.remove(due)
            due[1]()
        self._see_to_server()
        for number, process in self.fleet.workers.items():
            status = process.poll()
            assert status is None or status in (0, -signal.SIGKILL, -signal.SIGTERM), (
                f"worker {number} ended by itself with status {status}; see worker-{number}.log"
            )

    def _audit(self) -> None:
        while not self._auditing.wait(AUDIT_S):
            try:
                self.audit.look()
            except AssertionError as error:
                self.failure.append(str(error))
                return
            except sqlite3.OperationalError as error:  # the server starts, and has the ledger for itself
                if "locked" not in str(error):
                    self.failure.append(f"the ledger could not be read: {error}")
                    return
            except Exception as error:
                self.failure.append(f"the audit itself failed: {error!r}")
                return

    # --- the server --------------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        self._starting = (self.now, self.fleet.start_server())

    def _see_to_server(self) -> None:
        server, blow = self.fleet.server, self._server_blow
        assert server is not None
        if self._down:
            return
        status = server.poll()
        assert status is None, f"the server ended by itself with status {status}; see server.log"
        if self._early_at is not None and self.now >= self._early_at:
            self._kill_server(Blow(self.now, Deed.KILL, SERVER, 0.0))
        elif self._starting is not None and self._early_at is None:
            self._see_it_start(*self._starting)
        elif blow is not None and self.now >= blow.at_s:
            self._kill_server(blow)

    def _see_it_start(self, since: float, server: Process) -> None:
        assert self.now - since < START_S, f"the server was not ready within {START_S:g} s; see server.log"
        if self.fleet.up():
            self._starting = None
            self.record.ready_s.append((self.now, self.now - since))
            self.probe.life = Life(server.pid)
            drawn = next(self._server_blows)
            self._server_blow = replace(drawn, at_s=self.now + drawn.at_s)

    def _kill_server(self, blow: Blow) -> None:
        server, life = self.fleet.server, self.probe.life
        assert server is not None
        if life is not None:
            life.over.set()
        self._note_children()
        kill(server)
        self.record.blows.append((self.now, "server", Deed.KILL.value))
        self._down, self._starting, self._server_blow, self._early_at = True, None, None, None
        self._later(blow.back_s, lambda: self._restart_server(blow.again_s))

    def _restart_server(self, again_s: float | None) -> None:
        self._down = False
        self._start_server()
        self._early_at = None if again_s is None else self.now + again_s

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        if seconds > 0.0:
            self._due.append((self.now + seconds, what))
        else:
            what()

    # --- the workers -------------------------------------------------------------------------------------------------

    def _start_slot(self, number: int) -> None:
        if number < self.settings.workers:
            self.fleet.start_worker(number)
            return
        own = (self.fleet.url, str(self.fleet.folder), str(number), str(self.settings.seed * 1000 + int(self.now)))
        log = self.fleet.folder / f"worker-{number}.log"
        self.fleet.workers[number] = started(log, "tests.soak.liar", *own)

    def _hit(self, blow: Blow) -> None:
        process = self.fleet.workers[blow.whom]
        if process.poll() is not None or (blow.whom in self._stalled and blow.deed is not Deed.KILL):
            return  # it is away, or stands still
        self.record.blows.append((self.now, "worker", blow.deed.value))
        match blow.deed:
            case Deed.KILL:
                self._stalled.discard(blow.whom)
                kill(process)
                self._later(blow.back_s, lambda: self._start_slot(blow.whom))
            case Deed.STALL:
                self._stalled.add(blow.whom)
                os.kill(process.pid, signal.SIGSTOP)
                self._later(blow.back_s, lambda: self._go_on(blow.whom, process))
            case Deed.LEAVE:
                process.terminate()
                self._later(blow.back_s, lambda: self._come_back(blow.whom, process))

    def _go_on(self, number: int, process: Process) -> None:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            if self.fleet.workers[number] is process:
                self._stalled.discard(number)

    def _come_back(self, number: int, left: Process, waited_s: float = 0.0) -> None:
        """Start a worker that was told to leave, once it has."""
        assert waited_s < END_S, f"worker {number} did not end within {END_S:g} s of SIGTERM"
        if left.poll() is None:
            self._later(0.5, lambda: self._come_back(number, left, waited_s + 0.5))
        elif self.fleet.workers[number] is left:
            self._start_slot(number)

    # --- measuring ---------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        life, run = self.probe.life, self.fleet.run
        found = taken(life.pid) if life is not None and not life.over.is_set() else None
        ledger = sum(file.stat().st_size for file in run.glob("ledger.sqlite*") if file.exists())
        sample = {"at_s": self.now, "acknowledged": len(self.audit.acknowledged), "applied": self.audit.applied}
        sample |= {"disk_bytes": size_of(run), "ledger_bytes": ledger}
        sample |= {"workers": sum(1 for one in self.fleet.workers.values() if one.poll() is None)}
        if found is not None:
            sample |= {"memory_bytes": found.memory_bytes, "descriptors": found.descriptors}
        self.record.samples.append(sample)

    def line(self) -> str:
        """How it stands, in one line."""
        count, newest = self.record.count, self.record.samples[-1]
        return (
            f"minute {int(self.now // 60)}: server killed {count('server', 'killed')} times, workers killed "
            f"{count('worker', 'killed')}, stalled {count('worker', 'stalled')}, left {count('worker', 'left')}; "
            f"{len(self.audit.acknowledged)} acknowledged, {self.audit.applied} applied, lies "
            f"{self.audit.lies.total()}; server {newest.get('memory_bytes', 0) / 1e6:.0f} MB, "
            f"{newest.get('descriptors', 0):.0f} descriptors, folder {newest['disk_bytes'] / 1e6:.1f} MB"
        )

    # --- the end -----------------------------------------------------------------------------------------------------

    def _calm(self) -> None:
        """The blows stop: everybody must get on, and end when told to."""
        before = self.now
        self._early_at = self._server_blow = None
        due, self._due = self._due, []
        for _, what in due:
            what()
        seen = self._lines()
        while any(lines <= seen[number] for number, lines in self._lines().items()):
            slow = [number for number, lines in self._lines().items() if lines <= seen[number]]
            assert self.now - before < CALM_S, f"workers {slow} had nothing acknowledged in {CALM_S:g} s of calm"
            self._look()
            self._early_at = self._server_blow = None
            time.sleep(TICK_S)
        self._stop_cleanly()
        self.audit.look()
        self._compare(asked("verify", str(self.fleet.run)))

    def _lines(self) -> dict[int, int]:
        """How many updates every honest worker has noted."""
        return {
            number: journal.read_bytes().count(b"\n") if (journal := self.fleet.journal(number)).exists() else 0
            for number in range(self.settings.workers)
        }

    def _stop_cleanly(self) -> None:
        self._auditing.set()
        if self.probe.life is not None:
            self.probe.life.over.set()
        for process in self.fleet.workers.values():
            process.terminate()
        for number, process in self.fleet.workers.items():
            _ended(process, f"worker {number}")
        server = self.fleet.server
        assert server is not None
        server.terminate()
        _ended(server, "the server")
        assert server.returncode == 0, f"the server ended with status {server.returncode}; see server.log"

    def _compare(self, facts: dict[str, Any]) -> None:
        replay = self.audit.replay
        assert replay is not None
        assert facts["agrees"], f"offbeat verify does not agree: {json.dumps(facts)}"
        assert facts["x_sha256"] == replay.x_sha256, "the numpy replay gives another model than the server has"
        assert facts["applied"] == len(replay.applied) == facts["t"], f"counts differ: {json.dumps(facts)}"

    def _end_all(self) -> None:
        """No process is left; one that was is told."""
        self._note_children()
        for process in (self.fleet.server, *self.fleet.workers.values()):
            if process is not None:
                kill(process)
        _, alive = psutil.wait_procs(self._children, timeout=ORPHAN_S)
        for one in alive:
            self.failure.append(f"process {one.pid}, a child of a server that was killed, did not end by itself")
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def _note_children(self) -> None:
        """Remember the processes that the server has started: they must end when it is killed."""
        with suppress(psutil.NoSuchProcess):
            if self.fleet.server is not None:
                self._children += psutil.Process(self.fleet.server.pid).children(recursive=True)
        self._children = [one for one in self._children if one.is_running()]


def _ended(process: Process, what: str) -> None:
    before = time.monotonic()
    while process.poll() is None:
        assert time.monotonic() - before < END_S, f"{what} did not end within {END_S:g} s of SIGTERM"
        time.sleep(TICK_S)
