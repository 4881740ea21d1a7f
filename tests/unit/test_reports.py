"""Metrics that workers measured: what belongs together, what comes too late, and that nothing grows without limit."""

from collections import defaultdict
from math import fsum, inf, isfinite, isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import InvalidValue
from offbeat.protocol.worst_served import worst_tenth
from offbeat.server.reports import COUNT, Mean, Reports


def test_a_bucket_is_given_out_when_versions_are_well_past_it_and_only_once() -> None:
    reports = Reports(10)
    reports.add(3, 100, {"loss": 1.0, "accuracy": 0.5})
    reports.add(7, 300, {"loss": 3.0})
    assert reports.due(19) == []
    assert reports.due(20) == [(7, {"loss": 2.5, "accuracy": 0.5, "reports": 2.0})]
    assert reports.due(20) == []
    assert reports.due(500) == []


def test_buckets_come_in_their_order_whatever_the_order_of_the_reports() -> None:
    reports = Reports(2)
    for tau in (5, 0, 3, 1, 4):
        reports.add(tau, 1, {"loss": float(tau)})
    assert [tau for tau, _ in reports.due(6)] == [1, 3]
    assert reports.due(8) == [(5, {"loss": 4.5, COUNT: 2.0})]


def test_a_report_that_comes_too_late_is_dropped_and_counted() -> None:
    reports = Reports(10)
    reports.due(39)
    reports.add(19, 1, {"loss": 1.0})
    reports.add(20, 1, {"loss": 2.0})
    assert reports.dropped["late"] == 1
    assert reports.due(25) == []  # an older version opens nothing again
    reports.add(19, 1, {"loss": 1.0})
    assert reports.dropped["late"] == 2
    assert reports.due(40) == [(20, {"loss": 2.0, COUNT: 1.0})]


def test_the_end_gives_out_what_is_left_and_nothing_comes_after_it() -> None:
    reports = Reports(10)
    reports.add(15, 1, {"loss": 1.0})
    reports.add(31, 1, {"loss": 2.0})
    assert reports.finish() == [(15, {"loss": 1.0, COUNT: 1.0}), (31, {"loss": 2.0, COUNT: 1.0})]
    reports.add(32, 1, {"loss": 3.0})
    assert (reports.dropped["late"], reports.finish(), reports.due(100)) == (1, [], [])


def test_values_that_are_no_numbers_are_dropped_and_counted_and_the_others_stay() -> None:
    reports = Reports(1)
    reports.add(0, 5, {"loss": nan, "accuracy": 0.25})
    reports.add(0, 5, {"loss": inf, "accuracy": 0.75, "other": 10**400})
    reports.add(0, 5, {})
    assert reports.finish() == [(0, {"accuracy": 0.5, COUNT: 2.0})]
    assert reports.dropped["not_finite"] == 3


def test_no_worker_can_fill_the_memory() -> None:
    reports = Reports(1, buckets_max=3, names_max=2)
    for tau in range(10):
        reports.add(tau, 1, {f"name {n}": 1.0 for n in range(5)})
    assert reports.dropped["overflowed"] == 7
    assert reports.dropped["nameless"] == 30
    reports.add(6, 1, {"loss": 1.0})  # its bucket made way
    assert reports.dropped["late"] == 1
    assert [(tau, len(metrics)) for tau, metrics in reports.finish()] == [(7, 3), (8, 3), (9, 3)]


def test_the_number_of_reports_is_ours_to_say() -> None:
    reports = Reports(1)
    reports.add(0, 1, {COUNT: 1000.0})
    assert reports.finish() == [(0, {COUNT: 1.0})]


@pytest.mark.parametrize("limits", [{"every": 0}, {"every": 1, "names_max": 0}, {"every": 1, "buckets_max": 0}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match="must be a whole number >= 1"):
        Reports(**limits)


@pytest.mark.parametrize(("tau", "samples"), [(-1, 1), (0, 0), (0, -3)])
def test_a_report_that_makes_no_sense_is_refused(tau: int, samples: int) -> None:
    with pytest.raises(InvalidValue, match="samples >= 1"):
        Reports(1).add(tau, samples, {"loss": 1.0})


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(finite, st.integers(1, 10**20)), min_size=1))
def test_a_mean_stays_in_the_range_of_what_it_is_the_mean_of(values: list[tuple[float, int]]) -> None:
    mean = Mean()
    for value, samples in values:
        mean.add(value, samples)
    assert min(values)[0] <= mean.value <= max(values)[0]


@pytest.mark.parametrize("value", [0.1, 0.7, 1e308, -1.7e308, 5e-324])
def test_the_mean_of_equal_values_is_that_value_to_the_last_bit(value: float) -> None:
    mean = Mean()
    for samples in range(1, 200):
        mean.add(value, samples)
        assert mean.value == value


told = st.tuples(
    st.integers(0, 60),
    st.integers(1, 1000),
    st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6) | st.just(nan), min_size=1),
)


@given(st.integers(1, 7), st.lists(told), st.lists(st.integers(0, 80)))
def test_what_comes_out_is_what_went_in(
    every: int, given_reports: list[tuple[int, int, dict[str, float]]], published: list[int]
) -> None:
    """Against an oracle: everything that was in time is in exactly one mean, and nothing else is."""
    reports, newest = Reports(every), 0
    out: dict[int, dict[str, float]] = {}
    sums: dict[int, list[tuple[int, int, dict[str, float]]]] = defaultdict(list)
    late = 0
    for i, (tau, samples, metrics) in enumerate(given_reports):
        if i < len(published):
            out |= dict(reports.due(published[i]))
            newest = max(newest, published[i])
        reports.add(tau, samples, metrics)
        if newest // every > tau // every + 1:
            late += 1
        else:
            sums[tau // every].append((tau, samples, metrics))
    out |= dict(reports.finish())
    assert reports.dropped["late"] == late
    assert out.keys() == {max(tau for tau, _, _ in bucket) for bucket in sums.values()}
    for bucket in sums.values():
        _same(out[max(tau for tau, _, _ in bucket)], bucket)
    assert reports.dropped["not_finite"] == sum(
        not isfinite(v) for b in sums.values() for _, _, m in b for v in m.values()
    )


def _same(found: dict[str, float], bucket: list[tuple[int, int, dict[str, float]]]) -> None:
    assert found.pop(COUNT) == len(bucket)
    names = {name for _, _, metrics in bucket for name, value in metrics.items() if isfinite(value)}
    assert found.keys() == names
    for name in names:
        parts = [(n, m[name]) for _, n, m in bucket if name in m and isfinite(m[name])]
        mean = fsum(n * value for n, value in parts) / sum(n for n, _ in parts)
        assert found[name] == pytest.approx(mean, rel=1e-9, abs=1e-6)


# --- the worst-served devices ----------------------------------------------------------------------------------------


def test_the_worst_tenth_is_over_the_newest_report_of_each_device() -> None:
    reports = Reports(10)
    for device in range(20):
        reports.add(1, 5, {"accuracy": 0.1, "loss": 9.0, "training_loss": 3.0}, device)
    for device in range(20):
        reports.add(2, 5, {"accuracy": device / 20, "loss": float(device)}, device)
    ((tau, metrics),) = reports.due(20)
    assert tau == 2
    assert metrics["accuracy_worst_tenth"] == pytest.approx((0.0 + 0.05) / 2)  # two of twenty, whatever their samples
    assert metrics["loss_worst_tenth"] == pytest.approx((18 + 19) / 2)
    assert "training_loss_worst_tenth" not in metrics


def test_a_device_that_is_always_late_counts_among_the_worst() -> None:
    reports = Reports(1)
    reports.due(50)
    reports.add(3, 1, {"accuracy": 0.2}, 7)
    reports.add(50, 1, {"accuracy": 0.9}, 8)
    assert reports.dropped["late"] == 1
    assert reports.due(60) == [(50, {"accuracy": 0.9, "accuracy_worst_tenth": 0.2, COUNT: 1.0})]


def test_the_devices_that_reported_last_are_kept_and_no_more() -> None:
    reports = Reports(1, devices_max=3)
    for device, accuracy in enumerate((0.1, 0.2, 0.3)):
        reports.add(0, 1, {"accuracy": accuracy}, device)
    reports.add(0, 1, {"accuracy": 0.4}, 0)
    reports.add(0, 1, {"accuracy": 0.5}, 3)  # device 1 made way
    ((_, metrics),) = reports.finish()
    assert metrics["accuracy_worst_tenth"] == 0.3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_the_worst_tenth_is_no_better_than_any_of_the_others(values: list[float]) -> None:
    worst = worst_tenth("accuracy", values)
    assert worst is not None
    assert min(values) <= worst <= fsum(values) / len(values) + 1e-12
    assert worst_tenth("error", [-value for value in values]) == pytest.approx(-worst)


def test_a_value_that_is_no_number_is_the_worst() -> None:
    assert isnan(worst_tenth("accuracy", [0.9, nan, 0.1]) or 0.0)
    assert worst_tenth("loss", []) is None
