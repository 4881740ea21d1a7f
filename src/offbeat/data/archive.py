"""Owns the way from an address to the files of an archive: fetched, unpacked, and every byte checked.

Rules kept here:
- Bytes are counted and digested as they pass; nothing is read beyond the first byte too many.
- Only the named files leave an archive, under their own names and nowhere else.
- A digest names its kind: "sha256:..." or "sha1:...". An environment variable replaces all addresses by a mirror's,
  which has to serve the same bytes.
- An `OSError` is one of writing: what goes wrong with reading becomes `Broken`, and then a line that says what to do.
"""

import hashlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import wrap_file

from offbeat.errors import InvalidValue, OffbeatError

SCHEMES = ("https://", "http://", "file://")
TIMEOUT_S = 30.0
"""How long a server may stay silent: while connecting, and between two reads."""
AGENT = "offbeat"
"""Some hosts refuse Python's own name."""
CHUNK = 1 << 18
REASON_MAX = 200
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError),
    *(HTTPException, zlib.error, tarfile.TarError, zipfile.BadZipFile),
)
"""What the readers of the standard library raise at bytes that they do not like."""


@dataclass(frozen=True, slots=True)
class DataFile:
    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class DataSource:
    title: str
    archive: str
    size: int
    digest: str
    official: tuple[str, ...]
    """Addresses of the archive, tried in this order."""
    variable: str
    """The environment variable that names a mirror."""
    folder: str
    """The one folder in the archive, and its name in the cache."""
    files: tuple[DataFile, ...]
    """The files that are taken out of it; others stay inside."""

    def addresses(self) -> tuple[str, ...]:
        """Where to fetch the archive from: the mirror, if one is named, else the official addresses."""
        mirror = os.environ.get(self.variable, "")
        if not mirror:
            return self.official
        if not mirror.startswith(SCHEMES):
            raise InvalidValue(f"{self.variable} is {mirror!r}; an address starts with {', '.join(SCHEMES)}")
        return (mirror,)

    def by_hand(self, root: Path) -> str:
        """What a user without a network can do, in words."""
        return (
            f"put {self.archive} into {root}, or unpack it there (it makes {root / self.folder}), "
            f"or set {self.variable} to a mirror's address"
        )


class Broken(Exception):
    """Bytes did not come, or are not the expected ones. It stays inside this module, which knows what to do next."""


# --- fetching --------------------------------------------------------------------------------------------------------


def fetch(source: DataSource, path: Path, root: Path) -> None:
    """Write the archive to `path`, from the first address that serves it whole and unchanged."""
    failed = []
    for address in source.addresses():
        try:
            with _opened(source, address) as stream:
                _save(stream, path, source.size, source.digest)
        except Broken as broken:
            failed.append(f"{address}: {broken}")
        else:
            return
    raise OffbeatError(f"cannot fetch {source.title} ({'; '.join(failed)})\n{source.by_hand(root)}")


@contextmanager
def _opened(source: DataSource, address: str) -> Iterator[IO[bytes]]:
    """The body at this address; its progress is shown on a terminal only."""
    with _reading():
        request = Request(address, headers={"User-Agent": AGENT})  # noqa: S310 (the source checked the scheme)
        response = urlopen(request, timeout=TIMEOUT_S)  # noqa: S310 (see above)
    console = Console(stderr=True)
    silent = not console.is_terminal
    with (
        response,
        wrap_file(response, source.size, description=source.archive, console=console, disable=silent) as stream,
    ):
        yield cast(IO[bytes], stream)


# --- unpacking -------------------------------------------------------------------------------------------------------


def check_archive(source: DataSource, archive: Path) -> None:
    """Refuse an archive that is not the official one; it stays where it is, because a user put it there."""
    with _refusing(source, archive):
        with _reading():
            file = archive.open("rb")
        with file:
            for _ in _checked(file, source.size, source.digest):
                pass


def unpack(source: DataSource, archive: Path, folder: Path) -> None:
    """Write the files of the source to a new folder."""
    folder.mkdir()
    wanted = {f"{source.folder}/{file.name}": file for file in source.files}
    with _refusing(source, archive):
        for name, stream in (_zipped if archive.suffix == ".zip" else _tarred)(archive, wanted):
            file = wanted.pop(name)
            try:
                _save(stream, folder / file.name, file.size, file.digest)
            except Broken as broken:
                raise Broken(f"{file.name}: {broken}") from broken
            if not wanted:
                return
        raise Broken(f"it has no file {', '.join(wanted)}")


def _tarred(archive: Path, wanted: Container[str]) -> Iterator[tuple[str, IO[bytes]]]:
    """In the order of the archive: going back would decompress it anew."""
    with _reading(), tarfile.open(archive) as tar:
        for info in tar:
            if info.isreg() and info.name in wanted:
                yield info.name, cast(IO[bytes], tar.extractfile(info))


def _zipped(archive: Path, wanted: Container[str]) -> Iterator[tuple[str, IO[bytes]]]:
    with _reading(), zipfile.ZipFile(archive) as zipped:
        for name in zipped.namelist():
            if name in wanted:
                with zipped.open(name) as stream:
                    yield name, stream


@contextmanager
def _refusing(source: DataSource, archive: Path) -> Iterator[None]:
    try:
        yield
    except Broken as broken:
        raise OffbeatError(
            f"{archive} is damaged or not the official one ({broken})\n"
            f"remove it and it is fetched again, or {source.by_hand(archive.parent)}"
        ) from broken


# --- bytes -----------------------------------------------------------------------------------------------------------


def _save(stream: IO[bytes], path: Path, size: int, digest: str) -> None:
    """Write what is expected to a file, and the file to the disk."""
    with path.open("wb") as file:
        for chunk in _checked(stream, size, digest):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _checked(stream: IO[bytes], size: int, digest: str) -> Iterator[bytes]:
    """The stream in chunks; Broken as soon as there are too many bytes, or at the end if they are not the expected."""
    kind, _, expected = digest.partition(":")
    seen, count = hashlib.new(kind, usedforsecurity=False), 0
    with _reading():
        while chunk := stream.read(CHUNK):
            count += len(chunk)
            if count > size:
                raise Broken(f"longer than the expected {size:,} bytes")
            seen.update(chunk)
            yield chunk
    if count < size:
        raise Broken(f"ends after {count:,} of {size:,} bytes")
    if seen.hexdigest() != expected:
        raise Broken(f"its {kind} is {seen.hexdigest()}, not {expected}")


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except HTTPError as error:
        error.close()
        raise Broken(f"HTTP {error.code} {reason(error)}") from error
    except UNREADABLE as error:
        raise Broken(reason(error)) from error


def reason(error: BaseException) -> str:
    """Why, on one line: a server may have written it. Without the error's number, and without the one around it."""
    inner = getattr(error, "reason", None) or error
    words = str(getattr(inner, "strerror", None) or inner).split()
    return " ".join(words)[:REASON_MAX] or type(inner).__name__
