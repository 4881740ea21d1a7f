"""Owns what is said where an operation of the system fails: no room on the disk, or no descriptors left.

Rules kept here:
- A process that has used up its open files has no full disk, and an operator who is told so looks in the wrong place.
- SQLite says only that it cannot open a file; whether descriptors have run out is then tried.
"""

import errno
import os
import sqlite3

from offbeat.errors import OffbeatError
from offbeat.server.refusals import KINDS, Refusal

RETRY_S = 5.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


def is_known(error: OSError) -> bool:
    return error.errno in FULL or error.errno in NO_DESCRIPTORS


def refusal_of(what: str, error: OSError) -> Refusal:
    """The refusal where the system refused `what`: there is no room, no descriptor, or it is not known why."""
    if error.errno in NO_DESCRIPTORS:
        return no_descriptors()
    word = "disk_full" if error.errno in FULL else "not_now"
    why = error.strerror or type(error).__name__
    return Refusal(word, f"the server cannot {what} now: {why}", retry_after_s=RETRY_S)


def stuck_refusal(error: OffbeatError) -> Refusal:
    """The refusal while the ledger cannot be written: the disk is full, unless descriptors have run out."""
    return no_descriptors() if out_of_descriptors() else Refusal("disk_full", str(error), retry_after_s=RETRY_S)


def no_descriptors() -> Refusal:
    return Refusal(
        "no_descriptors", "the server has as many files and connections open as it may", retry_after_s=RETRY_S
    )


def is_shortage(error: BaseException) -> bool:
    """Did this fail for want of descriptors, itself or what it was caused by?"""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in NO_DESCRIPTORS:
            return True
        if isinstance(cause, sqlite3.Error) and out_of_descriptors():
            return True
        cause = cause.__cause__
    return False


def out_of_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in NO_DESCRIPTORS
    return False


DO = KINDS["no_descriptors"].do
