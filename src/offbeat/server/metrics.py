"""Owns what is counted for Prometheus while the server runs.

Rules kept here:
- Updates are counted from the rows that the ledger has committed, and after a restart their totals are read from the
  ledger: both ways give the same numbers. What no ledger has (bytes, seconds, refusals) starts from zero.
- Gauges are the status at the moment of the scrape; nothing is kept up to date in between.
- Every method may be called on any thread, and none waits for anything.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from offbeat.protocol.messages import Outcome
from offbeat.server.evaluator import Measures
from offbeat.server.exposition import Buckets, Exposed, counter, encoded, gauges, histogram, refuse_missing
from offbeat.storage.ledger import CHATTER
from offbeat.storage.rows import KINDS, NewRow

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
ALPHA_T = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the buckets."""
ANSWERS = {
    "busy": "busy",
    "unknown": "unknown_task",
    "not_yours": "not_yours",
    "repeated": "repeated",
    "bad_update": "bad",
}
"""The outcome of a push that led to a row of this kind; where it was decided on, the row says it."""
OUTCOMES = tuple(dict.fromkeys((*(outcome.value for outcome in Outcome), *ANSWERS.values())))
COUNTED = tuple(kind for kind in KINDS if kind not in CHATTER)
"""The ledger forgets its chatter, so those totals would not survive a restart."""
SUMS = {
    "mixed_updates": "Updates mixed since the start.",
    "evaluations_failed": "Versions that could not be evaluated since the start.",
    "received_bytes": "Bytes of updates that arrived since the start.",
    "sent_bytes": "Bytes of models sent since the start.",
}


class Metrics:
    """What has happened so far, in numbers."""

    def __init__(self, ledger: Path | None = None) -> None:
        """Where there is a ledger, counting goes on from its totals."""
        self._lock = Lock()
        self._updates: Counter[str] = Counter()
        self._events: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._staleness, self._alpha_t = Buckets(STALENESS), Buckets(ALPHA_T)
        self._mixing_s, self._evaluation_s = Buckets(SECONDS), Buckets(SECONDS)
        self._fsync_s = {"ledger": Buckets(SECONDS), "update": Buckets(SECONDS)}
        if ledger is not None:
            self._restore(ledger)

    # --- told by whoever does it -------------------------------------------------------------------------------------

    def written(self, rows: Sequence[NewRow], _last: int, seconds: float) -> None:
        """The ledger's hook: these rows were committed, which took so long."""
        with self._lock:
            self._fsync_s["ledger"].add(seconds)
            for row in rows:
                kind = row.kind
                self._events[kind] += 1
                if kind in ANSWERS:
                    self._updates[ANSWERS[kind]] += 1
                elif kind == "decided":
                    self._decided(row.facts())

    def _decided(self, facts: Mapping[str, Any]) -> None:
        self._updates[facts["outcome"]] += 1
        if "keep" in facts:  # else it was refused
            self._staleness.add(facts["staleness"])
            self._alpha_t.add(facts["new"])

    def mixed(self, updates: int, seconds: float) -> None:
        """One pass of the mixer."""
        with self._lock:
            self._mixing_s.add(seconds)
            self._sums["mixed_updates"] += updates

    def synced(self, seconds: float) -> None:
        """A whole update was brought to the disk."""
        with self._lock:
            self._fsync_s["update"].add(seconds)

    def evaluated(self, seconds: float) -> None:
        """A version was evaluated."""
        with self._lock:
            self._evaluation_s.add(seconds)

    def not_evaluated(self) -> None:
        """A version could not be evaluated."""
        self._add("evaluations_failed", 1)

    def received(self, size: int) -> None:
        """Bytes of an update arrived."""
        self._add("received_bytes", size)

    def sent(self, size: int) -> None:
        """Bytes of a model were sent."""
        self._add("sent_bytes", size)

    def refused(self, error: str) -> None:
        """A request was refused with this word, which is one of a few."""
        with self._lock:
            self._refusals[error] += 1

    def _add(self, name: str, by: int) -> None:
        with self._lock:
            self._sums[name] += by

    # --- after a restart ---------------------------------------------------------------------------------------------

    def _restore(self, ledger: Path) -> None:
        by_kind = "SELECT kind, count(*) FROM events GROUP BY kind"
        by_outcome = "SELECT outcome, count(*) FROM events WHERE kind = 'decided' GROUP BY outcome"
        with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            self._events.update(dict(connection.execute(by_kind)))
            self._updates.update(dict(connection.execute(by_outcome)))
            _fill(self._staleness, connection, "staleness")
            _fill(self._alpha_t, connection, "new")
        self._updates.update({word: self._events[kind] for kind, word in ANSWERS.items()})

    # --- for whoever looks -------------------------------------------------------------------------------------------

    def text(self, facts: Mapping[str, Any], accept: str = "") -> Exposed:
        """Everything, with the facts of the status, in the format that the scraper accepts."""
        refuse_missing()
        with self._lock:
            families = list(self._families())
        return encoded([*families, *gauges(facts)], accept)

    def _families(self) -> Iterator["Metric"]:
        yield counter("updates", "Pushes by what became of them.", _each(self._updates, OUTCOMES), "outcome")
        yield counter("events", "Rows of the ledger by their kind.", _each(self._events, COUNTED), "kind")
        yield counter("refusals", "Requests that were refused since the start.", dict(self._refusals), "error")
        for name, text in SUMS.items():
            yield counter(name, text, self._sums[name])
        yield histogram("staleness", "Staleness of applied updates.", self._staleness)
        yield histogram("alpha_t", "Weight of applied updates.", self._alpha_t)
        yield histogram("mixing_seconds", "One pass of the mixer.", self._mixing_s)
        yield histogram("evaluation_seconds", "One evaluation.", self._evaluation_s)
        yield histogram("fsync_seconds", "Bringing something to the disk.", self._fsync_s, "what")


class Timed:
    """Evaluates, and says how long it took."""

    def __init__(self, process: Measures, metrics: Metrics) -> None:
        self._process, self._metrics = process, metrics

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]:
        """Likewise; one that fails is not counted here."""
        begun = perf_counter()
        found = self._process.evaluate(t, file)
        self._metrics.evaluated(perf_counter() - begun)
        return found

    def close(self) -> None:
        """Close what evaluates."""
        self._process.close()


def _each(counts: Counter[str], names: Iterable[str]) -> dict[str, float]:
    """A count of zero is shown, too: else the first of its kind would be no increase."""
    return {name: counts[name] for name in names}


def _fill(buckets: Buckets, connection: sqlite3.Connection, column: str) -> None:
    """The applied updates, however many there are: mostly they have few values."""
    where = "kind = 'decided' AND keep IS NOT NULL"
    query = f"SELECT {column}, count(*) FROM events WHERE {where} GROUP BY {column}"  # noqa: S608 (our columns)
    for value, count in connection.execute(query):
        buckets.add(value, count)
