"""Owns the benchmark of `offbeat verify`: its time beside that of mixing the same updates, and its peak memory.

`python -m benchmarks.verifying --updates 10000` makes a served run without a network: the real coordinator, ledger,
store of updates and mixer, every update kept, nothing synced. Then, each in a process of its own: the server's mixer
applies all updates from their files; `verify` checks the run. Both are done twice: `cold`, with files that are not in
the page cache, as those of a run are that was not written just now; and `warm`.

Every update is a file of its own. What `verify` takes in memory is counted beyond what it takes for the same number of
updates of a model of a few floats, which loads the same code.
"""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import deque
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, process_time
from typing import Any

import click
import numpy as np

from benchmarks.unsynced import without_fsync
from offbeat.core.kernel import Updater
from offbeat.core.layout import Model, layout_from
from offbeat.core.vectors import Standing, Vectors
from offbeat.digests import Hasher, digest_of_file, known_digests
from offbeat.errors import OffbeatError
from offbeat.method import Method, method_of
from offbeat.protocol.messages import Lease, MixUpdate, SendTask, TaskRequested, WorkerJoined
from offbeat.server.driver import PublishedVersion, WorkerCommand
from offbeat.server.mixer import Mixer, MixOrder, next_pass
from offbeat.server.served_run import ServedRun
from offbeat.server.settings import ServerSettings
from offbeat.server.update_store import UpdateStore
from offbeat.server.verify import sentence, verify
from offbeat.server.version_store import VersionStore
from offbeat.settings import Settings
from offbeat.storage.disk import Bytes, Disk
from offbeat.storage.json_file import read_json, write_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision
from offbeat.storage.run_folder import LEDGER, SETTINGS, X_0
from offbeat.wire import body_of, header_of, mapped

WORKERS, PATIENCE_S = 8, 120.0
RULES = ("fedasync", "delta")
FLOATS_PER_MB = 1 << 18
TINY = 64
CHECKPOINT_EVERY = 1000


class FetchedLeases:
    """No worker is connected: leases wait to be fetched."""

    def __init__(self) -> None:
        self.leases: SimpleQueue[Lease] = SimpleQueue()

    def deliver(self, _worker: int, command: WorkerCommand) -> None:
        if isinstance(command, SendTask):
            self.leases.put(command.lease)

    def evaluate(self, version: PublishedVersion) -> None: ...
    def published(self, t: int) -> None: ...
    def over(self, reason: str) -> None: ...


class NoTask:
    devices = WORKERS


def make(folder: Path, rule: str, updates: int, floats: int) -> None:
    """Make a run of so many updates, all of them kept."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(7)
    x_0 = Model.of({"x": rng.standard_normal(floats).astype(np.float32)})
    method = _method(rule, updates)
    Disk().write_whole(folder / X_0, [header_of(x_0.layout), *body_of(x_0)])
    write_json(folder / SETTINGS, {"served": True, "rule": rule})
    write_json(folder / "run.json", {"run": "benchmark", "x_0_sha256": digest_of_file(folder / X_0)})
    ServedRun.begin(folder, x_0, method, Disk())
    outside = FetchedLeases()
    limits = ServerSettings(checkpoint_every=CHECKPOINT_EVERY, keep_updates="all")
    run = ServedRun(folder, method, limits, outside)
    run.start()
    try:
        for worker in range(WORKERS):
            run.driver.tell(lambda at, worker=worker: WorkerJoined(at, worker, worker, f"w{worker}"))  # type: ignore[misc]
            run.driver.tell(lambda at, worker=worker: TaskRequested(at, worker))  # type: ignore[misc]
        noise = rng.standard_normal(floats).astype(np.float32)
        for _ in range(updates):
            lease = outside.leases.get(timeout=PATIENCE_S)
            _push(run, lease, x_0, np.roll(noise, lease.task))
            run.driver.tell(lambda at, lease=lease: TaskRequested(at, lease.worker))  # type: ignore[misc]
    finally:
        run.stop()


def _method(rule: str, updates: int) -> Method:
    settings = Settings.of({"rule": rule, "epochs": updates, "in_flight_max": WORKERS, "evaluate_every": 10**9})
    return method_of(settings, NoTask())


def _push(run: ServedRun, lease: Lease, x_0: Model, vector: Any) -> None:
    parts: list[Bytes] = [header_of(x_0.layout), *body_of(Model(x_0.layout, vector, {}))]
    hasher = Hasher(known_digests()[0])
    for part in parts:
        hasher.update(part)
    upload = run.updates.begin(lease.task, sum(map(len, parts)), hasher.kind)
    upload.write(*parts)
    upload.finish(hasher.text())
    run.push(lease, 1, 1, hasher.text()).result(PATIENCE_S)


def mixed(folder: Path) -> dict[str, float]:
    """The time that the server's mixer takes for all updates of a run, as they lie in their files."""
    layout = layout_from(read_json(folder / "layout.json"))
    x_0 = mapped(folder / X_0, layout)
    updates = UpdateStore(folder / "updates", layout, Disk())
    on_disk = read_json(folder / SETTINGS)["rule"] == "delta"
    versions = VersionStore(folder.with_name("versions"), layout, Disk(), on_disk=on_disk)
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        orders: deque[MixOrder] = deque(MixUpdate(as_decision(row)) for row in ledger.rows("decided"))
    ends = _ends(folder)
    with closing(Updater()) as updater:
        updater.warm()
        mixer = Mixer(Vectors(Standing.first(x_0), updater), updates.mapped, versions.of, lambda _: None)
        versions.add(0, x_0)
        begun, used = perf_counter(), process_time()
        while orders:
            done = mixer.apply(_as_published(orders, ends))
            if done.t is not None:
                versions.add(done.t, done.standing.x)
        spent = {"seconds": perf_counter() - begun, "processor_s": process_time() - used}
    if hashlib.sha256(mixer.x.vector.data).hexdigest() != _newest_digest(folder):
        raise OffbeatError(f"mixing the updates of {folder} gave another model than the run has")
    return spent


def _ends(folder: Path) -> set[int]:
    """The versions that the server published: its passes ended there."""
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        return {row.t for row in ledger.rows("published") if row.t is not None}


def _as_published(orders: deque[MixOrder], ends: set[int]) -> list[MixOrder]:
    most = next(n for n, order in enumerate(orders, 1) if isinstance(order, MixUpdate) and order.decision.t in ends)
    return next_pass(orders, most)


def _newest_digest(folder: Path) -> str:
    newest = max((folder / "checkpoints").glob("*.json"), key=lambda file: int(file.stem))
    layout = layout_from(read_json(folder / "layout.json"))
    return hashlib.sha256(mapped(newest.with_suffix(".w.safetensors"), layout).vector.data).hexdigest()


def drop_from_cache(folder: Path) -> None:
    """Have the files of a run read from the disk the next time."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _in_process(what: str, folder: Path) -> dict[str, Any]:
    begun = perf_counter()
    done = subprocess.run(  # noqa: S603 (our own words)
        [sys.executable, "-m", "benchmarks.verifying", what, str(folder)], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_s": perf_counter() - begun}


def measure(folder: Path, rule: str, updates: int, floats: int) -> dict[str, Any]:
    """Make two runs, a tiny one for comparison; mix and verify."""
    for name, size in (("tiny", TINY), ("run", floats)):
        subprocess.run(  # noqa: S603 (our own words)
            [sys.executable, "-m", "benchmarks.verifying", "make", str(folder / name), rule, str(updates), str(size)],
            check=True,
        )
    tiny = _in_process("verify", folder / "tiny")
    found: dict[str, Any] = {"rule": rule, "updates": updates, "megabytes": floats / FLOATS_PER_MB}
    for state in ("cold", "warm"):
        spent = {}
        for what in ("mix", "verify"):
            if state == "cold":
                drop_from_cache(folder / "run")
            spent[what] = _in_process(what, folder / "run")
            shutil.rmtree(folder / "versions", ignore_errors=True)
        ratios = {f"ratio_{name}": spent["verify"][name] / spent["mix"][name] for name in ("seconds", "processor_s")}
        found[state] = {**spent, **ratios, "models": (spent["verify"]["peak"] - tiny["peak"]) / (4 * floats)}
    return found


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _child(what: str, arguments: list[str]) -> None:
    folder = Path(arguments[0])
    if what == "make":
        without_fsync()
        make(folder, arguments[1], int(arguments[2]), int(arguments[3]))
    elif what == "mix":
        print(json.dumps({**mixed(folder), "peak": peak()}))
    else:
        import offbeat.core.compiled  # noqa: F401 (the tiny run would not load it, and it takes more than the model)

        begun, used = perf_counter(), process_time()
        facts = verify(folder)
        spent = {"seconds": perf_counter() - begun, "processor_s": process_time() - used}
        print(json.dumps({**spent, "peak": peak(), "said": sentence(facts)}))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--updates", default=500, show_default=True, help="Updates of the run.")
@click.option("--megabytes", default=1.0, show_default=True, help="Size of the model.")
@click.option("--rule", type=click.Choice([*RULES, "both"]), default="both", show_default=True)
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("runs/verifying"), show_default=True)
def main(updates: int, megabytes: float, rule: str, folder: Path) -> None:
    """Measure verify beside mixing."""
    for one in RULES if rule == "both" else (rule,):
        where = folder / one
        shutil.rmtree(where, ignore_errors=True)
        try:
            found = measure(where, one, updates, int(megabytes * FLOATS_PER_MB))
        finally:
            shutil.rmtree(where, ignore_errors=True)
        click.echo(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in ("make", "mix", "verify"):
        _child(sys.argv[1], sys.argv[2:])
    else:
        main()
