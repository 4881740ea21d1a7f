"""Owns the cache folder: where it is, how a data set gets there whole, and when files in it can be used.

Rules kept here:
- A file in its place is complete. Everything is made in a temporary folder beside it, checked, then renamed.
- Of two processes that make the same thing the slower one drops its own.
- Files that a user put there are used if they have the official layout, and are never changed or removed.
- A process removes its temporary folder. That of a killed process is removed a day later, with the next fetch.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.data.archive import DataSource, check_archive, fetch, reason, unpack
from offbeat.errors import OffbeatError

VARIABLE = "OFFBEAT_DATA"
PREFIX, SUFFIX = ".offbeat-", ".aside"
LEFTOVER_S = 86_400.0


def cache_folder() -> Path:
    """Where data sets are kept: OFFBEAT_DATA, else `offbeat` in the platform's cache folder."""
    named = os.environ.get(VARIABLE)
    try:
        return Path(named).expanduser() if named else _caches() / "offbeat"
    except RuntimeError as error:  # no home folder, as in some containers
        raise OffbeatError(f"there is no home folder to keep data in; set {VARIABLE} to a folder") from error


def ready(source: DataSource, folder: Path | None = None) -> Path:
    """The folder that holds the data set's files, fetched and unpacked where they are not there yet."""
    root = (cache_folder() if folder is None else folder).absolute()
    place = root / source.folder
    try:
        if not place.exists():
            _make(source, root, place)
    except OSError as error:
        raise OffbeatError(
            f"cannot write to {root}: {reason(error)}; choose a folder that can be written to and has room "
            f"({VARIABLE} names it)"
        ) from error
    check(source, place)
    return place


def check(source: DataSource, place: Path) -> None:
    """Refuse a folder in which a file is missing or has the wrong length."""
    for file in source.files:
        path = place / file.name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise unusable(source, path, reason(error)) from error
        if size != file.size:
            raise unusable(source, path, f"it has {size:,} bytes and must have {file.size:,}")


def unusable(source: DataSource, path: Path, why: str) -> OffbeatError:
    """The error for a file in its place that cannot be used."""
    return OffbeatError(
        f"cannot use {path}: {why}\nremove {path.parent} and it is unpacked again, "
        f"or put the files of the official {source.archive} there"
    )


def _make(source: DataSource, root: Path, place: Path) -> None:
    archive = root / source.archive
    with _aside(root) as temporary:
        if archive.exists():
            check_archive(source, archive)
        else:
            fetch(source, temporary / archive.name, root)
            _settle(temporary / archive.name, archive)
        unpack(source, archive, temporary / place.name)
        _settle(temporary / place.name, place)


def _settle(finished: Path, place: Path) -> None:
    """Move a finished file or folder to its place; one that another process put there meanwhile stays."""
    try:
        finished.rename(place)
    except OSError:
        if not place.exists():
            raise


@contextmanager
def _aside(root: Path) -> Iterator[Path]:
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    temporary = Path(tempfile.mkdtemp(SUFFIX, PREFIX, root))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(root: Path) -> None:
    for left in root.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(left)


def _caches() -> Path:
    system = platform.system()
    if system == "Darwin":
        return Path.home() / "Library" / "Caches"
    named = os.environ.get("LOCALAPPDATA" if system == "Windows" else "XDG_CACHE_HOME", "")
    if Path(named).is_absolute():
        return Path(named)
    return Path.home() / "AppData" / "Local" if system == "Windows" else Path.home() / ".cache"
