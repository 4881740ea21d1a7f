"""What a worker must not lose: updates over power cuts, full disks and restarts; its name; its journal."""

import errno
import hashlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isnan, nan
from pathlib import Path

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.disk import Disk, Output
from offbeat.task import Trained
from offbeat.wire import body_of, header_of
from offbeat.worker.journal import Journal
from offbeat.worker.outbox import Finished, Outbox, OutboxFull
from tests.contract.forgetful import Forgetful, Image, restore

ACCEPTED = ("run", 3, "ab", "applied")


def model(seed: int) -> Model:
    x = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    return Model.of({"x": x, "n": np.array(seed)}, buffers=["n"])


def packed(of: Model) -> bytes:
    return header_of(of.layout) + b"".join(bytes(part) for part in body_of(of))


def keep(outbox: Outbox, task: int, seed: int | None = None, run: str = "run") -> Finished:
    return outbox.keep(run, task, model(task if seed is None else seed), Trained(60, 5, {"loss": 0.5}))


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


EMPTY = {"worker.json", "worker.lock"}
SEVEN = EMPTY | {"run-7.json", "run-7.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "outbox"


@pytest.fixture
def outbox(folder: Path) -> Iterator[Outbox]:
    with Outbox(folder) as opened:
        yield opened


# --- keeping ---------------------------------------------------------------------------------------------------------


def test_an_update_is_kept_over_restarts_until_it_is_dropped(folder: Path) -> None:
    with Outbox(folder) as outbox:
        assert outbox.held() is None
        finished = keep(outbox, 7)
        assert outbox.held() == finished
    data = packed(model(7))
    for _ in range(2):
        with Outbox(folder) as again:
            assert again.held() == finished
            assert not again.damages
            assert finished.path.read_bytes() == data
            assert files(folder) == SEVEN
    assert finished == Finished(
        folder / "run-7.safetensors",
        run="run",
        task=7,
        digest=hashlib.sha256(data).hexdigest(),
        size=len(data),
        samples=60,
        gradients=5,
        metrics={"loss": 0.5},
        layout=model(7).layout.fingerprint,
    )
    with Outbox(folder) as last:
        last.drop(finished)
        last.drop(finished)
        assert last.held() is None
        assert files(folder) == EMPTY


def test_only_the_newest_update_is_kept(outbox: Outbox, folder: Path) -> None:
    """Whatever its number: another run may have begun."""
    for run, task in (("first", 9), ("second", 1), ("second", 0)):
        finished = keep(outbox, task, run=run)
        assert outbox.held() == finished
        assert files(folder) == EMPTY | {finished.path.name, finished.record.name}


def test_of_two_updates_that_a_crash_has_left_the_newest_counts(outbox: Outbox, folder: Path) -> None:
    old = keep(outbox, 9)
    left = {file.name: file.read_bytes() for file in (old.path, old.record)}
    new = keep(outbox, 1)
    restore(left, folder)
    assert outbox.held() == new
    restore(left, folder)
    newest = keep(outbox, 4)
    assert outbox.held() == newest
    assert not outbox.damages


def test_the_same_task_again_takes_the_place_of_the_first(outbox: Outbox) -> None:
    first, second = keep(outbox, 7), keep(outbox, 7, seed=8)
    assert first.digest != second.digest
    assert outbox.held() == second


def test_any_number_is_a_metric(outbox: Outbox) -> None:
    metrics = {"loss": nan, "norm": -inf, "share": np.float32(0.25)}
    outbox.keep("run", 7, model(7), Trained(np.int64(3), 1, metrics))  # type: ignore[arg-type]
    held = outbox.held()
    assert held is not None
    assert isnan(held.metrics["loss"])
    assert (held.metrics["norm"], held.metrics["share"], held.samples) == (-inf, 0.25, 3)


@pytest.mark.parametrize("run", ["", "../run", "a/b", ".run", "-run", "r\n", "r" * 101, "ß"])
def test_a_server_cannot_choose_where_files_are_written(run: str, outbox: Outbox, folder: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot name a file: a run has"):
        keep(outbox, 7, run=run)
    with pytest.raises(InvalidValue, match="a task is a whole number >= 0"):
        keep(outbox, -1, seed=0)
    assert files(folder) == EMPTY


# --- damage ----------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def shortened(data: bytes) -> bytes:
    return data[:-1]


def emptied(_data: bytes) -> bytes:
    return b""


def of_another_task(data: bytes) -> bytes:
    return data.replace(b'"task": 7', b'"task": 8')


def without_its_size(data: bytes) -> bytes:
    return data.replace(b'"size"', b'"sise"')


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("run-7.safetensors", flipped, "run-7.safetensors is not what was written, by its digest"),
        ("run-7.safetensors", shortened, "run-7.safetensors has .* bytes, not "),
        ("run-7.safetensors", emptied, "run-7.safetensors has 0 bytes"),
        ("run-7.json", shortened, "run-7.json is no record"),
        ("run-7.json", emptied, "run-7.json is no record"),
        ("run-7.json", of_another_task, "run-7.json is no record .* task 8 of run run"),
        ("run-7.json", without_its_size, "run-7.json is no record"),
    ],
)
def test_a_damaged_update_is_removed_and_it_is_said_why(
    name: str, damage: Callable[[bytes], bytes], why: str, outbox: Outbox, folder: Path
) -> None:
    keep(outbox, 7)
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    assert outbox.held() is None
    (said,) = outbox.damages
    assert re.search(why, said)
    assert files(folder) == EMPTY


def test_a_record_without_its_vector_is_nothing(outbox: Outbox, folder: Path) -> None:
    keep(outbox, 7).path.unlink()
    assert outbox.held() is None
    assert outbox.damages == [f"{folder / 'run-7.safetensors'} is missing, and its record was removed"]
    assert files(folder) == EMPTY


def test_leftovers_are_tidied_and_what_is_not_ours_stays(outbox: Outbox, folder: Path) -> None:
    keep(outbox, 7)
    ours = ["run-8.safetensors", "run-8.safetensors.123.aside", "run-8.json.123.aside", "worker.json.9.aside"]
    strangers = {"journal.jsonl", "model.safetensors", "notes.json", "other.aside"}
    for name in (*ours, *strangers):
        (folder / name).write_bytes(b"left")
    assert outbox.held() is not None
    assert files(folder) == SEVEN | strangers
    assert not outbox.damages


@pytest.mark.parametrize("name", ["run-7.safetensors", "run-7.json"])
def test_what_cannot_be_read_is_not_thrown_away(name: str, outbox: Outbox, folder: Path) -> None:
    """It may be whole: a folder in its place stands for whatever the disk or the rights refuse."""
    keep(outbox, 7)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(OffbeatError, match=rf"cannot read .*{name}: .*; make it readable, remove it"):
        outbox.held()
    assert files(folder) == SEVEN


# --- a full disk -----------------------------------------------------------------------------------------------------


class Failing(Disk):
    """A disk on which every operation fails from some number on, but for those that make room."""

    def __init__(self, number: int = errno.ENOSPC) -> None:
        self.left, self.number = 10**9, number

    def _next(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))

    def create(self, path: Path) -> Output:
        self._next()
        return super().create(path)

    def extend(self, path: Path, size: int) -> Output:
        self._next()
        return super().extend(path, size)

    def sync_folder(self, path: Path) -> None:
        self._next()
        super().sync_folder(path)

    def replace(self, old: Path, new: Path) -> None:
        self._next()
        super().replace(old, new)

    def wrote(self, _path: Path) -> None:
        self._next()

    def synced(self, _path: Path) -> None:
        self._next()


@pytest.mark.parametrize("before", [None, 6])
def test_a_full_disk_leaves_nothing_behind_whenever_it_is_full(before: int | None, folder: Path) -> None:
    disk, operations = Failing(), 0
    with Outbox(folder, disk) as outbox:
        while True:
            held = keep(outbox, before) if before is not None else None
            there, disk.left = files(folder), operations
            try:
                finished = keep(outbox, 7)
                break
            except OutboxFull as error:
                assert "No space left on device; make room on its disk" in str(error)  # noqa: PT017
            disk.left = 10**9
            assert files(folder) == there
            assert outbox.held() == held
            operations += 1
        disk.left = 10**9
        assert operations > 10
        assert outbox.held() == finished


def test_a_disk_that_breaks_is_told_apart_from_one_that_is_full(folder: Path) -> None:
    disk = Failing(errno.EROFS)
    with Outbox(folder, disk) as outbox:
        disk.left = 3
        with pytest.raises(OffbeatError, match=r"cannot write .*: Read-only file system") as refused:
            keep(outbox, 7)
        assert not isinstance(refused.value, OutboxFull)


@contextmanager
def file_size_max(size: int) -> Iterator[None]:
    """The kernel itself writes a part and refuses the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_the_kernel_writes_half_is_gone_too_and_can_be_tried_again(outbox: Outbox, folder: Path) -> None:
    with file_size_max(2000), pytest.raises(OutboxFull, match="File too large"):
        keep(outbox, 7)
    assert files(folder) == EMPTY
    finished = keep(outbox, 7)
    assert outbox.held() == finished


# --- power cuts ------------------------------------------------------------------------------------------------------


class Cuts:
    """A worker's life on a disk that forgets; after every operation: the image, the digests allowed, the name."""

    def __init__(self, folder: Path, keeps_names: bool) -> None:
        folder.mkdir()
        self.seen: list[tuple[Image, set[str | None], str | None]] = []
        self.allowed: set[str | None] = {None}
        self.name: str | None = None
        self.disk = Forgetful(folder, keeps_names=keeps_names, moment=self._passed)
        self.outbox = Outbox(folder, self.disk)
        self.name = self.outbox.name
        self._passed(self.disk.image())

    def _passed(self, image: Image) -> None:
        self.seen.append((image, self.allowed, self.name))

    def keep(self, task: int, seed: int, *or_nothing: None) -> Finished:
        digest = hashlib.sha256(packed(model(seed))).hexdigest()
        self.allowed = self.allowed | {digest, *or_nothing}
        finished = keep(self.outbox, task, seed)
        self._is(digest)
        return finished

    def drop(self, finished: Finished) -> None:
        self.allowed = self.allowed | {None}
        self.outbox.drop(finished)
        self._is(None)

    def _is(self, digest: str | None) -> None:
        """From here on nothing else is right."""
        self.allowed = {digest}
        self._passed(self.disk.image())


@pytest.mark.parametrize("keeps_names", [False, True])
def test_after_a_power_cut_an_update_is_there_whole_or_not_at_all(keeps_names: bool, tmp_path: Path) -> None:
    cuts = Cuts(tmp_path / "life", keeps_names)
    cuts.drop(cuts.keep(7, 7))
    cuts.keep(9, 9)
    cuts.keep(3, 3)
    cuts.drop(cuts.keep(3, 4, None))
    cuts.keep(10, 10)
    cuts.outbox.held()
    assert len(cuts.seen) > 60
    for number, (image, allowed, name) in enumerate(cuts.seen):
        folder = tmp_path / str(number)
        restore(image, folder)
        with Outbox(folder) as again:
            held = again.held()
            assert (held and held.digest) in allowed, f"after operation {number}"
            assert not again.damages, f"after operation {number}"
            assert name is None or again.name == name
            left = set() if held is None else {held.path.name, held.record.name}
            assert files(folder) == EMPTY | left
            if held is not None:
                assert hashlib.sha256(held.path.read_bytes()).hexdigest() == held.digest
            keep(again, 11)
    cuts.outbox.close()


class Watched(Disk):
    """Remembers which folders were brought to the disk."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def synced_folder(self, path: Path) -> None:
        self.folders.append(path)


def test_the_names_of_new_folders_are_brought_to_the_disk_too(tmp_path: Path) -> None:
    disk = Watched()
    Outbox(tmp_path / "a" / "b" / "c", disk).close()
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"} == set(disk.folders)
    assert (tmp_path / "a" / "b" / "c").stat().st_mode & 0o777 == 0o700


# --- the folder and the worker's name --------------------------------------------------------------------------------


def test_two_workers_never_share_a_folder(outbox: Outbox, folder: Path) -> None:
    code = f"from pathlib import Path; from offbeat.worker.outbox import Outbox; Outbox(Path({str(folder)!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert other.returncode == 1
    assert f"{folder} is being written by process {os.getpid()};" in other.stderr
    assert "every worker needs its own, give it with --dir" in other.stderr
    outbox.close()
    outbox.close()
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_folder_that_is_no_workers_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-500.safetensors").write_bytes(b"somebody's month of work")
    with pytest.raises(InvalidValue, match=r"holds checkpoint-500.safetensors but is no worker's folder; .* --dir"):
        Outbox(tmp_path)
    assert files(tmp_path) == {"checkpoint-500.safetensors"}


def test_a_path_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OffbeatError, match=r"cannot write .*file"):
        Outbox(tmp_path / "file")


def test_a_worker_is_named_once_after_its_host(tmp_path: Path) -> None:
    names = []
    for name in ("a", "b", "a", "b"):
        with Outbox(tmp_path / name) as outbox:
            names.append(outbox.name)
    assert names[:2] == names[2:]
    assert names[0] != names[1]
    host, _, letters = names[0].rpartition("-")
    assert socket.gethostname().startswith(host)
    assert len(letters) == 4
    assert set(letters) <= set("0123456789abcdef")


def test_a_given_name_stays(folder: Path) -> None:
    for given, expected in (("kitchen", "kitchen"), (None, "kitchen"), ("Küche 2", "Küche 2"), (None, "Küche 2")):
        with Outbox(folder, name=given) as outbox:
            assert outbox.name == expected


@pytest.mark.parametrize("name", ["", " kitchen", "two\nlines", "x" * 101])
def test_a_name_that_is_none_is_refused_and_the_folder_is_free_again(name: str, folder: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot be called"):
        Outbox(folder, name=name)
    Outbox(folder).close()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 3}', '{"name": ""}'])
def test_a_damaged_identity_costs_the_name_but_no_update(text: str, folder: Path) -> None:
    with Outbox(folder) as outbox:
        finished = keep(outbox, 7)
    (folder / "worker.json").write_text(text)
    with Outbox(folder) as again:
        assert again.held() == finished
        (said,) = again.damages
        assert said.endswith("worker.json does not tell the worker's name; it gets another one")
        name = again.name
    with Outbox(folder) as last:
        assert last.name == name
        assert not last.damages


# --- the journal -----------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_journal_has_a_line_for_every_acknowledgement_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for task in (3, 4):
        journal = Journal(path)
        journal.note("run", task, "ab", "applied")
        journal.note("run", task, "ab", "too stale")
        journal.close()
    assert [(line["task"], line["outcome"]) for line in lines(path)] == [
        (3, "applied"),
        (3, "too stale"),
        (4, "applied"),
        (4, "too stale"),
    ]
    assert lines(path)[0] == {"run": "run", "task": 3, "digest": "ab", "outcome": "applied"}


def test_no_journal_is_one_too() -> None:
    journal = Journal(None)
    journal.note(*ACCEPTED)
    journal.close()


@pytest.mark.parametrize("half", [b"{", b'{"run": "ru', b'{"run": "run", "task": 3}', b"\0\0\0", b'{"ru\0\0'])
@pytest.mark.parametrize("before", [0, 1, 500])
def test_half_a_line_is_cut_off_when_a_journal_is_opened(half: bytes, before: int, tmp_path: Path) -> None:
    path, line = tmp_path / "journal.jsonl", json.dumps({"run": "run", "digest": "x" * 300}).encode() + b"\n"
    path.write_bytes(line * before + half)
    journal = Journal(path)
    assert path.read_bytes() == line * before
    journal.note(*ACCEPTED)
    journal.close()
    assert len(lines(path)) == before + 1


@pytest.mark.parametrize("text", ['{\n  "a": 1\n}', "no newline", "line\nno newline", "x" * 100_000])
def test_what_is_no_journal_loses_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(InvalidValue, match="does not end as a journal does"):
            Journal(path)
    assert path.read_text() == text
    assert files(tmp_path) == {"config.json"}


def test_a_journal_on_a_full_disk_can_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.note(*ACCEPTED)
    with file_size_max(path.stat().st_size + 10), pytest.raises(OutboxFull):
        journal.note(*ACCEPTED)
    journal.note(*ACCEPTED)
    journal.close()
    assert len(lines(path)) == 2


def test_two_workers_never_share_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(InvalidValue, match=f"process {os.getpid()}"):
        Journal(tmp_path / "journal.jsonl")
    journal.close()
    Journal(tmp_path / "journal.jsonl").close()


@pytest.mark.parametrize("keeps_names", [False, True])
def test_a_journal_forgets_no_line_in_a_power_cut(keeps_names: bool, tmp_path: Path) -> None:
    moments: list[tuple[Image, int]] = []
    noted, root = 0, tmp_path / "life"
    root.mkdir()
    disk = Forgetful(root, keeps_names=keeps_names, moment=lambda image: moments.append((image, noted)))
    journal = Journal(root / "journal.jsonl", disk)
    for task in range(4):
        journal.note("run", task, "ab", "applied")
        noted += 1
        moments.append((disk.image(), noted))
    journal.close()
    for number, (image, told) in enumerate(moments):
        folder = tmp_path / str(number)
        folder.mkdir()
        restore(image, folder)
        Journal(folder / "journal.jsonl").close()
        found = [line["task"] for line in lines(folder / "journal.jsonl")]
        assert found in (list(range(told)), list(range(told + 1)))
