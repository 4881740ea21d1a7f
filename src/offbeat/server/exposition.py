"""Owns how numbers are shown to Prometheus: families of counters, gauges and histograms, and their text.

Rules kept here:
- A registry of our own for every scrape: other metrics of the process are not ours to show.
- prometheus-client is imported at the first scrape. Without it the server runs, and the scrape says what to install.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.errors import MissingExtra

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
    "staleness_mean": "Mean staleness of what was applied.",
    "staleness_largest": "Largest staleness of what was applied.",
    "disk_bytes": "Bytes of updates and versions on the disk.",
    "disk_bytes_max": "Bytes that updates may take on the disk.",
    "metrics_t": "The version that offbeat_metric is about.",
    "finished": "1 once the run is finished.",
}
"""Parts of the status that are numbers; those that do not apply are not shown."""


class Exposed(NamedTuple):
    """What a scrape is answered with."""

    body: bytes
    content_type: str


class Buckets:
    """A histogram: how many values there were up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """A value, once or more often; a bound belongs to the bucket that it ends."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has it: up to each bound, the last being infinity.

        >>> two = Buckets([0, 1]); two.add(1); two.add(5); two.cumulative()
        [('0.0', 0.0), ('1.0', 1.0), ('+Inf', 2.0)]
        """
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self.counts), strict=True)]


class _Collected:
    """What was gathered for one scrape."""

    def __init__(self, families: Iterable["Metric"]) -> None:
        self._families = families

    def collect(self) -> Iterable["Metric"]:
        return self._families


def refuse_missing() -> None:
    """Say what to install where prometheus-client is missing."""
    try:
        import prometheus_client  # noqa: F401 (is it there?)
    except ImportError as error:
        raise MissingExtra("prometheus-client", "metrics") from error


def encoded(families: Sequence["Metric"], accept: str = "") -> Exposed:
    """The families, and what the process itself uses, in the format that the scraper accepts."""
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry, (encode, content_type) = CollectorRegistry(), choose_encoder(accept)
    registry.register(_Collected(families))
    ProcessCollector(registry=registry)
    return Exposed(encode(registry), content_type)


def counter(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> "Metric":
    """A counter; with a label, one for each of its values."""
    from prometheus_client.metrics_core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for value, count in (values if isinstance(values, Mapping) else {"": values}).items():
        family.add_metric([value] if label else [], count)
    return family


def histogram(name: str, text: str, values: Mapping[str, Buckets] | Buckets, label: str = "") -> "Metric":
    """A histogram; with a label, one for each of its values."""
    from prometheus_client.metrics_core import HistogramMetricFamily

    family = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for value, buckets in (values if isinstance(values, Mapping) else {"": values}).items():
        family.add_metric([value] if label else [], buckets.cumulative(), buckets.sum)
    return family


def gauges(facts: Mapping[str, Any]) -> Iterator["Metric"]:
    """The status."""
    from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

    about = {name: _label(facts[name]) for name in ("run", "task", "version") if name in facts}
    yield InfoMetricFamily("offbeat", "The run that is served.", about)
    yield counter("gradients", "Gradients in the versions so far.", facts["gradients"])
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
    """Any text as UTF-8 can hold it."""
    return str(text).encode(errors="replace").decode()
