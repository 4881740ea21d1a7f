"""Archives: only the named files leave one, each of them checked; one that a user placed stays, whatever it holds."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offbeat.data.archive import DataFile, DataSource
from offbeat.data.cache import ready
from offbeat.errors import OffbeatError

RNG = np.random.default_rng(0)
FILES = {"a.bin": RNG.bytes(500_000), "b.bin": RNG.bytes(700_000), "c.bin": b"c"}
MIRROR = "OFFBEAT_TEST_URL"
Pack = Callable[[Mapping[str, bytes]], bytes]


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def tarred(files: Mapping[str, bytes]) -> bytes:
    """A compressed tar archive of these files, made the same every time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), 1, mtime=0)


def zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip archive of these files."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return packed.getvalue()


def source_of(packed: bytes, files: Mapping[str, bytes] = FILES, archive: str = "set.tar.gz") -> DataSource:
    """A data set that is these files, in the folder `set` of this archive."""
    members = tuple(DataFile(name, len(content), sha256(content)) for name, content in files.items())
    return DataSource("Set", archive, len(packed), sha256(packed), (), MIRROR, "set", members)


def in_folder(files: Mapping[str, bytes] = FILES) -> dict[str, bytes]:
    return {f"set/{name}": content for name, content in files.items()}


def names(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def placed(root: Path, packed: bytes, archive: str) -> DataSource:
    """Put an archive there by hand; its digest is right, whatever is in it."""
    (root / archive).write_bytes(packed)
    return source_of(packed, archive=archive)


KINDS = pytest.mark.parametrize(("pack", "archive"), [(tarred, "set.tar.gz"), (zipped, "set.zip")])


@KINDS
def test_an_archive_placed_by_hand_is_unpacked_and_stays(tmp_path: Path, pack: Pack, archive: str) -> None:
    source = placed(tmp_path, pack(in_folder()), archive)
    place = ready(source, tmp_path)
    assert place == tmp_path / "set"
    assert {path.name: path.read_bytes() for path in place.iterdir()} == FILES
    assert names(tmp_path) == ["set", archive, "set/a.bin", "set/b.bin", "set/c.bin"]
    (tmp_path / archive).unlink()
    assert ready(source, tmp_path) == place


@KINDS
def test_only_the_named_files_leave_an_archive(tmp_path: Path, pack: Pack, archive: str) -> None:
    others = {"../out.bin": b"1", "/out.bin": b"2", "set/../../out.bin": b"3", "set/d.bin": b"4", "a.bin": b"5"}
    root = tmp_path / "root"
    root.mkdir()
    ready(placed(root, pack(others | in_folder()), archive), root)
    assert names(tmp_path / "root" / "set") == ["a.bin", "b.bin", "c.bin"]
    assert names(tmp_path) == sorted(
        ["root", "root/set", f"root/{archive}", "root/set/a.bin", "root/set/b.bin", "root/set/c.bin"]
    )


def test_a_link_under_the_name_of_a_file_is_not_followed(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        link = tarfile.TarInfo("set/a.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    source = placed(tmp_path, packed.getvalue(), "set.tar.gz")
    with pytest.raises(OffbeatError, match=r"it has no file set/a\.bin, set/b\.bin, set/c\.bin"):
        ready(source, tmp_path)
    assert names(tmp_path) == ["set.tar.gz"]


@KINDS
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"set/b.bin": b"b" * 699_999}, "b.bin: ends after 699,999 of 700,000 bytes"),
        ({"set/b.bin": b"b" * 700_001}, "b.bin: longer than the expected 700,000 bytes"),
        ({"set/b.bin": b"c" * 700_000}, "b.bin: its sha256 is"),
        ({"set/c.bin": b""}, "c.bin: ends after 0 of 1 bytes"),
    ],
)
def test_a_member_that_is_not_the_official_one_is_refused(
    tmp_path: Path, pack: Pack, archive: str, change: dict[str, bytes], says: str
) -> None:
    source = placed(tmp_path, pack(in_folder() | change), archive)
    with pytest.raises(OffbeatError, match=says) as refused:
        ready(source, tmp_path)
    assert str(tmp_path / archive) in str(refused.value)
    assert names(tmp_path) == [archive]


@KINDS
def test_a_member_that_is_not_there_is_named(tmp_path: Path, pack: Pack, archive: str) -> None:
    files = in_folder()
    del files["set/b.bin"]
    source = placed(tmp_path, pack(files), archive)
    with pytest.raises(OffbeatError, match=r"it has no file set/b\.bin\)"):
        ready(source, tmp_path)
    assert names(tmp_path) == [archive]


@KINDS
def test_an_archive_cut_or_spoilt_anywhere_is_refused_even_where_its_digest_is_right(
    tmp_path: Path, pack: Pack, archive: str
) -> None:
    packed = pack(in_folder())
    spoilt = [packed[:size] for size in range(0, len(packed) - 2000, 100_000)]
    spoilt += [packed[:at] + bytes([packed[at] ^ 255]) + packed[at + 1 :] for at in (0, len(packed) // 2)]
    for content in spoilt:
        source = placed(tmp_path, content, archive)
        with pytest.raises(OffbeatError, match="is damaged or not the official one") as refused:
            ready(source, tmp_path)
        assert len(str(refused.value).splitlines()) == 2
        assert names(tmp_path) == [archive]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda packed: packed[:-1], "ends after"),
        (lambda packed: packed + b"!", "longer than"),
        (lambda packed: packed[:-1] + b"!", "its sha256 is"),
    ],
)
def test_a_wrong_archive_placed_by_hand_is_named_and_left(
    tmp_path: Path, change: Callable[[bytes], bytes], says: str
) -> None:
    packed = tarred(in_folder())
    (tmp_path / "set.tar.gz").write_bytes(change(packed))
    with pytest.raises(OffbeatError, match=says) as refused:
        ready(source_of(packed), tmp_path)
    assert str(tmp_path / "set.tar.gz") in str(refused.value)
    assert "remove it and it is fetched again" in str(refused.value)
    assert (tmp_path / "set.tar.gz").read_bytes() == change(packed)
    assert names(tmp_path) == ["set.tar.gz"]


def test_an_archive_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "set.tar.gz").mkdir()
    with pytest.raises(OffbeatError, match=r"set\.tar\.gz is damaged or not the official one \(Is a directory\)"):
        ready(source_of(tarred(in_folder())), tmp_path)


def test_digests_of_other_kinds_are_checked_too(tmp_path: Path) -> None:
    packed = tarred(in_folder())
    right = "sha1:" + hashlib.sha1(packed, usedforsecurity=False).hexdigest()
    source = replace(placed(tmp_path, packed, "set.tar.gz"), digest=right[:-1] + "x")
    with pytest.raises(OffbeatError, match="its sha1 is"):
        ready(source, tmp_path)
    ready(replace(source, digest=right), tmp_path)
