"""The cache folder: where it is, and that nothing broken is ever in it, whatever fails and whoever comes first."""

import errno
import io
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Barrier
from typing import IO, Any

import pytest

from offbeat.data import cache
from offbeat.data.cache import cache_folder, ready
from offbeat.errors import OffbeatError
from tests.unit.test_data_archives import FILES, MIRROR, in_folder, names, source_of, zipped
from tests.unit.test_data_fetch import PACKED, SOURCE, fetching, sends, served

WHOLE = ["set", "set.tar.gz", "set/a.bin", "set/b.bin", "set/c.bin"]


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    for name in (MIRROR, "OFFBEAT_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")


@pytest.mark.parametrize(
    ("system", "variables", "folder"),
    [
        ("Linux", {}, "/home/ada/.cache/offbeat"),
        ("Linux", {"XDG_CACHE_HOME": "/caches"}, "/caches/offbeat"),
        ("Linux", {"XDG_CACHE_HOME": ""}, "/home/ada/.cache/offbeat"),
        ("Linux", {"XDG_CACHE_HOME": "relative/is/ignored"}, "/home/ada/.cache/offbeat"),
        ("Linux", {"XDG_CACHE_HOME": "/caches", "OFFBEAT_DATA": "/data"}, "/data"),
        ("Linux", {"OFFBEAT_DATA": "~/data"}, "/home/ada/data"),
        ("Linux", {"OFFBEAT_DATA": ""}, "/home/ada/.cache/offbeat"),
        ("Darwin", {"XDG_CACHE_HOME": "/caches"}, "/home/ada/Library/Caches/offbeat"),
        ("Windows", {"LOCALAPPDATA": "/local"}, "/local/offbeat"),
        ("Windows", {}, "/home/ada/AppData/Local/offbeat"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, system: str, variables: dict[str, str], folder: str) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_without_a_home_one_line_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(*_: object) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OffbeatError, match="set OFFBEAT_DATA to a folder"):
        cache_folder()


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "set.tar.gz").write_bytes(PACKED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFBEAT_DATA", "data")
    assert ready(SOURCE) == tmp_path / "data" / "set"


def test_unpacked_files_are_used_whoever_put_them_there(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name, content in FILES.items():
        (tmp_path / "set" / name).write_bytes(content[::-1])  # of the official length, with another digest
    (tmp_path / "set" / "more.txt").touch()
    assert ready(SOURCE, tmp_path) == tmp_path / "set"
    assert names(tmp_path) == ["set", "set/a.bin", "set/b.bin", "set/c.bin", "set/more.txt"]


@pytest.mark.parametrize(("content", "says"), [(None, "No such file"), (b"", "it has 0 bytes and must have 700,000")])
def test_an_unpacked_folder_that_is_not_whole_is_named_and_left(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    (tmp_path / "set.tar.gz").write_bytes(PACKED)
    broken = ready(SOURCE, tmp_path) / "b.bin"
    broken.unlink()
    if content is not None:
        broken.write_bytes(content)
    with pytest.raises(OffbeatError, match=says) as refused:
        ready(SOURCE, tmp_path)
    assert f"cannot use {broken}: " in str(refused.value)
    assert f"remove {broken.parent} and it is unpacked again" in str(refused.value)
    assert (tmp_path / "set" / "a.bin").exists()


class Disk:
    """Counts what changes the disk; from the given count on, it fails."""

    def __init__(self, patch: pytest.MonkeyPatch, fails_at: int, error: Callable[[], BaseException]) -> None:
        self.left, self.error = fails_at, error
        opens = Path.open

        def opened(path: Path, mode: str = "r", *rest: Any, **named: Any) -> IO[Any]:
            return io.BufferedWriter(self.raw(path)) if mode == "wb" else opens(path, mode, *rest, **named)

        patch.setattr(Path, "open", opened)
        for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "rename"), (tempfile, "mkdtemp")):
            patch.setattr(owner, name, self.failing(getattr(owner, name)))

    def step(self) -> None:
        self.left -= 1
        if self.left <= 0:
            raise self.error()

    def failing(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*given: Any, **named: Any) -> Any:
            self.step()
            return does(*given, **named)

        return instead

    def raw(self, path: Path) -> io.FileIO:
        disk = self

        class Raw(io.FileIO):
            def write(self, content: Any) -> int:
                disk.step()
                return super().write(content)

        self.step()
        return Raw(path, "wb")


@pytest.mark.parametrize("error", [lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt])
def test_a_full_disk_or_an_interruption_anywhere_leaves_nothing_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Callable[[], BaseException]
) -> None:
    (tmp_path / "copy").write_bytes(PACKED)
    source = replace(SOURCE, official=((tmp_path / "copy").as_uri(),))
    told, left = [], []
    for fails_at in range(1, 1000):
        root = tmp_path / str(fails_at)
        try:
            with monkeypatch.context() as patch:
                Disk(patch, fails_at, error)
                ready(source, root)
            break
        except (OffbeatError, KeyboardInterrupt) as failed:
            told.append(str(failed))
        left.append(names(root))
        ready(source, root)  # once there is room again
        assert {path.name: path.read_bytes() for path in (root / "set").iterdir()} == FILES
        assert (root / "set.tar.gz").read_bytes() == PACKED
    assert all(names in ([], ["set.tar.gz"]) for names in left)
    assert left.count(["set.tar.gz"]) > 8  # the archive was whole, and was not fetched again
    assert all(not line or ("cannot write to" in line and "No space left on device" in line) for line in told)
    assert len(told) > 20


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffbeatError, match=r"cannot write to .*OFFBEAT_DATA names it") as refused:
        ready(SOURCE, tmp_path / "file" / "root")
    assert "\n" not in str(refused.value)


def test_two_processes_that_fetch_at_once_both_succeed(tmp_path: Path) -> None:
    both = Barrier(2)

    def answer(request: BaseHTTPRequestHandler) -> None:
        both.wait(60)
        sends(PACKED)(request)

    with served(answer) as address:
        started = [fetching(tmp_path / "root", address, subprocess.PIPE) for _ in range(2)]
        assert [process.communicate() for process in started] == [(b"", b"")] * 2
    assert [process.returncode for process in started] == [0, 0]
    assert names(tmp_path / "root") == WHOLE


def test_the_slower_one_drops_its_own(tmp_path: Path) -> None:
    asked, inodes = [], []

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        if len(asked) == 1:  # the one who asked first waits until the other has finished
            inodes.append(ready(source, tmp_path).stat().st_ino)
        sends(PACKED)(request)

    with served(answer) as address:
        source = replace(SOURCE, official=(address,))
        place = ready(source, tmp_path)
    assert len(asked) == 2
    assert place.stat().st_ino == inodes[0]
    assert names(tmp_path) == WHOLE


def test_what_a_killed_process_left_goes_a_day_later(tmp_path: Path) -> None:
    packed = zipped(in_folder())
    (tmp_path / "set.zip").write_bytes(packed)
    old, new, foreign = (tmp_path / name for name in (".offbeat-old.aside", ".offbeat-new.aside", "mine.aside"))
    for folder in (old, new, foreign):
        folder.mkdir()
        (folder / "half").touch()
    for folder in (old, foreign):
        os.utime(folder, (0, 0))
    assert cache.LEFTOVER_S == 24 * 60 * 60
    ready(source_of(packed, archive="set.zip"), tmp_path)
    assert [folder.exists() for folder in (old, new, foreign)] == [False, True, True]
