"""Owns bytes on their way to the disk: read in chunks, counted and digested as they pass, written to the end."""

import hashlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

CHUNK = 1 << 18
REASON_MAX = 200
UNREADABLE = (OSError, EOFError, RuntimeError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
"""What the readers of the standard library raise at bytes that they do not like."""


class Broken(Exception):
    """Bytes did not come, or are not the expected ones. It stays inside `offbeat.data`, which knows what to do next."""


@contextmanager
def reading() -> Iterator[None]:
    """Errors of a reader become Broken, so that an OSError outside of it is one of writing."""
    try:
        yield
    except UNREADABLE as error:
        raise Broken(reason(error)) from error


def read(stream: IO[bytes]) -> Iterator[bytes]:
    """The stream in chunks."""
    with reading():
        while chunk := stream.read(CHUNK):
            yield chunk


def checked(chunks: Iterable[bytes], size: int, digest: str) -> Iterator[bytes]:
    """The same chunks; Broken as soon as there are too many bytes, or at the end if they are not the expected ones."""
    kind, _, expected = digest.partition(":")
    seen, count = hashlib.new(kind, usedforsecurity=False), 0
    for chunk in chunks:
        count += len(chunk)
        if count > size:
            raise Broken(f"longer than the expected {size:,} bytes")
        seen.update(chunk)
        yield chunk
    if count < size:
        raise Broken(f"ends after {count:,} of {size:,} bytes")
    if seen.hexdigest() != expected:
        raise Broken(f"its {kind} is {seen.hexdigest()}, not {expected}")


def save(path: Path, chunks: Iterable[bytes]) -> None:
    """Write the chunks to a file, and the file to the disk."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def reason(error: BaseException) -> str:
    """Why, on one line: a server may have written it. Without the error's number, and without the one around it."""
    inner = getattr(error, "reason", None) or error
    words = str(getattr(inner, "strerror", None) or inner).split()
    return " ".join(words)[:REASON_MAX] or type(inner).__name__
