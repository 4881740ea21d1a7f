"""Owns SQLite as the ledger uses it: connections, transactions, and errors in words."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import OffbeatError

Execute = Callable[..., object]


def connected(path: Path, mode: str) -> sqlite3.Connection:
    """A connection to a file that is there: to read and write it (`rw`), or to read it (`ro`)."""
    address = f"{path.absolute().as_uri()}?mode={mode}"
    with explained(f"cannot open the ledger {path}"):
        return sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[Execute]:
    """All of it is written, or nothing."""
    execute = connection.cursor().execute
    execute("BEGIN IMMEDIATE")
    try:
        yield execute
        execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            execute("ROLLBACK")
        raise


@contextmanager
def explained(what: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OverflowError) as error:
        raise OffbeatError(f"{what}: {error}") from error
