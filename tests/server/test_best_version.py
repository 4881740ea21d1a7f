"""The best version by a metric is kept beside the newest, whatever happens to the server."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.errors import InvalidValue
from offbeat.wire import mapped
from tests.server.measuring import SaidByTest, as_killed
from tests.server.serving import TASK, Running, Worker, serving
from tests.server.speaking import until
from tests.server.test_target_version import BLIND, exported, summary_of

SETTINGS: dict[str, Any] = {"keep_best": "size", "epochs": 4, "evaluate_every": 1}


def best_of(running: Running) -> bytes:
    return mapped(running.folder / "best.safetensors", running.server.run.layout).vector.tobytes()


def worked(running: Running, measured: SaidByTest, worker: Worker, t: int, size: float) -> bytes:
    """One more version, which has this size; its bits."""
    worker.work(1.0)
    until(lambda: running.status()["t"] == t)
    x = running.x
    measured.say(t, size, running)
    return x


def test_the_best_is_kept_served_exported_and_reported(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS) as running:
        measured, worker = SaidByTest(running), Worker(running)
        assert running.status()["best_t"] == 0
        versions = {t: worked(running, measured, worker, t, size) for t, size in ((1, 5.0), (2, 9.0), (3, 4.0))}
        until(lambda: best_of(running) == versions[2])
        answer = running.call("GET", "/v1/models/best")
        assert answer.headers["Offbeat-Epoch"] == "2"
        assert running.call("GET", "/v1/models/2").body == answer.body
        assert running.status()["best_t"] == 2
        assert [file.name for file in (running.folder / "kept").iterdir()] == ["2.safetensors"]
        of_url = exported(running.url, tmp_path / "u.safetensors", "--best")
        worked(running, measured, worker, 4, 8.0)
        summary = summary_of(running.folder)
    assert (summary["t"], summary["result_t"], summary["size"]) == (4, 4, 8.0)
    assert (summary["best_t"], summary["best_value"]) == (2, 9.0)
    assert exported(running.folder, tmp_path / "f.safetensors", "--best") == of_url
    assert of_url[0] == "2"
    assert b"".join(of_url[1].values()) == versions[2]


def test_the_last_version_may_be_the_best(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS | {"epochs": 2, "keep_best": "size:min"}) as running:
        measured, worker = SaidByTest(running), Worker(running)
        x_1 = worked(running, measured, worker, 1, -3.0)
        worked(running, measured, worker, 2, -3.0)
        summary = summary_of(running.folder)
        assert (summary["best_t"], best_of(running)) == (1, x_1)  # the first of two that are equally good


def test_after_a_kill_the_best_is_still_right(tmp_path: Path) -> None:
    with serving(tmp_path, SETTINGS) as running:
        measured, worker = SaidByTest(running), Worker(running)
        x_1 = worked(running, measured, worker, 1, 9.0)
        worked(running, measured, worker, 2, 5.0)
        until(lambda: best_of(running) == x_1)
        killed = as_killed(running, tmp_path / "killed")
    of_run = killed / "run"
    (of_run / "kept" / "2.safetensors").write_bytes(b"of a version that no evaluation was told of")
    (of_run / "best.safetensors").unlink()  # between the ledger's word and the new name
    with serving(killed, SETTINGS) as again:
        assert again.status()["best_t"] == 1
        assert best_of(again) == x_1
        assert [file.name for file in (again.folder / "kept").iterdir()] == ["1.safetensors"]
        measured, worker = SaidByTest(again), Worker(again, "another")
        x_3 = worked(again, measured, worker, 3, 12.0)
        until(lambda: best_of(again) == x_3)
        assert again.call("GET", "/v1/models/best").headers["Offbeat-Epoch"] == "3"


def test_without_it_there_is_no_best(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        refused = running.call("GET", "/v1/models/best")
        assert (refused.status, refused.json["error"]) == (404, "not_found")
        assert "--keep-best" in refused.json["do"]
        assert not (running.folder / "kept").exists()
    result = CliRunner().invoke(main, ["export", str(running.folder), str(tmp_path / "x.pt"), "--best"])
    assert result.exit_code == 2
    assert "was not run with --keep-best" in result.output


@pytest.mark.parametrize(
    ("task", "said"), [(TASK, "the task's metrics are size"), (BLIND, "measured by its workers, when the version")]
)
def test_a_metric_that_the_server_does_not_measure_is_refused(tmp_path: Path, task: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said), serving(tmp_path, {"keep_best": "accuracy"}, task=task):
        pass
    assert not list((tmp_path / "run").iterdir())
