"""A served run that is finished goes on to another end, and has the bits of one that never ended there."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import InvalidValue
from offbeat.server.verify import verify
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import RunFolder
from tests.server.measuring import as_killed
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import until
from tests.server.test_target_version import summary_of


def ended(epochs: int) -> dict[str, Any]:
    return {"epochs": epochs, "evaluate_every": 2}


def work_to(running: Running, worker: Worker, t: int) -> None:
    """Make versions up to this one; each starts from the one before."""
    for before in range(running.status()["t"], t):
        worker.work(0.5 + before / 8)
        until(lambda: running.status()["t"] == before + 1)  # noqa: B023 (called at once)


def served(folder: Path, epochs: int, versions: int) -> bytes:
    """Serve until the run is finished; a worker makes this many versions. The bits of the last."""
    with serving(folder, ended(epochs)) as running:
        worker = Worker(running)
        work_to(running, worker, versions)
        summary_of(running.folder)
        return running.x


def test_it_goes_on_with_the_bits_of_one_long_run(tmp_path: Path) -> None:
    (tmp_path / "short").mkdir()
    (tmp_path / "long").mkdir()
    served(tmp_path / "short", 3, 3)
    with serving(tmp_path / "short", ended(6)) as running:
        assert running.server.extension[0] == "Going on from epoch 3 to 6 epochs (before: 3 epochs)."
        assert running.server.extension[1].endswith("start them again.")
        status = running.status()
        assert (status["t"], status["epochs"], status["finished"], status["reason"]) == (3, 6, False, None)
        assert RunFolder.open(running.folder).state == "running"
        assert not (running.folder / "x.safetensors").exists()
        work_to(running, Worker(running), 6)
        summary = summary_of(running.folder)
        x = running.x
    assert x == served(tmp_path / "long", 6, 6)
    assert (summary["t"], summary["epochs"], summary["ended"]) == (6, 6, "6 epochs")
    assert summary["settings"]["epochs"] == 3  # what it began with
    assert verify(running.folder)["agrees"]
    with Ledger.open(running.folder / "ledger.sqlite", read_only=True) as ledger:
        ends = [row.kind for row in ledger.rows() if row.kind in ("finished", "extended")]
    assert ends == ["finished", "extended", "finished"]


def test_after_a_kill_it_still_has_its_new_end(tmp_path: Path) -> None:
    served(tmp_path, 3, 3)
    with serving(tmp_path, ended(6)) as running:
        Worker(running).work()
        until(lambda: running.status()["t"] == 4)
        killed = as_killed(running, tmp_path / "killed")
    with serving(killed, ended(6)) as again:
        assert not again.server.extension
        assert (again.status()["t"], again.status()["epochs"]) == (4, 6)
        worker = Worker(again, "another")
        for _ in range(2):
            worker.work()
        assert summary_of(again.folder)["t"] == 6
    with serving(killed, ended(6)) as again:  # as today: it answers for the finished run
        assert again.status()["finished"]
        assert again.call("GET", "/v1/health").json["state"] == "finished"
    assert verify(killed / "run")["agrees"]


def test_one_that_is_killed_as_it_is_extended_is_finished_as_before_or_goes_on(tmp_path: Path) -> None:
    """The results are taken back before the ledger knows of the new end."""
    served(tmp_path, 3, 3)
    (tmp_path / "run" / "summary.json").unlink()
    with serving(tmp_path, ended(3)) as running:
        assert summary_of(running.folder)["t"] == 3


def test_an_interrupted_run_may_be_given_another_end(tmp_path: Path) -> None:
    with serving(tmp_path, ended(10)) as running:
        worker = Worker(running)
        worker.work()
        until(lambda: running.status()["t"] == 1)
    with serving(tmp_path, ended(2)) as running:
        assert running.server.extension == ["Going on from epoch 1 to 2 epochs (before: 10 epochs)."]
        Worker(running).work()
        assert summary_of(running.folder)["t"] == 2


def test_another_target_extends_a_run_that_reached_one(tmp_path: Path) -> None:
    first = {"target": "size>=1", "epochs": 100, "evaluate_every": 1}
    with serving(tmp_path, first) as running:
        worker = Worker(running)
        worker.work(2.0)
        assert summary_of(running.folder)["result_t"] == 1
    with serving(tmp_path, first | {"target": "size>=20"}) as running:
        assert running.status()["result_t"] is None
        worker = Worker(running)
        while (answer := worker.ask())["state"] != "finished":
            worker.push(answer["lease"]["task"], worker.train(answer["lease"], 2.0))
        summary = summary_of(running.folder)
        assert summary["size"] >= 20
        assert not [file.name for file in (running.folder / "kept").iterdir() if file.stem == "1"]


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ({"epochs": 2}, "--epochs is 2, and the run has reached 3 epochs"),
        ({"epochs": 9, "target": "nothing>=1"}, "the task's metrics are size"),
        ({"epochs": 9, "target": "size>=0"}, "version 0 has reached it"),
        ({"epochs": 9, "alpha": 0.3}, "alpha is 0.6 there and 0.3 here"),
    ],
)
def test_what_would_not_go_on_is_refused_and_nothing_changes(tmp_path: Path, later: dict[str, Any], said: str) -> None:
    served(tmp_path, 3, 3)
    before = json.loads((tmp_path / "run" / "summary.json").read_text())
    with pytest.raises(InvalidValue, match=said), serving(tmp_path, ended(3) | later):
        pass
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == before
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert not ledger.count("extended")
