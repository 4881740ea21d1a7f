"""Ray itself: a real cluster of several nodes on this machine, one of them killed on the way."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from threading import Timer
from time import monotonic
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import offbeat
from offbeat.cli import main
from offbeat.errors import OffbeatError
from offbeat.sim.compare import Comparison, compare
from offbeat.sim.on_ray import remote_jobs
from offbeat.sim.on_ray.cluster import RAY_ENVIRONMENT
from offbeat.sim.run import Simulation
from tests.simulation.comparing import change, written

for package in ("ray", "torch", "sklearn"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytestmark = pytest.mark.slow
PATIENCE_S = 300.0
STORE_BYTES = 100_000_000
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
TOO_BUSY = "timed out during startup"
SETTINGS: dict[str, Any] = {"devices": 20, "epochs": 60, "seed": 5, "device_model": "lognormal:1"}


class Nodes:
    """A Ray cluster whose nodes are processes of this machine, with a CPU each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={**node_options(), "include_dashboard": False})
        self.address: str = self.cluster.address
        self.others: list[Any] = []

    def are(self, count: int) -> "Nodes":
        """With so many nodes."""
        while len(self.others) + 1 < count:
            self.others.append(self.cluster.add_node(**node_options()))
        return self

    def last_trains(self) -> bool:
        """Does the node that was added last train at this moment? Ray shows it in the title of a process."""
        titles = [process.cmdline()[:1] for process in processes_of(self.others[-1])]
        return ["ray::do_on_node"] in titles

    def kill_one(self) -> None:
        """As if its plug were pulled: the node's processes are gone, all at once and without a word."""
        node = self.others.pop()
        for process in processes_of(node):
            process.kill()
        self.cluster.remove_node(node, allow_graceful=False)


def processes_of(node: Any) -> list[psutil.Process]:
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


def node_options() -> dict[str, int]:
    """A CPU and a small object store; and ports, for a node that must ask its agents for theirs gives them only 15 s to
    start."""
    with ExitStack() as held:
        free = [held.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in AGENT_PORTS]
    return {"num_cpus": 1, "object_store_memory": STORE_BYTES, **dict(zip(AGENT_PORTS, free, strict=True))}


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Ray gives a node half a minute to start, which on a busy machine is not enough."""

    def waiting(*node: Any) -> Any:
        until = monotonic() + PATIENCE_S
        while monotonic() < until:
            with suppress(RuntimeError):
                return get_node(*node)
        return get_node(*node)

    return waiting


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        services = import_module("ray._private.services")
        patch.setattr(services, "get_node", patient(services.get_node))
        nodes = Nodes()
        yield nodes
        nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def inline() -> dict[str, Any]:
    return offbeat.simulate("digits", executor="inline", **SETTINGS).summary


def flags() -> list[str]:
    return [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("count", [1, 3])
def test_digits_on_ray_has_the_bits_of_inline(count: int, nodes: Nodes, inline: dict[str, Any]) -> None:
    command = ["simulate", "digits", "--executor", "ray", "--ray-address", nodes.are(count).address, "--json", *flags()]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["x_sha256"] == inline["x_sha256"]
    assert (summary["executor"], summary["actors"], summary["redone"]) == ("ray", count, 0)


def test_batched_on_ray_has_the_bits_of_batched(nodes: Nodes) -> None:
    here = offbeat.simulate("digits", executor="batched", **SETTINGS).summary
    there = offbeat.simulate("digits", executor="ray:2+batched", ray_address=nodes.are(3).address, **SETTINGS).summary
    assert there["x_sha256"] == here["x_sha256"]
    assert (there["executor"], there["actors"]) == ("ray:2+batched", 2)


def test_a_comparison_on_ray_gives_the_table_that_it_gives_here(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command gives it, but without pictures, which take longer than the runs."""
    command = import_module("offbeat.cli.simulating")
    monkeypatch.setattr(command, "run_comparison", lambda *a, **b: compare(*a, **{**b, "pictures": False}))
    monkeypatch.setattr(command, "_draw", lambda *_: None)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'task = "digits"\nseeds = [1, 2]\nreach = "FedAvg"\n'
        '[settings]\ndevices = 20\ndevice_model = "lognormal:1.5"\nin_flight_max = 8\nexecutor = "inline"\n'
        '[methods.FedAsync]\nrule = "fedasync"\nepochs = 60\n[methods.FedAvg]\nrule = "fedavg:8"\nepochs = 6\n'
    )
    here = compare(spec, tmp_path / "here", processes=1, pictures=False)
    where = ["--on", "ray", "--ray-address", nodes.are(3).address, "--processes", "2"]
    result = CliRunner().invoke(main, ["compare", str(spec), "--dir", str(tmp_path / "there"), *where])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(here.table)
    there = Comparison.read(here.spec, tmp_path / "there")
    for method, summaries in here.summaries.items():
        assert [s["x_sha256"] for s in summaries] == [s["x_sha256"] for s in there.summaries[method]]


@pytest.mark.parametrize("small_max", [remote_jobs.SMALL_BYTES_MAX, 0])
def test_with_one_of_three_nodes_killed_the_bits_are_the_same(
    small_max: int, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is killed in the middle of a training; models travel with the calls, or are in the object store."""
    monkeypatch.setattr(remote_jobs, "SMALL_BYTES_MAX", small_max)
    settings = {**SETTINGS, "local_passes": 10, "epochs": 150}
    inline = offbeat.simulate("digits", executor="inline", **settings).summary
    nodes.are(3)
    seen: list[int] = []

    def kill_on_the_way(simulation: Simulation) -> None:
        t = simulation.coordinator.t
        if not seen and t >= 5 and nodes.last_trains():
            nodes.kill_one()
            seen.append(t)

    run = offbeat.simulate("digits", executor="ray", ray_address=nodes.address, on_progress=kill_on_the_way, **settings)
    assert seen, "the node had work"
    assert run.summary["x_sha256"] == inline["x_sha256"]
    assert run.summary["redone"] > 0


def test_a_process_makes_its_task_once_and_works_as_it_should(nodes: Nodes, tmp_path: Path) -> None:
    """However many trainings it does; in one thread, and with the priority that the node has."""
    written(tmp_path)
    file, made = tmp_path / "pull.py", tmp_path / "made"
    file.write_text(
        f"{file.read_text()}\n"
        "with (HERE / 'made').open('a') as told:\n"
        "    told.write(f\"{os.getpid()} {os.nice(0)} {os.environ.get('OMP_NUM_THREADS')}\\n\")\n"
    )
    offbeat.simulate(str(file), executor="ray", ray_address=nodes.are(2).address, epochs=100, seed=1)
    lines = [line.split() for line in made.read_text().splitlines()]
    there = [line for line in lines if int(line[0]) != os.getpid()]
    assert 1 <= len(there) <= 1 + len(nodes.others)
    assert len({pid for pid, *_ in there}) == len(there)
    assert {(nice, threads) for _, nice, threads in there} == {(str(os.nice(0)), "1")}


@pytest.mark.parametrize(
    ("does", "kind", "said"),
    [
        ("raise ZeroDivisionError('in my code')", ZeroDivisionError, "^in my code"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            OffbeatError,
            "^a training was lost 6 times, perhaps for want of memory",
        ),
    ],
)
def test_a_training_that_fails_or_kills_its_process_is_not_begun_for_ever(
    does: str, kind: type[Exception], said: str, nodes: Nodes, tmp_path: Path
) -> None:
    written(tmp_path)
    file = tmp_path / "pull.py"
    text = file.read_text().replace(
        "def train(self, model, work):\n", f"def train(self, model, work):\n        {does}\n"
    )
    file.write_text(text)
    with pytest.raises(kind, match=said) as error:
        offbeat.simulate(str(file), executor="ray", ray_address=nodes.are(2).address, epochs=5, devices=1)
    if kind is ZeroDivisionError:
        assert f'pull.py", line {text[: text.index(does)].count(chr(10)) + 1}, in train' in error.value.__notes__[0]


def test_runs_of_a_node_that_is_killed_are_done_again(nodes: Nodes, tmp_path: Path) -> None:
    spec = written(tmp_path)
    change(spec, ("epochs = 30", "epochs = 50"))
    (tmp_path / "slow").touch()
    nodes.are(2)

    def kill_on_the_way(done: float, _total: int) -> None:
        if nodes.others and done > 0.5:
            nodes.kill_one()

    there = compare(
        spec, tmp_path / "there", on="ray", ray_address=nodes.address, pictures=False, on_progress=kill_on_the_way
    )
    assert not nodes.others
    (tmp_path / "slow").unlink()
    assert there.rows() == compare(spec, tmp_path / "here", processes=1, pictures=False).rows()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", r"^no Ray cluster answers at 127\.0\.0\.1:1: .*; `ray status` there tells more$"),
        ("ray://127.0.0.1:10001", r"must be HOST:PORT or auto; start the command on a node of the cluster"),
        ("localhost", "must be HOST:PORT or auto"),
    ],
)
def test_an_address_where_nothing_is_is_one_line(address: str, said: str) -> None:
    with pytest.raises(OffbeatError, match=said):
        offbeat.simulate("digits", executor="ray", ray_address=address, **SETTINGS)


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    """With a Ray of its own; Ctrl-C at a terminal reaches all of it."""
    written(tmp_path)
    file, told = tmp_path / "pull.py", tmp_path / "told"
    file.write_text(file.read_text().replace("os.write(1, ", "(HERE / 'told').write_bytes("))
    (tmp_path / "slow").touch()
    told.touch()
    command = [sys.executable, "-m", "offbeat", "simulate", str(file), "--executor", "ray:1"]
    environment = {**os.environ, "RAY_ADDRESS": ""}
    options: Any = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "env": environment}
    with subprocess.Popen([*command, "--dir", str(tmp_path / "out")], **options, preexec_fn=_hear_ctrl_c) as process:
        watchdog = Timer(PATIENCE_S, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            while not (pid := told.read_text()) and process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            started = [psutil.Process(int(pid)), *psutil.Process(process.pid).children(recursive=True)] if pid else []
            if started:
                os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate()
        finally:
            watchdog.cancel()
    if TOO_BUSY in said:
        pytest.skip("the machine is too busy: Ray gives itself half a minute to start")
    assert process.returncode == 130, said
    assert said.endswith("the same command goes on from there.\n")
    assert (tmp_path / "out" / "checkpoint.safetensors").exists()
    assert len(started) > 3
    assert psutil.wait_procs(started, timeout=PATIENCE_S)[1] == []


def _hear_ctrl_c() -> None:
    """Whoever starts the tests in the background may be deaf to it, and what they start would be, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
