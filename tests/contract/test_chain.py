"""The chain shows every lasting row that was changed, removed, added or moved, and names the rows that it means."""

import hashlib
import itertools
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.rules import Mix
from offbeat.protocol import messages
from offbeat.protocol.messages import AnswerPush, Decision, Lease, Outcome, SendTask, UpdateArrived
from offbeat.storage.chain import GENESIS, linked, row_packer, stored_bytes
from offbeat.storage.chain_check import ChainCheck, check_chain
from offbeat.storage.ledger import CHATTER, Ledger
from offbeat.storage.ledger_schema import TABLES
from offbeat.storage.rows import every_row
from tests.contract.test_ledger import ARRIVALS, DECISIONS, EVALUATIONS, STORIES

ROWS = 200


def events(count: int) -> Iterator[tuple[messages.Event, list[messages.Command]]]:
    """A small run: each task is asked for, leased, pushed, decided, published; now and then something else."""
    for number in range(1, count):
        at = number / 3
        lease = Lease(number, number % 5, number % 5, number // 5, number - 1, at, at + 60)
        mix = Mix(0.4, 0.6 / number, 0.0, True)
        decision = Decision(number, at, lease, Outcome.APPLIED, number, 0, mix, 50, 10)
        yield messages.TaskRequested(at, lease.worker), [SendTask(lease)]
        arrived = UpdateArrived(at, lease.worker, number, 50, 10, digest=f"{number:064x}")
        yield arrived, [AnswerPush(lease.worker, number, Outcome.APPLIED, decision)]
        yield messages.VersionPublished(at, number), []
        if not number % 9:
            yield messages.Evaluated(at, number, {"accuracy": number / 100}), []


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chain") / "ledger.sqlite"
    with Ledger.create(path, verbose=True) as ledger:
        for number, (event, commands) in enumerate(events(ROWS), 1):
            ledger.record(event, commands)
            if not number % 4:
                ledger.flush()
            if ledger.count() >= ROWS:
                break
    return path


def by_the_page(path: Path) -> subprocess.CompletedProcess[str]:
    """The check that docs/ledger.md shows, which needs nothing of ours."""
    page = (Path(__file__).parents[2] / "docs" / "ledger.md").read_text("utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return subprocess.run([sys.executable, "-I", "-c", program, path], capture_output=True, text=True, check=False)


def test_a_chain_can_be_checked_by_what_the_page_says(original: Path, tmp_path: Path) -> None:
    assert by_the_page(original).stdout.strip() == checked(original).head.hex()
    copy = tmp_path / "ledger.sqlite"
    copy.write_bytes(original.read_bytes())
    with closing(sqlite3.connect(copy)) as connection, connection:
        connection.execute("UPDATE events SET gradients = 11 WHERE kind = 'decided' AND decision = 20")
    broken = checked(copy).broken
    assert broken is not None
    assert by_the_page(copy).stderr.strip() == f"the rows up to {broken.last} are not those that were written"


def checked(path: Path) -> ChainCheck:
    with Ledger.open(path, read_only=True) as ledger:
        return check_chain(ledger)


def copied(original: Path, tmp_path: Path, change: Callable[[sqlite3.Connection], Any]) -> Path:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(original.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        change(connection)
        connection.commit()
    return path


def sequences(path: Path) -> list[int]:
    with closing(sqlite3.connect(path)) as connection:
        return [sequence for (sequence,) in connection.execute("SELECT sequence FROM events ORDER BY sequence")]


def test_an_untouched_ledger_chains(original: Path) -> None:
    with Ledger.open(original, read_only=True) as ledger:
        found, lasting = check_chain(ledger), sum(row.kind not in CHATTER for row in ledger.rows())
        assert found == ChainCheck(lasting, ledger.count("decided"), ledger.head_at(2**60))
    assert found.head != GENESIS


def test_every_row_that_is_removed_is_found(original: Path, tmp_path: Path) -> None:
    for sequence in sequences(original):
        delete = f"DELETE FROM events WHERE sequence = {sequence}"  # noqa: S608 (the test's own text)
        found = checked(copied(original, tmp_path, lambda c: c.execute(delete)))  # noqa: B023
        assert found.broken is not None
        assert found.broken.first <= sequence <= found.broken.last


@pytest.mark.parametrize(
    "change", ["at = at + 1e-9", "kind = 'left'", "new = 0.5", "detail = detail || ' '", "worker = 9"]
)
def test_every_row_that_is_changed_is_found(original: Path, tmp_path: Path, change: str) -> None:
    seen = 0
    for sequence in sequences(original):
        update = f"UPDATE events SET {change} WHERE sequence = {sequence}"  # noqa: S608 (the test's own text)
        path = copied(original, tmp_path, lambda c: c.execute(update))  # noqa: B023
        if path.read_bytes() == original.read_bytes():
            continue
        broken = checked(path).broken
        with closing(sqlite3.connect(original)) as a, closing(sqlite3.connect(path)) as b:
            same = a.execute("SELECT * FROM events").fetchall() == b.execute("SELECT * FROM events").fetchall()
        assert (broken is None) == same
        assert broken is None or broken.first <= sequence <= broken.last
        seen += not same
    assert seen > 10


def test_every_row_that_is_doubled_is_found(original: Path, tmp_path: Path) -> None:
    free = max(sequences(original)) + 1
    for sequence in sequences(original):

        def double(connection: sqlite3.Connection, sequence: int = sequence) -> None:
            connection.execute("CREATE TEMP TABLE one AS SELECT * FROM events WHERE sequence = ?", (sequence,))
            connection.execute("UPDATE one SET sequence = ?", (free,))
            connection.execute("INSERT INTO events SELECT * FROM one")

        found = checked(copied(original, tmp_path, double))
        assert found.broken is not None
        assert "no commit of the chain covers them" in str(found.broken)


def test_every_two_rows_that_are_swapped_are_found(original: Path, tmp_path: Path) -> None:
    order = sequences(original)
    for first, second in itertools.pairwise(order):

        def swap(connection: sqlite3.Connection, first: int = first, second: int = second) -> None:
            for old, new in ((first, -1), (second, first), (-1, second)):
                connection.execute("UPDATE events SET sequence = ? WHERE sequence = ?", (new, old))

        found = checked(copied(original, tmp_path, swap))
        assert found.broken is not None
        assert found.broken.first <= second and first <= found.broken.last  # noqa: PT018


def test_rows_of_a_commit_that_is_gone_are_found(original: Path, tmp_path: Path) -> None:
    path = copied(
        original, tmp_path, lambda c: c.execute("DELETE FROM commits WHERE last = (SELECT max(last) FROM commits)")
    )
    assert "no commit of the chain covers them" in str(checked(path).broken)


def test_a_value_of_another_type_is_a_break_and_no_traceback(original: Path, tmp_path: Path) -> None:
    path = copied(original, tmp_path, lambda c: c.execute("UPDATE events SET task = 'x' WHERE kind = 'decided'"))
    assert "cannot be read" in str(checked(path).broken)


def test_a_ledger_that_goes_on_chains_on(original: Path, tmp_path: Path) -> None:
    path = copied(original, tmp_path, lambda _: None)
    before = checked(path).head
    with Ledger.open(path) as ledger:
        assert ledger.head == before
        mark = ledger.mark()
        ledger.record(messages.TaskRequested(99.0, 3), [])
        ledger.flush()
        assert ledger.head == before  # chatter is not chained
        ledger.record(messages.VersionPublished(99.0, 77), [])
        ledger.flush()
        assert ledger.head not in (before, GENESIS)
        assert ledger.head_at(mark) == before
        assert check_chain(ledger, after=mark) == ChainCheck(1, 0, ledger.head)


def test_what_could_not_be_written_is_not_in_the_chain(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l") as ledger:
        ledger.record(messages.VersionPublished(1.0, 1), [])
        ledger.flush()
        head = ledger.head
        ledger._connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON commits BEGIN SELECT raise(ABORT, 'full'); END"
        )
        ledger.record(messages.VersionPublished(2.0, 2), [])
        with pytest.raises(Exception, match="full"):
            ledger.flush()
        assert ledger.head == head
        ledger._connection.execute("DROP TRIGGER full")
        ledger.flush()
        assert check_chain(ledger) == ChainCheck(2, 0, ledger.head)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(ARRIVALS, EVALUATIONS, DECISIONS), min_size=1, max_size=8))
def test_a_row_has_the_same_bytes_before_and_after_the_database(happened: list[Any]) -> None:
    told: list[tuple[messages.Event, list[messages.Command]]] = [
        (messages.TimePassed(h.at), [AnswerPush(1, h.lease.task, h.outcome, h)]) if isinstance(h, Decision) else (h, [])
        for h in happened
    ]
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(TABLES)
        made = [row for event, commands in told for row in every_row(event, commands) if row.kind not in CHATTER]
        for sequence, row in enumerate(made, 1):
            names = ", ".join(row.shape.columns)
            places = ", ?" * len(row.values)
            insert = f"INSERT INTO events (sequence, kind, {names}) VALUES (?, ?{places})"  # noqa: S608
            connection.execute(insert, (sequence, row.kind, *row.values))
        stored = connection.execute("SELECT * FROM events ORDER BY sequence").fetchall()
    packed = [row_packer(row.shape)(sequence, row.values) for sequence, row in enumerate(made, 1)]
    assert packed == [stored_bytes(row) for row in stored]


def test_every_kind_of_row_chains(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "l", verbose=True) as ledger:
        for event, commands, _ in STORIES:
            ledger.record(event, commands)
        ledger.flush()
        assert check_chain(ledger).broken is None
        assert check_chain(ledger).rows == sum(row.kind not in CHATTER for row in ledger.rows())


def test_the_head_is_plain_sha256() -> None:
    assert linked(GENESIS, [b"ab", b"c"]) == hashlib.sha256(bytes(32) + b"abc").digest()
