"""Rules with several vectors on a real server: the same bits as plain numpy, across restarts, damage and backups."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.rules import average_from_spec
from offbeat.errors import InvalidValue
from offbeat.server.backup import back_up
from offbeat.server.verify import verify
from offbeat.storage import vector_room as room
from offbeat.storage.rows import as_decision
from offbeat.wire import unpack
from tests.contract.plain_vectors import PlainVectors
from tests.server.serving import Running, Worker, serving

RULES = (
    *("fedbuff:3 + momentum:0.9", "ca2fl:2", "ca2fl:2,1,3", "ace:0.2", "nesterov:3", "fadas:2,0.1", "dcasgd:0.5"),
    *("asyncfeded", "ringmaster:4", "delta + momentum:0.5 + adam:0.1"),
)
LIMITS = {"checkpoint_every": 2, "keep_updates": "all"}


def settings(rule: str, **others: Any) -> dict[str, Any]:
    return {"rule": rule, "average": "poly:3", "evaluate_every": 1000, "weights": "participation", **others}


def step(task: int) -> float:
    return float(np.random.default_rng(task).standard_normal())


class Fleet:
    """Workers that hold a task each; those that are pushed last are the most stale."""

    def __init__(self, running: Running, size: int = 4) -> None:
        self.workers = [Worker(running, f"w{number}", device=number) for number in range(size)]
        self.open: list[tuple[Worker, Any, bytes]] = []
        for worker in self.workers:
            self.take(worker)

    def take(self, worker: Worker) -> None:
        lease = worker.lease()
        self.open.append((worker, lease, worker.train(lease, step(lease["task"]))))

    def work(self, tasks: int) -> None:
        """Push the newest and the oldest in turn, and take the next task."""
        for number in range(tasks):
            worker, lease, data = self.open.pop(-1 if number % 2 else 0)
            answer = worker.push(lease["task"], data)
            assert answer.status in (200, 409), answer
            self.take(worker)


def expected(running: Running, lost: frozenset[int] = frozenset()) -> PlainVectors:
    """The vectors from what the ledger says was decided, and the updates as they lie in their files."""
    run, layout = running.server.run, running.server.run.layout
    x_0 = unpack((running.folder / "x_0.safetensors").read_bytes(), layout).vector.copy()
    plain = PlainVectors(x_0, average_from_spec("poly:3"))
    for decision in map(as_decision, run.ledger.rows("decided")):
        if decision.mix is None:
            continue
        if decision.sequence in lost:
            if decision.mix.publish:
                plain.publish(decision.t, getattr(decision.mix, "closing", ()))
            continue
        x_new = unpack(run.updates.whole(decision.lease.task).read_bytes(), layout).vector
        # Where an update was lost, workers had started from versions with it: these lie in their files.
        base = run.versions.of(decision.lease.tau).vector if lost else plain.versions[decision.lease.tau]
        plain.apply(decision.mix, x_new, base, decision.t)
    return plain


def check(running: Running, lost: frozenset[int] = frozenset()) -> None:
    run = running.server.run
    run.driver.ask(lambda c: c.t).result()
    plain, found = expected(running, lost), run.mixer.vectors
    assert found.x.vector.tobytes() == plain.x.tobytes()
    assert {name: slot.tobytes() for name, slot in found.standing.slots.items() if slot.any()} == {
        name: slot.tobytes()
        for name, slot in plain.slots.items()
        if slot.any()  # a slot of zeros need not be kept
    }
    assert {cache: vector.tobytes() for cache, vector in found.caches.items()} == {
        cache: vector.tobytes() for cache, vector in plain.caches.items()
    }
    assert found.mean is not None
    assert found.mean.vector.tobytes() == plain.mean.tobytes()


def settled(running: Running) -> None:
    """Wait until everything that was decided is mixed: a worker's next answer comes after that."""
    run = running.server.run
    run.mixer.stop()


def flip(file: Path) -> None:
    """Change the last bit of a file."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("rule", RULES)
def test_a_served_run_goes_on_with_the_same_bits_after_restarts(tmp_path: Path, rule: str) -> None:
    for tasks in (7, 6):
        with serving(tmp_path, settings(rule), LIMITS) as running:
            Fleet(running).work(tasks)
            settled(running)
            check(running)
    assert verify(tmp_path / "run")["agrees"]
    with serving(tmp_path, settings(rule), LIMITS) as running:
        check(running)


@pytest.mark.parametrize("rule", ["ca2fl:2", "fedbuff:2 + momentum:0.9"])
def test_caches_may_lie_on_the_disk(tmp_path: Path, rule: str) -> None:
    for _ in range(2):
        with serving(tmp_path, settings(rule, device_cache="disk"), LIMITS) as running:
            Fleet(running).work(9)
            settled(running)
            check(running)
    assert verify(tmp_path / "run")["agrees"]
    caches = list((tmp_path / "run" / "checkpoints").glob("cache_*"))
    assert bool(caches) == (rule == "ca2fl:2")
    assert len(caches) <= 2 * 4, "of four devices, each may differ in the two checkpoints that are kept"


def test_a_publication_runs_the_finishes_though_its_update_is_lost(tmp_path: Path) -> None:
    rule = "fedbuff:3 + momentum:0.9"
    limits = {"checkpoint_every": 100, "keep_updates": "all"}
    with serving(tmp_path, settings(rule), limits) as running:
        Fleet(running).work(7)
        settled(running)
        decided = map(as_decision, running.server.run.ledger.rows("decided"))
        third = next(decision for decision in decided if decision.mix and decision.mix.publish)
        whole = running.server.run.updates.whole(third.lease.task)
    for file in (tmp_path / "run" / "checkpoints").glob("*"):
        if not file.name.startswith("0."):
            file.unlink()  # the run begins anew from x_0
    flip(whole)
    with serving(tmp_path, settings(rule), limits, drop_damaged=True) as running:
        settled(running)
        check(running, frozenset({third.sequence}))
    assert verify(tmp_path / "run")["replayed"] > 0


def test_a_backup_has_the_vectors_of_devices(tmp_path: Path) -> None:
    with serving(tmp_path, settings("ca2fl:2"), LIMITS) as running:
        Fleet(running).work(9)
        settled(running)
        check(running)
        facts = back_up(tmp_path / "run", tmp_path / "copy")
        caches = {cache: vector.tobytes() for cache, vector in running.server.run.mixer.vectors.caches.items()}
    assert facts["agrees"]
    assert list((tmp_path / "copy" / "checkpoints").glob("cache_*"))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "copy").rename(tmp_path / "run")
    with serving(tmp_path, settings("ca2fl:2"), LIMITS) as running:
        found = running.server.run.mixer.vectors.caches
        assert {cache: vector.tobytes() for cache, vector in found.items()} == caches


def test_a_damaged_cache_costs_time_only(tmp_path: Path) -> None:
    with serving(tmp_path, settings("ca2fl:2"), LIMITS) as running:
        Fleet(running).work(9)
        settled(running)
    newest = max((tmp_path / "run" / "checkpoints").glob("cache_*"), key=lambda file: int(file.stem.split("_")[2]))
    flip(newest)
    facts = verify(tmp_path / "run")
    assert any(newest.name in sentence for sentence in facts["wrong"])
    with serving(tmp_path, settings("ca2fl:2"), LIMITS) as running:
        check(running)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "memory_free", lambda: 500)
    monkeypatch.setattr(room, "disk_free", lambda _folder: 600)
    said = r"does not fit: beside the model there are 3 vectors .* each of 8 devices"
    with pytest.raises(InvalidValue, match=said), serving(tmp_path, settings("ca2fl:2", average=None)):
        pass
    assert not (tmp_path / "run" / "settings.json").exists()
    monkeypatch.setattr(room, "disk_free", lambda _folder: 10_000)
    with serving(tmp_path, settings("ca2fl:2")) as running:
        assert running.server.begun.room.where == "disk"
