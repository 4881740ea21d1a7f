"""Owns the checkpoints of a served run: the vectors, and the coordinator's state at a place in the ledger.

Rules kept here:
- A checkpoint is written aside, brought to the disk, renamed. The newest two are kept: a damaged one costs time only.
- A damaged one is known: its state has a digest of its own, and those of its vectors.
- It can be redone from the ledger and the updates since the one before it: what they hold is never in one place alone.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.core.layout import Layout, Model
from offbeat.digests import digest_of_file
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.disk import Bytes, Disk
from offbeat.storage.json_file import sealed, unsealed
from offbeat.wire import BadPayload, body_of, header_of, mapped

KEPT = 2


class Checkpoint(NamedTuple):
    mark: int
    """The last row of the ledger that it knows of."""
    state: dict[str, Any]
    w: Model
    x: Model
    head: str = ""
    """The head of the ledger's chain at that row; empty where there was no chain."""
    totals: dict[str, Any] | None = None
    """What the server knows of all rows up to there; None in checkpoints of before they held it."""


def checkpoint_heads(folder: Path) -> Iterator[tuple[int, str]]:
    """The mark and the head of the ledger's chain of every checkpoint whose state can be read."""
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            kept = unsealed(file.read_bytes())
            yield int(kept["mark"]), str(kept.get("head", ""))


def damaged_checkpoints(folder: Path) -> Iterator[str]:
    """A sentence for every file of a checkpoint that is not what was written; one that is removed meanwhile is none."""
    for file in sorted(folder.glob("*.json")):
        try:
            vectors: dict[str, str] = unsealed(file.read_bytes())["vectors"]
            for name, digest in vectors.items():
                path = file.with_name(f"{file.stem}.{name}.safetensors")
                if digest_of_file(path) != digest and file.exists():
                    yield f"checkpoint {file.stem} is damaged: {path} does not hold what was written"
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            if file.exists():
                yield f"checkpoint {file.stem} is damaged: {file}: {error}"


class Checkpoints:
    """The folder of checkpoints: each has a file for its state and one for each of its vectors."""

    def __init__(self, folder: Path, layout: Layout, disk: Disk) -> None:
        self.path, self.layout, self.disk = folder, layout, disk
        disk.make_folder(folder)

    def write(self, checkpoint: Checkpoint) -> None:
        """Keep it; the state comes last, and without it the vectors are no checkpoint."""
        names = ("w",) if checkpoint.w is checkpoint.x else ("w", "x")
        vectors = {name: self._written(checkpoint.mark, name, getattr(checkpoint, name)) for name in names}
        facts = {"mark": checkpoint.mark, "head": checkpoint.head, "vectors": vectors, "state": checkpoint.state}
        text = json.dumps(facts | {"totals": checkpoint.totals})
        self.disk.write_whole(self._file(checkpoint.mark, "json"), [sealed(text)])

    def _written(self, mark: int, name: str, model: Model) -> str:
        parts: list[Bytes] = [header_of(self.layout), *body_of(model)]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        self.disk.write_whole(self._file(mark, name), parts)
        return digest.hexdigest()

    def marks(self) -> list[int]:
        return sorted((int(file.stem) for file in self.path.glob("*.json") if file.stem.isdecimal()), reverse=True)

    def read(self, mark: int) -> Checkpoint:
        """One of them; refused where it is damaged."""
        try:
            kept = unsealed(self._file(mark, "json").read_bytes())
            vectors = {name: self._read(self._file(mark, name), digest) for name, digest in kept["vectors"].items()}
            models = vectors["w"], vectors.get("x", vectors["w"])
            return Checkpoint(kept["mark"], kept["state"], *models, kept.get("head", ""), kept.get("totals"))
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            file = self._file(mark, "json")
            raise InvalidValue(f"checkpoint {mark} in {self.path} is damaged: {file.name}: {error}") from error

    def _read(self, file: Path, digest: str) -> Model:
        """A vector, mapped: it takes no memory of ours until a newer one takes its place."""
        if digest_of_file(file) != digest:
            raise BadPayload(f"{file} does not hold what was written")
        return mapped(file, self.layout)

    def usable(self) -> Iterator[Checkpoint]:
        """Those that can be read, the newest first."""
        for mark in self.marks():
            try:
                yield self.read(mark)
            except InvalidValue:
                continue

    def newest(self) -> Checkpoint:
        found = next(self.usable(), None)
        if found is None:
            raise OffbeatError(f"{self.path} holds no checkpoint that can be read; restore one from a copy")
        return found

    def remove_after(self, mark: int) -> None:
        """Newer ones are damaged: they must not be counted among those that are kept."""
        for other in self.marks():
            if other > mark:
                self._remove(other)

    def _remove(self, mark: int) -> None:
        for name in ("json", "w", "x"):  # the state first: without it the vectors are no checkpoint
            self.disk.remove(self._file(mark, name))

    def prune(self) -> int | None:
        """Remove all but the newest; answers the mark of the oldest that is kept, if there are two."""
        marks = self.marks()
        for mark in marks[KEPT:]:
            self._remove(mark)
        return marks[KEPT - 1] if len(marks) >= KEPT else None

    def _file(self, mark: int, name: str) -> Path:
        return self.path / (f"{mark}.json" if name == "json" else f"{mark}.{name}.safetensors")
