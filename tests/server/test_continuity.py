"""A server does not go on with a ledger that lost rows or whose rows were changed, unless an operator says so."""

import json
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.storage.chain_check import check_chain
from offbeat.storage.head_file import HEAD, read_head
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from tests.server.serving import Running, Worker, serving

LIMITS = {"checkpoint_every": 5}
SETTINGS = {"evaluate_every": 1000}
"""No evaluation comes in while the folder is copied."""
UPDATES = 12


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server as a `kill -9` leaves it after twelve updates, its checkpoints at 5 and 10."""
    folder = tmp_path_factory.mktemp("killed")
    with serving(folder, settings=SETTINGS, limits=LIMITS) as running:
        worker = Worker(running)
        for _ in range(UPDATES):
            assert worker.work().status == 200
        until_checkpointed(running)
        shutil.copytree(folder, folder.with_name("killed_copy"))
    return folder.with_name("killed_copy")


def until_checkpointed(running: Running) -> None:
    """The newest two checkpoints are written, and what they make superfluous is gone."""
    run = running.server.run
    writer = run.checkpointer._writer
    assert writer is not None
    writer.join(30)
    run.driver.ask(lambda _: None).result(30)


def reached(running: Running, t: int) -> None:
    """Wait for a version: an update is acknowledged before it is mixed."""
    until = time.monotonic() + 30
    while (status := running.status())["t"] < t:
        assert time.monotonic() < until, status


def copy_of(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run", dirs_exist_ok=True))


def edited(folder: Path, *statements: str) -> None:
    """Change the ledger, and bring all of it into the one file."""
    with closing(sqlite3.connect(folder / "run" / "ledger.sqlite")) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def without_wal(folder: Path) -> None:
    for ending in ("-wal", "-shm"):
        (folder / "run" / f"ledger.sqlite{ending}").unlink()


def without_newest(rows: int) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        newest = "(SELECT max(sequence) FROM everything)"
        with closing(sqlite3.connect(folder / "run" / "ledger.sqlite")) as connection:
            (last,) = connection.execute(f"SELECT {newest}").fetchone()
        edited(
            folder,
            f"DELETE FROM events WHERE sequence > {last - rows}",  # noqa: S608
            f"DELETE FROM chatter WHERE sequence > {last - rows}",  # noqa: S608
            f"DELETE FROM commits WHERE last > {last - rows}",  # noqa: S608
        )

    return remove


def changed_coefficient(folder: Path) -> None:
    edited(folder, "UPDATE events SET new = 0.9 WHERE kind = 'decided' AND decision = 12")


def changed_history(folder: Path) -> None:
    edited(
        folder,
        "UPDATE events SET new = 0.9 WHERE kind = 'decided' AND decision = 2",
        "UPDATE commits SET head = zeroblob(32) WHERE last < (SELECT max(last) FROM commits)",
    )


def test_a_killed_server_goes_on(killed: Path, tmp_path: Path) -> None:
    with serving(copy_of(killed, tmp_path), settings=SETTINGS, limits=LIMITS) as running:
        assert running.status()["t"] == UPDATES
        assert running.status()["head"] == running.server.run.ledger.head.hex()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without_wal, "the last [0-9]+ of them, and what was acknowledged in them, are missing|taken at row"),
        (without_newest(1), "the last 1 of them"),
        (without_newest(3), "the last 3 of them"),
        (without_newest(60), "its checkpoint was taken at row"),
        (changed_coefficient, "its chain is broken at rows"),
        (changed_history, "are not those that its checkpoint was taken of"),
    ],
)
def test_a_ledger_that_lost_or_changed_rows_is_refused_and_nothing_is_written(
    killed: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    folder = copy_of(killed, tmp_path)
    damage(folder)
    before = {file.name: file.read_bytes() for file in (folder / "run" / "checkpoints").iterdir()}
    with pytest.raises(OffbeatError, match=says) as refused, serving(folder, settings=SETTINGS, limits=LIMITS):
        pass
    assert "--accept-loss" in str(refused.value)
    assert {file.name: file.read_bytes() for file in (folder / "run" / "checkpoints").iterdir()} == before


@pytest.mark.parametrize("damage", [without_wal, without_newest(3), without_newest(60), changed_history])
def test_an_accepted_loss_is_recorded_and_no_task_number_is_used_twice(
    killed: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = copy_of(killed, tmp_path)
    told = read_head(folder / "run")
    assert told is not None
    assert told.tasks == UPDATES
    damage(folder)
    with serving(folder, settings=SETTINGS, limits=LIMITS, accept_loss=True) as running:
        worker, t = Worker(running, "other"), running.status()["t"]
        lease = worker.lease()
        assert lease["task"] > UPDATES
        answer = worker.push(lease["task"], worker.train(lease))
        assert answer.status == 200
        reached(running, t + 1)
    with Ledger.open(folder / "run" / "ledger.sqlite", read_only=True) as ledger:
        (row,) = ledger.rows("loss_accepted")
        assert row.sequence > told.row
        assert json.loads(row.detail or "")["tasks"] == UPDATES
        assert check_chain(ledger, after=told.row).broken is None
    with serving(folder, settings=SETTINGS, limits=LIMITS) as running:  # from now on there is nothing to accept
        assert running.status()["t"] == t + 1
        assert Worker(running, "third").lease()["task"] > lease["task"]


def test_updates_whose_decisions_are_gone_do_not_keep_the_run_from_going_on(killed: Path, tmp_path: Path) -> None:
    """A checkpoint that knows of a queue, and a ledger that ends before it."""
    folder = copy_of(killed, tmp_path)
    newest = max((folder / "run" / "checkpoints").glob("*.json"), key=lambda file: int(file.stem))
    kept = read_json(newest)
    kept["state"]["applied"] += 2
    kept["state"]["t_decided"] += 2
    kept["state"]["sequence"] += 2
    newest.write_text(json.dumps(kept))
    without_newest(60)(folder)
    with serving(folder, settings=SETTINGS, limits=LIMITS, accept_loss=True) as running:
        assert running.status()["queued"] == 0
        before = running.status()["t"]
        assert Worker(running, "other").work().status == 200
        reached(running, before + 1)


def test_a_damaged_head_file_says_nothing(killed: Path, tmp_path: Path) -> None:
    folder = copy_of(killed, tmp_path)
    text = (folder / "run" / HEAD).read_text()
    for damaged in ("", text[:20], text.replace(str(UPDATES), str(UPDATES + 1)), "\0" * 256):
        (folder / "run" / HEAD).write_text(damaged)
        assert read_head(folder / "run") is None
    with serving(folder, settings=SETTINGS, limits=LIMITS) as running:
        assert running.status()["t"] == UPDATES


def test_an_acknowledgement_carries_a_head_that_covers_it(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        heads = [worker.work().json["head"] for _ in range(3)]
        ledger = running.server.run.ledger
        known = {bytes(head).hex(): last for last, head in ledger.select("SELECT last, head FROM commits")}
        decided = [row.sequence for row in Ledger.open(ledger.path, read_only=True).rows("decided")]
        assert all(known[head] >= sequence for head, sequence in zip(heads, decided, strict=True))
