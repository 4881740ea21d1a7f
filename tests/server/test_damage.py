"""A file of a run is cut off, or a bit of it is flipped: a start refuses it, `verify` names it, or nobody reads that.

The table below says which. A file that it does not name fails the test: whoever adds one says how damage to it shows.
"""

import itertools
import re
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.server.verify import ledger_facts
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import Row
from tests.server.damaging import (
    NOTHING,
    START,
    VERIFY,
    DamagedRun,
    damages,
    killed_run,
    read_by_others,
    simulated_run,
    stopped_run,
    told_by_start,
    told_by_verify,
)

MAKERS = {"stopped": stopped_run, "killed": killed_run, "simulated": simulated_run}
BLANK = {VERIFY, NOTHING}
"""Found, but for bits that say nothing: the names of digests, blanks, room that no row takes."""
FOUND = {
    "settings.json": {START, VERIFY, NOTHING},
    "run.json": BLANK,
    "layout.json": BLANK,
    "server.json": BLANK,
    "summary.json": BLANK,
    "checkpoints/*.json": BLANK,
    "checkpoints/*.safetensors": {VERIFY},
    "checkpoint.safetensors": BLANK,
    "updates/*.safetensors": {VERIFY},
    "versions/*.safetensors": BLANK,
    "kept/*.safetensors": BLANK,
    "best.safetensors": BLANK,
    "newest.safetensors": BLANK,
    "x.safetensors": {VERIFY},
    "x_0.safetensors": {VERIFY},
    "metrics.csv": {VERIFY},
    "contribution.csv": {VERIFY},
    "average.safetensors": {VERIFY},
    "ledger.sqlite": {START, VERIFY, NOTHING},
    "ledger.sqlite-wal": {VERIFY, NOTHING},
    "ledger.head": BLANK,
    "ledger.sqlite-shm": {NOTHING},  # SQLite makes it anew
    ".lock": {NOTHING},  # the kernel holds the lock, not what the file says
    "evaluating_average.safetensors": {NOTHING},
    "evaluating.safetensors": {NOTHING},  # what was being evaluated is evaluated again
}
"""By the names of files: where damage to one is found."""
NOT_LOOKED_AT = ("run.png", "run.svg")
"""Drawn from the ledger, and drawn anew at any time."""
PLACES, PLACES_OF_LEDGER = 32, 150
ALIKE = 2
"""Files of one kind that are damaged at all places; the others at four."""


@pytest.fixture(scope="module", params=MAKERS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DamagedRun:
    folder = tmp_path_factory.mktemp("damage") / "run"
    if request.param == "stopped":
        folder.mkdir()
    if request.param == "killed":
        folder.with_name("alive").mkdir()
    return MAKERS[request.param](folder)


def kind_of(name: str) -> str | None:
    return next((pattern for pattern in FOUND if fnmatch(name, pattern)), None)


class Judge:
    """Says where damage to a file of one run is found."""

    def __init__(self, original: DamagedRun, tmp_path: Path) -> None:
        self.original, self.tmp_path = original, tmp_path
        self.damaged = original.copied(tmp_path / "damaged")
        self.read = read_by_others(self.damaged)
        refused, self.begun = told_by_start(original.copied(tmp_path / "started"))
        assert not refused
        assert told_by_verify(self.damaged) == ""

    def found(self, name: str, data: bytes) -> str:
        """Damage one file, look where that is found, and bring everything back."""
        path = self.damaged.run / name
        before = path.read_bytes()
        path.write_bytes(data)
        try:
            return self._found("ledger" if name.startswith("ledger.sqlite") else name)
        finally:
            path.write_bytes(before)
            if name.startswith("ledger.sqlite"):  # SQLite may change the others
                for file in self.original.run.glob("ledger.sqlite*"):
                    shutil.copyfile(file, self.damaged.run / file.name)

    def _found(self, name: str) -> str:
        said = told_by_verify(self.damaged)
        if said:
            assert Path(name).name in said
            return VERIFY
        same = read_by_others(self.damaged) == self.read
        refused, begun = told_by_start(self.damaged.copied(self.tmp_path / "started"))
        if refused:
            assert Path(name).name in refused
            return START
        assert same, "what others read has changed, and nobody noticed"
        assert begun == self.begun, "what a start begins with has changed, and nobody noticed"
        return NOTHING


def test_every_file_is_in_the_table(original: DamagedRun) -> None:
    unknown = [name for name in original.files() if name not in NOT_LOOKED_AT and kind_of(name) is None]
    assert unknown == []


def damaged_everywhere(
    original: DamagedRun, tmp_path: Path, places: int, places_of_ledger: int, files_of_a_kind: int
) -> None:
    judge, seen = Judge(original, tmp_path), Counter[str]()
    for name in original.files():
        kind = kind_of(name)
        if kind is None or seen[kind] >= files_of_a_kind:
            continue
        seen[kind] += 1
        data, found = (original.run / name).read_bytes(), Counter[str]()
        count = places_of_ledger if name.startswith("ledger.sqlite") else places
        count = count if seen[kind] <= ALIKE else 4
        for what, changed in damages(name, data, count):
            try:
                where = judge.found(name, changed)
            except Exception as error:
                raise AssertionError(f"{name}, {what}: {error}") from error
            assert where in FOUND[kind], (name, what, where)
            found[where] += 1
        most = 0 if name.startswith("ledger.sqlite") else found[NOTHING]  # of its pages, many are empty or in the -wal
        assert VERIFY not in FOUND[kind] or found[VERIFY] > most, (name, found)


def test_damage_at_a_few_places_is_found(original: DamagedRun, tmp_path: Path) -> None:
    damaged_everywhere(original, tmp_path, 2, 6, 1)


@pytest.mark.slow
def test_damage_everywhere_is_found(original: DamagedRun, tmp_path: Path) -> None:
    damaged_everywhere(original, tmp_path, PLACES, PLACES_OF_LEDGER, 1000)


def test_a_start_refuses_what_it_would_go_on_from(original: DamagedRun, tmp_path: Path) -> None:
    """Not only `verify`: whoever starts a server or extends a simulation need not have called it."""
    needed = ["settings.json", "run.json", "layout.json", "checkpoint.safetensors"]
    newest = max((int(file.stem) for file in original.run.glob("checkpoints/*.json")), default=0)
    since = original.settings.get("rule") == "delta"
    needed += [f"updates/{task}.safetensors" for task in (updates_after(original, newest) if since else [])]
    for name in needed:
        if not (original.run / name).exists():
            continue
        run = original.copied(tmp_path / "copy")
        data = bytearray((run.run / name).read_bytes())
        data[len(data) // 2] ^= 1
        (run.run / name).write_bytes(data)
        refused, _ = told_by_start(run)
        assert name in refused, (name, refused)


def updates_after(run: DamagedRun, mark: int) -> list[int]:
    with Ledger.open(run.run / "ledger.sqlite", read_only=True) as ledger:
        return [row.task for row in ledger.rows("decided", after=mark) if row.keep is not None and row.task]


# --- rows ------------------------------------------------------------------------------------------------------------


class Rows:
    """The ledger of a copied run: damaged in a transaction, looked at from within it, and never committed."""

    def __init__(self, run: DamagedRun) -> None:
        self.folder = run.run
        self.connection = sqlite3.connect(run.run / "ledger.sqlite", isolation_level=None)

    def wrong(self, *statements: str) -> str:
        """What `verify` says about the ledger after these changes; empty where it says nothing."""
        self.connection.execute("BEGIN")
        try:
            changed = sum(self.connection.execute(statement).rowcount for statement in statements)
            assert changed, statements
            try:
                ledger = Ledger(self.folder / "ledger.sqlite", self.connection, read_only=True)
                return "; ".join(ledger_facts(self.folder, ledger)["wrong"])
            except OffbeatError as error:
                return str(error)
        finally:
            self.connection.execute("ROLLBACK")

    def of(self, table: str) -> list[tuple[int, ...]]:
        return self.connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()  # noqa: S608


@pytest.fixture(scope="module")
def rows(original: DamagedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    found = Rows(original.copied(tmp_path_factory.mktemp("rows") / "copy"))
    with closing(found.connection):
        assert len(found.of("events")) + len(found.of("chatter")) > 150
        yield found


TABLES = {"events": "sequence", "chatter": "sequence", "commits": "last", "chatter_checks": "last"}


def each(rows: Rows) -> Iterator[tuple[str, str, int]]:
    """Every row: its table, its key, and which it is."""
    for table, key in TABLES.items():
        for number, *_ in rows.of(table):
            yield table, key, number


def names_row(said: str, number: int) -> bool:
    """Does one of the ranges of rows in these words hold this row, or does it say that the end is missing?"""
    ranges = [(int(a), int(b)) for a, b in re.findall(r"rows (\d+) to (\d+)", said)]
    return any(first <= number <= last for first, last in ranges) or "rows at its end are missing" in said


def test_an_untouched_ledger_is_whole(rows: Rows) -> None:
    assert rows.wrong("UPDATE meta SET value = value") == ""


def test_every_row_that_is_removed_is_named(rows: Rows) -> None:
    for table, key, number in each(rows):
        said = rows.wrong(f"DELETE FROM {table} WHERE {key} = {number}")  # noqa: S608
        assert said, (table, number)
        assert names_row(said, number) or table in ("commits", "chatter_checks"), (table, number, said)


def test_every_row_that_is_doubled_is_named(rows: Rows) -> None:
    for table, key, number in each(rows):
        free = max(row[0] for name in TABLES for row in rows.of(name)) + 1
        said = rows.wrong(
            f"CREATE TEMP TABLE doubled AS SELECT * FROM {table} WHERE {key} = {number}",  # noqa: S608
            f"UPDATE doubled SET {key} = {free}",  # noqa: S608
            f"INSERT INTO {table} SELECT * FROM doubled",  # noqa: S608
        )
        assert str(free) in said, (table, number, said)


def test_every_row_that_is_swapped_with_its_neighbour_is_named(rows: Rows) -> None:
    for table, key in TABLES.items():
        for (first, *_), (second, *_) in itertools.pairwise(rows.of(table)):
            swap = ((first, -1), (second, first), (-1, second))
            said = rows.wrong(*(f"UPDATE {table} SET {key} = {new} WHERE {key} = {old}" for old, new in swap))  # noqa: S608
            assert said, (table, first, second)
            assert names_row(said, first) or names_row(said, second), (table, first, second, said)


@pytest.mark.slow
def test_every_value_that_is_changed_is_named(rows: Rows) -> None:
    """In every row, every column in turn; what was NULL gets a value."""
    for table, key, number in each(rows):
        columns = Row._fields[1:] if table in ("events", "chatter") else (("head",), ("crc",))[table != "commits"]
        for column in columns:
            other = OTHER.get(column, f"coalesce({column}, 0) + 1")
            said = rows.wrong(f"UPDATE {table} SET {column} = {other} WHERE {key} = {number}")  # noqa: S608
            assert names_row(said, number), (table, number, column, said)


OTHER = {name: f"coalesce({name}, '') || 'x'" for name in ("kind", "outcome", "detail")} | {"head": "zeroblob(32)"}


def test_the_last_rows_that_are_gone_are_missed_however_many(rows: Rows) -> None:
    numbers = sorted(number for table in ("events", "chatter") for number, *_ in rows.of(table))
    for number in numbers:
        said = rows.wrong(*(f"DELETE FROM {table} WHERE {key} >= {number}" for table, key in TABLES.items()))  # noqa: S608
        assert said, number


def test_what_meta_says_cannot_be_changed(rows: Rows) -> None:
    for name, value in rows.connection.execute("SELECT name, value FROM meta").fetchall():
        assert rows.wrong(f"DELETE FROM meta WHERE name = '{name}'"), name  # noqa: S608
        assert rows.wrong(f"UPDATE meta SET name = 'x' || name WHERE name = '{name}'"), name  # noqa: S608
        for other in ("0", "1", "2", f"{value}0"):
            if other != value:
                assert rows.wrong(f"UPDATE meta SET value = '{other}' WHERE name = '{name}'"), (name, other)  # noqa: S608


def test_a_table_that_says_another_thing_is_refused(original: DamagedRun, tmp_path: Path) -> None:
    for changed in ("DROP INDEX events_by_kind", "ALTER TABLE events RENAME COLUMN gamma TO gamlb"):
        run = original.copied(tmp_path / "copy")
        with closing(sqlite3.connect(run.run / "ledger.sqlite")) as connection:
            connection.execute(changed)
            connection.commit()
        assert "its tables were changed or damaged" in told_by_verify(run)


def test_without_its_wal_a_ledger_is_refused_and_named(original: DamagedRun, tmp_path: Path) -> None:
    run = original.copied(tmp_path / "copy")
    wal = run.run / "ledger.sqlite-wal"
    if not wal.exists():
        pytest.skip("it was stopped: all is in the one file")
    wal.unlink()
    assert "rows at its end are missing" in told_by_verify(run)
    refused, _ = told_by_start(run)
    assert "-wal" in refused or "its checkpoint was taken at row" in refused


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> DamagedRun:
    folder = tmp_path_factory.mktemp("killed")
    (folder / "alive").mkdir()
    return killed_run(folder / "run")


def test_chatter_that_a_redo_needs_is_not_believed_when_it_is_damaged(killed: DamagedRun, tmp_path: Path) -> None:
    """A start would go through other events than there were, and a later checkpoint would make that the truth."""
    run = killed.copied(tmp_path / "copy")
    newest = max(int(file.stem) for file in run.run.glob("checkpoints/*.json"))
    with closing(sqlite3.connect(run.run / "ledger.sqlite")) as connection:
        changed = connection.execute("UPDATE chatter SET at = at + 1 WHERE sequence > ?", (newest,))
        assert changed.rowcount > 0
        connection.commit()
    refused, _ = told_by_start(run)
    assert "those that a restart needs are not those that were written" in refused
    assert "--accept-loss" in refused


@pytest.mark.parametrize(
    "changed",
    [
        "detail = 'x' WHERE kind = 'joined' AND worker = 2",
        "outcome = 'applix' WHERE kind = 'decided' AND decision = 3",
        "t = 'x' WHERE kind = 'published' AND t = 3",
        "new = 'x' WHERE kind = 'decided' AND decision = 5",
    ],
)
def test_history_that_makes_no_sense_is_told_in_words(killed: DamagedRun, tmp_path: Path, changed: str) -> None:
    """A start does not check the rows before its checkpoint, but reads some of them: they lead to no traceback."""
    run = killed.copied(tmp_path / "copy")
    with closing(sqlite3.connect(run.run / "ledger.sqlite")) as connection:
        assert connection.execute(f"UPDATE events SET {changed}").rowcount == 1  # noqa: S608
        connection.commit()
    assert "the chain of the ledger: rows" in told_by_verify(run)
    refused, _ = told_by_start(run)
    assert not refused or "its chain is broken at rows" in refused
