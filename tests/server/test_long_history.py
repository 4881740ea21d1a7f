"""A run with a long history: neither a restart nor a verification reads or holds all of it."""

import hashlib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.core.rules import Rule, delta, fedasync
from offbeat.core.staleness import constant
from offbeat.method import Method
from offbeat.protocol.messages import TaskRequested, WorkerJoined
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.server.replay_bases import Bases
from offbeat.server.served_run import ServedRun
from offbeat.server.settings import ServerSettings
from offbeat.server.verify import verify
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import write_json
from offbeat.storage.ledger import Ledger
from offbeat.wire import body_of, header_of
from tests.server.test_checkpoints import PATIENCE_S, Outside

SIZE, TASKS = 50_000, 60
PLAN = Plan(in_flight_max=2, queue_max=500, evaluate_every=10**6, answers_kept=5)


@contextmanager
def running(folder: Path, rule: Rule) -> Iterator[tuple[ServedRun, Outside]]:
    """A run without a network; a checkpoint at its beginning and at its stop alone."""
    x_0, method, outside = Model.of({"x": np.zeros(SIZE, np.float32)}), Method(rule, PLAN, Scheduler()), Outside()
    if not folder.exists():
        folder.mkdir()
        write_json(folder / "settings.json", {"served": True})
        ServedRun.begin(folder, x_0, method, Disk())
    run = ServedRun(folder, method, ServerSettings(checkpoint_every=10**6, keep_updates="all"), outside)
    run.start()
    yield run, outside
    run.stop()


def work(run: ServedRun, outside: Outside, tasks: int) -> None:
    run.driver.tell(lambda at: WorkerJoined(at, 0, 0, "w0")).result(PATIENCE_S)
    for _ in range(tasks):
        run.driver.tell(lambda at: TaskRequested(at, 0)).result(PATIENCE_S)
        lease = outside.take(0)
        x = np.random.default_rng(lease.task).standard_normal(SIZE).astype(np.float32)
        model = Model(run.layout, x)
        data = header_of(run.layout) + b"".join(bytes(part) for part in body_of(model))
        upload = run.updates.begin(lease.task, len(data))
        upload.write(data)
        digest = hashlib.sha256(data).hexdigest()
        upload.finish(digest)
        run.push(lease, 1, 1, digest).result(PATIENCE_S)
        while run.coordinator.queued:
            run.driver.ask(lambda c: c.t).result(PATIENCE_S)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_verification_holds_the_versions_that_are_still_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool
) -> None:
    with running(tmp_path / "run", delta(0.1)) as (run, outside):
        work(run, outside, TASKS)
    if not on_disk:
        for file in (tmp_path / "run" / "versions").iterdir():
            file.unlink()
    most, offer = list[int](), Bases.offer

    def noted(bases: Bases, t: int, x: Model) -> None:
        offer(bases, t, x)
        most.append(len(bases.in_memory))

    monkeypatch.setattr(Bases, "offer", noted)
    tracemalloc.start()
    try:
        facts = verify(tmp_path / "run")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (facts["agrees"], facts["t"], facts["from"]) == (True, TASKS, 0)
    assert max(most) <= 2
    assert peak < 12 * 4 * SIZE, "sixty versions were made"


def test_a_version_whose_file_is_damaged_does_not_deceive_a_verification(tmp_path: Path) -> None:
    with running(tmp_path / "run", delta(0.1)) as (run, outside):
        work(run, outside, 5)
    file = tmp_path / "run" / "versions" / "3.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    facts = verify(tmp_path / "run")
    assert facts["x_sha256"] == facts["replay_sha256"], "the bits that the replay made count"
    assert len(facts["wrong"]) == 2  # what the file says of itself, and what the replay made
    assert all(str(file) in wrong for wrong in facts["wrong"])


def test_a_restart_reads_the_decisions_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path / "run", fedasync(0.1, constant())) as (run, outside):
        work(run, outside, TASKS)
        x, answers = run.mixer.x.vector.tobytes(), dict(run.coordinator.judge.answers)
    seen, select = list[int](), Ledger.select

    def counted(ledger: Ledger, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        found = select(ledger, query, values)
        seen.append(len(found) if "kind = 'decided'" in query or "decided" in values else 0)
        return found

    monkeypatch.setattr(Ledger, "select", counted)
    for file in (tmp_path / "run" / "updates").iterdir():  # each would be looked up by its task
        file.unlink()
    with running(tmp_path / "run", fedasync(0.1, constant())) as (run, _):
        assert run.mixer.x.vector.tobytes() == x
        assert {task: replace(a, repeated=True) for task, a in answers.items()} == dict(run.coordinator.judge.answers)
        assert len(run.coordinator.judge.answers) == PLAN.answers_kept
        assert PLAN.answers_kept <= sum(seen) <= PLAN.answers_kept + 2
