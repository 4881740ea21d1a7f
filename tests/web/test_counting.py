"""The totals against the coordinator's own, and against a plain count of all rows."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import OffbeatError
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import WorkerBarred, WorkerReadmitted
from offbeat.sim.run import Simulation, StopRequested
from offbeat.storage.json_file import write_json
from offbeat.storage.ledger import Ledger
from offbeat.web import asynchrony, overview, update_list, workers
from offbeat.web.run_reader import RunReader
from tests.simulation import faults
from tests.web.looking import SOME, Told, rows_of, simulated

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))]
EVERY = 41
"""Events between two looks: rows of one moment fall into two looks as well as into one."""


def led(seed: int, ledger: Ledger) -> Iterator[Coordinator]:
    """A faulty run once more, into a ledger, one event at a time."""
    watch = faults.run(seed)
    old, said = watch.coordinator, iter(watch.answers)
    new = Coordinator(old.rule, old.plan, old.scheduler, seed=seed, available=lambda _worker, _at: next(said))
    for event in watch.events:
        ledger.record(event, new.handle(event))
        yield new


def everything(reading: RunReader) -> dict[str, Any]:
    """All that is said of a run."""
    whom = workers.WorkerQuery(size=500)
    return {
        "overview": overview.overview(reading),
        "asynchrony": asynchrony.asynchrony(reading),
        "workers": workers.workers(reading, whom),
        "updates": update_list.updates(reading, update_list.UpdateQuery(size=500)),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_the_totals_are_the_coordinators(seed: int, tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", {"task": "pull", "rule": "?"})
    reading = RunReader(tmp_path)
    with Ledger.create(tmp_path / "ledger.sqlite", verbose=True) as ledger:
        for number, c in enumerate(led(seed, ledger)):
            if number % EVERY == 0 or c.finished:
                ledger.flush()
                reading.refresh(0.0)
                agree(reading, c)
    whole = RunReader(tmp_path)
    whole.refresh()
    assert everything(whole) == everything(reading)


def agree(reading: RunReader, c: Coordinator) -> None:
    """The page says what the coordinator knows."""
    fold, fleet = reading.fold, reading.fleet
    assert (fold.t, fold.applied, fold.duplicates) == (c.t, c.applied, c.judge.duplicates)
    assert fold.rejected().total() == c.judge.decisions - c.applied
    assert set(fleet.open) == set(c.leases)
    assert {number for number, worker in fleet.workers.items() if worker.task} == {
        lease.worker for lease in c.leases.values()
    }
    told = Told(rows_of(reading.folder))
    mixed = {row.decision for row in told.kind("mixed")}
    waiting = [row.t or 0 for row in told.applied if row.decision not in mixed]
    assert fleet.queued == sum(t > c.t for t in waiting)  # what is published is mixed, whenever word of it comes
    assert fleet.queued <= c.queued
    assert (fold.ended is not None) == c.finished
    if c.t == c.t_decided or c.scheduler.group_deadline_s is None:  # else a group at its deadline may be on its way
        assert fold.gradients == c.gradients
        for device, mass in c.contribution.mass.items():
            assert fleet.of(device).mass == pytest.approx(mass)


def test_quarantines_are_the_coordinators(tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", {"task": "pull"})
    reading = RunReader(tmp_path)
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        for number, c in enumerate(led(1, ledger)):
            if number == 50:
                for worker in (2, 3):
                    barred = WorkerBarred(c.at, worker, f"because {worker}")
                    ledger.record(barred, c.handle(barred))
                readmitted = WorkerReadmitted(c.at, 3)
                ledger.record(readmitted, c.handle(readmitted))
                break
    reading.refresh()
    found = workers.workers(reading, workers.WorkerQuery(state="quarantined"))["workers"]
    assert [(worker["worker"], worker["why"]) for worker in found] == [(2, "because 2")]
    assert c.quarantined == {2: "because 2"}


# --- the folder moves under the reader -------------------------------------------------------------------------------


def test_a_run_that_is_being_written_is_read_on_and_on(tmp_path: Path) -> None:
    reading, seen = RunReader(tmp_path / "run"), set()

    def look(simulation: Simulation) -> None:
        assert simulation.ledger is not None
        simulation.ledger.flush()
        reading.refresh(0.0)
        seen.add(reading.fold.t)
        assert (reading.fold.t, reading.fold.applied) == (simulation.coordinator.t, simulation.coordinator.applied)

    simulated_on(tmp_path / "run", look)
    whole = RunReader(tmp_path / "run")
    assert whole.refresh() == reading.refresh(0.0)
    assert everything(whole) == everything(reading)
    assert len(seen) > 20


def simulated_on(folder: Path, look: Any) -> None:
    simulated(folder, look, **SOME, executor="inline")


def test_a_run_that_goes_back_to_its_checkpoint_is_read_anew(tmp_path: Path) -> None:
    reading = RunReader(tmp_path / "run")
    checkpointed: list[int] = []

    def stop(simulation: Simulation) -> None:
        if simulation.coordinator.t >= 20 and not checkpointed:
            simulation.checkpoint()
            checkpointed.append(simulation.coordinator.t)
        if simulation.coordinator.t >= 40:
            assert simulation.ledger is not None
            simulation.ledger.flush()
            reading.refresh(0.0)
            raise OSError("the machine goes down")  # without the checkpoint that `StopRequested` makes

    with pytest.raises(OSError, match="goes down"):
        simulated_on(tmp_path / "run", stop)
    assert reading.fold.t == 40
    assert reading.state == "interrupted"
    shorter: list[int] = []

    def look(simulation: Simulation) -> None:
        if not shorter:
            assert simulation.ledger is not None
            simulation.ledger.flush()
            reading.refresh(0.0)
            shorter.append(reading.fold.t)

    simulated_on(tmp_path / "run", look)
    assert shorter[0] < 40
    whole = RunReader(tmp_path / "run")
    whole.refresh()
    reading.refresh(0.0)
    assert everything(whole) == everything(reading)
    assert whole.state == "finished"


def test_another_run_in_the_same_folder_is_read_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    simulated(folder, epochs=10)
    reading = RunReader(folder)
    reading.refresh()
    shutil.rmtree(folder)
    simulated(folder, epochs=30, alpha=0.3)  # at the same moments as before, perhaps in a file of the same number
    reading.refresh(0.0)
    assert {alpha_t for _, alpha_t in reading.versions.weights} == {row.new for row in Told(rows_of(folder)).applied}
    assert reading.fold.t == 30
    assert reading.settings["alpha"] == 0.3
    assert overview.overview(reading)["health"]["sentence"] == "finished: 30 epochs"


def test_what_a_server_forgets_is_not_missed(tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", {"task": "pull"})
    reading = RunReader(tmp_path)
    with Ledger.create(tmp_path / "ledger.sqlite", verbose=True) as ledger:
        for number, c in enumerate(led(2, ledger)):
            if number % 100 == 99:
                ledger.flush()
                reading.refresh(0.0)
                while ledger.forget_chatter(ledger.newest() - 20):
                    pass
                agree(reading, c)
        before = reading.fold
        reading.refresh(0.0)
        assert reading.fold is before  # it was not read anew


def test_nothing_stays_open(tmp_path: Path) -> None:
    """Whoever looks must not keep a run from making its ledger one file."""
    reading = RunReader(tmp_path)
    write_json(tmp_path / "settings.json", {"task": "pull"})
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        for _ in led(3, ledger):
            pass
        ledger.flush()
        reading.refresh()
        assert (tmp_path / "ledger.sqlite-wal").exists()
    assert not (tmp_path / "ledger.sqlite-wal").exists()


def test_a_look_that_fails_counts_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "run")
    reading = RunReader(tmp_path / "run")
    monkeypatch.setattr("offbeat.storage.fleet_fold.FleetFold.settle", lambda _self, _t: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reading.refresh(0.0)
    monkeypatch.undo()
    reading.refresh(0.0)
    assert reading.fold.applied == len(Told(rows_of(tmp_path / "run")).applied)


def test_looks_are_rare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "run")
    reading, looks = RunReader(tmp_path / "run"), []
    monkeypatch.setattr(reading, "_refresh", lambda: looks.append(1))
    for _ in range(5):
        reading.refresh()
    assert len(looks) == 1
    reading.refresh(0.0)
    assert len(looks) == 2


def test_stopping_a_run_leaves_it_interrupted(tmp_path: Path) -> None:
    def stop(simulation: Simulation) -> None:
        if simulation.coordinator.t >= 10:
            raise StopRequested

    with pytest.raises(StopRequested):
        simulated(tmp_path / "run", stop)
    reading = RunReader(tmp_path / "run")
    reading.refresh()
    found = overview.overview(reading)
    assert found["run"]["state"] == "interrupted"
    assert found["health"] == {
        "level": "bad",
        "sentence": f"interrupted at epoch {found['t']}: start it again with the same command and it goes on",
    }
    assert found["eta_s"] is None


def test_a_long_reading_ends_when_nobody_looks_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "run", epochs=30)
    monkeypatch.setattr("offbeat.storage.fold.SPAN_ROWS", 20)
    reading, pages, select = RunReader(tmp_path / "run"), list[str](), Ledger.select

    def closed_meanwhile(ledger: Ledger, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        pages.append(query)
        reading.closing = len(pages) > 20
        return select(ledger, query, values)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "select", closed_meanwhile)
        with pytest.raises(OffbeatError, match="being closed"):
            reading.refresh()
    assert len(pages) == 21
    reading.closing = False
    reading.refresh(0.0)
    assert reading.fold.t == 30, "it is counted anew, and nothing twice"
    assert reading.fold.applied == len(Told(rows_of(tmp_path / "run")).applied)
