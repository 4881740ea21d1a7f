"""Owns how a server hands out a backup of its run while it goes on: as one uncompressed tar file.

Rules kept here:
- The moment is held by links and a copy of the ledger, on a thread; then the server has forgotten nothing that the
  backup needs, however slowly it is read. One backup at a time: what it holds takes room on the disk.
- The length is known before the first byte, so a backup that breaks off is noticed.
- A reader that takes nothing for too long is cut off.
- Everything that is in the run's folder leaves it here: it takes an administrator.
"""

import logging
import tarfile
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from offbeat.errors import OffbeatError
from offbeat.server.capture import Capture
from offbeat.server.context import ServerContext, context_of, hello, identity_of
from offbeat.server.descriptors import is_shortage, no_descriptors, refusal_of
from offbeat.server.pulls import NO_HURRY_S
from offbeat.server.refusals import Refusal
from offbeat.server.slow_readers import write_within
from offbeat.storage.run_folder import LEDGER, SETTINGS

PIECE = 1 << 20
RETRY_S = 30.0
MEDIA_TYPE = "application/x-tar"
log = logging.getLogger("offbeat.server")
END = bytes(2 * tarfile.BLOCKSIZE)
"""How a tar file ends."""


async def send_backup(request: web.Request) -> web.StreamResponse:
    context = context_of(request)
    if context.tokens is None and not context.limits.private:
        do = "Start the server with --access (see `offbeat init`), and use an administrator's token."
        raise Refusal("not_allowed", "without tokens, backups are given out on loopback only", do=do)
    if request.method == "HEAD":
        return web.Response(headers={**hello(), "Cache-Control": "no-store"}, content_type=MEDIA_TYPE)
    if context.backing_up.locked():
        raise Refusal("not_now", "another backup is being taken", retry_after_s=RETRY_S)
    async with context.backing_up:
        capture = Capture(context.run.ledger.path.parent)
        try:
            await context.off_loop(_take, context, capture)
            return await _send(request, capture)
        finally:
            await context.off_loop(capture.close)


def _take(context: ServerContext, capture: Capture) -> None:
    """Hold everything, the ledger included, where it can be read for as long as the reader needs."""

    def go_on(_bytes: int) -> None:
        if context.long_poll.stopping:
            raise Refusal("stopping", "the server is being stopped", retry_after_s=RETRY_S)

    try:
        capture.take()
        capture.ledger.copy_to(capture.held / LEDGER, go_on)
    except OffbeatError as error:
        if isinstance(error.__cause__, OSError):
            raise refusal_of("hold the files of a backup", error.__cause__) from error
        raise (
            no_descriptors() if is_shortage(error) else Refusal("not_now", str(error), retry_after_s=RETRY_S)
        ) from error
    settings = capture.files.pop(SETTINGS)  # the last one: without it, half a backup is no run
    capture.files |= {LEDGER: capture.held / LEDGER, SETTINGS: settings}


async def _send(request: web.Request, capture: Capture) -> web.StreamResponse:
    context = context_of(request)
    archive = await context.off_loop(Archive, capture.files)
    response = web.StreamResponse(headers={**hello(), "Cache-Control": "no-store"})
    response.content_type, response.content_length = MEDIA_TYPE, archive.size
    await response.prepare(request)
    rate = context.limits.upload_rate_min
    patience_s = context.limits.stall_s + (PIECE / rate if rate else NO_HURRY_S)
    pieces = archive.pieces()
    try:
        while piece := await context.off_loop(next, pieces, b""):
            await write_within(request, response, piece, patience_s)
            context.metrics.sent(len(piece))
        await response.write_eof()
        log.info("%s has taken a backup, up to row %s", identity_of(request), capture.marker.row)
    except ConnectionError:
        pass  # the reader has gone, or was cut off
    except OSError as error:
        log.warning("a backup broke off, because a file cannot be read: %s", error)
        if request.transport is not None:
            request.transport.abort()
    return response


class Archive:
    """A tar file of these files, made while it is read; none of them changes meanwhile."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = [(_head(name, path), path, path.stat().st_size) for name, path in files.items()]
        self.size = sum(len(head) + size + _padding(size) for head, _, size in self._files) + len(END)

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, about a megabyte at a time, so that many small files are few pieces."""
        piece = bytearray()
        for head, path, size in self._files:
            piece += head
            with path.open("rb") as file:
                while data := file.read(PIECE):
                    piece += data
                    if len(piece) >= PIECE:
                        yield bytes(piece)
                        piece.clear()
            piece += bytes(_padding(size))
        yield bytes(piece + END)


def _head(name: str, path: Path) -> bytes:
    about = tarfile.TarInfo(name)
    about.size, about.mtime, about.mode = path.stat().st_size, int(path.stat().st_mtime), 0o600
    return about.tobuf(tarfile.PAX_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
