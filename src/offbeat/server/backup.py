"""Owns how a backup comes to its place: copied or received beside it, checked as a whole, and only then named.

Rules kept here:
- A folder that has the name of the backup was verified, and is on the disk. What is not finished is called OUT.partial,
  has no settings before all else is there, and goes when the command ends, or with the next one.
- What is received from a server is believed in nothing: only names that a backup can have, only plain files.
"""

import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server.capture import FOLDERS, Capture
from offbeat.server.verify import Facts, verify
from offbeat.storage.backup_marker import read_marker
from offbeat.storage.disk import cannot_write, sync
from offbeat.storage.lock import Lock
from offbeat.storage.run_folder import LEDGER, SETTINGS

PIECE = 1 << 20
SPARE = 64 << 20
"""Bytes that must be free beside what a backup takes."""
NAME = re.compile(rf"(?:(?:{'|'.join(FOLDERS)})/)?[A-Za-z0-9_][A-Za-z0-9_.]{{0,99}}", re.ASCII)


class Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


Connect = Callable[[], AbstractContextManager[tuple[Stream, int]]]
"""Asks a server for a backup: its bytes, and how many there are."""
Tell = Callable[[int, int], None]
"""Hears how many bytes were written, and of how many."""


def back_up(folder: Path, out: Path, tell: Tell = lambda _done, _all: None) -> Facts:
    """Copy the run in a folder, whether it goes on or not, to a new folder; answers what was verified."""
    if out.resolve().is_relative_to(folder.resolve()) and out.resolve() != folder.resolve():
        raise InvalidValue(f"{out} lies in the run's own folder; choose another place, best on another disk")
    with _partial(out) as partial:
        capture = Capture(folder, None if os.access(folder, os.W_OK) else partial)
        try:
            capture.take()
            progress = _Progress(capture.bytes(), tell, out)
            last = capture.files.pop(SETTINGS)
            for name, source in capture.files.items():
                _copy(source, partial / name, progress)
            capture.ledger.copy_to(partial / LEDGER, progress)
            sync(partial / LEDGER)
            _copy(last, partial / SETTINGS, progress)
        finally:
            capture.close()
        return _verified(partial)


def receive(connect: Connect, out: Path, tell: Tell = lambda _done, _all: None) -> Facts:
    """Write what a server sends as a tar file to a new folder; answers what was verified."""
    with _partial(out) as partial:
        with connect() as (stream, size):
            count = _unpacked(stream, partial, _Progress(size, tell, out))
        marker = read_marker(partial)
        if marker is None or marker.files != count:
            raise OffbeatError(f"the backup broke off after {count} files; try again")
        return _verified(partial)


def _unpacked(stream: Stream, partial: Path, progress: "_Progress") -> int:
    """How many files there were."""
    count = 0
    try:
        with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=PIECE) as tar:
            for member in tar:
                if not (member.isreg() and NAME.fullmatch(member.name)):
                    raise InvalidValue(f"the server sent {member.name[:100]!r}, which no backup has; check the URL")
                _write(tar.extractfile(member), partial / member.name, progress)
                count += 1
    except tarfile.TarError as error:
        raise OffbeatError(f"what the server sent is no whole backup ({error}); try again") from error
    return count


# --- its place -------------------------------------------------------------------------------------------------------


@contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` when the block ends well, and is gone when it does not."""
    if out.exists() or out.is_symlink():
        raise InvalidValue(f"{out} is there already; a backup needs a name of its own")
    partial = out.with_name(f"{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(out.with_name(f"{out.name}.partial.lock"))
    except OSError as error:
        raise cannot_write(out, error) from error
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that died
        partial.mkdir(mode=0o700)
        yield partial
        for folder in (partial, *(path for path in partial.iterdir() if path.is_dir())):
            sync(folder)
        if out.exists():  # rename would replace an empty folder
            raise InvalidValue(f"{out} is there by now; a backup needs a name of its own")
        partial.rename(out)
        sync(out.parent)
    except OSError as error:
        raise cannot_write(out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()


def _verified(partial: Path) -> Facts:
    facts = verify(partial)
    if not facts["agrees"]:
        raise OffbeatError(
            f"the backup is not kept, because it does not verify: {'; '.join(facts['wrong'])}. "
            "Look at the run itself with offbeat verify"
        )
    return facts


# --- files -----------------------------------------------------------------------------------------------------------


class _Progress:
    """Called with the bytes that were just written."""

    def __init__(self, size: int, tell: Tell, out: Path) -> None:
        self._size, self._tell, self._done = size, tell, 0
        free = shutil.disk_usage(out.parent).free
        if free < size + SPARE:
            raise OffbeatError(
                f"{out.parent} has {free >> 20:,} MB free, and the backup takes {(size + SPARE) >> 20:,} MB; "
                "make room, or choose another disk"
            )

    def __call__(self, count: int) -> None:
        self._done += count
        self._tell(self._done, self._size)


def _copy(source: Path, target: Path, progress: _Progress) -> None:
    if source == target:  # it was copied when it was captured
        sync(target)
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise OffbeatError(f"cannot read {source}: {error.strerror}; make it readable") from error
    with file:
        _write(file, target, progress)


def _write(source: IO[bytes] | Any, target: Path, progress: _Progress) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with target.open("xb") as file:
        while piece := source.read(PIECE):
            file.write(piece)
            progress(len(piece))
        file.flush()
        os.fsync(file.fileno())
