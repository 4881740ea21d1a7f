"""Owns the benchmark of a restart: how long `offbeat serve` takes to answer, and its memory, after a long run.

    python -m benchmarks.restart [--updates 1000 1000000] [--turns 3] [--dir FOLDER]

The run is begun by a real server. Its updates are then told to the real coordinator, and recorded by the real ledger, a
commit for each; nothing is trained or sent, and nothing waits for the disk. The checkpoints are those that a server
writes. Then `offbeat serve` is started on the folder, several times; each time it is stopped as an operator stops it.
"""

import argparse
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.bars import MB
from benchmarks.exchange import START_S, Process, pause, started
from benchmarks.process_tree import cpu_s, memory, refuse_elsewhere
from benchmarks.served import serving
from offbeat.core.layout import layout_from
from offbeat.errors import OffbeatError
from offbeat.hosting.task_host import TaskDescription
from offbeat.protocol import messages
from offbeat.protocol.coordinator import Coordinator
from offbeat.server.checkpointing import checkpoint_of
from offbeat.server.folder import RUN, served_method
from offbeat.server.served_fold import ServedFold
from offbeat.settings import Settings
from offbeat.storage.checkpoints import Checkpoints
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import LEDGER, SETTINGS

SIZE, WORKERS = 1000, 50
FORGOTTEN_EVERY = 50_000
"""Updates after which chatter is pruned: a server does it at every checkpoint."""
TASK_S, MIXING_S = 0.25, 0.01
"""Seconds of the run from one update to the next, and for its mixing."""
SAMPLES, GRADIENTS = 600, 12
LOOK_S = 0.01
OPTIONS = ("--evaluate-every", "10")
"""What a run without an end in epochs has: every tenth version is evaluated."""


class Start(NamedTuple):
    """One start of a server."""

    seconds: float
    """Until it answers that it is healthy."""
    cpu_s: float
    """Processor time until then, of all its processes: other work on the machine does not change it much."""
    memory: int
    """Bytes then, without mapped files."""


class ToldRun:
    """A served run whose workers are played: every event goes through the coordinator and into the ledger."""

    def __init__(self, folder: Path) -> None:
        facts, recorded = read_json(folder / RUN), read_json(folder / SETTINGS)
        about = TaskDescription(**{**facts["about"], "metrics": tuple(facts["about"]["metrics"])})
        own = {name: value for name, value in recorded.items() if name not in ("task", "served") and value is not None}
        method = served_method(Settings.of(own), about, facts["silent_s"], facts["queue_max"])
        layout = layout_from(read_json(folder / "layout.json"))
        self.checkpoints, self.fold = Checkpoints(folder / "checkpoints", layout, Disk()), ServedFold()
        found = self.checkpoints.newest()
        self.stood = found.standing
        self.c: Coordinator = method.restored(found.state, ())
        self.ledger = Ledger.open(folder / LEDGER, observers=(self.fold.written,))
        self.fold.begin(self.ledger, found.mark, found.totals)
        self.at = self.c.at
        self.leases: dict[int, messages.Lease] = {}
        """Open tasks, the oldest first."""
        self.to_mix: list[int] = []
        self.to_evaluate: list[int] = []

    def work(self, updates: int) -> None:
        """Let the workers come, and push so many updates; every hundredth is pushed twice."""
        for worker in range(WORKERS):
            self.tell(messages.WorkerJoined(self.at, worker, worker, f"worker-{worker}", "0" * 64))
            self.tell(messages.TaskRequested(self.at, worker))
        for count in range(1, updates + 1):
            task = next(iter(self.leases))
            self._push(self.leases.pop(task), twice=count % 100 == 0)
            if count % FORGOTTEN_EVERY == 0:
                self.checkpoint()
        self.checkpoint()

    def _push(self, lease: messages.Lease, *, twice: bool) -> None:
        self.at += TASK_S
        for _ in range(2 if twice else 1):
            digest = f"{lease.task:064x}"
            self.tell(messages.UpdateArrived(self.at, lease.worker, lease.task, SAMPLES, GRADIENTS, digest=digest))
        self.ledger.flush()
        self.at += MIXING_S
        for sequence in self.to_mix:
            self.tell(messages.VersionPublished(self.at, self.c.t + 1))
            self.tell(messages.UpdateMixed(self.at, sequence))
        self.to_mix.clear()
        self.tell(messages.TaskRequested(self.at, lease.worker))
        for t in self.to_evaluate:
            self.tell(messages.Evaluated(self.at, t, {"accuracy": 1 - 1 / (2 + t), "loss": 1 / (1 + t)}))
        self.to_evaluate.clear()
        self.ledger.flush()

    def tell(self, event: messages.Event) -> None:
        commands = self.c.handle(event)
        self.ledger.record(event, commands)
        for command in commands:
            if isinstance(command, messages.SendTask):
                self.leases[command.lease.task] = command.lease
            elif isinstance(command, messages.MixUpdate):
                self.to_mix.append(command.decision.sequence)
            elif isinstance(command, messages.EvaluateModel):
                self.to_evaluate.append(command.t)

    def checkpoint(self) -> None:
        """What a server does at a checkpoint: write it, remove what no redo needs any more."""
        self.checkpoints.write(checkpoint_of(self.c, self.ledger, self.fold, self.stood))
        oldest = self.checkpoints.prune()
        while oldest is not None and self.ledger.forget_chatter(oldest):
            pass


def long_run(folder: Path, updates: int) -> None:
    """Make the folder of a run with so many applied updates."""
    with serving(folder, SIZE, *OPTIONS, devices=WORKERS):
        pass
    run = ToldRun(folder / "run")
    with closing(run.ledger):
        run.work(updates)
    if run.c.applied != updates:
        raise OffbeatError(f"{run.c.applied} updates were applied, not {updates}; this must not happen")


def starts(folder: Path, turns: int) -> Iterator[Start]:
    for _ in range(turns):
        begun = perf_counter()
        arguments = ("--dir", str(folder / "run"), "--port", "0", "--epochs", "1000000000", *OPTIONS)
        log = folder / "server.log"
        with started(log, "offbeat", "serve", str(folder / "task.py"), *arguments) as process:
            _until_healthy(folder / "run" / "server.json", process, log)
            seconds = perf_counter() - begun
            yield Start(seconds, cpu_s(process.pid), memory(process.pid).own)


def _until_healthy(where: Path, process: Process, log: Path) -> None:
    begun = perf_counter()
    while True:
        try:
            with urlopen(f"{read_json(where)['url']}/v1/health", timeout=START_S) as answer:  # noqa: S310 (our own)
                if answer.status == 200:
                    return
        except (OSError, OffbeatError, URLError) as error:
            if process.poll() is not None or perf_counter() - begun > START_S:
                text = log.read_text().strip()[-500:]
                raise OffbeatError(f"the server did not answer: {error}; its log ends with: {text}") from error
        pause(process, LOOK_S)


def facts_of(folder: Path) -> dict[str, Any]:
    run = folder / "run"
    newest = max((run / "checkpoints").glob("*.json"), key=lambda file: int(file.stem))
    with closing(sqlite3.connect(run / LEDGER)) as ledger:
        (rows,) = ledger.execute("SELECT count(*) FROM events").fetchone()
    return {"rows": rows, "ledger": (run / LEDGER).stat().st_size, "checkpoint": newest.stat().st_size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="Where the runs are made; kept if given.")
    asked = parser.parse_args()
    refuse_elsewhere()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as temporary:
        for updates in asked.updates:
            folder = (asked.dir or Path(temporary)) / f"of-{updates}"
            if not folder.is_dir():
                folder.mkdir(parents=True)
                begun = perf_counter()
                long_run(folder, updates)
                print(f"{updates:,} updates told in {perf_counter() - begun:.0f} s", flush=True)
            facts, found = facts_of(folder), list(starts(folder, asked.turns))
            print(
                f"{updates:,} updates: {facts['rows']:,} rows, ledger {facts['ledger'] / MB:,.1f} MB, checkpoint "
                f"{facts['checkpoint'] / 1000:,.1f} kB; started in {median(one.seconds for one in found):.2f} s "
                f"({min(one.seconds for one in found):.2f} to {max(one.seconds for one in found):.2f}), processor time "
                f"{median(one.cpu_s for one in found):.2f} s, memory {median(one.memory for one in found) / MB:.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
