"""Owns the way from an archive to its files: only the named members leave it, each one checked."""

import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from offbeat.data.chunks import Broken, checked, read, reading, save
from offbeat.data.source import Member, Source
from offbeat.errors import OffbeatError


def check_archive(source: Source, archive: Path) -> None:
    """Refuse an archive that is not the official one; it stays where it is, for somebody put it there."""
    try:
        with reading(), archive.open("rb") as file:
            for _ in checked(read(file), source.size, source.digest):
                pass
    except Broken as broken:
        raise _refused(source, archive, broken) from broken


def unpack(source: Source, archive: Path, folder: Path) -> None:
    """Write the source's members to a new folder, under their own names and nowhere else."""
    folder.mkdir()
    try:
        for member, stream in (_zipped if archive.suffix == ".zip" else _tarred)(source, archive):
            _take(member, stream, folder)
    except Broken as broken:
        raise _refused(source, archive, broken) from broken


def _take(member: Member, stream: IO[bytes], folder: Path) -> None:
    try:
        save(folder / member.name, checked(read(stream), member.size, member.digest))
    except Broken as broken:
        raise Broken(f"{member.name}: {broken}") from broken


def _tarred(source: Source, archive: Path) -> Iterator[tuple[Member, IO[bytes]]]:
    """In the order of the archive: going back would decompress it anew."""
    wanted = {f"{source.folder}/{member.name}": member for member in source.members}
    with reading(), tarfile.open(archive) as tar:
        for info in tar:
            stream = tar.extractfile(info) if info.isreg() and info.name in wanted else None
            if stream is not None:
                yield wanted.pop(info.name), stream
            if not wanted:
                return
    raise Broken(f"it has no file {', '.join(wanted)}")


def _zipped(source: Source, archive: Path) -> Iterator[tuple[Member, IO[bytes]]]:
    with reading(), zipfile.ZipFile(archive) as zipped:
        names = set(zipped.namelist())
        for member in source.members:
            name = f"{source.folder}/{member.name}"
            if name not in names:
                raise Broken(f"it has no file {name}")
            with zipped.open(name) as stream:
                yield member, stream


def _refused(source: Source, archive: Path, broken: Broken) -> OffbeatError:
    return OffbeatError(
        f"{archive} is damaged or not the official one ({broken})\n"
        f"remove it and it is fetched again, or {source.by_hand(archive.parent)}"
    )
