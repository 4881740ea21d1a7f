"""The power goes after every single file operation of a scripted run: nothing acknowledged may be missing."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.core.rules import (
    Average,
    Rule,
    adam,
    asyncfeded,
    ca2fl,
    compose,
    delta,
    fedasync,
    fedavg,
    fedbuff,
    momentum,
    participation,
    poly,
)
from offbeat.core.staleness import polynomial
from offbeat.method import Method
from offbeat.protocol.messages import AnswerPush, Lease, Outcome, SendTask, TaskRequested, WorkerJoined
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.server.backup import back_up
from offbeat.server.driver import PublishedVersion, WorkerCommand
from offbeat.server.served_run import ServedRun
from offbeat.server.settings import ServerSettings
from offbeat.storage.backup_marker import named_fork, read_marker
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json
from offbeat.storage.rows import as_decision
from offbeat.storage.run_folder import LEDGER
from offbeat.wire import body_of, header_of
from tests.contract.forgetful import Forgetful, Image, restore
from tests.contract.plain_vectors import PlainVectors

WORKERS, PATIENCE_S = 3, 20.0
X_0 = Model.of({"x": np.arange(6, dtype=np.float32), "n": np.array(0)}, buffers=["n"])
RULES: dict[str, tuple[Rule, Scheduler]] = {
    "fedasync": (fedasync(0.6, polynomial(0.5)), Scheduler()),
    "delta": (delta(0.5), Scheduler()),
    "fedbuff": (fedbuff(3), Scheduler(choice="fair")),
    "fedavg": (fedavg(2), Scheduler(group=2)),
    "slots": (compose(fedbuff(3), participation(), momentum(0.9)), Scheduler()),
    "caches": (ca2fl(2, 0.5), Scheduler()),
    "shared caches": (ca2fl(2, 0.5, groups=2), Scheduler()),
    "moving": (asyncfeded(), Scheduler()),
    "groups with slots": (compose(fedavg(2), adam(0.1)), Scheduler(group=2)),
}
AVERAGED: dict[str, Average] = {"slots": poly(8), "caches": poly(2), "delta": poly(0)}


class Outside:
    """No worker is connected: leases wait to be fetched."""

    def __init__(self) -> None:
        self.leases: SimpleQueue[Lease] = SimpleQueue()
        self.reason = ""

    def deliver(self, _worker: int, command: WorkerCommand) -> None:
        if isinstance(command, SendTask):
            self.leases.put(command.lease)

    def evaluate(self, version: PublishedVersion) -> None: ...
    def published(self, t: int) -> None: ...

    def over(self, reason: str) -> None:
        self.reason = reason


def trained(task: int) -> Model:
    """What is pushed for a task: known to whoever checks, whatever happened in between."""
    rng = np.random.default_rng(task)
    return Model.of({"x": rng.standard_normal(6).astype(np.float32), "n": np.array(task)}, buffers=["n"])


def plan(epochs: int = 12) -> Plan:
    return Plan(in_flight_max=WORKERS, epochs=epochs, lease_s=1000.0, queue_max=8, evaluate_every=10**6)


def method(name: str) -> Method:
    rule, scheduler = RULES[name]
    return Method(rule, plan(), scheduler, average=AVERAGED.get(name))


def served(folder: Path, name: str, disk: Disk, outside: Outside) -> ServedRun:
    return ServedRun(folder, method(name), ServerSettings(checkpoint_every=3), outside, disk=disk)


def push(run: ServedRun, lease: Lease) -> AnswerPush:
    data = header_of(X_0.layout) + b"".join(bytes(part) for part in body_of(trained(lease.task)))
    upload = run.updates.begin(lease.task, len(data))
    for start in range(0, len(data), 100):
        upload.write(data[start : start + 100])
    digest = hashlib.sha256(data).hexdigest()
    upload.finish(digest)
    commands = run.push(lease, 1, 1, digest).result(PATIENCE_S)
    return next(command for command in commands if isinstance(command, AnswerPush))


def ask(run: ServedRun, worker: int) -> None:
    run.driver.tell(lambda at: TaskRequested(at, worker)).result(PATIENCE_S)


def script(run: ServedRun, outside: Outside, acknowledged: Callable[[int], None], until: int = 10**6) -> None:
    """Workers ask, train, push and ask again until the run is over, or so far."""
    for worker in range(WORKERS):
        run.driver.tell(lambda at, worker=worker: WorkerJoined(at, worker, worker, f"w{worker}")).result(PATIENCE_S)  # type: ignore[misc]
        ask(run, worker)
    while not run.driver.ask(lambda c: bool(c.end_reason) or c.applied >= until).result(PATIENCE_S):
        lease = outside.leases.get(timeout=PATIENCE_S)
        if push(run, lease).outcome is Outcome.APPLIED:
            acknowledged(lease.task)
        ask(run, lease.worker)


def expected(run: ServedRun) -> PlainVectors:
    """The vectors, from nothing but what the ledger says and the known updates, in plain numpy."""
    plain = PlainVectors(X_0.vector.copy(), run.mixer.vectors.average)
    for d in map(as_decision, run.ledger.rows("decided")):
        if d.mix is not None:
            plain.apply(d.mix, trained(d.lease.task).vector, plain.versions.get(d.lease.tau, plain.x), d.t)
    return plain


def check_vectors(run: ServedRun) -> None:
    """Every vector that mixing changes has the bits that it should have."""
    plain, found = expected(run), run.mixer.vectors
    assert found.x.vector.tobytes() == plain.x.tobytes()
    assert found.w.vector.tobytes() == plain.w.tobytes()
    assert {name: slot.tobytes() for name, slot in found.standing.slots.items() if slot.any()} == {
        name: slot.tobytes()
        for name, slot in plain.slots.items()
        if slot.any()  # a slot of zeros need not be kept
    }
    assert {cache: vector.tobytes() for cache, vector in found.caches.items()} == {
        cache: vector.tobytes() for cache, vector in plain.caches.items()
    }
    if found.mean is not None:
        assert found.mean.vector.tobytes() == plain.mean.tobytes()


def finished(run: ServedRun) -> None:
    """All that was decided is mixed."""
    run.mixer.stop()
    run.driver.stop()
    assert run.driver.failure is None


@dataclass
class Cut:
    """What a power cut leaves. Several operations in a row may leave the same: one restart tests them all."""

    image: Image
    kinds: set[str] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    """The tasks acknowledged until the last of these operations."""


class Cuts:
    """Every image that differs from all others, in the order of the operations."""

    def __init__(self, root: Path, *, keeps_names: bool) -> None:
        self.disk = Forgetful(root, keeps_names=keeps_names, moment=self._passed)
        self.operations = 0
        self.acknowledged: set[int] = set()
        self._cuts: dict[frozenset[tuple[str, bytes]], Cut] = {}

    def acknowledge(self, task: int) -> None:
        with self.disk.lock:
            self.acknowledged.add(task)

    def forget(self) -> None:
        """Only what follows the last operation is of interest."""
        self._cuts = dict([self._cuts.popitem()])

    def all(self) -> list[Cut]:
        return [*self._cuts.values()]

    def some_of_each_kind(self) -> list[Cut]:
        """The first, the middle and the last one after every kind of operation."""
        kinds = sorted(set[str]().union(*(cut.kinds for cut in self.all())))
        taken = set[int]()
        for kind in kinds:
            found = [number for number, cut in enumerate(self.all()) if kind in cut.kinds]
            taken |= {found[0], found[len(found) // 2], found[-1]}
        return [cut for number, cut in enumerate(self.all()) if number in taken]

    def _passed(self, image: Image) -> None:
        self.operations += 1
        cut = self._cuts.setdefault(frozenset(image.items()), Cut(image))
        cut.kinds.add(self.disk.operation)
        cut.told |= self.acknowledged


@pytest.mark.parametrize("choose", [Cuts.some_of_each_kind, pytest.param(Cuts.all, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keeps_names", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_nothing_acknowledged_is_ever_missing(
    name: str, keeps_names: bool, choose: Callable[[Cuts], list[Cut]], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    cuts = Cuts(root, keeps_names=keeps_names)
    ServedRun.begin(root, X_0, method(name), cuts.disk)
    cuts.forget()
    outside = Outside()
    run = served(root, name, cuts.disk, outside)
    run.start()
    script(run, outside, cuts.acknowledge)
    finished(run)
    assert cuts.operations > 100
    assert len(cuts.all()) > 50
    assert len(cuts.acknowledged) >= 12
    for number, cut in enumerate(choose(cuts)):
        folder = tmp_path / str(number)
        restore(cut.image, folder)
        again = served(folder, name, Disk(), Outside())
        applied = [d.lease.task for d in map(as_decision, again.ledger.rows("decided")) if d.mix is not None]
        assert sorted(applied) == sorted(set(applied)), "exactly once"
        assert cut.told <= set(applied), f"acknowledged and gone after {cut.kinds}"
        again.start()
        finished(again)
        check_vectors(again)
        again.ledger.close()


def test_a_run_goes_on_where_the_power_went(tmp_path: Path) -> None:
    """Cut at some moments, switched on, and run to its end: as many epochs, and each update once."""
    moments: list[Image] = []
    root = tmp_path / "run"
    root.mkdir()
    disk = Forgetful(root, keeps_names=False, moment=moments.append)
    ServedRun.begin(root, X_0, method("fedasync"), disk)
    outside = Outside()
    run = served(root, "fedasync", disk, outside)
    run.start()
    script(run, outside, lambda _task: None)
    finished(run)
    for number in range(60, len(moments), 40):
        folder = tmp_path / str(number)
        restore(moments[number], folder)
        outside = Outside()
        again = served(folder, "fedasync", Disk(), outside)
        again.start()
        script(again, outside, lambda _task: None)
        finished(again)
        assert again.coordinator.t == 12
        check_vectors(again)
        again.ledger.close()


def test_the_power_goes_while_a_backup_becomes_a_run_of_its_own(tmp_path: Path) -> None:
    """Whenever it goes, the next start ends with one id, one row and no marker."""
    first, outside = tmp_path / "first", Outside()
    first.mkdir()
    ServedRun.begin(first, X_0, method("fedasync"), Disk())
    write_files(first, {"settings.json": {}, "run.json": {"run": "original"}})
    run = served(first, "fedasync", Disk(), outside)
    run.start()
    script(run, outside, lambda _task: None, until=5)
    finished(run)
    run.ledger.close()
    back_up(first, tmp_path / "out")

    moments: list[Image] = []
    root = tmp_path / "root"
    root.mkdir()
    disk = Forgetful(root, keeps_names=False, moment=moments.append)
    for file in sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file()):
        place = root / file.relative_to(tmp_path / "out")
        disk.make_folder(place.parent)
        if file.name == LEDGER:
            shutil.copy(file, place)
            disk.committed(place)
        else:
            disk.write_whole(place, [file.read_bytes()])
    copied = len(moments)
    forked = started(root, disk)
    finished(forked)
    ids = set[str]()
    for number, image in enumerate(moments[copied - 1 :]):
        folder = tmp_path / str(number)
        restore(image, folder)
        again = started(folder, Disk())
        (row,) = again.ledger.rows("forked")
        detail = json.loads(row.detail or "")
        assert detail["run"] == "original"
        assert detail["fork"] == read_json(folder / "run.json")["run"] != "original"
        assert read_marker(folder) is None
        check_vectors(again)
        assert not again.coordinator.leases
        again.start()
        finished(again)
        again.ledger.close()
        ids.add(detail["fork"])
    assert len(moments) - copied >= 10
    assert len(ids) > 1, "before the id was on the disk, another one was made"


def write_files(folder: Path, files: dict[str, dict[str, object]]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def started(folder: Path, disk: Disk) -> ServedRun:
    """As a server starts: the id, then the run."""
    fork = named_fork(folder, read_json(folder / "run.json")["run"], disk)
    limits = ServerSettings(checkpoint_every=3)
    return ServedRun(folder, method("fedasync"), limits, Outside(), disk=disk, fork=fork)
