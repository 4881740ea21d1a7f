"""`offbeat init`, `serve`, `work`, `status`, `verify`, `export`, `runs` as a user calls them: real processes, TLS."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

import numpy as np
from safetensors.numpy import load_file
from tests.server.serving import TASK

PATIENCE_S = 60.0


def offbeat(*arguments: str, cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "offbeat", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=PATIENCE_S,
        env=os.environ | environment,
    )


@contextmanager
def server(*arguments: str, cwd: Path, run: str = "run") -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A server that is up, and its URL; it must end with 0."""
    where = cwd / run / "server.json"
    with (cwd / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "offbeat", "serve", *arguments, "--dir", run, "--port", "0"],
            stdout=log,
            stderr=log,
            cwd=cwd,
        )
    try:
        until = time.monotonic() + PATIENCE_S
        while not (where.is_file() and json.loads(where.read_text())["pid"] == process.pid):
            assert process.poll() is None, (cwd / "server.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield json.loads(where.read_text())["url"], process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the server's things are; devices have folders of their own."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "line.py").write_text(TASK)
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "line.py").write_text(TASK)
    return tmp_path / "home"


def test_tls_and_tokens_from_another_folder(home: Path) -> None:
    device = home.parent / "device"
    made = offbeat("init", "access", "--worker", "ward", "--write-tokens", "--json", cwd=home)
    assert made.returncode == 0, made.stderr
    tokens = json.loads(made.stdout)["tokens"]
    (device / "ca.pem").write_bytes((home / "access" / "ca.pem").read_bytes())
    (device / "ward.token").write_bytes((home / "access" / "tokens" / "ward.token").read_bytes())
    options = ("--access", "access", "--host", "0.0.0.0", "--epochs", "12", "--in-flight-max", "1")  # noqa: S104
    with server("line.py", *options, cwd=home) as (url, _):
        assert url.startswith("https://")
        url = url.replace("0.0.0.0", "localhost")  # noqa: S104
        work = ("work", "line.py", "--server", url, "--ca", "ca.pem")
        assert "wants a token" in offbeat(*work, cwd=device).stderr
        wrong = offbeat(*work, "--token", "ob_wrong", cwd=device)
        assert (wrong.returncode, "not known" in wrong.stderr) == (2, True)
        done = offbeat(*work, "--token-file", "ward.token", cwd=device)
        assert done.returncode == 0, done.stderr
        assert "the run is finished: 12 epochs" in done.stderr
        status = offbeat("status", url, "--ca", "ca.pem", "--token", tokens["viewer"], "--json", cwd=device)
        facts = json.loads(status.stdout)
        assert (facts["t"], facts["finished"], facts["applied"]) == (12, True, 12)
        out = offbeat("export", url, "x.safetensors", "--ca", "ca.pem", "--token", tokens["viewer"], cwd=device)
        assert out.returncode == 0, out.stderr
        assert np.array_equal(load_file(device / "x.safetensors")["x"], load_file(home / "run" / "x.safetensors")["x"])
        assert (
            "may not do this" in offbeat("status", url, "--ca", "ca.pem", "--token", tokens["ward"], cwd=device).stderr
        )
        untrusted = offbeat("status", url, "--token", tokens["viewer"], cwd=device)
        assert (untrusted.returncode, "does not answer" in untrusted.stderr) == (2, True)
        offbeat("token", "revoke", "access", "viewer", cwd=home)
        _refused_soon(url, tokens["viewer"], device)


def _refused_soon(url: str, token: str, device: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while "revoked" not in offbeat("status", url, "--ca", "ca.pem", "--token", token, cwd=device).stderr:
        assert time.monotonic() < until


def test_the_life_of_a_run_on_the_command_line(home: Path) -> None:
    with server("line.py", "--epochs", "1000", cwd=home) as (url, process):
        second = offbeat("serve", "line.py", "--dir", "run", "--epochs", "1000", cwd=home)
        assert (second.returncode, f"process {process.pid}" in second.stderr) == (2, True)
        started = [started_with("work", "line.py", "--server", url, "-q", cwd=home.parent / "device")]
        try:
            reaches(home, 20)
            process.kill()
            process.wait()
            assert status(home)["state"] == "interrupted"
            port = url.rpartition(":")[2]
            started.append(
                started_with("serve", "line.py", "--epochs", "1000", "--dir", "run", "--port", port, cwd=home)
            )
            reaches(home, status(home)["t"] + 10)
            started[0].terminate()
            assert started[0].wait(PATIENCE_S) == 0
        finally:
            for one in started:
                one.terminate()
                one.wait(PATIENCE_S)
        process.returncode = 0
    other = offbeat("serve", "line.py", "--dir", "run", "--alpha", "0.3", "--epochs", "1000", cwd=home)
    assert (other.returncode, "alpha is 0.6 there and 0.3 here" in other.stderr) == (2, True)
    verified = offbeat("verify", "run", cwd=home)
    assert (verified.returncode, "the same bits." in verified.stdout) == (0, True)
    assert "served" not in offbeat("runs", ".", cwd=home).stderr
    assert "interrupted" in offbeat("runs", ".", cwd=home).stdout
    assert offbeat("export", "run", "x.safetensors", cwd=home).returncode == 0
    assert load_file(home / "x.safetensors")["x"].shape == (6,)


def started_with(*arguments: str, cwd: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-m", "offbeat", *arguments], cwd=cwd, stderr=subprocess.DEVNULL)


def reaches(home: Path, t: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while status(home)["t"] < t:
        assert time.monotonic() < until


def status(home: Path) -> Any:
    done = offbeat("status", "run", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "line.py", "--host", "0.0.0.0"], "--access DIR for TLS and tokens"),  # noqa: S104
        (["serve", "nothing.py"], "there is no file nothing.py"),
        (["serve", "line.py", "--rule", "sgd"], "simulate it"),
        (["serve", "line.py", "--target", "accuracy>=0.9"], "the task's metrics are size"),
        (["serve", "line.py", "--port", "99999"], "0..65535"),
        (["serve", "line.py", "--poll-s", "0"], "(0, 3600]"),
        (["serve", "line.py", "--init", "nothing.safetensors"], "cannot be the first model"),
        (["work", "line.py", "--server", "nowhere"], "write it as https://HOST:PORT"),
        (["status", "nowhere"], "is not the folder of a run"),
        (["verify", "."], "is not the folder of a run"),
        (["export", "."], "say where to"),
    ],
)
def test_wrong_input_is_one_line_and_exit_status_2(home: Path, arguments: list[str], said: str) -> None:
    done = offbeat(*arguments, cwd=home)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (home / "runs").exists() or not list((home / "runs").rglob("settings.json")), "nothing is left behind"


def test_a_run_starts_from_a_model_of_the_users(home: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.full(6, 3, np.float32), "y": np.ones((2, 2), np.float32)}, home / "first.safetensors")
    with server("line.py", "--init", "first.safetensors", cwd=home) as (url, _):
        assert offbeat("export", url, "x_0.safetensors", cwd=home).returncode == 0
    assert load_file(home / "x_0.safetensors")["x"].tolist() == [3.0] * 6
    again = offbeat("serve", "line.py", "--dir", "run", "--init", "first.safetensors", cwd=home)
    assert (again.returncode, "--init is for a new one" in again.stderr) == (2, True)


def test_task_arguments_reach_the_server_and_its_workers(home: Path) -> None:
    """The server says the step, the device adds its own; a restart with another step is refused."""
    made = TASK.replace("task = Line()\n", "")
    made += (
        "\n\ndef make(step: float = 1.0, folder: str = 'none', devices: int = 8):\n"
        "    class Stepping(Line):\n"
        "        def train(self, model, work):\n"
        "            model['x'][:] += step if folder == 'mine' else -step\n"
        "            return Trained(samples=1, gradients=1)\n"
        "    return Stepping()\n"
    )
    for place in (home, home.parent / "device"):
        (place / "line.py").write_text(made)
    end = ("--epochs", "3", "--exit-when-finished", "--alpha", "1", "--staleness-fn", "constant")
    with server("line.py:make", "--task-arg", "step=2", *end, cwd=home) as (url, process):
        worker = ("work", "line.py:make", "--server", url, "--dir", "out", "--task-arg", "folder=mine")
        done = offbeat(*worker, cwd=home.parent / "device")
        assert done.returncode == 0, done.stderr
        process.wait(PATIENCE_S)
    recorded = json.loads((home / "run" / "settings.json").read_text())
    assert recorded["task_args"] == {"step": 2}
    assert load_file(home / "run" / "x.safetensors")["x"].tolist() == [6.0] * 6
    again = offbeat("serve", "line.py:make", "--task-arg", "step=3", *end, "--dir", "run", "--port", "0", cwd=home)
    assert again.returncode == 2
    assert 'task_args is {"step": 2} there and {"step": 3} here' in again.stderr
