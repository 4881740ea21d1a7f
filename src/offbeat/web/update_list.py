"""Owns the ledger as people read it: updates, newest first, and the story of one task.

Rules kept here:
- A page is read from the ledger by its rows' numbers: what lies before and after costs nothing, whatever the filter.
- An update is taken for mixed when the version that it went into is published: not every ledger knows better.
"""

import json
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from offbeat.protocol.messages import Outcome, Spent
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import Row, read
from offbeat.web.json_twins import NUMBER_MAX, Query, choice, said, whole
from offbeat.web.run_reader import RunReader

SIZE, SIZE_MAX = 100, 500
STORY_MAX = 500
"""Rows of one task that are told: a task that takes days has many heartbeats."""
UNDECIDED = {"busy": "busy", "unknown_task": "unknown", "not_yours": "not_yours", "bad_update": "bad_update"}
"""Outcomes of pushes on which nothing was decided, and the kinds of their rows."""
OUTCOMES = (*(outcome.value for outcome in Outcome), "bad_update")
UNTOLD = ("sequence", "at", "kind", "task", "detail")
_ROWS = "SELECT * FROM events WHERE"


@dataclass(frozen=True, slots=True)
class UpdateQuery:
    worker: str = ""
    outcome: str = ""
    before: int = NUMBER_MAX
    size: int = SIZE

    @classmethod
    def of(cls, query: Query) -> Self:
        return cls(
            query.get("worker", "").strip(),
            choice(query, "outcome", OUTCOMES, ""),
            whole(query, "before", 1, NUMBER_MAX, NUMBER_MAX),
            whole(query, "size", 1, SIZE_MAX, SIZE),
        )


def updates(reading: RunReader, wanted: UpdateQuery) -> dict[str, Any]:
    with reading.ledger() as ledger:
        found = _found(reading, ledger, wanted)
    page, more = found[: wanted.size], len(found) > wanted.size
    return {
        "updates": [_update(row, reading) for row in page],
        "next_before": page[-1].sequence if more else None,
        "sequence": reading.sequence,
    }


def _found(reading: RunReader, ledger: Ledger, wanted: UpdateQuery) -> list[Row]:
    """The rows of a page, and one more where there are more."""
    number = None
    if wanted.worker:
        worker = reading.fleet.find(wanted.worker)
        if worker is None:
            return []
        number = worker.number
    before = min(wanted.before, reading.sequence + 1)  # what came since is not counted yet
    kind = UNDECIDED.get(wanted.outcome, "decided")
    if kind == "decided" and (number is not None or wanted.outcome):
        return _at(ledger, _sequences(reading, number, wanted.outcome, before, wanted.size + 1))
    mine, values = ("AND worker = ?", [number]) if number is not None else ("", [])
    query = f"{_ROWS} kind = ? AND sequence < ? {mine} ORDER BY sequence DESC LIMIT ?"
    return [read(row) for row in ledger.select(query, (kind, before, *values, wanted.size + 1))]


def _sequences(reading: RunReader, worker: int | None, outcome: str, before: int, most: int) -> list[int]:
    """The rows of the newest updates of a worker, with an outcome, or both."""
    of_outcome = reading.fleet.decided.get(outcome, ())
    if worker is None:
        end = bisect_left(of_outcome, before)
        return list(of_outcome[max(0, end - most) : end])
    mine = reading.fleet.of(worker).decided
    mine = mine[: bisect_left(mine, before)]
    if outcome:
        both = np.intersect1d(np.array(mine, np.int64), np.array(of_outcome, np.int64), assume_unique=True)
        return [int(sequence) for sequence in both[-most:]]
    return list(mine[-most:])


def _at(ledger: Ledger, sequences: list[int]) -> list[Row]:
    places = ", ".join("?" * len(sequences))
    query = f"{_ROWS} sequence IN ({places}) ORDER BY sequence DESC"
    return [read(row) for row in ledger.select(query, tuple(sequences))]


def _update(row: Row, reading: RunReader) -> dict[str, Any]:
    worker = reading.fleet.of(row.worker or 0)
    return {
        "sequence": row.sequence,
        "task": row.task,
        "worker": row.worker,
        "name": worker.name,
        "device": worker.device if row.device is None else row.device,
        "tau": row.tau,
        "t": row.t,
        "staleness": row.staleness,
        "alpha_t": row.new,
        "outcome": row.outcome or row.kind,
        "leased_s": row.granted_at,
        "arrived_s": row.at,
        "mixed_s": reading.versions.mixed_at(row.t) if row.keep is not None else None,
        "samples": row.samples,
        "gradients": row.gradients,
    }


# --- the story of a task ---------------------------------------------------------------------------------------------


def story(reading: RunReader, task: int) -> dict[str, Any]:
    """Everything that the ledger says about a task, in order; an empty story where that is nothing."""
    with reading.ledger() as ledger:
        query = f"{_ROWS} task = ? ORDER BY sequence LIMIT ?"
        rows = [read(row) for row in ledger.select(query, (task, STORY_MAX))]
        rows += _after(ledger, rows)
    return {"task": task, "story": [_told(row) for row in rows]}


def _after(ledger: Ledger, rows: list[Row]) -> list[Row]:
    """When its update was mixed, and when the version was published that it went into."""
    decided = next((row for row in rows if row.kind == "decided" and row.keep is not None), None)
    if decided is None:
        return []
    mixed = f"{_ROWS} kind = 'mixed' AND sequence > ? AND decision = ? ORDER BY sequence LIMIT 1"
    published = f"{_ROWS} kind = 'published' AND sequence > ? AND t >= ? ORDER BY sequence LIMIT 1"
    found = ledger.select(mixed, (decided.sequence, decided.decision))
    found += ledger.select(published, (decided.sequence, decided.t))
    return sorted(map(read, found))


def _told(row: Row) -> dict[str, Any]:
    facts = {name: value for name, value in row._asdict().items() if value is not None and name not in UNTOLD}
    if row.kind == "decided" and row.new is not None:
        facts["alpha_t"] = row.new
    facts |= json.loads(row.detail) if row.detail else {}
    facts |= Spent(*facts.pop("spent"))._asdict() if "spent" in facts else {}
    facts.pop("session", None)  # of no use to anybody, not even as a digest
    return {"at_s": row.at, "kind": row.kind, "facts": said(facts)}
