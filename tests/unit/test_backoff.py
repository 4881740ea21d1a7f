"""How long a worker waits: within its bounds, spread out, never before the server's wish, and the same for a seed."""

from collections.abc import Callable
from itertools import pairwise
from math import inf
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.worker.retrying import ASKED_MAX_S, Backoff

SECONDS = st.floats(0.001, 1e6)
SEEDS = st.integers(0, 2**32)


def always(number: float) -> Callable[[], float]:
    return lambda: number


def ceilings(backoff: Backoff, count: int) -> list[float]:
    return [backoff.next() for _ in range(count)]


def test_the_ceiling_doubles_up_to_the_longest() -> None:
    assert ceilings(Backoff(draw=always(1.0)), 9) == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_success_starts_over() -> None:
    backoff = Backoff(draw=always(1.0))
    ceilings(backoff, 5)
    backoff.reset()
    assert ceilings(backoff, 2) == [0.5, 1.0]


@given(SECONDS, SECONDS, SEEDS, st.lists(st.floats(0, 10**4), max_size=30))
def test_a_wait_is_never_shorter_than_asked_nor_longer_than_the_jitter_on_top(
    first_s: float, more_s: float, seed: int, asked: list[float]
) -> None:
    backoff = Backoff(first_s, first_s + more_s, Random(seed).random)  # noqa: S311 (jitter is no secret)
    for nth, at_least_s in enumerate(asked):
        wait_s, wish_s = backoff.next(at_least_s), min(at_least_s, ASKED_MAX_S)
        assert wish_s <= wait_s <= wish_s + first_s + more_s
        assert wait_s <= wish_s + first_s * 2.0**nth * (1 + 1e-9)


@given(SECONDS)
def test_ceilings_never_shrink_and_never_overflow(first_s: float) -> None:
    found = ceilings(Backoff(first_s, first_s * 100, draw=always(1.0)), 2000)
    assert all(before <= after for before, after in pairwise(found))
    assert found[-1] <= first_s * 100


@given(SEEDS)
def test_one_seed_gives_one_story(seed: int) -> None:
    for make in (Random, np.random.default_rng):
        assert ceilings(Backoff(draw=make(seed).random), 10) == ceilings(Backoff(draw=make(seed).random), 10)


@pytest.mark.parametrize("at_least_s", [0.0, 30.0])
def test_a_fleet_that_failed_together_comes_back_spread_out(at_least_s: float) -> None:
    """After six failures the ceiling is 16 s: of a thousand workers each second sees about one in sixteen."""
    waits = []
    for worker in range(1000):
        backoff = Backoff(draw=np.random.default_rng(worker).random)
        ceilings(backoff, 5)
        waits.append(backoff.next(at_least_s) - at_least_s)
    counts = np.histogram(waits, bins=16, range=(0, 16))[0]
    assert counts.sum() == 1000
    assert counts.min() > 30
    assert counts.max() < 100


def test_what_a_server_asks_for_is_bounded_and_may_lie_in_the_past() -> None:
    backoff = Backoff(draw=always(0.0))
    assert [backoff.next(asked) for asked in (-5.0, 7.0, 1e9, inf)] == [0.0, 7.0, ASKED_MAX_S, ASKED_MAX_S]
