"""A restart reads what came after its checkpoint, and knows what a reading of the whole ledger would tell it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offbeat.core.rules import fedasync
from offbeat.core.staleness import polynomial
from offbeat.method import Method
from offbeat.protocol.messages import Evaluated, TaskRequested
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Plateau, Scheduler
from offbeat.server.served_fold import ServedFold
from offbeat.server.served_run import ServedRun
from offbeat.server.settings import ServerSettings
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import unsealed, write_json
from offbeat.storage.ledger import Ledger
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import file_of, ones, refused
from tests.server.test_checkpoints import PATIENCE_S, X_0, Outside, work
from tests.server.test_continuity import until_checkpointed

LIMITS = {"checkpoint_every": 4}
SETTINGS = {"evaluate_every": 1000, "staleness_policy": "reject", "staleness_max": 2}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server as a `kill -9` leaves it, with two checkpoints, and rows of most kinds around them."""
    folder = tmp_path_factory.mktemp("killed")
    with serving(folder, SETTINGS, LIMITS) as running:
        eventful(running)
        until_checkpointed(running)
        assert len(list((folder / "run" / "checkpoints").glob("*.json"))) == 2
        shutil.copytree(folder, folder.with_name("restart_copy"))
    return folder.with_name("restart_copy")


def eventful(running: Running) -> None:
    late, steady = Worker(running, "late", samples=7), Worker(running, "steady")
    stale = late.lease()
    for step in range(9):
        lease = steady.lease()
        data = steady.train(lease, step)
        assert steady.push(lease["task"], data).status == 200
        if step % 3 == 0:
            assert steady.push(lease["task"], data).json["repeated"]
        if step == 4:
            refused(late.push(stale["task"], late.train(lease), Offbeat_Samples=7), 409, "too_stale")
            assert running.call("DELETE", f"/v1/workers/{late.number}", headers=late.session).status == 204
    nan = file_of(ones(x=ones()["x"] * float("nan")))
    refused(steady.push(steady.lease()["task"], nan), 422, "not_finite")
    again = Worker(running, "late", samples=9)
    assert again.number == late.number


def copy_of(killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "run", dirs_exist_ok=True))


def checkpoints_of(folder: Path) -> list[Path]:
    """The states, the oldest first."""
    return sorted((folder / "run" / "checkpoints").glob("*.json"), key=lambda file: int(file.stem))


def leave_whole(_folder: Path) -> None:
    """Nothing is changed."""


def damage_newest(folder: Path) -> None:
    file = checkpoints_of(folder)[-1]
    file.write_bytes(file.read_bytes()[:-100])


def forget_totals(folder: Path) -> None:
    """As an earlier version left it."""
    for file in checkpoints_of(folder):
        facts = unsealed(file.read_bytes())
        assert facts.pop("totals")["run"]["applied"] >= 4
        file.write_text(json.dumps(facts))


def plain_totals(state: Any) -> Any:
    """Without the order of counts, which is that in which their values first came."""
    if isinstance(state, dict):
        return {name: plain_totals(value) for name, value in state.items()}
    counts = isinstance(state, list) and state and not isinstance(state[0], int)
    return sorted(map(list, state)) if counts else state


def totals_of(running: Running) -> dict[str, Any]:
    """What the server has counted, which is what the whole ledger tells."""
    run, whole = running.server.run, ServedFold()
    totals, newest = run.driver.ask(lambda _: (run.fold.state(), run.ledger.newest())).result(PATIENCE_S)
    with Ledger.open(run.ledger.path, read_only=True) as ledger:
        whole.run.read(ledger.select, 0, newest)
    assert plain_totals(totals) == plain_totals(whole.state())
    return dict(totals)


@pytest.mark.parametrize("change", [leave_whole, damage_newest, forget_totals])
def test_totals_after_a_restart_are_those_of_the_whole_ledger(killed: Path, tmp_path: Path, change: Any) -> None:
    folder = copy_of(killed, tmp_path)
    change(folder)
    for _ in range(2):  # the second start goes on from a checkpoint of the first
        with serving(folder, SETTINGS, LIMITS) as running:
            assert Worker(running, "steady").work().status == 200
            totals = totals_of(running)
            counted = totals["run"]
            assert counted["applied"] >= 10
            assert {name for name, _, _ in counted["refused"]} == {"too_stale", "not_finite"}
            assert counted["kinds"]["repeated"] == 3
            assert [(name, samples) for _, name, _, _, samples, _ in totals["workers"]] == [("late", 9), ("steady", 5)]


def test_a_loss_that_was_accepted_is_not_in_the_totals(killed: Path, tmp_path: Path) -> None:
    folder = copy_of(killed, tmp_path)
    shutil.rmtree(folder / "run" / "updates")
    for ending in ("-wal", "-shm"):
        (folder / "run" / f"ledger.sqlite{ending}").unlink()
    with serving(folder, SETTINGS, LIMITS, accept_loss=True) as running:
        totals = totals_of(running)
        assert totals["run"]["kinds"]["loss_accepted"] == 1
        assert totals["run"]["applied"] < 9


# --- how much is read, kept and written ------------------------------------------------------------------------------

PLAN = Plan(in_flight_max=2, queue_max=500, evaluate_every=10**6, answers_kept=5, evaluations_kept=5)
METHOD = Method(fedasync(0.1, polynomial(0.5)), PLAN, Scheduler(gamma=Plateau(0.1, "loss", 0.5)))


@contextmanager
def running(folder: Path) -> Iterator[tuple[ServedRun, Outside]]:
    """A run without a network; a checkpoint at its beginning and at its stop alone."""
    outside = Outside()
    if not folder.exists():
        folder.mkdir()
        write_json(folder / "settings.json", {"served": True})
        ServedRun.begin(folder, X_0, METHOD, Disk())
    run = ServedRun(folder, METHOD, ServerSettings(checkpoint_every=10**6), outside)
    run.start()
    yield run, outside
    run.stop()


def stopped_after(folder: Path, tasks: int) -> int:
    """A run of so many updates, each of which is evaluated; the bytes of its last checkpoint."""
    with running(folder) as (run, outside):
        for t in range(1, tasks + 1):
            work(run, outside, 0, 1)
            metrics = {"loss": 0.5 + 1 / t if t % 2 else 0.9}
            run.driver.tell(lambda at, t=t, metrics=metrics: Evaluated(at, t, metrics)).result(PATIENCE_S)  # type: ignore[misc]
            while run.coordinator.queued:
                run.driver.ask(lambda c: c.t).result(PATIENCE_S)
    newest = max((folder / "checkpoints").glob("*.json"), key=lambda file: int(file.stem))
    return newest.stat().st_size


def rows_selected_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows that a start is given by SQLite, the restart's own events and their like included."""
    selected, select = list[int](), Ledger.select

    def counted(ledger: Ledger, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        found = select(ledger, query, values)
        selected.append(len(found))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "select", counted)
        run = ServedRun(folder, METHOD, ServerSettings(checkpoint_every=10**6), Outside())
        at_start = sum(selected)
    run.start()
    run.stop()
    return at_start


def test_neither_the_checkpoint_nor_what_a_start_reads_grows_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, read = list[int](), list[int]()
    for tasks in (40, 240):
        folder = tmp_path / str(tasks)
        sizes.append(stopped_after(folder, tasks))
        for file in (folder / "updates").iterdir():  # each would be looked up by its task
            file.unlink()
        read.append(rows_selected_at_start(folder, monkeypatch))
    assert sizes[1] - sizes[0] < 150, "the numbers in it have more digits, and that is all"
    assert read[0] == read[1] < 60


def test_a_schedule_and_the_newest_metrics_outlast_a_restart_without_all_evaluations(tmp_path: Path) -> None:
    stopped_after(tmp_path / "run", 11)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        told = ledger.evaluations()
    with running(tmp_path / "run") as (run, outside):
        run.driver.tell(lambda at: TaskRequested(at, 0)).result(PATIENCE_S)
        assert METHOD.scheduler.gamma is not None
        assert outside.take(0).gamma == METHOD.scheduler.gamma(0, told) < 0.1
        assert run.coordinator.evaluations == told[-5:]
