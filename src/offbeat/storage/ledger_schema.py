"""Owns the tables of a ledger, and whether a file has them as they were made.

Rules kept here:
- The text of every table, index and view is compared: a damaged one would give columns another meaning.
- What the table `meta` says has a digest beside it, in the same table.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path

SCHEMA = 2
UNCHAINED_SCHEMA = 1
"""Of the versions before there was a chain: read, and gone on with, as it is."""
SIZE_MIN = 4096
"""Bytes of the smallest ledger: one page of SQLite's."""
DIGEST = "sha256"
"""The name in `meta` of the digest of all the others."""
COLUMNS = """(
    sequence INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL,
    task INTEGER, worker INTEGER, device INTEGER, number INTEGER, t INTEGER, tau INTEGER, staleness INTEGER,
    outcome TEXT, keep REAL, new REAL, base REAL, publish INTEGER, samples INTEGER, gradients INTEGER,
    local_iterations INTEGER, gamma REAL, granted_at REAL, deadline REAL, finite INTEGER, distance REAL,
    decision INTEGER, detail TEXT, asked_at REAL
)"""
TABLES = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE events {COLUMNS};
CREATE INDEX events_by_kind ON events (kind);
CREATE INDEX events_by_task ON events (task) WHERE task IS NOT NULL;
CREATE TABLE chatter {COLUMNS};
CREATE VIEW everything AS SELECT * FROM events UNION ALL SELECT * FROM chatter;
CREATE TABLE commits (last INTEGER PRIMARY KEY, head BLOB NOT NULL);
CREATE TABLE chatter_checks (last INTEGER PRIMARY KEY, crc INTEGER NOT NULL);
"""  # noqa: S608 (text from above)
_MADE = "SELECT type, name, tbl_name, sql FROM main.sqlite_master ORDER BY type, name"


def make_tables(path: Path, meta: Mapping[str, str]) -> None:
    """In a file that nobody knows yet, and that is synced as a whole before it gets its name: SQLite need not do it."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN; {TABLES}")
        connection.executemany("INSERT INTO meta VALUES (?, ?)", {**meta, DIGEST: _digest(meta)}.items())
        connection.commit()
        connection.execute("PRAGMA journal_mode = WAL")


def unchained_views(chatter: Sequence[str]) -> str:
    """What gives a ledger of before there was a chain the tables that it lacks; `chatter` are kinds of rows."""
    kinds = ", ".join(f"'{kind}'" for kind in chatter)
    return f"""
        CREATE TEMP VIEW everything AS SELECT * FROM events;
        CREATE TEMP VIEW chatter AS SELECT * FROM events WHERE kind IN ({kinds});
        CREATE TEMP VIEW commits AS SELECT 0 AS last, x'' AS head WHERE 0;
    """  # noqa: S608 (text from above)


def forget_rows_after(execute: Callable[..., object], sequence: int, *, chained: bool) -> None:
    """Remove all rows after one, and what covers them."""
    execute("DELETE FROM events WHERE sequence > ?", (sequence,))
    if chained:
        execute("DELETE FROM chatter WHERE sequence > ?", (sequence,))
        execute("DELETE FROM commits WHERE last > ?", (sequence,))
        execute("DELETE FROM chatter_checks WHERE last > ?", (sequence,))


def wrong_with(connection: sqlite3.Connection) -> str | None:
    """Why these are not the tables of a ledger of this version or the one before; None where they are."""
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    schema = meta.get("schema")
    if schema not in (str(UNCHAINED_SCHEMA), str(SCHEMA)):
        return f"it is of schema {schema} and this version of Offbeat reads {SCHEMA}"
    made = connection.execute(_MADE).fetchall()
    if schema == str(UNCHAINED_SCHEMA):
        return "its meta was changed or damaged" if any(name == "commits" for _, name, *_ in made) else None
    if meta.pop(DIGEST, None) != _digest(meta):
        return "its meta was changed or damaged"
    if made != _expected():
        return "its tables were changed or damaged"
    return None


def _digest(meta: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(meta), sort_keys=True).encode()).hexdigest()


@cache
def _expected() -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(TABLES)
        return connection.execute(_MADE).fetchall()
