"""A replay of a served FedAsync run that imports nothing of ours: SQLite, JSON, hashlib and numpy.

It reads x_0, the ledger's coefficients and the updates, and gives x_t and what was applied. It can follow a run that
is being served, as long as it is told to go on before the server removes updates that it does not need any more.
"""

import hashlib
import json
import sqlite3
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import closing, suppress
from pathlib import Path

import blake3
import numpy as np

UNREAD = ""
"""In place of the digest of an update that was removed before it was read."""
SEEN_MAX = 20_000
"""Versions whose digest is remembered."""


DECIDED = (
    "SELECT sequence, task, t, keep, new FROM events WHERE kind = 'decided' AND keep IS NOT NULL "
    "AND sequence > ? ORDER BY sequence"
)
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]


def vector(path: Path) -> Vector:
    """The float32 arrays of a safetensors file, one after the other."""
    return vector_in(path.read_bytes())


def vector_in(data: bytes) -> Vector:
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    end = max(e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__")
    return np.frombuffer(data[8 + length : 8 + length + end], np.float32).copy()


class IndependentReplay:
    """x after the decisions that were read so far, and the digest of every update that went into it, by task."""

    def __init__(self, run: Path) -> None:
        self.run, self.x = run, vector(run / "x_0.safetensors")
        self.applied: dict[int, str] = {}
        self.sequence = 0
        """The last row of the ledger that was read."""
        self.seen: OrderedDict[int, str] = OrderedDict({0: self.x_sha256})
        """Digests of x by how many updates were in it."""
        self.skipped = 0
        """Updates that were removed before they were read, so that the x of a checkpoint was taken instead."""
        self.compared: set[str] = set()
        """The checkpoints that held the same x."""
        self._last: tuple[int, int] | None = None

    @property
    def x_sha256(self) -> str:
        return hashlib.sha256(self.x.tobytes()).hexdigest()

    def advance(self) -> int:
        """Apply what was decided since; answers how many updates that were."""
        with closing(self._ledger()) as ledger:
            self._check_ledger(ledger)
            found = ledger.execute(DECIDED, (self.sequence,)).fetchall()
            for sequence, task, t, keep, new in found:
                self._apply(ledger, task, t, keep, new)
                self.sequence, self._last = sequence, (task, t)
        return len(found)

    def skip(self) -> None:
        """Go on from the oldest checkpoint that lies ahead: the updates before it are gone, which it makes up for."""
        ahead = [(mixed, x) for _, mixed, x in self._checkpoints() if mixed > len(self.applied)]
        assert ahead, f"an update after the first {len(self.applied)} is gone, and no checkpoint holds it"
        mixed, self.x = min(ahead, key=lambda one: one[0])
        with closing(self._ledger()) as ledger:
            rows = ledger.execute(DECIDED, (self.sequence,)).fetchmany(mixed - len(self.applied))
            for sequence, task, t, _, _ in rows:
                assert task not in self.applied, f"task {task} was applied twice"
                self.applied[task] = UNREAD
                self.sequence, self._last = sequence, (task, t)
        self.skipped += len(rows)
        self.seen[len(self.applied)] = self.x_sha256

    def _ledger(self) -> sqlite3.Connection:
        return sqlite3.connect(f"{self.run.absolute().as_uri()}/ledger.sqlite?mode=ro", uri=True)

    @staticmethod
    def _told(ledger: sqlite3.Connection, task: int) -> set[str]:
        """Digests that the worker announced for the update of this task."""
        arrived = "SELECT json_extract(detail, '$.digest') FROM events WHERE kind = 'arrived' AND task = ?"
        return {one for (one,) in ledger.execute(arrived, (task,))}

    def _check_ledger(self, ledger: sqlite3.Connection) -> None:
        """What was read is still there: a row that was committed never goes away, and none takes its place."""
        row = ledger.execute("SELECT task, t FROM events WHERE sequence = ?", (self.sequence,)).fetchone()
        assert row == self._last, f"row {self.sequence} of the ledger was task and epoch {self._last}, and is now {row}"

    def _apply(self, ledger: sqlite3.Connection, task: int, t: int, keep: float, new: float) -> None:
        assert task not in self.applied, f"task {task} was applied twice"
        assert t == len(self.applied) + 1, f"task {task} became epoch {t}, and {len(self.applied)} were applied before"
        data = (self.run / "updates" / f"{task}.safetensors").read_bytes()
        found = _digests(data) & self._told(ledger, task)
        assert found, f"task {task} holds something else than was acknowledged"
        self.applied[task] = min(found)
        self.x = np.float32(keep) * self.x + np.float32(new) * vector_in(data)
        self.seen[len(self.applied)] = self.x_sha256
        if len(self.seen) > SEEN_MAX:
            self.seen.popitem(last=False)

    def check_checkpoints(self) -> None:
        """Compare the checkpoints that are there, bit for bit, as far as they are not ahead of this."""
        for name, mixed, x in self._checkpoints(self.compared):
            if mixed in self.seen:
                same = hashlib.sha256(x.tobytes()).hexdigest() == self.seen[mixed]
                assert same, f"the checkpoint after {mixed} updates holds another x than these updates give"
                self.compared.add(name)

    def _checkpoints(self, known: Collection[str] = ()) -> Iterator[tuple[str, int, Vector]]:
        """The name of each that is not known, how many updates are in it, and its x."""
        for file in (self.run / "checkpoints").glob("*.json"):
            with suppress(FileNotFoundError):  # a newer one has taken its place
                if file.stem not in known:
                    mixed = json.loads(file.read_bytes())["state"]["mixed"]
                    yield file.stem, mixed, vector(file.with_name(f"{file.stem}.w.safetensors"))


def _digests(data: bytes) -> set[str]:
    """What a worker may have announced for these bytes."""
    return {hashlib.sha256(data).hexdigest(), f"blake3:{blake3.blake3(data).hexdigest()}"}


def replay(run: Path) -> tuple[str, dict[int, str]]:
    """sha256 of x_t, and the digest of every update that went into it, by task."""
    whole = IndependentReplay(run)
    whole.advance()
    return whole.x_sha256, whole.applied
