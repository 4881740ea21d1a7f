"""Owns the folder of a run: which files it has, who may write them, and whether the run is over.

    settings.json           written first: a folder with it is a run's
    ledger.sqlite           everything that happened
    checkpoint.safetensors  where an interrupted run goes on; of a finished one, where it can be extended
    x.safetensors           the final model: the newest version, or the one that reached the target
    newest.safetensors      the newest version, where it is another one (simulated)
    best.safetensors        the best version by a metric, where that is kept
    average.safetensors     the averaged model, where one is kept
    summary.json            written last: a folder with it is a finished run's
    *.png, *.svg            plots

Rules kept here:
- A run is begun in a new or an empty folder, or goes on in its own; everything else is refused and left as it was.
- One process writes a folder at a time; any number read it, also while it is written.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from offbeat.core.layout import Layout, Model
from offbeat.digests import digest_of_file
from offbeat.errors import InvalidValue
from offbeat.storage.disk import cannot_write, is_leftover, sync
from offbeat.storage.json_file import plain, read_json, write_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.lock import Lock, is_held
from offbeat.storage.model_file import load_model, save_model

SETTINGS, SUMMARY, LEDGER, LOCK = "settings.json", "summary.json", "ledger.sqlite", ".lock"
CHECKPOINT, FINAL, X_0 = "checkpoint.safetensors", "x.safetensors", "x_0.safetensors"
BEST, PICTURE = "best.safetensors", "run.svg"
NEWEST, AVERAGE = "newest.safetensors", "average.safetensors"
SHOWN_MAX = 60
"""Characters of a setting's value that a message shows."""

State = Literal["running", "interrupted", "finished"]


class RunFolder:
    """The folder of one run: begun by the process that runs it, opened by those who only read."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, lock: Lock | None, resumed: bool) -> None:
        self.path, self.settings, self.resumed = path, settings, resumed
        self._lock = lock
        self._ledger: Ledger | None = None

    @classmethod
    def begin(cls, path: Path, settings: Mapping[str, object], *, reopen: bool = False) -> Self:
        """Begin a run, or resume (`resumed`) one of the same settings that was interrupted.

        `reopen` is for a finished run that goes on: a server answers for it, or it is extended.
        """
        wanted: dict[str, Any] = plain(settings, "settings")
        missing: list[Path] = []
        try:
            missing = [folder for folder in (path, *path.parents) if not folder.exists()]
            _resumable(path, wanted, reopen=reopen)
            for folder in reversed(missing):
                folder.mkdir(exist_ok=True)
                sync(folder.parent)
            lock = Lock.take(path / LOCK)
            return cls(path, wanted, lock=lock, resumed=_prepared(path, wanted, lock, reopen=reopen))
        except BaseException as error:
            for folder in missing:
                with suppress(OSError):
                    folder.rmdir()
            if isinstance(error, OSError):
                raise cannot_write(path, error) from error
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read a run: finished, interrupted, or under way in another process."""
        if not _there(path / SETTINGS):
            raise InvalidValue(f"{path} is not the folder of a run: it has no {SETTINGS}; give the --dir of a run")
        return cls(path, read_json(path / SETTINGS), lock=None, resumed=False)

    @classmethod
    def recorded(cls, path: Path, name: str) -> Any:
        """A setting of the run that is in this folder; None if there is no run, or no such setting."""
        return read_json(path / SETTINGS).get(name) if _there(path / SETTINGS) else None

    # --- what it holds -----------------------------------------------------------------------------------------------

    @property
    def summary(self) -> dict[str, Any] | None:
        return read_json(self.path / SUMMARY) if (self.path / SUMMARY).is_file() else None

    @property
    def state(self) -> State:
        if (self.path / SUMMARY).is_file():
            return "finished"
        return "running" if self._lock or is_held(self.path / LOCK) else "interrupted"

    @property
    def checkpoint_path(self) -> Path:
        return self.path / CHECKPOINT

    def ledger(self, *, durable: bool = False) -> Ledger:
        """The ledger: the run's own, made where it is missing and closed with the folder; or another one to read."""
        file = self.path / LEDGER
        if self._lock is None:
            return Ledger.open(file, read_only=True)
        if self._ledger is None:
            self._ledger = (
                Ledger.open(file, durable=durable)
                if file.exists()
                else Ledger.create(file, durable=durable, mixings=bool(self.settings.get("mix_s")))
            )
        return self._ledger

    def model(self, layout: Layout) -> Model:
        return load_model(self.path / FINAL, layout)[0]

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(
        self,
        summary: Mapping[str, object],
        x: Model,
        *,
        newest: Model | None = None,
        best: Model | None = None,
        average: Model | None = None,
        tables: Sequence[str] = (),
        keep_checkpoint: bool = False,
    ) -> None:
        """The run is over: write the final model, then the summary that says so.

        `newest` where the final model is an older version; `average` is the averaged model; `tables` are files
        that are there already, and are about the same end.
        """
        if self._lock is None:
            raise InvalidValue(f"{self.path} was opened for reading; only the process that began the run can finish it")
        results: dict[str, Any] = plain(summary, "summary")
        if self._ledger is not None:
            self._ledger.flush()
        t = results.get("result_t", results.get("t"))
        others = ((NEWEST, newest), (BEST, best), (AVERAGE, average))
        beside = [name for name, model in others if model is not None]
        if newest is not None:
            save_model(self.path / NEWEST, newest, {"t": str(results["t"])})
        if best is not None:
            save_model(self.path / BEST, best, {"t": str(results["best_t"])})
        if average is not None:
            save_model(self.path / AVERAGE, average, {"t": str(results["average_t"])})
        save_model(self.path / FINAL, x, {} if t is None else {"t": str(t)})
        results["file_sha256"] = digest_of_file(self.path / FINAL)
        if tables or beside:
            results["files_sha256"] = {name: digest_of_file(self.path / name) for name in (*tables, *beside)}
        write_json(self.path / SUMMARY, results)
        if not keep_checkpoint:
            self.checkpoint_path.unlink(missing_ok=True)

    def take_back_results(self) -> None:
        """The run goes on after its end: what was written about that end is removed, the summary first."""
        for name in (SUMMARY, FINAL, NEWEST, AVERAGE, PICTURE):
            (self.path / name).unlink(missing_ok=True)
        sync(self.path)

    def close(self) -> None:
        """Close the run's ledger and let others write; a second time does nothing."""
        try:
            if self._ledger is not None:
                self._ledger.close()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._lock = self._ledger = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have, or a folder that may not be looked into
        return False


def _prepared(path: Path, wanted: dict[str, Any], lock: Lock, *, reopen: bool) -> bool:
    """Look again, now that no other process writes; tidy up; write the settings. Is the run resumed?"""
    try:
        resumed = _resumable(path, wanted, reopen=reopen)
        for name in _leftovers(path):
            (path / name).unlink(missing_ok=True)
        if not resumed:
            write_json(path / SETTINGS, wanted)
    except BaseException:
        lock.release()
        raise
    return resumed


def _resumable(path: Path, wanted: dict[str, Any], *, reopen: bool) -> bool:
    """Is it this very run, interrupted? False where a run can begin; everything else is refused."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise InvalidValue(f"{path} is a file; give a new or an empty folder")
    if not (path / SETTINGS).exists():
        strangers = {entry.name for entry in path.iterdir()} - {LOCK, *_leftovers(path)}
        if strangers:
            raise InvalidValue(f"{path} holds other files ({_some(sorted(strangers))}); give a new or an empty folder")
        return False
    different = _differences(read_json(path / SETTINGS), wanted)
    if (path / SUMMARY).exists() and not reopen:
        raise InvalidValue(
            f"{path} holds a finished run; give a new or an empty folder, "
            "or a later end (such as more --epochs) to extend it"
        )
    if different:
        changed = any(one.startswith("task is ") for one in different)
        accept = "; where only the task's code has changed, --accept-changed-task goes on with it" if changed else ""
        raise InvalidValue(
            f"{path} holds a run with other settings: {'; '.join(different)}. "
            f"Use the same settings to resume it, or give a new or an empty folder{accept}"
        )
    return True


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    pairs = {name: (there.get(name), here.get(name)) for name in sorted({*there, *here})}
    return [f"{name} is {_shown(old)} there and {_shown(new)} here" for name, (old, new) in pairs.items() if old != new]


def _shown(value: object) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."


def _leftovers(path: Path) -> list[str]:
    """Files that a process which died was still writing."""
    ours = (SETTINGS, SUMMARY, LEDGER, CHECKPOINT, FINAL, NEWEST, BEST, AVERAGE)
    return [entry.name for entry in path.iterdir() if any(is_leftover(entry.name, name) for name in ours)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
