"""Batches that are drawn in a compiled loop are those that numpy's generators draw."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("numba", reason="numba is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.task import Work
from offbeat.train import compiled_draws
from offbeat.train.compiled_draws import draw_many
from offbeat.train.samples import Batches, Drawing, draw_one_by_one
from offbeat.train.solver import SORTED_SAMPLES_MAX, Solver

KEYS = st.integers(0, 2**32 - 1) | st.integers(0, 2**64)
WORKS = st.builds(Work, KEYS, KEYS, KEYS)
SOLVERS = st.builds(Solver, batch_size=st.integers(1, 60), local_iterations=st.integers(1, 5)) | st.builds(
    Solver, batch_size=st.integers(1, 60), local_passes=st.integers(1, 2)
)
TRAININGS = st.lists(st.tuples(WORKS, SOLVERS, st.integers(1, SORTED_SAMPLES_MAX + 20)), max_size=5)


def same(ours: list[Batches], theirs: list[Batches]) -> bool:
    return all(
        all(map(np.array_equal, one, other)) and one[0].dtype == other[0].dtype
        for one, other in zip(ours, theirs, strict=True)
    )


@settings(deadline=None)
@given(TRAININGS)
def test_whatever_is_asked_for_numpys_samples_are_drawn(trainings: list[Drawing]) -> None:
    assert compiled_draws.agrees()
    assert same(draw_many(trainings), draw_one_by_one(trainings))


def test_where_it_does_not_agree_with_numpy_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    training = (Work(1, 2, 3), Solver(batch_size=5, local_iterations=2), 30)
    right = draw_one_by_one([training])
    monkeypatch.setattr(compiled_draws, "_drawn", lambda trainings: [(np.zeros((2, 5)), np.zeros(2))] * len(trainings))
    assert not compiled_draws.agrees.__wrapped__()
    monkeypatch.setattr(compiled_draws, "agrees", lambda: False)
    assert same(draw_many([training]), right)
