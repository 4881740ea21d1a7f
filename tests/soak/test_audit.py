"""The audit of a soak finds what it looks for: updates that are lost, doubled or exchanged, and believed lies."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Worker, serving
from tests.server.speaking import settled, sha256
from tests.soak.audit import Audit

UPDATES = 6


def noted(folder: Path, name: str, **entry: Any) -> None:
    with (folder / name).open("a") as file:
        file.write(json.dumps(entry) + "\n")


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """Of a run with a few updates, each of which its worker has noted."""
    with serving(tmp_path, limits={"checkpoint_every": 2, "keep_updates": "all"}) as running:
        worker = Worker(running)
        for number in range(UPDATES):
            lease = worker.lease()
            data = worker.train(lease, step=number)
            assert worker.push(lease["task"], data).status == 200
            noted(tmp_path, "journal-0.jsonl", task=lease["task"], digest=sha256(data), outcome="applied")
        settled(running)
    return Audit(tmp_path, tmp_path / "run")


def changed(audit: Audit, statement: str) -> None:
    with closing(sqlite3.connect(audit.run / "ledger.sqlite")) as ledger, ledger:
        assert ledger.execute(statement).rowcount > 0


def newest(audit: Audit) -> int:
    assert audit.replay is not None
    return max(audit.replay.applied)


def test_a_sound_run_passes(audit: Audit) -> None:
    audit.look()
    audit.look()
    assert (audit.applied, len(audit.acknowledged), audit.skipped) == (UPDATES, UPDATES, 0)
    assert audit.checkpoints > 0


def test_an_acknowledged_update_that_is_not_in_the_ledger_is_found(audit: Audit) -> None:
    noted(audit.folder, "journal-1.jsonl", task=77, digest="d" * 64, outcome="applied")
    with pytest.raises(
        AssertionError, match="task 77 was acknowledged as applied, and the ledger has no such decision"
    ):
        audit.look()


def test_another_update_than_the_acknowledged_one_is_found(audit: Audit) -> None:
    audit.look()
    noted(audit.folder, "journal-1.jsonl", task=newest(audit), digest="d" * 64, outcome="applied")
    with pytest.raises(AssertionError, match="was acknowledged with the digest dddd"):
        audit.look()


def test_a_ledger_that_went_back_is_found(audit: Audit) -> None:
    audit.look()
    changed(audit, "DELETE FROM events WHERE sequence >= (SELECT max(sequence) FROM events WHERE kind = 'decided')")
    with pytest.raises(AssertionError, match=r"of the ledger was task and epoch .* and is now None"):
        audit.look()


def test_an_update_that_was_applied_twice_is_found(audit: Audit) -> None:
    columns = "at, kind, task, worker, t, keep, new"
    rows = f"SELECT {columns} FROM events WHERE kind = 'decided' ORDER BY sequence DESC LIMIT 1"  # noqa: S608
    changed(audit, f"INSERT INTO events ({columns}) {rows}")
    with pytest.raises(AssertionError, match="was applied twice"):
        audit.look()


def test_an_update_whose_bytes_changed_is_found(audit: Audit) -> None:
    file = next((audit.run / "updates").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    with pytest.raises(AssertionError, match="holds something else than was acknowledged"):
        audit.look()


def test_a_coefficient_that_was_not_the_one_applied_is_found(audit: Audit) -> None:
    changed(audit, "UPDATE events SET new = new / 2 WHERE kind = 'decided'")
    with pytest.raises(AssertionError, match="holds another x than these updates give"):
        audit.look()


def test_updates_that_were_removed_in_time_are_made_up_for_by_a_checkpoint(audit: Audit) -> None:
    for file in (audit.run / "updates").glob("*.safetensors"):
        file.unlink()
    audit.look()
    assert (audit.applied, audit.skipped) == (UPDATES, UPDATES)


def test_an_update_that_is_gone_and_in_no_checkpoint_is_found(audit: Audit) -> None:
    for file in (audit.run / "checkpoints").glob("*.json"):
        if json.loads(file.read_bytes())["state"]["mixed"] == UPDATES:
            file.unlink()
    tasks = sorted(int(file.stem) for file in (audit.run / "updates").glob("*.safetensors"))
    (audit.run / "updates" / f"{tasks[-1]}.safetensors").unlink()
    with pytest.raises(AssertionError, match=f"an update after the first {UPDATES - 1} is gone"):
        audit.look()


@pytest.mark.parametrize(
    ("lie", "facts", "found"),
    [
        ("nan", {"applied": True, "repeated": False, "status": 200}, "the lie 'nan' was applied"),
        ("garbage", {"applied": False, "repeated": None, "status": 500}, "was answered with 500"),
        ("task of another", {"applied": True, "repeated": False, "status": 200, "worker": 9}, "of another worker"),
    ],
)
def test_a_lie_that_is_believed_is_found(audit: Audit, lie: str, facts: dict[str, Any], found: str) -> None:
    audit.look()
    common = {"worker": 0, "task": newest(audit), "digest": "d" * 64, "error": None}
    noted(audit.folder, "lies-9.jsonl", lie=lie, **(common | facts))
    with pytest.raises(AssertionError, match=found):
        audit.look()


def test_half_a_line_that_a_kill_left_is_passed_over(audit: Audit) -> None:
    with (audit.folder / "journal-0.jsonl").open("a") as file:
        file.write('{"task": 3, "dig')
    audit.look()
    assert len(audit.acknowledged) == UPDATES
