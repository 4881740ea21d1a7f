"""Owns how trouble is noticed that no single part knows of: from refusals, and by looking every now and then.

Rules kept here:
- A full disk, or too few descriptors, is noted with the first request that is refused for it.
- Whether it has passed is found out by trying: nobody may come back to be told.
"""

import asyncio
import errno
import logging
import os
import resource
from contextlib import suppress

from offbeat.errors import OffbeatError
from offbeat.server.access import TokenBook
from offbeat.server.context import ServerContext
from offbeat.server.open_troubles import DESCRIPTORS, TOKENS, UPDATES, OpenTroubles
from offbeat.server.refusals import Refusal
from offbeat.server.update_store import PART, UpdateStore

LOOK_S = 0.5
SPARE = 8
"""Descriptors that should be left: with fewer, the next requests fail."""
PROBE = f"room{PART}"
PROBE_BYTES_MAX = 64 << 20
PIECE = 1 << 20

log = logging.getLogger("offbeat.server")


def note_answer(context: ServerContext, refusal: Refusal | None, *, pushing: bool) -> None:
    """A request was answered: does that tell of trouble, or that it has passed?"""
    if refusal is not None:
        _note_refusal(context, refusal)
    elif pushing:
        context.troubles.over(UPDATES)
    if pushing:
        context.push_answers.add(refusal)


def _note_refusal(context: ServerContext, refusal: Refusal) -> None:
    troubles, updates = context.troubles, context.run.updates
    if refusal.error == "disk_full" and context.run.driver.trouble is None:
        what = f"updates are refused: {refusal.message}; make room on the disk, or raise updates_bytes_max"
        troubles.note(UPDATES, what, has_passed=lambda: has_room(updates))
    elif refusal.error == "no_descriptors":
        note_descriptors(troubles)


def note_unreadable_tokens(troubles: OpenTroubles, book: TokenBook, why: Exception) -> None:
    what = f"every request is refused, because tokens cannot be read: {why}"
    troubles.note(TOKENS, what, has_passed=lambda: _readable(book))


def _readable(book: TokenBook) -> bool:
    with suppress(OffbeatError):
        book.entries()
        return True
    return False


def has_room(updates: UpdateStore) -> bool:
    """Can one more update be written?"""
    if updates.bytes() + updates.size > updates.bytes_max:
        return False
    probe, left = updates.path / PROBE, min(updates.size, PROBE_BYTES_MAX)
    try:
        with updates.disk.create(probe) as output:
            for size in (*(PIECE,) * (left // PIECE), left % PIECE):
                output.write(bytes(size))
            output.sync()
    except OSError:
        return False
    finally:
        with suppress(OSError):
            updates.disk.remove(probe)
    return True


# --- descriptors -----------------------------------------------------------------------------------------------------


def note_descriptors(troubles: OpenTroubles) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    what = (
        f"the server has nearly all of the {most} files and connections open that it may; raise the limit "
        "(LimitNOFILE in systemd, ulimit -n), or let fewer connect (connections_max)"
    )
    troubles.note(DESCRIPTORS, what, has_passed=has_descriptors)


def has_descriptors() -> bool:
    """Are some left? The lowest free number is the one that a new file gets."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        number = os.open(os.devnull, os.O_RDONLY)
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    os.close(number)
    return number < most - SPARE


# --- looking ---------------------------------------------------------------------------------------------------------


async def watch(context: ServerContext) -> None:
    """Look every now and then, until cancelled."""
    while True:
        try:
            await _look(context)
        except Exception:  # a probe that fails must not end the others
            log.exception("it could not be found out whether this has passed: %s", context.troubles.text)
        await asyncio.sleep(LOOK_S)


async def _look(context: ServerContext) -> None:
    if not has_descriptors():
        note_descriptors(context.troubles)
    for about, has_passed in context.troubles.probes():
        if await context.off_loop(has_passed):
            context.troubles.over(about)
