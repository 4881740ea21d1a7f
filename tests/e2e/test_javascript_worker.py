"""examples/worker.mjs: a worker in plain JavaScript trains with a real server, and does what docs/protocol.md says."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import numpy as np
from safetensors.numpy import load_file
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import Line, put, until

from offbeat.server.settings import AccessSettings
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import Row
from offbeat.task import Task, Work, solve, start

EXAMPLES = Path(__file__).parents[2] / "examples"
LOGISTIC, WORKER = EXAMPLES / "logistic.py", EXAMPLES / "worker.mjs"
LINES_MAX = 120
PATIENCE_S = 60.0
NODE = shutil.which("node") or ""
with_node = pytest.mark.skipif(not NODE, reason="Node.js is not installed")
Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The devices' CSV files, as the example writes them."""
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(LOGISTIC), str(folder)], check=True, capture_output=True, timeout=PATIENCE_S)
    return folder


@contextmanager
def node(url: str, data: Path, device: int, **environment: str) -> Iterator[Process]:
    """A worker in JavaScript for this device."""
    command = [NODE, str(WORKER), url, str(data / f"device-{device}.csv"), str(device)]
    known = {"NAME": f"js-{device}", **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: Process = subprocess.Popen(command, env=os.environ | known, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: Process) -> str:
    """What a worker said until it ended, by itself and well."""
    out, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    return out + complaints


@contextmanager
def served(folder: Path, settings: dict[str, Any], **limits: Any) -> Iterator[Running]:
    with serving(folder, settings, limits, task=LOGISTIC.read_text()) as running:
        yield running


def rows(running: Running, kind: str) -> list[Row]:
    with Ledger.open(running.server.run.ledger.path, read_only=True) as ledger:
        return list(ledger.rows(kind))


# --- the file --------------------------------------------------------------------------------------------------------


def test_it_is_short_and_needs_no_package() -> None:
    text = WORKER.read_text()
    assert len(text.splitlines()) < LINES_MAX
    imported = re.findall(r'from "([^"]+)"', text)
    assert imported
    assert all(name.startswith("node:") for name in imported)
    assert not re.search(r"\brequire\(|\bimport\(", text)


# --- a run -----------------------------------------------------------------------------------------------------------


@with_node
def test_two_workers_learn_what_neither_can_learn_alone(tmp_path: Path, data: Path) -> None:
    """A real `offbeat serve`; a device alone stays near 80 %, because it measures only every second feature."""
    run = tmp_path / "run"
    target = ["--target", "accuracy>=0.95", "--evaluate-every", "1", "--epochs", "2000"]
    command = [sys.executable, "-m", "offbeat", "serve", str(LOGISTIC), "--dir", str(run), "--port", "0", *target]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until((run / "server.json").is_file)
        url = json.loads((run / "server.json").read_text())["url"]
        with node(url, data, 0) as even, node(url, data, 1) as odd:
            said = [ended(even), ended(odd)]
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    finally:
        server.kill()
        server.wait()
    for lines in said:
        assert "mixed as epoch" in lines
        assert "the run is finished: target accuracy>=0.95 reached" in lines
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"] > 0.9
    assert summary["applied"] > 10


@with_node
def test_workers_in_javascript_and_python_train_in_one_run(tmp_path: Path, data: Path) -> None:
    with served(tmp_path, {"target": "accuracy>=0.95", "evaluate_every": 1, "epochs": 2000}) as running:
        own = ["--device", "1", "--name", "py-1", "--dir", str(tmp_path / "work")]
        command = [sys.executable, "-m", "offbeat", "work", str(tmp_path / "line.py"), "--server", running.url, *own]
        with node(running.url, data, 0) as worker:
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
            ended(worker)
        applied = {row.device for row in rows(running, "decided") if row.outcome == "applied"}
    assert applied == {0, 1}


@with_node
@pytest.mark.parametrize(
    ("settings", "work"),
    [
        ({}, {}),
        ({"gamma": 0.7, "rho": 0.4, "local_passes": 3}, {}),
        ({"gamma": 0.7, "rho": 0.4, "local_iterations": 7}, {}),
        ({"gamma": 0.7, "gamma_schedule": "step:0,0.5"}, {"gamma": 0.35}),
        ({"local_iterations_min": 4, "local_iterations_max": 4}, {"local_iterations": 4}),
    ],
    ids=["its own", "passes", "iterations", "gamma of the lease", "iterations of the lease"],
)
def test_an_update_is_the_whole_x_new_of_the_settings_and_the_lease(
    tmp_path: Path, data: Path, settings: dict[str, Any], work: dict[str, Any]
) -> None:
    """All rows in one batch, so that nothing is left to chance; alpha = 1, so that x_1 is what was pushed."""
    chosen = {"alpha": 1.0, "epochs": 1, "batch_size": 1000, **settings}
    with served(tmp_path, chosen) as running, node(running.url, data, 0) as worker:
        ended(worker)
        (arrived,) = rows(running, "decided")
    task = example().with_settings(**{n: v for n, v in chosen.items() if n in KNOWN and n not in work})
    expected = solve(task, start(task, 0), Work(0, **work))
    found = load_file(tmp_path / "run" / "x.safetensors")
    for name, array in expected.x_new.items():
        assert np.abs(array).max() > 0.01, "something was learnt"
        np.testing.assert_allclose(found[name], array, atol=1e-5)
    assert (arrived.samples, arrived.gradients) == (expected.trained.samples, expected.trained.gradients)


KNOWN = ("gamma", "rho", "batch_size", "local_passes", "local_iterations")


def example() -> Any:
    """The task of examples/logistic.py."""
    spec = spec_from_file_location("logistic", LOGISTIC)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules["logistic"] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    assert isinstance(module.task, Task)
    return module.task


# --- what goes wrong -------------------------------------------------------------------------------------------------


@with_node
def test_a_full_server_is_pushed_to_again_after_retry_after(tmp_path: Path, data: Path) -> None:
    with served(tmp_path, {"epochs": 1, "retry_after_s": 0.2}, uploads_max=1) as running:
        other = Worker(running, "other", device=1)
        task = other.lease()["task"]
        with (
            Line(running, put(other, task, bytes(500), Offbeat_Samples=200)) as upload,
            node(running.url, data, 0) as worker,
        ):
            assert worker.stderr is not None
            refused = worker.stderr.readline()  # the only place for uploads is taken
            assert re.match(r"503 not_now: too many uploads are under way.* \(trying again in [0-9.]+ s\)", refused)
            upload.cut()
            assert "mixed as epoch 1, staleness 0" in ended(worker)
        assert (running.status()["applied"], running.status()["duplicates"]) == (1, 0)


@with_node
def test_heartbeats_keep_the_lease_of_a_long_training(tmp_path: Path, data: Path) -> None:
    """A training that would last for hours; without heartbeats its lease would be over after two seconds."""
    with served(tmp_path, {"lease_s": 2.0, "local_iterations": 10**9}) as running, node(running.url, data, 0):
        until(lambda: rows(running, "leased"))
        late = rows(running, "leased")[0].at + 3.0
        until(lambda: running.status()["at_s"] > late or rows(running, "released"))
        assert rows(running, "released") == []
        assert running.call("GET", "/v1/workers").json["workers"][0]["state"] == "working"


@with_node
def test_a_server_that_is_restarted_is_waited_for(tmp_path: Path, data: Path) -> None:
    """The second server goes on with the run on the same port, and the worker with its session."""
    with ExitStack() as workers:
        with served(tmp_path, {"epochs": 40}, poll_s=0.2) as running:
            worker = workers.enter_context(node(running.url, data, 0))
            until(lambda: running.status()["t"], lambda t: t >= 3)
            port = int(running.url.rpartition(":")[2])
        with served(tmp_path, {"epochs": 40}, poll_s=0.2, port=port) as running:
            assert "the run is finished: 40 epochs" in ended(worker)
            assert len(rows(running, "joined")) == 1


@with_node
def test_a_worker_that_was_forgotten_joins_again(tmp_path: Path, data: Path) -> None:
    """Another run under the same address does not know the worker's session."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with ExitStack() as workers:
        with served(tmp_path / "first", {"epochs": 100_000}, poll_s=0.2) as running:
            worker = workers.enter_context(node(running.url, data, 0))
            until(lambda: running.status()["t"])
            port = int(running.url.rpartition(":")[2])
        with served(tmp_path / "second", {"epochs": 5}, port=port) as running:
            assert "the run is finished: 5 epochs" in ended(worker)


@with_node
def test_a_refusal_for_good_ends_it_with_the_servers_words(tmp_path: Path, data: Path) -> None:
    with served(tmp_path, {}) as running, node(running.url, data, 0, NAME="two words") as worker:
        _, complaints = worker.communicate(timeout=PATIENCE_S)
    assert worker.returncode == 1
    assert complaints.startswith("400 bad_request: name must have 1..100 letters")


@with_node
def test_it_speaks_tls_and_shows_its_token(tmp_path: Path, data: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "offbeat", "init", str(tmp_path / "access"), "--worker", "ward", "--json"],
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    token, access = json.loads(made.stdout)["tokens"]["ward"], AccessSettings(folder=tmp_path / "access")
    trusted = {"NODE_EXTRA_CA_CERTS": str(tmp_path / "access" / "ca.pem"), "TOKEN": token}
    with serving(tmp_path, {"epochs": 3}, task=LOGISTIC.read_text(), access=access) as running:
        assert running.url.startswith("https://")
        with node(running.url, data, 0, **trusted) as worker:
            assert "the run is finished: 3 epochs" in ended(worker)
        (joined,) = rows(running, "joined")
        assert json.loads(joined.detail or "")["name"] == "ward", "a worker is called as its token is"
