"""Owns the numbers of a server while it runs, and how they are shown to Prometheus.

Rules kept here:
- Updates and events are read from the fold of the run, which goes on over restarts. What no ledger has (bytes, seconds,
  refusals) starts from zero.
- Gauges are the status at the moment of the scrape; nothing is kept up to date in between.
- A registry of our own for every scrape: other metrics of the process are not ours to show.
- prometheus-client is imported at the first scrape. Without it the server runs, and the scrape says what to install.
- Every method may be called on any thread, and waits at most for another thread to add a number.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.errors import MissingExtra
from offbeat.protocol.messages import Outcome
from offbeat.server.buckets import Buckets
from offbeat.server.evaluator import Measures
from offbeat.server.served_fold import ServedFold
from offbeat.storage.fold import COUNTED
from offbeat.storage.row_shapes import NewRow

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

PREFIX = "offbeat_"
GAUGES = {
    "t": "Versions published.",
    "epochs": "Versions after which the run is finished, where that is set.",
    "in_flight": "Open leases.",
    "queued": "Updates that wait to be mixed.",
    "workers": "Workers that have joined and not left.",
    "waiting": "Workers that wait for a task.",
    "quarantined": "Workers in quarantine.",
    "silent": "Workers that lost their place because they were not heard of.",
    "paused": "1 while an administrator has paused the run.",
    "staleness_mean": "Mean staleness of what was applied.",
    "staleness_largest": "Largest staleness of what was applied.",
    "disk_bytes": "Bytes of updates and versions on the disk.",
    "disk_bytes_max": "Bytes that updates may take on the disk.",
    "metrics_t": "The version that offbeat_metric is about.",
    "finished": "1 once the run is finished.",
}
"""Parts of the status that are numbers; those that do not apply are not shown."""
STALENESS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
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
SUMS = {
    "mixed_updates": "Updates mixed since the start.",
    "evaluations_failed": "Versions that could not be evaluated since the start.",
    "received_bytes": "Bytes of updates that arrived since the start.",
    "sent_bytes": "Bytes of models sent since the start.",
}


class Exposed(NamedTuple):
    body: bytes
    content_type: str


class Metrics:
    def __init__(self, fold: ServedFold | None = None) -> None:
        self._fold = fold or ServedFold()
        self._lock = Lock()
        self._refusals: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._mixing_s, self._evaluation_s = Buckets(SECONDS), Buckets(SECONDS)
        self._fsync_s = {"ledger": Buckets(SECONDS), "update": Buckets(SECONDS)}

    def staleness(self) -> dict[str, float]:
        with self._fold.lock:
            run = self._fold.run
            return {"staleness_mean": run.staleness_mean, "staleness_largest": run.staleness_largest}

    # --- told by those who do it -------------------------------------------------------------------------------------

    def written(self, _rows: Sequence[NewRow], _last: int, seconds: float) -> None:
        """The ledger's hook: rows were committed, which took so long."""
        with self._lock:
            self._fsync_s["ledger"].add(seconds)

    def mixed(self, updates: int, seconds: float) -> None:
        with self._lock:
            self._mixing_s.add(seconds)
            self._sums["mixed_updates"] += updates

    def synced(self, seconds: float) -> None:
        """A whole update was brought to the disk."""
        with self._lock:
            self._fsync_s["update"].add(seconds)

    def evaluated(self, seconds: float) -> None:
        with self._lock:
            self._evaluation_s.add(seconds)

    def not_evaluated(self) -> None:
        self._add("evaluations_failed", 1)

    def received(self, size: int) -> None:
        self._add("received_bytes", size)

    def sent(self, size: int) -> None:
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
        try:
            with self._lock, self._fold.lock:
                families = list(self._families())
            return _encoded([*families, *_gauges(facts)], accept)
        except ImportError as error:
            raise MissingExtra("prometheus-client", "metrics") from error

    def _families(self) -> Iterator["Metric"]:
        fold, staleness = self._fold.run, Buckets(STALENESS)
        for value, count in fold.staleness.items():
            staleness.add(value, count)
        staleness.sum = fold.staleness_sum
        yield _counter("updates", "Pushes by what became of them.", _each(self._updates(), OUTCOMES), "outcome")
        yield _counter("events", "Rows of the ledger by their kind.", _each(fold.kinds, COUNTED), "kind")
        yield _counter("refusals", "Requests that were refused since the start.", dict(self._refusals), "error")
        for name, text in SUMS.items():
            yield _counter(name, text, self._sums[name])
        yield _histogram("staleness", "Staleness of applied updates.", staleness)
        yield _histogram("alpha_t", "Weight of applied updates.", self._fold.alpha_t)
        yield _histogram("mixing_seconds", "One pass of the mixer.", self._mixing_s)
        yield _histogram("evaluation_seconds", "One evaluation.", self._evaluation_s)
        yield _histogram("fsync_seconds", "Bringing something to the disk.", self._fsync_s, "what")

    def _updates(self) -> Counter[str]:
        fold = self._fold.run
        answered = {word: fold.kinds[kind] for kind, word in ANSWERS.items()}
        return fold.rejected() + Counter(answered) + Counter({Outcome.APPLIED.value: fold.applied})


class Timed:
    def __init__(self, process: Measures, metrics: Metrics) -> None:
        self._process, self._metrics = process, metrics

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]:
        """Evaluates a version and times it; a failure is not timed."""
        begun = perf_counter()
        found = self._process.evaluate(t, file)
        self._metrics.evaluated(perf_counter() - begun)
        return found

    def close(self) -> None:
        self._process.close()


# --- families --------------------------------------------------------------------------------------------------------


def _each(counts: Counter[str], names: Iterable[str]) -> dict[str, float]:
    """A count of zero is shown, too: else the first of its kind would be no increase."""
    return {name: counts[name] for name in names}


class _Collected:
    def __init__(self, families: Iterable["Metric"]) -> None:
        self._families = families

    def collect(self) -> Iterable["Metric"]:
        return self._families


def _encoded(families: Sequence["Metric"], accept: str) -> Exposed:
    """The families, and what the process itself uses, in the format that the scraper accepts."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry, (encode, content_type) = CollectorRegistry(), choose_encoder(accept)
    registry.register(_Collected(families))
    ProcessCollector(registry=registry)
    return Exposed(encode(registry), content_type)


def _counter(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> "Metric":
    """A counter; with a label, one for each of its values."""
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for value, count in (values if isinstance(values, Mapping) else {"": values}).items():
        family.add_metric([value] if label else [], count)
    return family


def _histogram(name: str, text: str, values: Mapping[str, Buckets] | Buckets, label: str = "") -> "Metric":
    """A histogram; with a label, one for each of its values."""
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for value, buckets in (values if isinstance(values, Mapping) else {"": values}).items():
        family.add_metric([value] if label else [], buckets.cumulative(), buckets.sum)
    return family


def _gauges(facts: Mapping[str, Any]) -> Iterator["Metric"]:
    from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

    about = {name: _label(facts[name]) for name in ("run", "task", "version") if name in facts}
    yield InfoMetricFamily("offbeat", "The run that is served.", about)
    yield _counter("gradients", "Gradients in the versions so far.", facts["gradients"])
    for name, text in GAUGES.items():
        if facts.get(name) is not None:
            yield GaugeMetricFamily(PREFIX + name, text, float(facts[name]))
    trouble = 1.0 if facts.get("trouble") else 0.0
    yield GaugeMetricFamily(f"{PREFIX}trouble", "1 while something needs an administrator.", trouble)
    measured = GaugeMetricFamily(f"{PREFIX}metric", "The task's newest metrics.", labels=["name"])
    for name, value in {_label(name): value for name, value in facts["metrics"].items()}.items():
        measured.add_metric([name], float(value))  # NaN and infinity are words in the status, and numbers here
    yield measured


def _label(text: object) -> str:
    return str(text).encode(errors="replace").decode()
