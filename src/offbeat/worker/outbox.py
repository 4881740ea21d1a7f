"""Owns what a worker must not lose: its finished update until the server has it, its device's state, its name.

Rules kept here:
- An update is two files: the vector, `RUN-TASK.safetensors`, and then its record, `RUN-TASK.json`. Each is written
  aside, brought to the disk, renamed; without its record a vector is nothing. When an update goes, its record goes
  first.
- Where the task keeps state, what the training brought is on the disk before the record, which tells its number. When
  the server has applied the update, the state is committed before the record goes: a worker that dies in between is
  told the same answer again.
- Only the newest update is kept: the one before it goes when the newest is on the disk, not earlier.
- An update on the disk counts only if its size and its digest are right. Otherwise it is removed, and the log says why.
- One worker per folder. A folder of something else is refused, because files are removed here.
"""

import errno
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self

from offbeat.core.layout import Model
from offbeat.digests import SHA256, Hasher, digest_of_file, holds
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.disk import Bytes, Disk, cannot_write
from offbeat.storage.json_file import plain
from offbeat.storage.lock import Lock
from offbeat.task import DeviceState, Trained
from offbeat.wire import body_of, header_of
from offbeat.worker.kept_states import BROUGHT, COMMITTED, KeptStates

LOCK, IDENTITY = "worker.lock", "worker.json"
VECTOR, RECORD = ".safetensors", ".json"
RUN = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
OURS = re.compile(rf"{RUN}-\d+\.(safetensors|json|brought)(\.\d+\.aside)?|worker\.json\.\d+\.aside")
"""The files that may be removed."""
NAME_MAX = 100
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PIECE = 1 << 20
"""Bytes that are hashed and then written, while they are in the processor's cache."""


class OutboxFull(OffbeatError):
    """There is no room on the worker's disk; nothing was left on it, so the same can be tried again."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished update on the disk, and the facts that are sent with it."""

    path: Path
    """The vector: the bytes to send."""
    run: str
    task: int
    digest: str
    """Of those bytes; it says its kind."""
    size: int
    samples: int
    gradients: int
    metrics: Mapping[str, float]
    layout: str
    """The fingerprint of the model's layout."""
    download_s: float = 0.0
    train_s: float = 0.0
    device: int = 0
    state: int | None = None
    """The number of the state that the training brought, where the task keeps state."""

    @property
    def record(self) -> Path:
        return self.path.with_suffix(RECORD)

    def facts(self) -> dict[str, Any]:
        """Everything but where it lies."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "path"}

    def opened(self, offset: int) -> BinaryIO:
        try:
            file = self.path.open("rb", buffering=0)
        except OSError as error:
            raise _cannot_read(self.path, error) from error
        file.seek(offset)
        return file


class Outbox:
    """The folder of one worker. Everything here blocks, so it runs off the event loop."""

    def __init__(self, folder: Path, disk: Disk | None = None, *, name: str | None = None) -> None:
        """`name` is the worker's name from now on; without it, the one that it had, or a new one."""
        self.path, self.disk = folder, disk or Disk()
        self.damages: list[str] = []
        """Damaged files that were found, one line each, for the log."""
        self._states = KeptStates(folder, self.disk)
        with writing(folder):
            _make(folder, self.disk)
        with ExitStack() as held:
            held.callback(_taken(folder).release)
            self.name = self._called(name)
            """The worker's name, today and after a restart."""
            self._held = held.pop_all()

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- updates -----------------------------------------------------------------------------------------------------

    def keep(
        self,
        run: str,
        task: int,
        model: Model,
        trained: Trained,
        download_s: float = 0.0,
        train_s: float = 0.0,
        kind: str = SHA256,
        *,
        device: int = 0,
        state: DeviceState | None = None,
    ) -> Finished:
        """Bring an update to the disk, where it stays until it is dropped or a newer one is kept.

        `kind` is that of the digest with which it will be sent, `state` what its training brought for the device.
        """
        path = self._vector(run, task)
        before = self._records()
        if path in before:  # the same task again: a record must never stand beside another vector
            self.drop(before.pop(path)[1])
        order = 1 + max((order for order, _ in before.values()), default=0)
        try:
            with writing(path):
                digest, size = self._write(path, model, kind)
                if state is not None:
                    self._states.write_brought(path, state)
                facts = (digest, size, *trained, model.layout.fingerprint, download_s, train_s)
                finished = Finished(path, run, task, *facts, device, None if state is None else state.number)
                self._write_record(finished, order)
        except BaseException:
            self._forget(path)
            raise
        for other in before:
            self._forget(other)
        return finished

    def redigested(self, finished: Finished, kind: str) -> Finished:
        """The same update with a digest of another kind, on the disk as well."""
        with writing(finished.record):
            order = self._records()[finished.path][0]
            again = replace(finished, digest=digest_of_file(finished.path, kind))
            self._write_record(again, order)
        return again

    def held(self) -> Finished | None:
        """The update that the server has not acknowledged, if there is one; leftovers are removed."""
        found = sorted(self._records().values(), key=lambda record: record[0], reverse=True)
        whole = next((one for _, one in found if self._is_whole(one) and self._state_is_whole(one)), None)
        stay = {whole.path, whole.record, whole.path.with_suffix(BROUGHT)} if whole else set()
        with writing(self.path):
            gone = [file for file in self._ours() if file not in stay]
            for file in sorted(gone, key=lambda file: file.suffix != RECORD):
                self.disk.remove(file)
            self.disk.sync_folder(self.path)
        return whole

    def drop(self, finished: Finished) -> None:
        """Remove an update that the server has or does not want; after this it never comes back."""
        with writing(finished.path):
            self._remove(finished.path)

    def state_of(self, run: str, device: int) -> DeviceState:
        """What the device keeps from its last update that was applied; a damaged state is lost, and that is said."""
        path = self._file(run, device, COMMITTED)
        try:
            return self._states.of(path)
        except InvalidValue as error:
            self._damaged(path, f"is damaged and was removed: the device keeps nothing any more ({error})")
        except OSError as error:
            raise _cannot_read(path, error) from error
        with writing(path):
            self.disk.remove(path)
        return DeviceState()

    def commit(self, finished: Finished) -> None:
        """The server has applied this update: what its training brought is the device's state from now on.

        A second time changes nothing.
        """
        if finished.state is None or self.state_of(finished.run, finished.device).number >= finished.state:
            return
        with writing(finished.path):
            self._states.commit(finished.path, self._file(finished.run, finished.device, COMMITTED))

    def _write(self, path: Path, model: Model, kind: str) -> tuple[str, int]:
        """In one pass; its name reaches the disk together with that of its record, which is nothing without it."""
        parts: tuple[Bytes, ...] = (header_of(model.layout), *body_of(model))
        hasher = Hasher(kind)

        def hashed() -> Iterator[Bytes]:
            for part in [memoryview(given) for given in parts]:
                for start in range(0, len(part), PIECE):
                    hasher.update(part[start : start + PIECE])
                    yield part[start : start + PIECE]

        self.disk.write_unnamed(path, hashed())
        return hasher.text(), sum(len(part) for part in parts)

    def _write_record(self, finished: Finished, order: int) -> None:
        record = plain({"order": order, **finished.facts()})
        self.disk.write_whole(finished.record, [json.dumps(record, allow_nan=False).encode()])

    def _remove(self, vector: Path) -> None:
        """The record is gone from the disk before the vector goes: at no moment does a record lack its vector."""
        self.disk.remove(vector.with_suffix(RECORD))
        self.disk.sync_folder(self.path)
        self.disk.remove(vector)
        self.disk.remove(vector.with_suffix(BROUGHT))

    def _forget(self, vector: Path) -> None:
        """Remove it, but not durably: one that comes back is not the newest, and `held` removes it."""
        for file in (vector.with_suffix(RECORD), vector, vector.with_suffix(BROUGHT)):
            with suppress(OSError):
                self.disk.remove(file)

    def _vector(self, run: str, task: int) -> Path:
        return self._file(run, task, VECTOR)

    def _file(self, run: str, task: int, suffix: str) -> Path:
        if not re.fullmatch(RUN, run) or task < 0:
            raise InvalidValue(
                f"run {run!r}, task {task} cannot name a file: a run has 1..100 of A-Z a-z 0-9 _ . - and begins with "
                "none of . -; a task is a whole number >= 0"
            )
        return self.path / f"{run}-{task}{suffix}"

    # --- what is there -----------------------------------------------------------------------------------------------

    def _ours(self) -> list[Path]:
        with writing(self.path):
            return [file for file in self.path.iterdir() if OURS.fullmatch(file.name)]

    def _records(self) -> dict[Path, tuple[int, Finished]]:
        """Every record that can be read, by its vector, with its place in the order: the highest is the newest."""
        found: dict[Path, tuple[int, Finished]] = {}
        for file in self._ours():
            if file.suffix == RECORD:
                try:
                    order, finished = self._parsed(json.loads(_read(file)))
                    if finished.record != file:
                        raise ValueError(f"it is of task {finished.task} of run {finished.run}")  # noqa: TRY301
                    found[finished.path] = order, finished
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    self._damaged(file, f"is no record and was removed: {error!r}")
        return found

    def _parsed(self, fields: dict[str, Any]) -> tuple[int, Finished]:
        order, path = int(fields.pop("order")), self._vector(fields["run"], fields["task"])
        fields["metrics"] = {name: float(value) for name, value in fields["metrics"].items()}
        return order, Finished(path, **fields)

    def _is_whole(self, finished: Finished) -> bool:
        try:
            with finished.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                if size != finished.size:
                    return self._damaged(finished.path, f"has {size} bytes, not {finished.size}, and was removed")
                if not holds(finished.path, finished.digest):
                    return self._damaged(finished.path, "is not what was written, by its digest, and was removed")
        except FileNotFoundError:
            return self._damaged(finished.path, "is missing, and its record was removed")
        except OSError as error:
            raise _cannot_read(finished.path, error) from error
        return True

    def _state_is_whole(self, finished: Finished) -> bool:
        """Is the state that came with it there, or is it the device's already?"""
        if finished.state is None or self.state_of(finished.run, finished.device).number >= finished.state:
            return True
        try:
            return self._states.brought(finished.path).number == finished.state
        except (InvalidValue, FileNotFoundError) as error:
            return self._damaged(finished.path, f"was removed, for the state that came with it is damaged: {error}")
        except OSError as error:
            raise _cannot_read(finished.path.with_suffix(BROUGHT), error) from error

    def _damaged(self, file: Path, why: str) -> bool:
        self.damages.append(f"{file} {why}")
        return False

    # --- the worker --------------------------------------------------------------------------------------------------

    def _called(self, given: str | None) -> str:
        file = self.path / IDENTITY
        others = [other.name for other in self._ours() if other.suffix in (VECTOR, RECORD)]
        if others and not file.exists():
            raise InvalidValue(f"{self.path} holds {others[0]} but is no worker's folder; give a new one with --dir")
        known = self._known(file)
        name = _checked(given) if given is not None else known or _new_name()
        if name != known:
            with writing(file):
                self.disk.write_whole(file, [json.dumps({"name": name}).encode()])
        return name

    def _known(self, file: Path) -> str | None:
        try:
            return _checked(json.loads(_read(file))["name"]) if file.exists() else None
        except (KeyError, TypeError, ValueError):
            self._damaged(file, "does not tell the worker's name; it gets another one")
            return None


# --- files and names -------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk refuses is said in one line; `OutboxFull` where there is no room."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            where = f"cannot write {path}: {error.strerror}"
            raise OutboxFull(f"{where}; make room on its disk, or give a folder on another one with --dir") from error
        raise cannot_write(path, error) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Path, error: OSError) -> OffbeatError:
    """The file may be whole, so it is not removed."""
    return OffbeatError(f"cannot read {path}: {error.strerror}; make it readable, remove it, or give another --dir")


def _make(folder: Path, disk: Disk) -> None:
    """Only the owner can read it: an update tells something of the data. New names are on the disk, too."""
    new = [made for made in (folder, *folder.parents) if not made.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in new:
        disk.sync_folder(made.parent)


def _taken(folder: Path) -> Lock:
    try:
        with writing(folder):
            return Lock.take(folder / LOCK)
    except InvalidValue as error:
        raise InvalidValue(f"{error}: every worker needs its own, give it with --dir") from None


def _new_name() -> str:
    """The name of the host, and some digits that tell its workers apart."""
    host = "".join(letter for letter in socket.gethostname().split(".")[0] if "!" <= letter <= "~")
    return f"{host[: NAME_MAX - 5] or 'worker'}-{secrets.token_hex(2)}"


def _checked(name: str) -> str:
    if not (isinstance(name, str) and 1 <= len(name) <= NAME_MAX and name.isprintable() and name == name.strip()):
        raise InvalidValue(f"a worker cannot be called {name!r}; use 1..{NAME_MAX} printable characters")
    return name
