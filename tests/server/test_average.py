"""The averaged model of a served run: kept, evaluated, exported and verified beside x_t, over restarts too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.core.layout import Model
from offbeat.digests import digest_of_file
from offbeat.errors import InvalidValue
from offbeat.server.backup import back_up
from offbeat.server.verify import verify
from offbeat.storage.json_file import read_json, write_json
from offbeat.wire import mapped
from tests.server.measuring import SaidByTest, as_killed
from tests.server.serving import TASK, Running, Worker, serving
from tests.server.speaking import until
from tests.server.test_target_version import BLIND, exported, summary_of

AVERAGED: dict[str, Any] = {"average": "poly:0", "evaluate_every": 1}


def mean_of(running: Running) -> bytes:
    mean = running.server.run.driver.newest.mean
    assert mean is not None
    return mean.vector.tobytes()


def in_file(running: Running, name: str = "average.safetensors") -> bytes:
    return mapped(running.folder / name, running.server.run.layout).vector.tobytes()


def worked(running: Running, worker: Worker, t: int) -> np.ndarray:
    """One more version; its numbers."""
    worker.work(float(t))
    until(lambda: running.status()["t"] == t)
    return np.frombuffer(running.x, np.float32)


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["export", *arguments])
    assert result.exit_code == 2
    return result.output


@pytest.mark.parametrize("rule", ["fedasync", "fedbuff:2", "fedbuff:2 + momentum:0.5", "fedavg:1"])
def test_it_is_evaluated_with_its_version_and_kept_at_the_end(tmp_path: Path, rule: str) -> None:
    with serving(tmp_path, AVERAGED | {"rule": rule, "epochs": 3}) as running:
        worker, versions = Worker(running), list[Any]()
        while len(versions) < 3:
            before = running.status()["t"]
            worker.work(1.0)
            if "fedbuff" in rule:
                worker.work(2.0)
            until(lambda before=before: running.status()["t"] == before + 1)  # type: ignore[misc]
            versions.append(np.frombuffer(running.x, np.float32))
        summary = summary_of(running.folder)
        mean = np.frombuffer(mean_of(running), np.float32)
    np.testing.assert_allclose(mean, np.mean(versions, axis=0), rtol=1e-5)  # poly:0 is the plain mean
    assert in_file(running) == mean.tobytes()
    assert summary["average_t"] == summary["result_t"] == 3
    assert (summary["size"], summary["size_average"]) == tuple(
        pytest.approx(float(np.abs(one[:6]).sum())) for one in (versions[-1], mean)
    )
    found = verify(running.folder)
    assert found["agrees"], found["wrong"]
    assert "likewise the averaged model" in found["compared"]


def test_one_event_has_the_metrics_of_both(tmp_path: Path) -> None:
    with serving(tmp_path, AVERAGED) as running:
        measured, worker = SaidByTest(running), Worker(running)
        assert set(running.status()["metrics"]) == {"size", "size_average"}
        worker.work(1.0)
        assert measured.next() == 1
        measured.answers.put({"size": 5.0})
        assert measured.next() == 1
        evaluations = len(running.server.run.coordinator.evaluations)
        measured.answers.put({"size": 4.0})
        until(lambda: running.status()["metrics_t"] == 1)
        assert running.status()["metrics"] == {"size": 5.0, "size_average": 4.0}
        assert len(running.server.run.coordinator.evaluations) == evaluations + 1


def test_a_file_that_is_not_the_averaged_model_is_found(tmp_path: Path) -> None:
    with serving(tmp_path, AVERAGED | {"epochs": 2}) as running:
        worker = Worker(running)
        for t in (1, 2):
            worked(running, worker, t)
        summary = summary_of(running.folder)
    file = running.folder / "average.safetensors"
    assert summary["files_sha256"] == {"average.safetensors": digest_of_file(file)}
    other = bytearray(file.read_bytes())
    other[-1] ^= 1
    file.write_bytes(other)
    assert any(
        "average.safetensors is not the file that the run wrote" in said for said in verify(running.folder)["wrong"]
    )
    told = read_json(running.folder / "summary.json") | {"files_sha256": {file.name: digest_of_file(file)}}
    write_json(running.folder / "summary.json", told)
    assert any("the averaged model is" in said for said in verify(running.folder)["wrong"])
    file.unlink()
    assert any("average.safetensors is missing" in said for said in verify(running.folder)["wrong"])


def test_after_a_kill_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with serving(tmp_path, AVERAGED, {"checkpoint_every": 2}) as running:
        worker = Worker(running)
        for t in range(1, 6):
            worked(running, worker, t)
        mean, killed = mean_of(running), as_killed(running, tmp_path / "killed")
    with serving(tmp_path, AVERAGED) as stopped:
        assert mean_of(stopped) == mean
    with serving(killed, AVERAGED) as again:
        assert mean_of(again) == mean
        worked(again, Worker(again, "another"), 6)
        assert mean_of(again) != mean
    found = verify(again.folder)
    assert found["agrees"], found["wrong"]


def test_what_reached_the_target_is_kept_with_its_version(tmp_path: Path) -> None:
    settings = AVERAGED | {"target": "size_average>=50", "epochs": 1000}
    with serving(tmp_path, settings) as running:
        measured, worker = SaidByTest(running), Worker(running)
        worked(running, worker, 1)
        assert measured.next() == 1
        mean_1 = mean_of(running)
        for t in (2, 3):
            worked(running, worker, t)
        mean_3 = mean_of(running)
        measured.answers.put({"size": 7.0})
        assert measured.next() == 1
        measured.answers.put({"size": 60.0})
        for _ in range(2):
            assert measured.next() == 3  # the last one of a run is always evaluated, both models of it
            measured.answers.put({"size": 8.0})
        summary = summary_of(running.folder)
        assert running.call("GET", "/v1/models/average").headers["Offbeat-Epoch"] == "1"
        back_up(running.folder, tmp_path / "copy")
    assert (summary["t"], summary["result_t"], summary["average_t"], summary["size_average"]) == (3, 1, 1, 60.0)
    assert in_file(running) == in_file(running, "kept/1.mean.safetensors") == mean_1 != mean_3
    found = verify(running.folder)
    assert found["agrees"], found["wrong"]
    assert verify(tmp_path / "copy")["agrees"]
    assert (tmp_path / "copy" / "kept" / "1.mean.safetensors").read_bytes() == (
        running.folder / "kept" / "1.mean.safetensors"
    ).read_bytes()
    assert (tmp_path / "copy" / "average.safetensors").is_file()
    _, latest = exported(running.folder, tmp_path / "f.safetensors", "--average", "--epoch", "latest")
    assert b"".join(latest.values()) == mean_3


def test_it_is_exported_from_a_server_and_from_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    with serving(tmp_path, AVERAGED | {"epochs": 4}) as running:
        worker, means = Worker(running), []
        for t in (1, 2, 3):
            worked(running, worker, t)
            means.append(mean_of(running))
        answer = running.call("GET", "/v1/models/average")
        assert answer.headers["Offbeat-Epoch"] == "3"
        assert answer.body.endswith(means[2])
        again = running.call("GET", "/v1/models/average", headers={"If-None-Match": answer.headers["ETag"]})
        assert again.status == 304
        of_url = CliRunner().invoke(main, ["export", running.url, str(out), "--average"])
        assert of_url.output == f"Wrote the averaged model up to version 3 to {out}\n"
        assert out.read_bytes() == answer.body
        for more in ((), ("--epoch", "latest"), ("--epoch", "3")):
            _, arrays = exported(running.folder, out, "--average", *more)  # while it is being served
            assert b"".join(arrays.values()) == means[2]
        _, arrays = exported(running.folder, out, "--average", "--epoch", "2")
        assert b"".join(arrays.values()) == means[1]
        assert "newest averaged model and no other" in refused(running.url, str(out), "--average", "--epoch", "2")
        worked(running, worker, 4)
        summary_of(running.folder)
        last = mean_of(running)
    for more in ((), ("--epoch", "latest"), ("--epoch", "4")):
        _, arrays = exported(running.folder, out, "--average", *more)
        assert b"".join(arrays.values()) == last
    assert "leave out --best and --ledger" in refused(str(running.folder), str(out), "--average", "--best")


def test_a_run_that_keeps_none_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        answer = running.call("GET", "/v1/models/average")
        assert (answer.status, answer.json["error"]) == (404, "not_found")
        assert "no averaged model is kept" in refused(running.url, str(tmp_path / "a.safetensors"), "--average")
        assert "size_average" not in running.status()["metrics"]
    told = refused(str(running.folder), str(tmp_path / "a.safetensors"), "--average")
    assert "it was not run with --average poly:P or ema:C" in told
    assert not (tmp_path / "a.safetensors").exists()


def test_workers_never_measure_it(tmp_path: Path) -> None:
    """They measure the model that they received: without test data, nothing is said of the averaged model."""
    with serving(tmp_path, AVERAGED | {"epochs": 3}, task=BLIND) as running:
        worker = Worker(running)
        for _ in range(3):
            lease = worker.lease()
            worker.push(lease["task"], worker.train(lease), Offbeat_Metrics=json.dumps({"size": 1.0}))
        summary = summary_of(running.folder)
        mean = mean_of(running)
    assert summary["size"] == summary["size_worst_tenth"] == 1.0
    assert not [name for name in summary if name.endswith("_average")]
    assert in_file(running) == mean


@pytest.mark.parametrize(
    ("settings", "task", "why"),
    [
        ({"keep_best": "size_average"}, TASK, "what is kept are versions, not averaged models"),
        ({"target": "shape_average>=1"}, TASK, "the task's metrics are size, size_average"),
        ({"target": "size_average>=1"}, BLIND, "never the averaged one"),
        ({}, TASK.replace('"size": ', '"size_average": '), "names that end in _average are for the averaged model"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, settings: dict[str, Any], task: str, why: str) -> None:
    with pytest.raises(InvalidValue, match=why), serving(tmp_path, AVERAGED | settings, task=task):
        pass
    with serving(tmp_path, {"evaluate_every": 1}, task=task):  # without an average, any name will do
        pass


ARRAYS = '{"x": np.zeros(6, np.float32), "s": np.zeros(2, np.float32), "n": np.zeros(1, np.int64)}'
BUFFERS = TASK.replace("import numpy as np", "import numpy as np\nfrom offbeat.core.layout import Model").replace(
    'return {"x": np.zeros(6, np.float32), "y": np.zeros((2, 2), np.float32)}',
    f'return Model.of({ARRAYS}, buffers=["s", "n"])',
)


def test_its_buffers_are_those_of_the_newest_version(tmp_path: Path) -> None:
    with serving(tmp_path, AVERAGED | {"epochs": 3}, task=BUFFERS) as running:
        worker = Worker(running)
        for t in (1, 2, 3):
            worked(running, worker, t)
        newest = running.server.run.driver.newest
        summary_of(running.folder)
        layout = running.server.run.layout
    models: list[Model] = [mapped(running.folder / f"{name}.safetensors", layout) for name in ("x", "average")]
    assert newest.mean is not None
    for name in ("s", "n"):
        np.testing.assert_array_equal(models[1][name], models[0][name])
    assert not np.array_equal(models[1]["x"], models[0]["x"])
