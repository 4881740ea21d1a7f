"""The one fold against a plain recount of all rows; the same rows at once, in pieces, and straight from the writer."""

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.protocol.coordinator import Coordinator
from offbeat.storage import fold as folding
from offbeat.storage import version_fold
from offbeat.storage.fleet_fold import FleetFold
from offbeat.storage.fold import COUNTED, RunFold, VersionUpdates
from offbeat.storage.ledger import Ledger
from offbeat.storage.row_shapes import NewRow
from offbeat.storage.rows import Row
from offbeat.storage.version_fold import VersionFold
from tests.simulation import faults

SEEDS = range(12)


class Recorded:
    """A faulty run in a ledger, with the rows as they were made."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.pieces: list[tuple[Sequence[NewRow], int]] = []
        self.ledger = Ledger.create(
            folder / f"{seed}.sqlite",
            verbose=seed % 2 == 0,
            observers=(lambda rows, last, _seconds: self.pieces.append((rows, last)),),
        )
        for number, (event, commands) in enumerate(again(faults.run(seed), seed)):
            self.ledger.record(event, commands)
            if number % 37 == 0:
                self.ledger.flush()
        self.rows = list(self.ledger.rows())


def again(watch: faults.Watch, seed: int) -> Iterator[tuple[Any, Any]]:
    """Every event of a faulty run, and what the coordinator answers."""
    old, said = watch.coordinator, iter(watch.answers)
    new = Coordinator(old.rule, old.plan, old.scheduler, seed=seed, available=lambda _worker, _at: next(said))
    for event in watch.events:
        yield event, new.handle(event)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Recorded]]:
    folder = tmp_path_factory.mktemp("fold")
    found = {seed: Recorded(folder, seed) for seed in SEEDS}
    yield found
    for one in found.values():
        one.ledger.close()


def folded(recorded: Recorded, cuts: list[int]) -> dict[str, Any]:
    """The state of a fold that read the ledger up to each cut in turn."""
    fleet = FleetFold(verbose=recorded.ledger.verbose)
    versions, after = VersionFold(), 0
    fold = RunFold(fleet, versions)
    for until in [*cuts, recorded.ledger.newest()]:
        fold.read(recorded.ledger.select, after, until)
        after = until
    return state_of(fold, fleet, versions)


def state_of(fold: RunFold, fleet: FleetFold, versions: VersionFold) -> dict[str, Any]:
    """All that is counted, but for the order of tasks that ended within one piece."""
    of_fold = {name: value for name, value in vars(fold).items() if name not in ("_takers", "_settle")}
    of_fleet = {name: value for name, value in vars(fleet).items() if name not in ("_version", "workers", "open")}
    for name in ("leased_at", "ended_at"):
        of_fleet[name] = array("d", sorted(of_fleet[name]))
    of_fleet["recent"] = sorted(of_fleet["recent"], key=repr)
    workers = {number: asdict(worker) for number, worker in fleet.workers.items()}
    open_ = {task: held[1] for task, held in fleet.open.items()}
    return of_fold | vars(versions) | of_fleet | {"workers": workers, "open": open_}


@pytest.mark.parametrize("seed", SEEDS)
def test_totals_are_those_of_a_plain_recount(recorded: dict[int, Recorded], seed: int) -> None:
    rows, versions = recorded[seed].rows, VersionFold()
    fold = RunFold(versions)
    fold.read(recorded[seed].ledger.select, 0, rows[-1].sequence)
    decided = [row for row in rows if row.kind == "decided"]
    applied = [row for row in decided if row.keep is not None]
    assert fold.kinds == Counter(row.kind for row in rows if row.kind in COUNTED)
    assert fold.t == max((row.t or 0 for row in rows if row.kind == "published"), default=0)
    assert fold.applied == len(applied)
    assert fold.staleness == Counter(row.staleness for row in applied)
    assert fold.staleness_largest == max((row.staleness or 0 for row in applied), default=0)
    assert fold.staleness_mean == sum(row.staleness or 0 for row in applied) / max(1, len(applied))
    assert versions.weights == Counter((row.staleness, row.new) for row in applied)
    assert fold.rejected() == Counter(row.outcome for row in decided if row.keep is None)
    assert fold.duplicates == sum(row.kind == "repeated" for row in rows)
    assert [(one.t, one.at, one.detail) for one in versions.evaluations] == [
        (row.t, row.at, row.detail) for row in rows if row.kind == "evaluated"
    ]
    assert list(versions.gradients_of) == [_gradients(applied, t) for t in range(len(versions.gradients_of))]
    assert fold.gradients == versions.gradients_of[-1]
    assert [versions.mixed_at(t) for t in range(1, fold.t + 1)] == [_published(rows, t) for t in range(1, fold.t + 1)]


def _gradients(applied: list[Row], t: int) -> int:
    return sum(row.gradients or 0 for row in applied if (row.t or 0) <= t)


def _published(rows: list[Row], t: int) -> float:
    return next(row.at for row in rows if row.kind == "published" and (row.t or 0) >= t)


@settings(max_examples=30, deadline=None)
@given(seed=st.sampled_from(SEEDS), data=st.data())
def test_rows_in_one_go_and_in_pieces_count_the_same(
    recorded: dict[int, Recorded], seed: int, data: st.DataObject
) -> None:
    newest = recorded[seed].ledger.newest()
    cuts = sorted(data.draw(st.lists(st.integers(0, newest), max_size=8)))
    assert folded(recorded[seed], cuts) == folded(recorded[seed], [])


def test_a_cut_after_any_row_counts_the_same(recorded: dict[int, Recorded]) -> None:
    """Seed 1 has a worker that is given a task and leaves: its rows fall into one piece, or into two."""
    whole = folded(recorded[1], [])
    assert all(folded(recorded[1], [cut]) == whole for cut in range(recorded[1].ledger.newest()))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_from_the_writer_count_like_rows_read_back(recorded: dict[int, Recorded], seed: int) -> None:
    fleet, versions = FleetFold(verbose=recorded[seed].ledger.verbose), VersionFold()
    fold = RunFold(fleet, versions)
    for rows, last in recorded[seed].pieces:
        fold.take(rows, last)
    assert state_of(fold, fleet, versions) == folded(recorded[seed], [])


@pytest.mark.parametrize("seed", SEEDS[:4])
def test_a_long_ledger_is_read_span_by_span(
    recorded: dict[int, Recorded], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = folded(recorded[seed], [])
    monkeypatch.setattr(folding, "SPAN_ROWS", 100)
    assert folded(recorded[seed], []) == whole


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fold_goes_on_from_its_state_after_any_row(recorded: dict[int, Recorded], seed: int) -> None:
    ledger, newest = recorded[seed].ledger, recorded[seed].ledger.newest()
    whole = RunFold.of(ledger).state()
    for cut in range(0, newest, 1 + newest // 60):
        before, after = RunFold(), RunFold()
        before.read(ledger.select, 0, cut)
        after.restore(json.loads(json.dumps(before.state())))
        after.read(ledger.select, cut, newest)
        assert sorted_state(after.state()) == sorted_state(whole)


def sorted_state(state: dict[str, Any]) -> dict[str, Any]:
    """Counts come in the order in which their values first came, which a cut may change."""
    return {name: sorted(map(list, value)) if isinstance(value, list) else value for name, value in state.items()}


def test_large_staleness_is_counted_rounded_and_summed_exactly() -> None:
    fold = RunFold()
    rows = [(1, u, "applied", 0.5, 0.5, True, 1, u, 0, 0, u, 0.0, u, 0.0) for u in (*range(9_990, 50_000), 123_456)]
    fold._decided(rows)
    assert (fold.staleness_sum, fold.staleness_largest) == (sum(row[1] for row in rows), 123_456)
    assert (fold.staleness[9_999], fold.staleness[10_000], fold.staleness[123_400]) == (1, 10, 1)
    assert len(fold.staleness) == 10 + 4_000 + 1
    assert fold.staleness.total() == fold.applied == len(rows)


def test_many_different_weights_are_rounded(recorded: dict[int, Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_fold, "WEIGHTS_MAX", 3)
    versions = VersionFold()
    fold = RunFold(versions)
    fold.read(recorded[0].ledger.select, 0, recorded[0].ledger.newest())
    assert all(float(f"{alpha_t:.2g}") == alpha_t for _, alpha_t in versions.weights)
    assert versions.weights.total() == fold.applied


def test_a_version_is_complete_with_its_last_update_or_when_it_is_published() -> None:
    told: list[list[str]] = []
    version = VersionUpdates(lambda updates: told.append([update for update, _, _ in updates]))
    version.add("a", 1, 0.0, 1.0, publish=False)
    version.add("b", 1, 0.75, 0.25, publish=False)
    assert told == []
    version.add("c", 2, 0.5, 0.5, publish=True)  # the deadline of version 1 has passed
    assert told == [["a", "b"], ["c"]]
    version.add(None, 3, 0.0, 1.0, publish=False)  # lost
    version.add("d", 3, 0.5, 0.5, publish=False)
    version.settle(2)
    assert len(told) == 2
    version.settle(3)
    assert told[-1] == ["d"]
