"""Owns the checkpoints of a served run: the vectors, and the coordinator's state at a place in the ledger.

Rules kept here:
- A checkpoint is written aside, brought to the disk, renamed. The newest two are kept: a damaged one costs time only.
- A damaged one is known: its state has a digest of its own, and those of its vectors.
- A vector that the rule keeps for a device is written when it has changed; checkpoints share the file until then.
- It can be redone from the ledger and the updates since the one before it: what they hold is never in one place alone.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.core.layout import Layout, Model, Vector
from offbeat.core.vectors import Standing
from offbeat.digests import digest_of_file
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.disk import Bytes, Disk
from offbeat.storage.json_file import sealed, unsealed
from offbeat.wire import BadPayload, body_of, header_of, mapped

KEPT = 2
SLOT, MEAN = "slot_", "mean"
CACHES = "caches"
NO_CACHES: Mapping[int, Vector] = {}


class Checkpoint(NamedTuple):
    mark: int
    """The last row of the ledger that it knows of."""
    state: dict[str, Any]
    standing: Standing
    head: str = ""
    """The head of the ledger's chain at that row; empty where there was no chain."""
    totals: dict[str, Any] | None = None
    """What the server knows of all rows up to there; None in checkpoints of before they held it."""
    caches: Mapping[int, Vector] = NO_CACHES
    """The vectors that the rule keeps for devices."""

    @property
    def w(self) -> Model:
        return self.standing.w

    @property
    def x(self) -> Model:
        return self.standing.x


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
            kept = unsealed(file.read_bytes())
            vectors: dict[str, str] = kept["vectors"]
            for name, digest in vectors.items():
                path = file.with_name(f"{file.stem}.{name}.safetensors")
                if digest_of_file(path) != digest and file.exists():
                    yield f"checkpoint {file.stem} is damaged: {path} does not hold what was written"
            for cache, (mark, digest) in kept.get(CACHES, {}).items():
                path = file.parent / _cache_name(int(cache), mark)
                if digest_of_file(path) != digest and file.exists():
                    yield f"checkpoint {file.stem} is damaged: {path} does not hold what was written"
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            if file.exists():
                yield f"checkpoint {file.stem} is damaged: {file}: {error}"


class WrittenCache(NamedTuple):
    """A cache as it lies on the disk."""

    vector: Vector
    mark: int
    """Of the checkpoint that it was written for."""
    digest: str


def _cache_name(cache: int | str, mark: int | str) -> str:
    return f"cache_{cache}_{mark}.safetensors"


def cache_files(state: Path) -> list[str]:
    """The names of the files of caches that belong to a checkpoint, given the file of its state."""
    kept = unsealed(state.read_bytes()).get(CACHES, {})
    return [_cache_name(int(cache), mark) for cache, (mark, _) in kept.items()]


class Checkpoints:
    """The folder of checkpoints: each has a file for its state and one for each of its vectors."""

    def __init__(self, folder: Path, layout: Layout, disk: Disk) -> None:
        self.path, self.layout, self.disk = folder, layout, disk
        self.on_cache_written: Callable[[int, Vector, Vector], None] | None = None
        """Where caches are to lie on the disk: called with one that was written, and with its file, mapped."""
        self._caches: dict[int, WrittenCache] = {}
        disk.make_folder(folder)

    def write(self, checkpoint: Checkpoint) -> None:
        """Keep it; the state comes last, and without it the vectors are no checkpoint."""
        models = self._models(checkpoint.standing)
        vectors = {name: self._written(self._file(checkpoint.mark, name), model) for name, model in models.items()}
        facts = {"mark": checkpoint.mark, "head": checkpoint.head, "vectors": vectors, "state": checkpoint.state}
        if checkpoint.caches:
            facts[CACHES] = self._write_caches(checkpoint)
        text = json.dumps(facts | {"totals": checkpoint.totals})
        self.disk.write_whole(self._file(checkpoint.mark, "json"), [sealed(text)])

    def _models(self, standing: Standing) -> dict[str, Model]:
        """What is written of the vectors; x where it is not w, and the mean where it is not x."""
        found = {"w": standing.w} | ({} if standing.x is standing.w else {"x": standing.x})
        if standing.mean is not None and standing.mean is not standing.x:
            found[MEAN] = standing.mean
        carried = standing.w.carried
        return found | {f"{SLOT}{name}": Model(self.layout, slot, carried) for name, slot in standing.slots.items()}

    def _write_caches(self, checkpoint: Checkpoint) -> dict[str, list[Any]]:
        """Write those that changed since they were written last; by cache, the file of each and its digest."""
        carried = checkpoint.w.carried
        for cache, vector in checkpoint.caches.items():
            written = self._caches.get(cache)
            if written is None or written.vector is not vector:
                file = self._cache_file(cache, checkpoint.mark)
                digest = self._written(file, Model(self.layout, vector, carried))
                written = WrittenCache(vector, checkpoint.mark, digest)
                if self.on_cache_written is not None:
                    there = mapped(file, self.layout).vector
                    self.on_cache_written(cache, vector, there)
                    written = WrittenCache(there, checkpoint.mark, digest)
                self._caches[cache] = written
        return {str(cache): [self._caches[cache].mark, self._caches[cache].digest] for cache in checkpoint.caches}

    def _written(self, file: Path, model: Model) -> str:
        parts: list[Bytes] = [header_of(self.layout), *body_of(model)]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        self.disk.write_whole(file, parts)
        return digest.hexdigest()

    def marks(self) -> list[int]:
        return sorted((int(file.stem) for file in self.path.glob("*.json") if file.stem.isdecimal()), reverse=True)

    def read(self, mark: int) -> Checkpoint:
        """One of them; refused where it is damaged."""
        try:
            kept = unsealed(self._file(mark, "json").read_bytes())
            vectors = {name: self._read(self._file(mark, name), digest) for name, digest in kept["vectors"].items()}
            x = vectors.get("x", vectors["w"])
            slots = {name.removeprefix(SLOT): one.vector for name, one in vectors.items() if name.startswith(SLOT)}
            standing = Standing(vectors["w"], x, slots, vectors.get(MEAN))
            caches = self._read_caches(kept.get(CACHES, {}))
            return Checkpoint(kept["mark"], kept["state"], standing, kept.get("head", ""), kept.get("totals"), caches)
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            file = self._file(mark, "json")
            raise InvalidValue(f"checkpoint {mark} in {self.path} is damaged: {file.name}: {error}") from error

    def _read_caches(self, kept: Mapping[str, list[Any]]) -> dict[int, Vector]:
        found = dict[int, WrittenCache]()
        for name, (mark, digest) in kept.items():
            cache = int(name)
            found[cache] = WrittenCache(self._read(self._cache_file(cache, mark), digest).vector, mark, digest)
        self._caches = found
        return {cache: written.vector for cache, written in found.items()}

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
        self.disk.remove(self._file(mark, "json"))  # first: without it the vectors are no checkpoint
        for file in sorted(self.path.glob(f"{mark}.*.safetensors")):
            self.disk.remove(file)

    def prune(self) -> int | None:
        """Remove all but the newest; answers the mark of the oldest that is kept, if there are two."""
        marks = self.marks()
        for mark in marks[KEPT:]:
            self._remove(mark)
        if marks[KEPT:]:
            self._prune_caches(marks[:KEPT])
        return marks[KEPT - 1] if len(marks) >= KEPT else None

    def _prune_caches(self, marks: list[int]) -> None:
        """Remove the files of caches that no checkpoint which is kept speaks of."""
        used = {file for mark in marks for file in cache_files(self._file(mark, "json"))}
        for file in sorted(self.path.glob(_cache_name("*", "*"))):
            if file.name not in used and int(file.stem.rpartition("_")[2]) < marks[0]:
                self.disk.remove(file)

    def _cache_file(self, cache: int, mark: int) -> Path:
        return self.path / _cache_name(cache, mark)

    def _file(self, mark: int, name: str) -> Path:
        return self.path / (f"{mark}.json" if name == "json" else f"{mark}.{name}.safetensors")
