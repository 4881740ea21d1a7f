"""What Prometheus is told: read with its own parsers, equal to what was fed, and the same after a restart."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

from offbeat.core.rules import Mix
from offbeat.errors import MissingExtra
from offbeat.protocol.messages import AnswerPush, Decision, Lease, Outcome, UpdateArrived, VersionPublished
from offbeat.server.metrics import OUTCOMES, SECONDS, STALENESS, Metrics, Timed
from offbeat.server.served_fold import ALPHA_T, ServedFold
from offbeat.storage.ledger import Ledger, Observer
from offbeat.storage.row_shapes import NewRow, RowShape
from tests.unit.test_event_log import HAPPENED, record

COUNTS = {"t": 12, "epochs": 50, "applied": 1, "gradients": 10, "in_flight": 4, "queued": 2, "quarantined": 1}
SIZES = {"workers": 7, "waiting": 3, "disk_bytes": 1000, "disk_bytes_max": 5000, "staleness_largest": 3}
WORDS = {"run": "r1", "task": "line.py", "version": "0.1", "trouble": None, "reason": None, "finished": False}
FACTS: dict[str, Any] = COUNTS | SIZES | WORDS | {"staleness_mean": 0.5, "metrics": {"loss": 0.25}, "metrics_t": 10}
"""A status."""
MOMENT_S, PATIENCE_S = 0.3, 30.0
OPEN = "application/openmetrics-text; version=1.0.0"


def families(metrics: Metrics, facts: dict[str, Any] = FACTS) -> dict[str, Metric]:
    """What the official parser reads."""
    return {family.name: family for family in parse(metrics.text(facts).body.decode())}


def values(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in families(metrics)[name].samples if label in sample.labels}


def value(metrics: Metrics, name: str, facts: dict[str, Any] = FACTS) -> float:
    found = {sample.name: sample.value for family in families(metrics, facts).values() for sample in family.samples}
    return found[name]


def buckets(metrics: Metrics, name: str, **labels: str) -> tuple[list[float], float, float]:
    """Counts up to each bound, their number, their sum."""
    samples = [s for s in families(metrics)[name].samples if labels.items() <= s.labels.items()]
    counts = [s.value for s in samples if s.name.endswith("_bucket")]
    number, total = (next(s.value for s in samples if s.name == f"{name}_{end}") for end in ("count", "sum"))
    return counts, number, total


def decided(sequence: int, staleness: int, alpha_t: float, outcome: Outcome = Outcome.APPLIED) -> Decision:
    lease = Lease(sequence, 1, 1, sequence, 0, 0.0, 9.0)
    mix = Mix(1 - alpha_t, alpha_t, 0.0, True) if outcome is Outcome.APPLIED else None
    return Decision(sequence, 1.0, lease, outcome, sequence, staleness, mix, 5, 3)


def fed(folder: Path, decisions: Sequence[Decision], transactions: int = 1) -> Metrics:
    """Metrics that heard of these decisions while they were written to folder/ledger.sqlite."""
    fold = ServedFold()
    with Ledger.create(folder / "ledger.sqlite", observers=[fold.written]) as ledger:
        fold.begin(ledger)
        for decision in decisions:
            answer = AnswerPush(1, decision.lease.task, decision.outcome, decision)
            ledger.record(UpdateArrived(1.0, 1, decision.lease.task, 5, 3), [answer])
            if decision.sequence % max(1, len(decisions) // transactions) == 0:
                ledger.flush()
    return Metrics(fold)


def counted_in(path: Path) -> Metrics:
    """Metrics of a server that starts with this ledger, and finds no totals in its checkpoint."""
    fold = ServedFold()
    with Ledger.open(path, read_only=True) as ledger:
        fold.begin(ledger)
    return Metrics(fold)


# --- what is counted -------------------------------------------------------------------------------------------------


def test_pushes_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    fold = ServedFold()
    metrics = Metrics(fold)
    with Ledger.create(tmp_path / "ledger.sqlite", verbose=True, observers=[fold.written]) as ledger:
        fold.begin(ledger)
        record(ledger)
    some = ("applied", "too_stale", "repeated", "busy", "unknown_task", "not_yours", "bad")
    assert values(metrics, "offbeat_updates", "outcome") == dict.fromkeys(OUTCOMES, 0) | dict.fromkeys(some, 1)
    events = values(metrics, "offbeat_events", "kind")
    assert (events["leased"], events["arrived"], events["quarantined"], events["lost"]) == (2, 6, 1, 0)
    assert "heartbeat" not in events, "its total would not survive a restart"


def test_staleness_and_alpha_are_of_applied_updates_alone(tmp_path: Path) -> None:
    told = [decided(1, 0, 0.6), decided(2, 5, 0.25), decided(3, 300, 1.0), decided(4, 99, 0.5, Outcome.TOO_STALE)]
    metrics = fed(tmp_path, told)
    counts, number, total = buckets(metrics, "offbeat_staleness")
    assert counts == [sum(s <= bound for s in (0, 5, 300)) for bound in STALENESS] + [3]
    assert (number, total) == (3, 305)
    counts, number, total = buckets(metrics, "offbeat_alpha_t")
    assert counts == [sum(a <= bound for a in (0.6, 0.25, 1.0)) for bound in ALPHA_T] + [3]
    assert number == 3
    assert total == pytest.approx(1.85)


def test_a_value_on_a_bound_is_within_it(tmp_path: Path) -> None:
    on_bounds = [decided(i, STALENESS[i], ALPHA_T[i]) for i in range(len(ALPHA_T))]
    metrics = fed(tmp_path, on_bounds)
    rising = [float(i + 1) for i in range(len(ALPHA_T))]
    for counted in (metrics, counted_in(tmp_path / "ledger.sqlite")):
        assert buckets(counted, "offbeat_staleness")[0] == [*rising, len(ALPHA_T)]
        assert buckets(counted, "offbeat_alpha_t")[0] == [*rising, len(ALPHA_T)]


TIMES: list[tuple[str, dict[str, str], Callable[[Metrics, float], None]]] = [
    ("offbeat_mixing_seconds", {}, lambda metrics, s: metrics.mixed(3, s)),
    ("offbeat_evaluation_seconds", {}, Metrics.evaluated),
    ("offbeat_fsync_seconds", {"what": "update"}, Metrics.synced),
    ("offbeat_fsync_seconds", {"what": "ledger"}, lambda metrics, s: metrics.written([], 0, s)),
]


@pytest.mark.parametrize(("name", "labels", "tell"), TIMES)
def test_times_are_histograms(name: str, labels: dict[str, str], tell: Callable[[Metrics, float], None]) -> None:
    metrics = Metrics()
    for seconds in (0.0002, 0.02, 500.0):
        tell(metrics, seconds)
    counts, number, total = buckets(metrics, name, **labels)
    assert counts == [sum(s <= bound for s in (0.0002, 0.02, 500)) for bound in SECONDS] + [3]
    assert number == 3
    assert total == pytest.approx(500.0202)
    others = {(other, tuple(with_.items())) for other, with_, _ in TIMES} - {(name, tuple(labels.items()))}
    assert all(buckets(metrics, other, **dict(with_))[1] == 0 for other, with_ in others)


def test_sums_are_what_was_told() -> None:
    metrics = Metrics()
    metrics.received(10)
    metrics.received(5)
    metrics.sent(1 << 40)
    metrics.mixed(8, 0.1)
    metrics.mixed(2, 0.1)
    metrics.not_evaluated()
    for word in ("busy", "busy", "no_token"):
        metrics.refused(word)
    assert value(metrics, "offbeat_received_bytes_total") == 15
    assert value(metrics, "offbeat_sent_bytes_total") == 1 << 40
    assert value(metrics, "offbeat_mixed_updates_total") == 10
    assert value(metrics, "offbeat_evaluations_failed_total") == 1
    assert values(metrics, "offbeat_refusals", "error") == {"busy": 2, "no_token": 1}


class Slow(int):
    """A number that takes its time to be added: until somebody else is done, or cannot be."""

    begun, done = threading.Event(), threading.Event()

    def __radd__(self, other: int) -> int:
        self.begun.set()
        self.done.wait(MOMENT_S)
        return other + int(self)


def test_threads_do_not_lose_each_others_counts() -> None:
    metrics = Metrics()
    metrics.sent(0)
    slow = threading.Thread(target=metrics.sent, args=(Slow(10),))
    slow.start()
    assert Slow.begun.wait(PATIENCE_S)
    metrics.sent(1)
    Slow.done.set()
    slow.join()
    assert value(metrics, "offbeat_sent_bytes_total") == 11


class Measured:
    """Evaluates, or fails."""

    closed = False

    def evaluate(self, t: int, _file: Path) -> dict[str, float]:
        if t < 0:
            raise RuntimeError("diverged")
        return {"t": float(t)}

    def close(self) -> None:
        self.closed = True


def test_an_evaluation_is_timed_where_it_succeeds() -> None:
    metrics, process = Metrics(), Measured()
    timed = Timed(process, metrics)
    assert timed.evaluate(5, Path()) == {"t": 5}
    with pytest.raises(RuntimeError, match="diverged"):
        timed.evaluate(-1, Path())
    timed.close()
    assert process.closed
    counts, number, total = buckets(metrics, "offbeat_evaluation_seconds")
    assert number == counts[-1] == 1
    assert 0 <= total < 1


# --- after a restart -------------------------------------------------------------------------------------------------

DECISIONS = st.lists(
    st.tuples(
        st.integers(0, 400) | st.sampled_from(STALENESS),
        st.floats(0, 1.5) | st.sampled_from(ALPHA_T),
        st.sampled_from([Outcome.APPLIED, Outcome.APPLIED, Outcome.TOO_STALE, Outcome.NOT_FINITE]),
    ),
    max_size=30,
)


@settings(max_examples=20, deadline=None)
@given(told=DECISIONS, transactions=st.integers(1, 5))
def test_totals_after_a_restart_are_those_from_before(
    tmp_path_factory: pytest.TempPathFactory, told: list[tuple[int, float, Outcome]], transactions: int
) -> None:
    folder = tmp_path_factory.mktemp("restart")
    live = fed(folder, [decided(i, *facts) for i, facts in enumerate(told, 1)], transactions)
    again = counted_in(folder / "ledger.sqlite")
    for name, label in (("offbeat_updates", "outcome"), ("offbeat_events", "kind")):
        assert values(live, name, label) == values(again, name, label)
    for name in ("offbeat_staleness", "offbeat_alpha_t"):
        *exact, total = buckets(live, name)
        *same, total_again = buckets(again, name)
        assert exact == same
        assert total == pytest.approx(total_again)


def test_counting_goes_on_from_the_ledgers_totals_while_it_is_open(tmp_path: Path) -> None:
    observers: list[Observer] = []
    with Ledger.create(tmp_path / "ledger.sqlite", durable=True, verbose=True, observers=observers) as ledger:
        record(ledger)
        fold = ServedFold()
        fold.begin(ledger)
        metrics, took = Metrics(fold), list[float]()
        observers.extend([fold.written, metrics.written, lambda _rows, _last, seconds: took.append(seconds)])
        record(ledger, HAPPENED[5:9])
        assert ledger.count("decided") == 4
    updates = values(metrics, "offbeat_updates", "outcome")
    assert (updates["applied"], updates["too_stale"], updates["repeated"], updates["busy"]) == (2, 2, 2, 2)
    assert (updates["bad"], updates["not_yours"]) == (1, 1)
    assert buckets(metrics, "offbeat_alpha_t")[1] == 2
    assert buckets(metrics, "offbeat_alpha_t")[2] == pytest.approx(2 * (1 - 1 / 3))
    assert buckets(metrics, "offbeat_fsync_seconds", what="ledger")[1:] == (1, sum(took)), "of this server alone"


def test_a_new_run_starts_from_zero(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite"):
        pass
    assert set(values(counted_in(tmp_path / "ledger.sqlite"), "offbeat_updates", "outcome").values()) == {0}


# --- how it is shown -------------------------------------------------------------------------------------------------


def test_gauges_are_the_status() -> None:
    names = ("t", "epochs", "in_flight", "queued", "workers", "waiting", "quarantined", "disk_bytes", "metrics_t")
    for name in (*names, "disk_bytes_max", "staleness_mean", "staleness_largest"):
        assert value(Metrics(), f"offbeat_{name}") == FACTS[name]
    assert value(Metrics(), "offbeat_gradients_total") == FACTS["gradients"]
    assert (value(Metrics(), "offbeat_trouble"), value(Metrics(), "offbeat_finished")) == (0, 0)
    over = FACTS | {"trouble": "the disk is full", "finished": True}
    assert (value(Metrics(), "offbeat_trouble", over), value(Metrics(), "offbeat_finished", over)) == (1, 1)
    about = families(Metrics())["offbeat_info"].samples[0]
    assert (about.labels, about.value) == ({"run": "r1", "task": "line.py", "version": "0.1"}, 1)


def test_what_does_not_apply_is_not_shown() -> None:
    shown = families(Metrics(), FACTS | {"epochs": None, "metrics_t": None, "metrics": {}})
    assert not {"offbeat_epochs", "offbeat_metrics_t"} & set(shown)
    assert not shown["offbeat_metric"].samples


def test_a_diverged_metric_is_shown_as_what_it_is() -> None:
    shown = families(Metrics(), FACTS | {"metrics": {"loss": "nan", "norm": "inf", "accuracy": 0.5}})
    told = {sample.labels["name"]: sample.value for sample in shown["offbeat_metric"].samples}
    assert isnan(told.pop("loss"))
    assert told == {"norm": float("inf"), "accuracy": 0.5}


def test_any_name_of_a_metric_can_be_read_back() -> None:
    names = ['a"b', "a\\b", "a\nb", "a}b", "loss{x=1}", "größe", "\\n", "a b", "", "#"]
    shown = families(Metrics(), FACTS | {"metrics": dict.fromkeys(names, 1.5), "task": "t\udcffs"})
    assert [sample.labels["name"] for sample in shown["offbeat_metric"].samples] == names
    assert shown["offbeat_info"].samples[0].labels["task"] == "t?s"
    twice = FACTS | {"metrics": {f"a{chr(0xDCFF)}": 1.0, f"a{chr(0xDCFE)}": 2.0}}
    assert len(families(Metrics(), twice)["offbeat_metric"].samples) == 1, "a name that is there twice is no text"


def test_the_format_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    metrics = fed(tmp_path, [decided(1, 2, 0.5)])
    plain, modern = metrics.text(FACTS), metrics.text(FACTS, OPEN)
    assert plain.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert modern.content_type.startswith(OPEN)
    read = {family.name: family for family in parse_open(modern.body.decode())}  # type: ignore[no-untyped-call]
    assert {s.labels["outcome"]: s.value for s in read["offbeat_updates"].samples}["applied"] == 1
    assert next(s.value for s in read["offbeat_staleness"].samples if s.labels.get("le") == "2.0") == 1


def test_the_process_is_measured_in_a_registry_of_our_own() -> None:
    metrics = Metrics()
    assert metrics.text(FACTS).body.count(b"# TYPE offbeat_t gauge") == 1
    assert metrics.text(FACTS).body.count(b"# TYPE offbeat_t gauge") == 1, "and again"
    assert value(metrics, "process_resident_memory_bytes") > 1e6
    assert value(metrics, "process_cpu_seconds_total") > 0
    assert not [family.name for family in REGISTRY.collect() if family.name.startswith("offbeat")]


def test_every_family_says_what_it_is() -> None:
    for family in families(Metrics()).values():
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")


def test_without_prometheus_client_a_scrape_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = fed(tmp_path, [decided(1, 0, 0.5)])
    metrics.sent(5)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(MissingExtra, match=r"prometheus-client is not installed; .*offbeat\[metrics\]"):
            metrics.text(FACTS)
    assert value(metrics, "offbeat_sent_bytes_total") == 5


def test_counting_imports_nothing_of_prometheus() -> None:
    program = "import sys, offbeat.server.metrics as m; m.Metrics().sent(1); print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_row_that_nobody_knows_is_no_trouble() -> None:
    metrics = Metrics()
    row = NewRow(RowShape("unheard_of", ()), ())
    metrics.written([row], 1, 0.1)
    assert buckets(metrics, "offbeat_fsync_seconds", what="ledger")[1] == 1


def test_nothing_is_counted_before_it_is_on_the_disk(tmp_path: Path) -> None:
    fold = ServedFold()
    metrics = Metrics(fold)
    with Ledger.create(tmp_path / "ledger.sqlite", observers=[fold.written]) as ledger:
        fold.begin(ledger)
        ledger.record(VersionPublished(1.0, 1), [])
        assert values(metrics, "offbeat_events", "kind")["published"] == 0
        ledger.flush()
        assert values(metrics, "offbeat_events", "kind")["published"] == 1
    assert not isnan(value(metrics, "offbeat_t", FACTS | {"metrics": {"x": nan}}))
