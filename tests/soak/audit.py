"""Owns what must hold while a soak goes on: what was acknowledged is in the ledger and in the model, once.

Rules kept here:
- Acknowledgements are read before the ledger: what was acknowledged by then must be there.
- It looks at the files of a run that is being served, and at nothing in the server.
- What does not hold is an AssertionError that says what, and of which task.
"""

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.server.independent import UNREAD, IndependentReplay
from tests.soak.liar import NEVER_APPLIED, ONLY_REPEATED

JUDGED = ("not_finite", "too_large", "too_stale")
"""Answers after which an update is never applied."""
EXPECTED = frozenset({0, 200, 400, 401, 403, 404, 408, 409, 410, 413, 415, 422, 429, 503})


class LineReader:
    """Whole lines of JSON of a file that grows; half a line that a kill left is passed over."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.startswith(b"{") and line.endswith(b"}")]


class Audit:
    def __init__(self, folder: Path, run: Path) -> None:
        self.folder, self.run = folder, run
        self.replay: IndependentReplay | None = None
        self.acknowledged: dict[int, str] = {}
        """Digests by task."""
        self.lies: Counter[tuple[str, str]] = Counter()
        """How often each lie was answered with what."""
        self.refused: set[int] = set()
        self._readers: dict[Path, LineReader] = {}

    @property
    def applied(self) -> int:
        return 0 if self.replay is None else len(self.replay.applied)

    @property
    def skipped(self) -> int:
        return 0 if self.replay is None else self.replay.skipped

    @property
    def checkpoints(self) -> int:
        """How many were compared."""
        return 0 if self.replay is None else len(self.replay.compared)

    def look(self) -> None:
        """Everything that came since the last look."""
        if self.replay is None:
            if not (self.run / "checkpoints").is_dir() or not any((self.run / "checkpoints").glob("*.json")):
                return  # the first server has not begun the run yet
            self.replay = IndependentReplay(self.run)
        new, told = self._new_in("journal-*.jsonl"), self._new_in("lies-*.jsonl")
        self._follow(self.replay)
        for entry in new:
            self._acknowledged(self.replay, entry)
        for entry in told:
            self._told(entry)
        self.replay.check_checkpoints()

    def _new_in(self, pattern: str) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob(pattern))
        return [entry for file in files for entry in self._readers.setdefault(file, LineReader(file)).new()]

    @staticmethod
    def _follow(replay: IndependentReplay) -> None:
        """Replay what was decided since; where this came too late for an update, go on from a checkpoint."""
        while True:
            try:
                replay.advance()
            except FileNotFoundError:
                replay.skip()
            else:
                return

    def _acknowledged(self, replay: IndependentReplay, entry: dict[str, Any]) -> None:
        task, digest = entry["task"], entry["digest"]
        if entry["outcome"] == "applied":
            there = replay.applied.get(task)
            assert there is not None, f"task {task} was acknowledged as applied, and the ledger has no such decision"
            assert there in (digest, UNREAD), (
                f"task {task} was acknowledged with the digest {digest}, and {there} was applied"
            )
            self.acknowledged[task] = digest
        elif entry["outcome"] in JUDGED:
            assert task not in replay.applied, f"task {task} was refused as {entry['outcome']}, and was applied"
            self.refused.add(task)

    def _told(self, entry: dict[str, Any]) -> None:
        """What came of a lie."""
        lie, task = entry["lie"], entry["task"]
        self.lies[lie, "applied" if entry["applied"] and not entry["repeated"] else _word(entry)] += 1
        assert entry["status"] in EXPECTED, f"the lie {lie!r} of task {task} was answered with {entry['status']}"
        if not entry["applied"] or entry["repeated"]:
            return
        assert lie not in NEVER_APPLIED, f"the lie {lie!r} was applied: task {task}, {entry['digest']}"
        if lie in ONLY_REPEATED:
            assert task not in self.acknowledged or self.acknowledged[task] == entry["digest"], (
                f"task {task} was acknowledged twice, with other bytes the second time"
            )
        assert self._holder(task) == entry["worker"], f"worker {entry['worker']} pushed task {task} of another worker"

    def _holder(self, task: int) -> int | None:
        with closing(
            sqlite3.connect(f"{(self.run / 'ledger.sqlite').absolute().as_uri()}?mode=ro", uri=True)
        ) as ledger:
            row = ledger.execute("SELECT worker FROM events WHERE kind = 'leased' AND task = ?", (task,)).fetchone()
        return None if row is None else int(row[0])


def _word(entry: dict[str, Any]) -> str:
    return "answered again" if entry["repeated"] else str(entry["error"] or "not answered")
