"""Owns the table of workers: sorted, filtered and paged here, so that a browser gets the few that it shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from offbeat.errors import InvalidValue
from offbeat.storage.fleet_fold import STATES, WorkerTotals
from offbeat.web.json_twins import Query, choice, whole
from offbeat.web.run_reader import RunReader

SIZE, SIZE_MAX = 50, 500
PAGE_MAX = 1_000_000
TEXT_MAX = 100

COLUMNS = {
    "worker": "number",
    "name": "name",
    "device": "device",
    "state": "state",
    "tasks": "tasks",
    "applied": "applied",
    "refused": "refused",
    "mass": "mass",
    "seconds": "seconds",
    "last_seen_s": "seen_at",
    "why": "why",
}
"""Of the table: how each is called in `WorkerTotals`."""
SORTED_AS: dict[str, Callable[[Any], Any]] = {"name": str.casefold, "refused": lambda counts: sum(counts.values())}


@dataclass(frozen=True, slots=True)
class WorkerQuery:
    sort: str = "worker"
    order: str = "asc"
    text: str = ""
    state: str = ""
    page: int = 1
    size: int = SIZE

    @classmethod
    def of(cls, query: Query) -> Self:
        text = query.get("text", "").strip()
        if len(text) > TEXT_MAX:
            raise InvalidValue(f"text has {len(text)} letters; use at most {TEXT_MAX}")
        return cls(
            choice(query, "sort", tuple(COLUMNS), "worker"),
            choice(query, "order", ("asc", "desc"), "asc"),
            text,
            choice(query, "state", STATES, ""),
            whole(query, "page", 1, PAGE_MAX, 1),
            whole(query, "size", 1, SIZE_MAX, SIZE),
        )


def workers(reading: RunReader, wanted: WorkerQuery) -> dict[str, Any]:
    everybody = reading.fleet.workers.values()
    found = [w for w in everybody if _has(w, wanted.text) and wanted.state in ("", w.state)]
    begin = (wanted.page - 1) * wanted.size
    return {
        "total": len(found),
        "page": wanted.page,
        "size": wanted.size,
        "at_s": reading.now(),
        "workers": [_row(worker) for worker in _sorted(found, wanted)[begin : begin + wanted.size]],
    }


def _has(worker: WorkerTotals, text: str) -> bool:
    return not text or text.casefold() in worker.name.casefold() or text in (str(worker.number), str(worker.device))


def _sorted(found: list[WorkerTotals], wanted: WorkerQuery) -> list[WorkerTotals]:
    """Those without a value come last, whatever the order; equal ones by number."""
    name, key = COLUMNS[wanted.sort], SORTED_AS.get(wanted.sort, lambda value: value)
    keyed = [(key(getattr(worker, name)), worker) for worker in found]
    known = sorted((pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[1].number)
    known.sort(key=lambda pair: pair[0], reverse=wanted.order == "desc")
    unknown = sorted((worker for value, worker in keyed if value is None), key=lambda worker: worker.number)
    return [worker for _, worker in known] + unknown


def _row(worker: WorkerTotals) -> dict[str, Any]:
    return {column: getattr(worker, name) for column, name in COLUMNS.items()}
