"""Owns the ledger: everything that happened in a run, in order, in one SQLite file; simulated and served alike.

Rules kept here:
- Append-only. The one way back is `truncate_after`, with which a run returns to the moment of its checkpoint, and which
  leaves a row that says so.
- Rows of two kinds share one order: what lasts (`events`) is chained, a digest per commit (`chain.py`); what only a
  redo needs (`chatter`) has a checksum per commit, and both go when no redo needs them any more. A ledger of schema 1
  has one table, no chain.
- Rows wait in memory and are written many in one transaction; `flush` writes them now. Readers see all rows up to the
  last transaction, also while another process writes (WAL).
- Not durable: what was flushed survives the death of the process, not a power cut. Durable: both.
- One thread at a time uses a ledger. A finished one is one file, readable also where nothing can be written.
"""

import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Self

from offbeat.errors import InvalidValue
from offbeat.protocol.answer_book import DecidedTask
from offbeat.protocol.messages import Command, Decision, Evaluated, Event
from offbeat.storage.chain import GENESIS, RowPacker, linked, row_packer
from offbeat.storage.disk import aside
from offbeat.storage.ledger_schema import (
    SCHEMA,
    SIZE_MIN,
    UNCHAINED_SCHEMA,
    forget_rows_after,
    make_tables,
    unchained_views,
    wrong_with,
)
from offbeat.storage.row_shapes import NewRow, RowShape
from offbeat.storage.rows import (
    KINDS,
    Row,
    as_decision,
    as_evaluation,
    every_row,
    lasting_rows,
    lasting_rows_and_mixings,
    read,
    truncated_row,
)
from offbeat.storage.sqlite_file import connected, explained, transaction

CHATTER = ("requested", "request_ended", "heartbeat", "time_passed")
"""Kinds of rows that only a redo needs: an idle fleet makes many of them."""
NO_ROW = 2**63 - 1
"""Beyond every row."""
BUFFER_ROWS = 5_000
"""Rows that wait in memory for one transaction."""
PAGE_ROWS = 5_000
"""Rows that a reader holds at a time; no transaction stays open between two pages."""

Observer = Callable[[Sequence[NewRow], int, float], None]
"""Hears which rows were committed, the sequence number of the last, and how long that took; must not block."""


class RowWriter(NamedTuple):
    """How rows of one shape are written: the statement, and their bytes for the chain or the checksum of chatter."""

    statement: str
    packed: RowPacker | None
    lasts: bool


_WRITERS: dict[RowShape, RowWriter] = {}
_UNCHAINED_WRITERS: dict[RowShape, RowWriter] = {}
"""Those of ledgers with and without a chain, made when they are first needed."""


class Ledger:
    """The ledger of one run, open for writing or for reading only."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, *, read_only: bool, observers: Sequence[Observer] = ()
    ) -> None:
        self.path, self.read_only = path, read_only
        self._observers = observers
        self._connection = connection
        meta = self._meta()
        self.verbose, self.chained = meta["verbose"] == "1", meta["schema"] != str(UNCHAINED_SCHEMA)
        if not self.chained:
            connection.executescript(unchained_views(CHATTER))
        self.mixings = self.verbose or meta.get("mixings") == "1"
        """Has it a row for every mixing?"""
        self._rows_of = every_row if self.verbose else lasting_rows_and_mixings if self.mixings else lasting_rows
        self._waiting: list[NewRow] = []
        self.head, self._last = GENESIS, 0
        """The digest over all lasting rows, and the newest row; a reader asks `head_at` and `newest`."""
        if not read_only:
            self.head, self._last = self.head_at(NO_ROW), self.newest()

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        durable: bool = False,
        verbose: bool = False,
        mixings: bool = False,
        observers: Sequence[Observer] = (),
    ) -> Self:
        """A new ledger where there is none.

        `TaskRequested` and `TimePassed` are as many as all others together and follow from them: only a `verbose`
        ledger has them. It has every `UpdateMixed`, too, which another has only where `mixings` take time.
        """
        if path.exists():
            raise InvalidValue(f"{path} is there already; open it to go on, or choose another folder")
        with explained(f"cannot make the ledger {path}"), aside(path) as temporary:
            make_tables(temporary, {"schema": str(SCHEMA), "verbose": str(int(verbose)), "mixings": str(int(mixings))})
            for suffix in ("-wal", "-shm", "-journal"):  # of a ledger that was here before: SQLite would replay them
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        return cls.open(path, durable=durable, observers=observers)

    @classmethod
    def open(
        cls, path: Path, *, durable: bool = False, read_only: bool = False, observers: Sequence[Observer] = ()
    ) -> Self:
        """A ledger that is there, to go on writing it or, while another process may do that, to read it."""
        if not path.is_file():
            raise InvalidValue(f"there is no ledger {path}; give the folder of a run")
        if path.stat().st_size < SIZE_MIN:  # SQLite would take it for a new one, and remove the -wal beside it
            raise InvalidValue(f"{path} cannot be read as a ledger: it is cut off; restore it from a copy")
        connection = connected(path, "ro" if read_only else "rw")
        try:
            if not read_only:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
            return cls(path, connection, read_only=read_only, observers=observers)
        except sqlite3.Error as error:
            connection.close()
            raise InvalidValue(
                f"{path} cannot be read as a ledger ({error}); restore it from a copy, or start a new run"
            ) from error
        except BaseException:
            connection.close()
            raise

    # --- writing -----------------------------------------------------------------------------------------------------

    def record(self, event: Event, commands: list[Command]) -> list[NewRow]:
        """Take down an event and what the coordinator answered; its rows are on disk after the next `flush`."""
        rows = self._rows_of(event, commands)
        self._waiting += rows
        if len(self._waiting) >= BUFFER_ROWS:
            self.flush()
        return rows

    def add(self, row: NewRow) -> None:
        """Take down what is no event of the coordinator's: what an operator has decided, a fork."""
        self._waiting.append(row)

    def flush(self) -> None:
        """Write what waits, in one transaction."""
        if self._waiting:
            self._commit(self._waiting)

    def _commit(self, rows: list[NewRow], forgetting: int | None = None) -> None:
        begun = perf_counter()
        with explained(f"cannot write to the ledger {self.path}"):
            last = self._write(rows, forgetting)
        seconds, self._waiting = perf_counter() - begun, []
        for observer in self._observers:
            observer(rows, last, seconds)

    def mark(self) -> int:
        """The sequence number of the newest row, which is flushed: a checkpoint keeps it for `truncate_after`."""
        self.flush()
        return self.newest()

    def truncate_after(self, sequence: int) -> None:
        """Forget everything that was recorded after this mark; where that was something, a row tells of it.

        Numbers of rows are not used again, so that whoever reads along sees that rows are gone.
        """
        newest = self.mark()
        if newest < sequence:
            raise InvalidValue(
                f"{self.path} ends at row {newest} but its checkpoint was taken at row {sequence}: "
                "rows were lost; start the run anew in another folder"
            )
        if newest == sequence:
            return
        (at,) = self.select("SELECT coalesce(max(at), 0) FROM everything WHERE sequence <= ?", (sequence,))[0]
        (count,) = self.select("SELECT count(*) FROM everything WHERE sequence > ?", (sequence,))[0]
        if self.chained:
            self._commit([truncated_row(float(at), count, self.head.hex())], sequence)
        else:
            self._last = sequence
            self._commit([], sequence)

    def forget_chatter(self, until: int) -> bool:
        """Remove a page of rows, up to this mark, that no redo needs any more; false where there are none left.

        Where they have checksums, those go with them: of every commit all rows go, or none.
        """
        self.flush()
        page = f"SELECT sequence FROM chatter WHERE sequence <= ? ORDER BY sequence LIMIT {PAGE_ROWS}"  # noqa: S608
        (last,) = self.select(f"SELECT max(sequence) FROM ({page})", (until,))[0]  # noqa: S608
        if last is None:
            return False
        with explained(f"cannot write to the ledger {self.path}"), transaction(self._connection) as execute:
            if not self.chained:
                execute(
                    "DELETE FROM events WHERE sequence IN (SELECT sequence FROM chatter WHERE sequence <= ?)", (last,)
                )
                return True
            (whole,) = self.select("SELECT coalesce(min(last), ?) FROM chatter_checks WHERE last >= ?", (last, last))[0]
            execute("DELETE FROM chatter WHERE sequence <= ?", (whole,))
            execute("DELETE FROM chatter_checks WHERE last <= ?", (whole,))
        return True

    def go_on_after(self, sequence: int) -> None:
        """The next row has a number above this one: rows up to it were lost, and their numbers are not used again."""
        self._last = max(self._last, sequence)

    def head_at(self, sequence: int) -> bytes:
        """The head of the chain when this was the newest row."""
        found = self.select("SELECT head FROM commits WHERE last <= ? ORDER BY last DESC LIMIT 1", (sequence,))
        return bytes(found[0][0]) if found else GENESIS

    def latest_applied(self, count: int, until: int) -> list[Decision]:
        """The last `count` applied decisions whose number is at most `until`."""
        where = "kind = 'decided' AND keep IS NOT NULL AND decision <= ?"
        query = f"SELECT * FROM events WHERE {where} ORDER BY sequence DESC LIMIT ?"  # noqa: S608 (text of this file)
        return [as_decision(read(row)) for row in reversed(self.select(query, (until, count)))]

    def latest_decisions(self, count: int, until: int) -> Iterator[DecidedTask]:
        """The last `count` decisions up to this row, read a page at a time."""
        latest = "SELECT sequence FROM events WHERE kind = 'decided' AND sequence <= ? ORDER BY sequence DESC LIMIT ?"
        first = self.select(f"SELECT min(sequence) FROM ({latest})", (until, count))[0][0]  # noqa: S608 (text from above)
        columns = ", ".join(DecidedTask._fields)
        query = f"SELECT sequence, {columns} FROM events WHERE kind = 'decided' AND sequence > ? AND sequence <= ?"  # noqa: S608
        after = until if first is None else first - 1
        while page := self.select(f"{query} ORDER BY sequence LIMIT {PAGE_ROWS}", (after, until)):
            yield from (DecidedTask._make(row[1:]) for row in page)
            after = page[-1][0]

    def close(self) -> None:
        """Flush and close; a second time does nothing."""
        try:
            self.flush()
        finally:
            self._waiting = []
            with suppress(sqlite3.Error):  # closed before, or being read: then its WAL stays beside it
                if not self.read_only:
                    self._connection.execute("PRAGMA busy_timeout = 0")
                    self._connection.execute("PRAGMA journal_mode = DELETE")
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- reading -----------------------------------------------------------------------------------------------------

    def rows(
        self, kind: str | None = None, after: int = 0, limit: int | None = None, *, task: int | None = None
    ) -> Iterator[Row]:
        """Rows in order: of one kind, of one task, after a sequence number, at most `limit` of them."""
        if kind is not None:
            _refuse_unknown(kind)
        if limit is not None and limit < 0:
            raise InvalidValue(f"limit is {limit} but must be >= 0, or None for all")
        asked = {"kind": kind, "task": task}
        return self._pages({name: value for name, value in asked.items() if value is not None}, after, limit)

    def count(self, kind: str | None = None) -> int:
        """How many rows there are, of one kind or of all."""
        if kind is not None:
            _refuse_unknown(kind)
        self.flush()
        where, values = ("WHERE kind = ?", (kind,)) if kind else ("", ())
        return int(self.select(f"SELECT count(*) FROM {_table_of(kind)} {where}", values)[0][0])  # noqa: S608 (text from above)

    def decisions(self) -> Iterator[Decision]:
        """Every decision in the order in which they were made, with the coefficients that were applied."""
        return map(as_decision, self.rows("decided"))

    def evaluations(self) -> list[Evaluated]:
        return [as_evaluation(row) for row in self.rows("evaluated")]

    # --- SQLite ------------------------------------------------------------------------------------------------------

    def _write(self, rows: list[NewRow], forgetting: int | None) -> int:
        """Answers the sequence number of the last one; rows after `forgetting` go in the same transaction."""
        head, sequence, lasting = (
            self.head if forgetting is None else self.head_at(forgetting),
            self._last,
            list[bytes](),
        )
        chatter: int | None = None
        writers = _WRITERS if self.chained else _UNCHAINED_WRITERS
        with transaction(self._connection) as execute:
            if forgetting is not None:
                forget_rows_after(execute, forgetting, chained=self.chained)
            for shape, values in rows:
                sequence += 1
                writer = writers.get(shape) or _new_writer(shape, chained=self.chained)
                execute(writer.statement, (sequence, *values))
                if writer.packed is None:
                    continue
                if writer.lasts:
                    lasting.append(writer.packed(sequence, values))
                else:
                    chatter = zlib.crc32(writer.packed(sequence, values), chatter or 0)
            if lasting:
                head = linked(head, lasting)
                execute("INSERT INTO commits VALUES (?, ?)", (sequence, head))
            if chatter is not None:
                execute("INSERT INTO chatter_checks VALUES (?, ?)", (sequence, chatter))
        self.head, self._last = head, sequence
        return sequence

    def _pages(self, asked: dict[str, Any], after: int, limit: int | None) -> Iterator[Row]:
        self.flush()
        newest = self.newest()
        table, where = _table_of(asked.get("kind")), "".join(f"{name} = ? AND " for name in asked)
        query = f"SELECT * FROM {table} WHERE {where} sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?"  # noqa: S608
        while limit is None or limit > 0:
            size = PAGE_ROWS if limit is None else min(PAGE_ROWS, limit)
            page = self.select(query, (*asked.values(), after, newest, size))
            yield from map(read, page)
            if len(page) < size:
                return
            after, limit = page[-1][0], None if limit is None else limit - size

    def newest(self) -> int:
        """The sequence number of the newest row that is written."""
        tables = ("events", "chatter") if self.chained else ("events",)
        return max(int(self.select(f"SELECT coalesce(max(sequence), 0) FROM {table}")[0][0]) for table in tables)  # noqa: S608

    def _meta(self) -> dict[str, str]:
        wrong = wrong_with(self._connection)
        if wrong is not None:
            raise InvalidValue(
                f"{self.path} cannot be read as a ledger: {wrong}; "
                "use the version that wrote it, restore it from a copy, or start a new run"
            )
        return dict(self._connection.execute("SELECT name, value FROM meta"))

    @contextmanager
    def at_one_moment(self) -> Iterator[None]:
        """All that is selected within the block is as it was at one moment, whatever another process writes."""
        self._connection.execute("SAVEPOINT moment")
        try:
            yield
        finally:
            with suppress(sqlite3.Error):  # a damaged file, which the reading has told
                self._connection.execute("RELEASE moment")

    def select(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """All rows that a query gives, of those that are written."""
        with explained(f"cannot read the ledger {self.path}"):
            return self._connection.execute(query, values).fetchall()


def _table_of(kind: str | None) -> str:
    return "everything" if kind is None else "chatter" if kind in CHATTER else "events"


def _new_writer(shape: RowShape, *, chained: bool) -> RowWriter:
    table = _table_of(shape.kind) if chained else "events"
    places = {name: f"?{place}" for place, name in enumerate(shape.columns, 2) if chained or name != "asked_at"}
    names, values = ", ".join(places), ", ".join(places.values())
    statement = f"INSERT INTO {table} (sequence, kind, {names}) VALUES (?1, '{shape.kind}', {values})"  # noqa: S608 (names from rows.py)
    writer = RowWriter(statement, row_packer(shape) if chained else None, shape.kind not in CHATTER)
    return (_WRITERS if chained else _UNCHAINED_WRITERS).setdefault(shape, writer)


def _refuse_unknown(kind: str) -> None:
    if kind not in KINDS:
        raise InvalidValue(f"kind is {kind!r}; use one of {', '.join(KINDS)}")
