"""Owns the numbers of a server while it runs: the fold of its ledger, and what no ledger has.

Rules kept here:
- Updates and events are read from the fold. The ledger's hook feeds it, and after a restart it is read from the
  ledger: both ways give the same numbers. What no ledger has (bytes, seconds, refusals) starts from zero.
- Gauges are the status at the moment of the scrape; nothing is kept up to date in between.
- Every method may be called on any thread, and waits at most for another thread to add a number.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from offbeat.protocol.messages import Outcome
from offbeat.server.evaluator import Measures
from offbeat.server.exposition import Buckets, Exposed, counter, encoded, gauges, histogram, refuse_missing
from offbeat.storage.fold import COUNTED, FEEDS, KEEP, Rows, RunFold, Taker
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import NewRow

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
NEW = FEEDS["decided"].columns.index("new")
SUMS = {
    "mixed_updates": "Updates mixed since the start.",
    "evaluations_failed": "Versions that could not be evaluated since the start.",
    "received_bytes": "Bytes of updates that arrived since the start.",
    "sent_bytes": "Bytes of models sent since the start.",
}


class WeightBuckets:
    """The part of the fold that knows how alpha_t is distributed, however many different weights there are."""

    def __init__(self) -> None:
        self.buckets = Buckets(ALPHA_T)

    def takers(self) -> Mapping[str, Taker]:
        return {"decided": self._decided}

    def _decided(self, rows: Rows) -> None:
        for row in rows:
            if row[KEEP] is not None:
                self.buckets.add(row[NEW])


class Metrics:
    """What has happened so far, in numbers."""

    def __init__(self, ledger: Path | None = None) -> None:
        """Where there is a ledger, counting goes on from its totals."""
        self._lock = Lock()
        self._refusals: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._mixing_s, self._evaluation_s = Buckets(SECONDS), Buckets(SECONDS)
        self._fsync_s = {"ledger": Buckets(SECONDS), "update": Buckets(SECONDS)}
        self._weights = WeightBuckets()
        self._fold = RunFold(self._weights)
        if ledger is not None:
            with Ledger.open(ledger, read_only=True) as reader:
                self._fold = RunFold.of(reader, self._weights)

    def staleness(self) -> dict[str, float]:
        """Of applied updates, as the status and the summary say it."""
        with self._lock:
            fold = self._fold
            return {"staleness_mean": fold.staleness_mean, "staleness_largest": fold.staleness_largest}

    # --- told by those who do it -------------------------------------------------------------------------------------

    def written(self, rows: Sequence[NewRow], last: int, seconds: float) -> None:
        """The ledger's hook: these rows were committed, which took so long."""
        with self._lock:
            self._fsync_s["ledger"].add(seconds)
            self._fold.take(rows, last)

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

    # --- for a scrape -------------------------------------------------------------------------------------------------

    def text(self, facts: Mapping[str, Any], accept: str = "") -> Exposed:
        """Everything, with the facts of the status, in the format that the scraper accepts."""
        refuse_missing()
        with self._lock:
            families = list(self._families())
        return encoded([*families, *gauges(facts)], accept)

    def _families(self) -> Iterator["Metric"]:
        fold, staleness = self._fold, Buckets(STALENESS)
        for value, count in fold.staleness.items():
            staleness.add(value, count)
        yield counter("updates", "Pushes by what became of them.", _each(self._updates(), OUTCOMES), "outcome")
        yield counter("events", "Rows of the ledger by their kind.", _each(fold.kinds, COUNTED), "kind")
        yield counter("refusals", "Requests that were refused since the start.", dict(self._refusals), "error")
        for name, text in SUMS.items():
            yield counter(name, text, self._sums[name])
        yield histogram("staleness", "Staleness of applied updates.", staleness)
        yield histogram("alpha_t", "Weight of applied updates.", self._weights.buckets)
        yield histogram("mixing_seconds", "One pass of the mixer.", self._mixing_s)
        yield histogram("evaluation_seconds", "One evaluation.", self._evaluation_s)
        yield histogram("fsync_seconds", "Bringing something to the disk.", self._fsync_s, "what")

    def _updates(self) -> Counter[str]:
        answered = {word: self._fold.kinds[kind] for kind, word in ANSWERS.items()}
        return self._fold.rejected() + Counter(answered) + Counter({Outcome.APPLIED.value: self._fold.applied})


class Timed:
    """Times every evaluation."""

    def __init__(self, process: Measures, metrics: Metrics) -> None:
        self._process, self._metrics = process, metrics

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]:
        """Evaluates a version and times it; a failure is not timed."""
        begun = perf_counter()
        found = self._process.evaluate(t, file)
        self._metrics.evaluated(perf_counter() - begun)
        return found

    def close(self) -> None:
        """Close the process that evaluates."""
        self._process.close()


def _each(counts: Counter[str], names: Iterable[str]) -> dict[str, float]:
    """A count of zero is shown, too: else the first of its kind would be no increase."""
    return {name: counts[name] for name in names}
