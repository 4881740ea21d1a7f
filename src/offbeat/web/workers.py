"""Owns the table of workers: sorted, filtered and paged here, so that a browser gets the few that it shows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from offbeat.errors import InvalidValue
from offbeat.storage.fleet_fold import STATES, WorkerTotals
from offbeat.web.asked import Query, choice, whole
from offbeat.web.run_reader import RunReader

SIZE, SIZE_MAX = 50, 500
PAGE_MAX = 1_000_000
TEXT_MAX = 100

SORTS: dict[str, Callable[[WorkerTotals], Any]] = {
    "worker": lambda worker: worker.number,
    "name": lambda worker: worker.name.casefold(),
    "device": lambda worker: worker.device,
    "state": lambda worker: worker.state,
    "tasks": lambda worker: worker.tasks,
    "applied": lambda worker: worker.applied,
    "refused": lambda worker: sum(worker.refused.values()),
    "mass": lambda worker: worker.mass,
    "seconds": lambda worker: worker.seconds,
    "last_seen_s": lambda worker: worker.seen_at,
    "why": lambda worker: worker.why,
}


@dataclass(frozen=True, slots=True)
class WorkerQuery:
    """Which workers a page shows, and in which order."""

    sort: str = "worker"
    order: str = "asc"
    text: str = ""
    state: str = ""
    page: int = 1
    size: int = SIZE

    @classmethod
    def of(cls, query: Query) -> Self:
        """From a query; what it does not say is as usual."""
        text = query.get("text", "").strip()
        if len(text) > TEXT_MAX:
            raise InvalidValue(f"text has {len(text)} letters; use at most {TEXT_MAX}")
        return cls(
            choice(query, "sort", tuple(SORTS), "worker"),
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
    key = SORTS[wanted.sort]
    keyed = [(key(worker), worker) for worker in found]
    known = sorted((pair for pair in keyed if pair[0] is not None), key=lambda pair: pair[1].number)
    known.sort(key=lambda pair: pair[0], reverse=wanted.order == "desc")
    unknown = sorted((worker for value, worker in keyed if value is None), key=lambda worker: worker.number)
    return [worker for _, worker in known] + unknown


def _row(worker: WorkerTotals) -> dict[str, Any]:
    return {
        "worker": worker.number,
        "name": worker.name,
        "device": worker.device,
        "state": worker.state,
        "tasks": worker.tasks,
        "applied": worker.applied,
        "refused": worker.refused,
        "mass": worker.mass,
        "seconds": worker.seconds,
        "last_seen_s": worker.seen_at,
        "why": worker.why,
    }
