"""Partitions: every sample exactly once, every device something, as skewed as asked, the same for the same seed."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import InvalidValue
from offbeat.partition import Indices, partition, partition_by

LABELS = np.random.default_rng(0).choice(10, 6000, p=np.arange(1, 11) / 55)
"""6000 samples with ten labels, the last one ten times as frequent as the first."""
SCHEMES = ["iid", "shards:1", "shards:2", "shards:7", "dirichlet:0.01", "dirichlet:0.3", "dirichlet:1", "dirichlet:100"]
SIZES = [None, "linear:1", "linear:4", "lognormal:0", "lognormal:1", "lognormal:5"]


def exactly_once(parts: list[Indices], samples: int) -> bool:
    return sorted(np.concatenate(parts).tolist()) == list(range(samples))


def shares(parts: list[Indices], labels: npt.NDArray[Any] = LABELS) -> npt.NDArray[np.float64]:
    """A row per device: which part of its samples has which label."""
    counts = [np.bincount(labels[part], minlength=int(labels.max()) + 1) / len(part) for part in parts]
    return np.array(counts, np.float64)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(st.integers(-3, 5), min_size=1, max_size=80),
    st.integers(1, 12),
    st.sampled_from(SCHEMES),
    st.sampled_from(SIZES),
    st.integers(0, 5),
)
def test_every_sample_exactly_once_and_every_device_something(
    labels: list[int], devices: int, scheme: str, sizes: str | None, seed: int
) -> None:
    pieces = int(scheme.partition(":")[2]) if scheme.startswith("shards") else 1
    if devices * pieces > len(labels):
        with pytest.raises(InvalidValue):
            partition(labels, devices, scheme, seed=seed, sizes=sizes)
        return
    parts = partition(labels, devices, scheme, seed=seed, sizes=sizes)
    assert len(parts) == devices
    assert exactly_once(parts, len(labels))
    assert all(len(part) for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    lengths = [len(part) for part in parts]
    if sizes in (None, "linear:1", "lognormal:0"):
        assert max(lengths) - min(lengths) <= 1
    assert all(part.dtype == np.intp for part in parts)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sizes", SIZES)
def test_one_seed_one_partition(scheme: str, sizes: str | None) -> None:
    one, again, other = (partition(LABELS, 20, scheme, seed=seed, sizes=sizes) for seed in (3, 3, 4))
    assert [part.tolist() for part in one] == [part.tolist() for part in again]
    assert [part.tolist() for part in one] != [part.tolist() for part in other]


def test_iid_devices_look_like_the_whole() -> None:
    """600 samples each: a share of p is within 4 sqrt(p(1-p)/600), so 0.08 at most."""
    overall = np.bincount(LABELS) / len(LABELS)
    assert np.abs(shares(partition(LABELS, 10)) - overall).max() < 0.08


def test_iid_does_not_look_at_the_labels() -> None:
    other = partition(LABELS[::-1], 10, seed=5)
    assert [part.tolist() for part in partition(LABELS, 10, seed=5)] == [part.tolist() for part in other]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_shards_give_every_device_few_labels(pieces: int) -> None:
    """A piece is shorter than any label's run, so it holds one label or parts of two neighbours."""
    labels = np.arange(6000) % 10
    parts = partition(labels, 30, f"shards:{pieces}", seed=1)
    kinds = [len(set(labels[part].tolist())) for part in parts]
    assert max(kinds) <= 2 * pieces
    assert np.mean(kinds) < 1 + pieces


def test_shards_that_fit_the_labels_hold_one_label_each() -> None:
    labels = np.repeat(np.arange(5), 40)[np.random.default_rng(1).permutation(200)]
    parts = partition(labels, 10, "shards:1", seed=2)
    assert [len(set(labels[part].tolist())) for part in parts] == [1] * 10
    assert [len(part) for part in parts] == [20] * 10
    assert len({tuple(labels[part][:1].tolist()) for part in parts[:5]}) > 1  # dealt, not in order


def test_shards_take_any_samples_of_a_label() -> None:
    """Which samples of its label a device gets is random too, not the next ones in the file."""
    labels = np.zeros(100, np.int64)
    assert partition(labels, 2, "shards:1", seed=0)[0].tolist() not in (list(range(50)), list(range(50, 100)))


@pytest.mark.parametrize("sizes", [None, "lognormal:1"])
def test_dirichlet_is_the_more_one_sided_the_smaller_a_is(sizes: str | None) -> None:
    largest = [
        float(shares(partition(LABELS, 50, f"dirichlet:{a}", seed=1, sizes=sizes)).max(axis=1).mean())
        for a in (0.03, 0.3, 3, 1000)
    ]
    assert largest == sorted(largest, reverse=True)
    assert largest[0] > 0.7
    assert largest[-1] < 0.25  # the most frequent label has a share of 10/55


def test_dirichlet_shares_spread_as_that_distribution_does() -> None:
    """With equally frequent labels a share has mean 1/L and variance (1/L)(1-1/L)/(L A+1); fitting narrows it a bit."""
    labels = np.arange(20_000) % 4
    for a in (0.5, 2.0):
        drawn = shares(partition(labels, 200, f"dirichlet:{a}", seed=2), labels)
        assert drawn.mean(axis=0) == pytest.approx(np.full(4, 0.25))
        assert drawn.std() == pytest.approx(math.sqrt(0.25 * 0.75 / (4 * a + 1)), rel=0.15)


def test_dirichlet_copes_with_what_does_not_fit() -> None:
    """One label for 99 in 100 samples, and devices that would like another."""
    labels = np.array([0] * 990 + [1] * 5 + [2] * 5)
    parts = partition(labels, 100, "dirichlet:0.001")
    assert exactly_once(parts, 1000)
    assert {len(part) for part in parts} == {10}


def test_linear_sizes_rise_to_r_times_the_smallest() -> None:
    assert [len(part) for part in partition(np.zeros(100), 4, sizes="linear:4")] == [10, 20, 30, 40]
    lengths = [len(part) for part in partition(LABELS, 40, "dirichlet:0.3", sizes="linear:9")]
    assert lengths == sorted(lengths)
    assert lengths[-1] / lengths[0] == pytest.approx(9, rel=0.05)
    steps = np.diff(lengths)
    assert steps.max() - steps.min() <= 2


def test_lognormal_sizes_spread_by_sigma() -> None:
    """The logarithms of 500 sizes have standard deviation sigma within 4 sigma/sqrt(1000); sizes are around 240."""
    labels = np.zeros(120_000)
    logs = np.log([len(part) for part in partition(labels, 500, sizes="lognormal:0.5", seed=3)])
    assert float(logs.std()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(1000) + 0.01)
    assert len(set(np.diff(logs) > 0)) == 2  # in no order


def test_sizes_that_would_leave_devices_empty_leave_them_one_sample() -> None:
    lengths = [len(part) for part in partition(np.zeros(30), 25, sizes="lognormal:5", seed=1)]
    assert sum(lengths) == 30
    assert min(lengths) == 1


def test_sizes_hold_whatever_the_scheme() -> None:
    lengths = [[len(part) for part in partition(LABELS, 12, scheme, sizes="linear:3")] for scheme in SCHEMES]
    assert lengths == [lengths[0]] * len(SCHEMES)


def test_one_device_per_key() -> None:
    keys = ["b", "a", "c", "a", "b", "a"]
    assert [part.tolist() for part in partition_by(keys)] == [[1, 3, 5], [0, 4], [2]]
    assert [part.tolist() for part in partition_by([30, -1, 30])] == [[1], [0, 2]]
    assert [part.tolist() for part in partition_by(["x"])] == [[0]]


def test_labels_may_be_anything_that_sorts() -> None:
    words = np.array(["cat", "dog", "emu"])[LABELS % 3]
    assert exactly_once(partition(words, 9, "dirichlet:0.1"), len(words))
    assert exactly_once(partition(LABELS.astype(np.float32), 9, "shards:2"), len(LABELS))
    assert exactly_once(partition([True, False, True], 3), 3)


@pytest.mark.parametrize(
    ("devices", "scheme", "said"),
    [
        (0, "iid", r"devices is 0 but must lie in 1\.\.10"),
        (-1, "iid", r"1\.\.10"),
        (11, "iid", r"devices is 11 but must lie in 1\.\.10: 10 samples, a sample for each device"),
        (11, "dirichlet:1", r"1\.\.10"),
        (4, "shards:3", r"devices is 4 but must lie in 1\.\.3: 10 samples, 3 pieces for each device"),
        (1, "shards:11", "shards:10 at most"),
    ],
)
def test_too_many_devices_are_refused_with_how_many_are_possible(devices: int, scheme: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        partition([0, 1] * 5, devices, scheme)


@pytest.mark.parametrize(
    "scheme",
    [
        *(
            "",
            "IID",
            "iid:1",
            "iid:",
            "nonsense",
            "shards",
            "shards:",
            "shards:0",
            "shards:-1",
            "shards:1.5",
            "shards:x",
        ),
        *("shards:1,2", "shards:inf", "shards:nan", "dirichlet", "dirichlet:", "dirichlet:0", "dirichlet:-1"),
        *("dirichlet:nan", "dirichlet:inf", "dirichlet:1,2", "key", "by:key"),
    ],
)
def test_a_malformed_scheme_is_refused_with_what_is_allowed(scheme: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        partition(LABELS, 10, scheme)
    message = str(refused.value)
    assert repr(scheme) in message
    assert all(name in message for name in ("iid", "shards:S", "dirichlet:A", "partition_by(keys)"))
    assert "\n" not in message


@pytest.mark.parametrize(
    "sizes",
    [
        "",
        "equal",
        "linear",
        "linear:",
        "linear:0.5",
        "linear:nan",
        "linear:inf",
        "linear:1,2",
        "lognormal:-1",
        "lognormal",
    ],
)
def test_malformed_sizes_are_refused_with_what_is_allowed(sizes: str) -> None:
    with pytest.raises(InvalidValue, match="linear:R") as refused:
        partition(LABELS, 10, sizes=sizes)
    assert repr(sizes) in str(refused.value)
    assert "lognormal:S" in str(refused.value)


@pytest.mark.parametrize("labels", [[], [[0, 1], [1, 0]], 5])
def test_labels_that_are_no_list_are_refused(labels: Any) -> None:
    with pytest.raises(InvalidValue, match="one entry per sample"):
        partition(labels, 1)
    with pytest.raises(InvalidValue, match="keys has shape"):
        partition_by(labels)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InvalidValue, match="seed is -1"):
        partition(LABELS, 10, seed=-1)
