"""A checkpoint's vectors are those of its state, however many push at once and whenever the server stops."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.core.rules import fedasync
from offbeat.core.staleness import constant
from offbeat.errors import OffbeatError
from offbeat.method import Method
from offbeat.protocol.messages import Lease, SendTask, TaskRequested, WorkerJoined
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.server.driver import PublishedVersion, WorkerCommand
from offbeat.server.served_run import ServedRun
from offbeat.server.settings import ServerSettings
from offbeat.storage.checkpoints import Checkpoint
from offbeat.storage.disk import Disk
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision
from offbeat.wire import body_of, header_of
from tests.server.serving import Worker, serving

WORKERS, TASKS, PATIENCE_S = 12, 30, 30.0
X_0 = Model.of({"x": np.zeros(8, np.float32)})
RULE = fedasync(0.001, constant())
"""So little of every update that none of them is forgotten soon."""


class Outside:
    """Leases go to whoever waits for them."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.news = threading.Condition()

    def deliver(self, worker: int, command: WorkerCommand) -> None:
        if isinstance(command, SendTask):
            with self.news:
                self.leases[worker] = command.lease
                self.news.notify_all()

    def take(self, worker: int) -> Lease:
        with self.news:
            assert self.news.wait_for(lambda: worker in self.leases, PATIENCE_S)
            return self.leases.pop(worker)

    def evaluate(self, version: PublishedVersion) -> None: ...
    def published(self, t: int) -> None: ...
    def over(self, reason: str) -> None: ...


def served(folder: Path, outside: Outside) -> ServedRun:
    plan = Plan(in_flight_max=WORKERS, queue_max=500, evaluate_every=10**6)
    method = Method(RULE, plan, Scheduler())
    if not folder.exists():
        folder.mkdir()
        ServedRun.begin(folder, X_0, method, Disk())
    return ServedRun(folder, method, ServerSettings(checkpoint_every=3, keep_updates="all"), outside)


def trained(task: int) -> Model:
    return Model.of({"x": np.random.default_rng(task).standard_normal(8).astype(np.float32)})


def work(run: ServedRun, outside: Outside, worker: int, tasks: int) -> None:
    run.driver.tell(lambda at: WorkerJoined(at, worker, worker, f"w{worker}")).result(PATIENCE_S)
    for _ in range(tasks):
        run.driver.tell(lambda at: TaskRequested(at, worker)).result(PATIENCE_S)
        lease = outside.take(worker)
        task = lease.task
        data = header_of(X_0.layout) + b"".join(bytes(part) for part in body_of(trained(task)))
        upload = run.updates.begin(task, len(data))
        upload.write(data)
        digest = hashlib.sha256(data).hexdigest()
        upload.finish(digest)
        run.push(lease, 1, 1, digest).result(PATIENCE_S)


def history(run: ServedRun) -> list[bytes]:
    """w after every applied decision, from the ledger's coefficients, in plain numpy."""
    w = X_0.vector.copy()
    found = [w.tobytes()]
    with Ledger.open(run.ledger.path, read_only=True) as ledger:
        decisions = [as_decision(row) for row in ledger.rows("decided")]
    for decision in decisions:
        if decision.mix is not None:
            keep, new = np.float32(decision.mix.keep), np.float32(decision.mix.new)
            w = keep * w + new * trained(decision.lease.task).vector
            found.append(w.tobytes())
    return found


def test_every_checkpoint_holds_the_vectors_of_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = Outside()
    run = served(tmp_path / "run", outside)
    written: list[tuple[int, bytes]] = []
    checkpoints = run.checkpointer._checkpoints
    write = checkpoints.write

    def noted(checkpoint: Checkpoint) -> None:
        written.append((checkpoint.state["mixed"], checkpoint.w.vector.tobytes()))
        write(checkpoint)

    monkeypatch.setattr(checkpoints, "write", noted)
    run.start()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda worker: work(run, outside, worker, TASKS), range(WORKERS)))
    passed = history(run)
    run.stop()
    assert len(passed) == WORKERS * TASKS + 1
    assert len(written) > 5
    for mixed, w in written:
        assert w == passed[mixed], f"the checkpoint after {mixed} updates"


def test_a_version_that_could_not_be_kept_is_mixed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while a full disk keeps a version from being published: the restart mixes it, and not again."""
    outside = Outside()
    run = served(tmp_path / "run", outside)
    run.start()
    work(run, outside, 0, 2)
    full = threading.Event()

    def add(_t: int, _x: Model) -> None:
        full.set()
        raise OSError(28, "No space left on device")

    while run.coordinator.queued:
        run.driver.ask(lambda c: c.t).result(PATIENCE_S)
    monkeypatch.setattr(run.versions, "add", add)
    work(run, outside, 0, 1)
    assert full.wait(PATIENCE_S)
    run.stop()
    again = served(tmp_path / "run", Outside())
    again.start()
    expected = history(again)
    while again.coordinator.t < 3:
        again.driver.ask(lambda c: c.t).result(PATIENCE_S)
    again.stop()
    assert again.mixer.x.vector.tobytes() == expected[3]


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        Worker(running).work()
    for file in (running.folder / "checkpoints").iterdir():
        file.unlink()
    with pytest.raises(OffbeatError, match="holds no checkpoint of this run"), serving(tmp_path):
        pass
    assert list((running.folder / "updates").iterdir()), "nothing was removed"


def test_whoever_left_stays_away_and_numbers_are_never_given_twice(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        gone, there = Worker(running, "gone"), Worker(running, "there")
        assert running.call("DELETE", f"/v1/workers/{gone.number}", headers=gone.session).status == 204
        sessions: Any = running.server.context.sessions
        assert sessions.number("never joined") == 2
    with serving(tmp_path) as running:
        assert running.status()["workers"] == 1
        assert running.call("POST", "/v1/workers/0/ask?wait_s=0", headers=gone.session).status == 401
        there.running = running
        assert there.ask(1)["state"] == "working"
        assert Worker(running, "gone").number == 0


def test_a_restart_forgets_who_waited_and_gives_every_lease_its_time_anew(tmp_path: Path) -> None:
    with serving(tmp_path, {"lease_s": 50, "in_flight_max": 1}) as running:
        busy = Worker(running, "busy")
        lease = busy.lease()
    with serving(tmp_path, {"lease_s": 50, "in_flight_max": 1}) as running:
        facts = running.server.run.driver.ask(lambda c: (len(c.idle), c.leases[lease["task"]].deadline - c.at)).result()
        assert facts[0] == 0
        assert 40 < facts[1] <= 50
