"""A run that ends at a target keeps, reports and exports the version that reached it, though it went on meanwhile."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from offbeat.cli import main
from offbeat.protocol.messages import Evaluated
from offbeat.server import keeping
from offbeat.server.verify import verify
from tests.server.measuring import SaidByTest, as_killed
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import until

SETTINGS: dict[str, Any] = {"target": "size>=50", "epochs": 1000, "evaluate_every": 1}


def bits(running: Running, name: object) -> bytes:
    """The file of a version, as the server gives it."""
    answer = running.call("GET", f"/v1/models/{name}")
    assert answer.status == 200, answer
    return answer.body


def digest(x: bytes) -> str:
    return hashlib.sha256(x).hexdigest()


def exported(source: object, out: Path, *more: str) -> tuple[str, dict[str, Any]]:
    result = CliRunner().invoke(main, ["export", str(source), str(out), *more])
    assert result.exit_code == 0, result.output
    return result.output.split()[2], {name: array.tobytes() for name, array in load_file(out).items()}


def summary_of(folder: Path) -> dict[str, Any]:
    until((folder / "summary.json").exists)
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def went_past(running: Running) -> tuple[SaidByTest, bytes]:
    """Version 1 is being evaluated, and the run stands at version 4; its evaluator, and the bits of version 1."""
    measured, worker = SaidByTest(running), Worker(running)
    worker.work(1.0)
    assert measured.next() == 1
    x_1 = running.x
    for _ in range(3):
        worker.work(1.0)
    until(lambda: running.status()["t"] == 4)
    return measured, x_1


def test_the_version_that_reached_the_target_is_the_result(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS) as running:
        measured, x_1 = went_past(running)
        measured.answers.put({"size": 60.0})
        assert measured.next() == 4  # the last one of a run is always evaluated
        x_4 = running.x
        measured.answers.put({"size": 7.0})
        summary = summary_of(running.folder)
        assert running.status()["result_t"] == 1
        of_url = [exported(running.url, tmp_path / "u.safetensors", *more) for more in ((), ("--epoch", "latest"))]
        assert running.call("GET", "/v1/models/1").body == bits(running, "result") != bits(running, "latest")
    assert (summary["t"], summary["result_t"], summary["metrics_t"], summary["size"]) == (4, 1, 1, 60.0)
    assert summary["x_sha256"] == digest(x_1) != digest(x_4)
    assert summary["ended"] == "target size>=50 reached at epoch 1"
    of_folder = [exported(running.folder, tmp_path / "f.safetensors", *more) for more in ((), ("--epoch", "latest"))]
    assert of_folder == of_url
    assert [t for t, _ in of_folder] == ["1", "4"]
    assert of_folder[0][1] != of_folder[1][1]
    assert b"".join(of_folder[0][1].values()) == x_1


def test_a_replay_agrees_and_says_what_it_compares(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS) as running:
        measured, _ = went_past(running)
        measured.answers.put({"size": 60.0})
        assert measured.next() == 4
        measured.answers.put({"size": 7.0})
        summary_of(running.folder)
    found = verify(running.folder)
    assert found["agrees"]
    assert found["t"] == 4
    assert "x.safetensors with a replay of version 1, which reached the target" in found["compared"]
    final = running.folder / "x.safetensors"
    final.write_bytes(final.read_bytes()[:-1] + b"\x01")
    assert not verify(running.folder)["agrees"]


def test_it_is_on_the_disk_before_the_ledger_says_that_it_reached_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, SETTINGS) as running:
        measured, _ = went_past(running)
        told, there = running.server.run.driver.tell, []

        def tell(happened: Any, *, must: bool = False) -> Any:
            if isinstance(happened(0.0), Evaluated):
                there.append((running.folder / "kept" / "1.safetensors").is_file())
            return told(happened, must=must)

        monkeypatch.setattr(running.server.run.driver, "tell", tell)
        measured.answers.put({"size": 60.0})
        assert measured.next() == 4
        measured.answers.put({"size": 7.0})
        summary_of(running.folder)
    assert there == [True, True]


def test_a_server_that_is_killed_before_it_wrote_its_results_has_the_same_ones(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS) as running:
        measured, x_1 = went_past(running)
        measured.answers.put({"size": 60.0})
        assert measured.next() == 4  # the target is in the ledger, and the last evaluation is under way
        killed = as_killed(running, tmp_path / "killed")
        measured.answers.put({"size": 7.0})
        summary = summary_of(running.folder)
    assert not (killed / "run" / "summary.json").exists()
    with serving(killed, SETTINGS) as again:
        found = summary_of(again.folder)
        assert hashlib.sha256(x_1).hexdigest() == found["x_sha256"] == summary["x_sha256"]
        assert (found["t"], found["result_t"], found["size"]) == (4, 1, 60.0)
    assert verify(killed / "run")["agrees"]


def test_one_that_is_killed_before_the_ledger_knew_goes_on(tmp_path: Path) -> None:
    """The version was kept, but nobody was told: it is no result, and its file is removed."""
    with serving(tmp_path, SETTINGS) as running:
        measured, _ = went_past(running)
        killed = as_killed(running, tmp_path / "killed")
        running.server.run.kept.keep(1, running.server.run.mixer.x)
        (killed / "run" / "kept").mkdir()
        (killed / "run" / "kept" / "1.safetensors").write_bytes(
            (running.folder / "kept" / "1.safetensors").read_bytes()
        )
        measured.answers.put({"size": 1.0})
        assert measured.next() == 4
        measured.answers.put({"size": 1.0})
    with serving(killed, SETTINGS) as again:
        assert not again.status()["finished"]
        assert not list((again.folder / "kept").iterdir())


def test_a_full_disk_delays_the_end_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "RETRY_S", 0.01)
    with serving(tmp_path, SETTINGS) as running:
        measured, x_1 = went_past(running)
        kept = running.server.run.kept
        keep = kept.keep

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kept, "keep", full)
        measured.answers.put({"size": 60.0})
        until(lambda: "version 1 cannot be kept" in (running.status()["trouble"] or ""))
        assert not running.status()["finished"]
        monkeypatch.setattr(kept, "keep", keep)
        assert measured.next() == 4
        measured.answers.put({"size": 7.0})
        assert summary_of(running.folder)["x_sha256"] == digest(x_1)
        assert running.status()["trouble"] is None


BLIND = """
import numpy as np
from offbeat import Trained


class Blind:
    devices = 4

    def initial(self, seed):
        return {"x": np.zeros(6, np.float32)}

    def train(self, model, work):
        return Trained(samples=10, gradients=3)

    def evaluate(self, model):
        return {}


task = Blind()
"""


def test_what_workers_measured_ends_at_the_version_that_they_measured(tmp_path: Path) -> None:
    """Without test data here: the version is kept where it is still there when the reports are in."""
    settings = {"target": "size>=50", "epochs": 1000, "evaluate_every": 1}
    with serving(tmp_path, settings, task=BLIND) as running:
        worker, seen = Worker(running), {}
        for size in (1.0, 1.0, 60.0, 1.0, 1.0, 1.0, 1.0):
            answer = worker.ask()
            if answer["state"] == "finished":
                break
            lease = answer["lease"]
            seen[lease["tau"]] = running.x
            worker.push(lease["task"], worker.train(lease), Offbeat_Metrics=json.dumps({"size": size}))
        summary = summary_of(running.folder)
    assert summary["result_t"] == 2 < summary["t"]
    assert (summary["size"], summary["x_sha256"]) == (60.0, digest(seen[2]))
