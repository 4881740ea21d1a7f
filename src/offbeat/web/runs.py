"""Owns the runs that can be looked at: the one that is served, or all in a folder; their list, and their comparison.

Rules kept here:
- Each run has a name fit for a URL.
- A folder of runs is searched again after a while, and only on a request: runs come and go.
- Only the runs looked at last are kept in memory.
"""

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import LEDGER, SUMMARY
from offbeat.web.json_twins import metrics_of, said
from offbeat.web.overview import about, curve
from offbeat.web.run_reader import RunReader, Stamp, stamp_of

SEARCH_S = 5.0
READINGS_MAX = 20
LISTED_MAX = 2000
COMPARED_MAX = 20
COMPARED_POINTS_MAX = 2000
"""Of all curves together."""
NOT_COMPARED = ("executor",)
"""Settings that change nothing of what comes out."""
RESULTS = ("virtual_s", "wall_s", "ended")
"""What a summary knows besides."""
Find = Callable[[Path], Iterable[Path]]


class Runs:
    """By name; every method may block."""

    def __init__(self, folder: Path, find: Find) -> None:
        """`find` gives the folders of runs below a folder."""
        self.folder, self._find = folder, find
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self._searched_at = -inf
        self._readings: OrderedDict[str, RunReader] = OrderedDict()
        self._listed: dict[str, tuple[Stamp, dict[str, Any]]] = {}

    def get(self, name: str) -> RunReader | None:
        with self._lock:
            folder = self._folders.get(name) or self._searched().get(name)
            if folder is None or not (folder / LEDGER).is_file():
                return None
            reading = self._readings.pop(name, None) or RunReader(folder, name)
            self._readings[name] = reading
            while len(self._readings) > READINGS_MAX:
                self._readings.popitem(last=False)
            return reading

    def listed(self) -> dict[str, Any]:
        with self._lock:
            folders = list(self._searched().items())[:LISTED_MAX]
        found = []
        for name, folder in folders:
            with suppress(OffbeatError):  # it has just been removed, or is damaged
                found.append(self._line(name, folder))
        return {"runs": found}

    def _searched(self) -> dict[str, Path]:
        if time.monotonic() - self._searched_at >= SEARCH_S:
            self._folders = names_of(self.folder, self._find(self.folder))
            self._searched_at = time.monotonic()
        return self._folders

    def _line(self, name: str, folder: Path) -> dict[str, Any]:
        stamp = stamp_of(folder / SUMMARY)
        if stamp is not None and self._listed.get(name, (None,))[0] == stamp:
            return self._listed[name][1]
        line = line_of(RunReader(folder, name))
        if stamp is not None:  # a finished run stays as it is
            self._listed[name] = (stamp, line)
        return line


def line_of(reading: RunReader) -> dict[str, Any]:
    """One run in a line, without counting its whole ledger."""
    with reading.ledger() as ledger:
        t, detail = _newest(ledger, "published", "t"), _newest(ledger, "evaluated", "detail")
    line = {name: value for name, value in about(reading).items() if name in ("name", "state", "task", "rule")}
    return line | {"t": t or 0, "metrics": metrics_of(detail) if detail else {}}


def _newest(ledger: Ledger, kind: str, column: str) -> Any:
    query = f"SELECT {column} FROM events WHERE kind = ? ORDER BY sequence DESC LIMIT 1"  # noqa: S608 (text from above)
    return next((value for (value,) in ledger.select(query, (kind,))), None)


def names_of(folder: Path, runs: Iterable[Path]) -> dict[str, Path]:
    """A name for every run, from its path below the folder: unique, and the same in a URL.

    >>> list(names_of(Path("runs"), [Path("runs"), Path("runs/a b/1"), Path("runs/a-b/1")]))
    ['runs', 'a-b~1', 'a-b~1~2']
    """
    names: dict[str, Path] = {}
    for run in runs:
        parts = run.relative_to(folder).parts or (folder.resolve().name,)
        plain = "~".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in parts).lstrip(".") or "run"
        name, number = plain, 1
        while name in names:
            number += 1
            name = f"{plain}~{number}"
        names[name] = run
    return names


class One:
    def __init__(self, reading: RunReader) -> None:
        self.reading = reading

    def get(self, name: str) -> RunReader | None:
        """It, whether or not it is called by its name."""
        return self.reading if name in ("", self.reading.name) else None

    def listed(self) -> dict[str, Any]:
        return {"runs": [line_of(self.reading)]}


# --- side by side ----------------------------------------------------------------------------------------------------


def part(reading: RunReader, runs: int) -> dict[str, Any]:
    """What a comparison of `runs` runs needs of one of them."""
    settings = {name: said(value) for name, value in reading.settings.items() if name not in NOT_COMPARED}
    return {
        "about": about(reading),
        "settings": settings,
        "results": results(reading),
        "curve": curve(reading.versions, min(500, COMPARED_POINTS_MAX // runs)),
    }


def results(reading: RunReader) -> dict[str, Any]:
    fold, summary = reading.fold, reading.summary or {}
    evaluations = reading.versions.evaluations
    newest = metrics_of(evaluations[-1].detail) if evaluations else {}
    return {
        **newest,
        "t": fold.t,
        "applied": fold.applied,
        "rejected": fold.rejected().total(),
        "gradients": fold.gradients,
        "at_s": reading.at,
        "staleness_mean": fold.staleness_mean,
        "staleness_largest": fold.staleness_largest,
        **{name: said(summary[name]) for name in RESULTS if name in summary},
    }


def comparison(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All of them, side by side; a setting that is the same in all is left out."""
    settings = _side_by_side({run: part["settings"] for run, part in parts.items()})
    return {
        "runs": [{**part["about"], "name": run} for run, part in parts.items()],
        "settings": [row for row in settings if _differs(list(row["values"].values()))],
        "results": _side_by_side({run: part["results"] for run, part in parts.items()}),
        "curves": {run: part["curve"] for run, part in parts.items()},
    }


def _side_by_side(columns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for values in columns.values() for name in values)
    return [{"name": name, "values": {run: values.get(name) for run, values in columns.items()}} for name in names]


def _differs(values: list[Any]) -> bool:
    return any(value != values[0] for value in values)
