"""Owns the question whether a ledger is the one that its checkpoint was taken of, and whether its end is there.

Rules kept here:
- Nothing is begun on a ledger that has lost rows, or whose rows since the checkpoint were changed: the operator is told
  what is missing and what can be done, and decides.
- Only what came after the checkpoint is read: the whole history is `offbeat verify`'s.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.storage.chain_check import ChainBreak, check_chain, check_chatter
from offbeat.storage.checkpoints import Checkpoint
from offbeat.storage.head_file import LedgerHead
from offbeat.storage.ledger import Ledger

NONSENSE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)
"""What rows that make no sense lead to."""


@dataclass(frozen=True, slots=True)
class LedgerLoss:
    """What a ledger lacks."""

    what: str
    holds: int
    """Up to this row, commit by commit, what came after the checkpoint is as it was written."""
    row: int
    """The next row must come after this one: up to here, numbers may have been used."""
    tasks: int
    """Up to here, numbers of tasks may have been given out."""


class LedgerLost(OffbeatError):
    """The ledger lacks rows that it had, or has others."""

    def __init__(self, ledger: Ledger, loss: LedgerLoss) -> None:
        super().__init__(
            f"{ledger.path}: {loss.what}. Restore the whole folder from a copy (`offbeat backup` makes one) and start "
            "again; or start once with --accept-loss, which records this and goes on with what is there"
        )


@contextmanager
def legible(path: Path) -> Iterator[None]:
    """Say it in words where rows from before the checkpoint, which a start reads without checking, make no sense."""
    try:
        yield
    except OffbeatError:
        raise
    except NONSENSE as error:
        with Ledger.open(path, read_only=True) as ledger:
            broken = check_chain(ledger).broken if ledger.chained else None
        if broken is None:  # it is not the ledger's fault
            raise
        raise OffbeatError(
            f"{path}: its chain is broken at {broken}. Restore the whole folder from a copy and start again; "
            "`offbeat verify` says what else is wrong"
        ) from error


def loss_of(ledger: Ledger, checkpoint: Checkpoint, told: LedgerHead | None) -> LedgerLoss | None:
    """What is missing, or None. `told` is what the file beside the ledger says, if it can be read."""
    broken = _broken(ledger, checkpoint.mark) if ledger.chained else None
    what = _missing(ledger.newest(), checkpoint, told) or (_changed(ledger, checkpoint, told, broken))
    if what is None:
        return None
    newest = ledger.newest()
    row, tasks = max(newest, checkpoint.mark, told.row if told else 0), told.tasks if told else 0
    return LedgerLoss(what, newest if broken is None else min(newest, broken.first - 1), row, tasks)


def _broken(ledger: Ledger, mark: int) -> ChainBreak | None:
    """The first rows after the checkpoint that are not those that were written; chatter is read by a redo as well."""
    found = [broken for broken in (check_chain(ledger, mark).broken, check_chatter(ledger, mark)) if broken]
    return min(found, key=lambda broken: broken.first, default=None)


def _missing(newest: int, checkpoint: Checkpoint, told: LedgerHead | None) -> str | None:
    if newest < checkpoint.mark:
        return f"it ends at row {newest}, but its checkpoint was taken at row {checkpoint.mark}"
    if told is not None and newest < told.row:
        return (
            f"it ends at row {newest}, but had {told.row} rows: the last {told.row - newest} of them, and what was "
            "acknowledged in them, are missing (was a -wal file removed, or an older copy restored?)"
        )
    return None


def _changed(ledger: Ledger, checkpoint: Checkpoint, told: LedgerHead | None, broken: ChainBreak | None) -> str | None:
    if not ledger.chained:
        return None
    if checkpoint.head and ledger.head_at(checkpoint.mark).hex() != checkpoint.head:
        return f"its rows up to {checkpoint.mark} are not those that its checkpoint was taken of"
    if broken is not None:
        return f"its chain is broken at {broken}"
    if told is not None and ledger.head_at(told.row) != told.head:
        return f"its rows up to {told.row} are not those that were written"
    return None
