"""Owns the copy of a ledger that may be written meanwhile: all of it as it was at one moment.

Rules kept here:
- One read transaction is open from the first look to the last page, so what is read and what is copied are the same.
- Nothing that writes waits for it: with a WAL, readers and the writer do not meet.
- The copy is one file, without a WAL, that can be read where nothing can be written.
"""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.ledger import Ledger
from offbeat.storage.sqlite_file import connected

PAGES = 4096
"""Pages that are copied between two looks at whether to go on."""


class LedgerSnapshot:
    """A ledger at one moment: `ledger` reads it, `copy_to` copies it."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InvalidValue(f"there is no ledger {path}; give the folder of a run")
        self._connection = connected(path, "ro")
        try:
            self.ledger = Ledger(path, self._connection, read_only=True)
            self.ledger.select("BEGIN")
            self.row = self.ledger.newest()  # the first look: from here on it does not change
        except sqlite3.Error as error:
            self._connection.close()
            raise InvalidValue(f"{path} cannot be read as a ledger ({error})") from error
        except BaseException:
            self._connection.close()
            raise

    @property
    def bytes(self) -> int:
        """The size of a copy."""
        (pages,), (size,) = (self.ledger.select(f"PRAGMA {name}")[0] for name in ("page_count", "page_size"))
        return int(pages) * int(size)

    def copy_to(self, path: Path, tell: Callable[[int], None] = lambda _bytes: None) -> None:
        """Make a copy; `tell` hears how many bytes were copied since it last did, and may raise to end it."""
        size = int(self.ledger.select("PRAGMA page_size")[0][0])
        left = self.bytes // size

        def copied(_status: int, remaining: int, _total: int) -> None:
            nonlocal left
            tell((left - remaining) * size)
            left = remaining

        try:
            with closing(sqlite3.connect(path, isolation_level=None)) as target:
                target.execute("PRAGMA synchronous = OFF")  # a copy that is not finished is thrown away
                self._connection.backup(target, pages=PAGES, progress=copied)
                target.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as error:
            raise OffbeatError(f"cannot copy the ledger to {path}: {error}; is there room?") from error

    def close(self) -> None:
        self._connection.close()
