"""The peers' columns without the peers: what is said of one that fails, hangs or cannot be installed."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from benchmarks import beside_peers as peers
from benchmarks.results import Results
from benchmarks.scale import QUICK
from benchmarks.turns import silent

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "peers"
PATIENCE_S = 20.0
SCALE = replace(QUICK, peer_s=PATIENCE_S, peer_net_s=0.1)
WORKS = (
    'print(\'a word\'); print(\'{"tasks_per_s": 5.0, "updates_per_s": 2.0, "server_cpu_s": 0.5, "server_peak_mb": 9}\')'
)
FAILS = "import sys; print('noise', file=sys.stderr); sys.exit('no luck\\ntoday\\n')"
SPAWNS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({path!r}).write_text(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts in the place of the peers'; both peers can be installed, and all work."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.setattr(peers, "SCRIPTS", folder)
    (folder / "environments.py").write_text("import sys; print('pip says'); print(sys.executable)")
    for name in ("appfl_sim", "appfl_net", "flower_sim", "flower_net"):
        (folder / f"{name}.py").write_text(WORKS)
    return folder


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own sides, without measuring them."""
    import benchmarks.plain
    import benchmarks.served

    class Served:
        updates_per_s = 40.0

    monkeypatch.setattr(benchmarks.plain.PlainLoop, "rate", lambda *_: 10.0)
    monkeypatch.setattr(benchmarks.served, "ours", lambda *_: Served())


def found(part: str, folder: Path, **options: Any) -> Results:
    results = Results([part])
    peers.run(results, replace(SCALE, **options), silent, folder)
    return results


def gone(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def eventually(holds: Callable[[], bool]) -> bool:
    until, never = time.monotonic() + PATIENCE_S, threading.Event()
    while not holds() and time.monotonic() < until:
        never.wait(0.05)
    return holds()


@pytest.mark.usefixtures("scripts", "ours")
def test_simulations_are_held_against_the_plain_loop(tmp_path: Path) -> None:
    results = found("sim", tmp_path)
    assert [note.name for note in results.notes] == [
        f"peers, sim S, {name}, against the plain loop" for name in peers.SIMULATIONS
    ]
    assert {(note.value, note.reference, note.ratio) for note in results.notes} == {(5.0, 10.0, 0.5)}
    assert results.skipped == []


@pytest.mark.usefixtures("scripts", "ours")
def test_networks_are_held_against_ours_and_leave_no_files(tmp_path: Path) -> None:
    results = found("net", tmp_path)
    assert results.figures["net_10mb_appfl"].ratio == results.figures["net_10mb_flower"].ratio == 20.0
    assert {note.name.rpartition(", ")[2]: note.value for note in results.notes} == {
        "updates": 2.0,
        "server's processor time per update": 500.0,
        "server's peak memory": 9,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["scripts"]


@pytest.mark.usefixtures("ours")
def test_a_peer_that_fails_is_left_out_with_one_line_and_the_rest_goes_on(scripts: Path, tmp_path: Path) -> None:
    (scripts / "appfl_sim.py").write_text(FAILS)
    results = found("sim", tmp_path)
    assert results.skipped == ["APPFL, its virtual-time simulator: today"]
    assert len(results.notes) == 2


@pytest.mark.usefixtures("ours")
def test_a_network_that_fails_says_why_the_bar_has_no_figure(scripts: Path, tmp_path: Path) -> None:
    (scripts / "flower_net.py").write_text(FAILS)
    (scripts / "appfl_net.py").write_text(WORKS.replace("2.0", "0.0"))
    results = found("net", tmp_path)
    assert results.figures["net_10mb_flower"].why_not == "Flower's network: today"
    assert results.figures["net_10mb_appfl"].why_not == "APPFL's network: no update came in 0.1 s"
    assert results.notes == []


@pytest.mark.usefixtures("ours")
def test_a_peer_that_takes_too_long_is_left_out_and_nothing_of_it_runs_on(scripts: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (scripts / "appfl_sim.py").write_text(SPAWNS.format(path=str(pid)))
    (scripts / "flower_sim.py").write_text(FAILS)
    results = found("sim", tmp_path, peer_s=3.0)
    assert results.skipped[0] == "APPFL, its virtual-time simulator: it took longer than 3 s"
    assert eventually(lambda: gone(int(pid.read_text())))


@pytest.mark.usefixtures("ours")
def test_a_peer_that_cannot_be_installed_is_left_out(scripts: Path, tmp_path: Path) -> None:
    works = (scripts / "environments.py").read_text()
    (scripts / "environments.py").write_text(f"import sys\nif sys.argv[1] == 'appfl': sys.exit('no pip')\n{works}")
    results = found("sim", tmp_path)
    assert results.skipped == ["APPFL could not be installed: no pip"]
    assert [note.name.split(", ")[2] for note in results.notes] == ["Flower", "Flower"]


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("pass", "it printed nothing"),
        ("print('words')", "it printed no figure"),
        ("print('{}')", "it printed no figure"),
    ],
)
def test_what_is_no_figure_is_said(scripts: Path, tmp_path: Path, program: str, why: str) -> None:
    (scripts / "appfl_sim.py").write_text(program)
    (scripts / "appfl_net.py").write_text(program)
    for part, name in (("sim", "APPFL, its virtual-time simulator"), ("net", "APPFL's network")):
        (line,) = found(part, tmp_path).skipped
        assert line.startswith(f"{name}: {why}")


def test_an_interpreter_that_is_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(peers.PeerFailed, match="cannot be run: No such file"):
        peers._said([str(tmp_path / "python")], 1.0)


# --- the scripts themselves ------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """One of the scripts, as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module


@pytest.mark.parametrize("name", ["environments.py", "appfl_net.py", "appfl_sim.py", "flower_net.py"])
@pytest.mark.parametrize("arguments", [(), ("flow",) * 6])
def test_wrong_arguments_are_answered_with_what_is_right(name: str, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{name} " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_environment_is_made_once_and_anew_when_its_pins_change(
    script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments, installed, pins = script("environments"), list[tuple[str, ...]](), tmp_path / "pins.txt"
    pins.write_text("torch==2.13.0\n")
    monkeypatch.setitem(environments.PINS, "appfl", pins)
    monkeypatch.setattr(environments.venv, "create", lambda place, **_: place.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(environments, "_install", lambda _python, *what: installed.append(what))
    for _ in range(2):
        assert environments.made("appfl", tmp_path / "env") == tmp_path / "env" / "appfl" / "bin" / "python"
    assert [what[0] for what in installed] == [environments.TORCH, "--no-deps"]
    pins.write_text("torch==2.13.0\nappfl\n")
    environments.made("appfl", tmp_path / "env")
    assert len(installed) == 4


def test_pins_agree_with_the_torch_that_comes_first(script: Callable[[str], Any]) -> None:
    environments = script("environments")
    for peer, distribution in (("appfl", "appfl"), ("flower", "flwr")):
        pins = environments.PINS[peer].read_text().splitlines()
        assert environments.TORCH in pins
        assert any(pin.startswith(f"{distribution}==") for pin in pins)
        assert all("==" in pin for pin in pins if not pin.startswith("#"))


def test_a_cast_is_ended_whole_and_watched_meanwhile(script: Callable[[str], Any], tmp_path: Path) -> None:
    spawned, pid, notes = script("spawned"), tmp_path / "pid", tmp_path / "notes"
    with spawned.Cast(tmp_path) as cast:
        server = cast.start("server", [sys.executable, "-c", SPAWNS.format(path=str(pid))])
        cast.wait(lambda: pid.exists() and pid.read_text(), "the start")
        notes.write_text("1\n" * spawned.UPDATES_MIN)
        counts = iter([0, 16, 16])
        seen = spawned.watched(cast, server, lambda: next(counts), 0.01)
        assert spawned.lines([notes, tmp_path / "none"]) == seen["updates"] == 16
        assert seen["updates_per_s"] > 0
        assert seen["server_peak_mb"] > 5
    assert gone(server)
    assert eventually(lambda: gone(int(pid.read_text())))


def test_a_process_of_a_cast_that_fails_is_named(script: Callable[[str], Any], tmp_path: Path) -> None:
    spawned = script("spawned")
    with spawned.Cast(tmp_path) as cast:
        cast.start("worker-0", [sys.executable, "-c", FAILS])
        with pytest.raises(SystemExit, match="worker-0 ended with 1: today"):
            cast.wait(lambda: False, "an update")


def test_what_does_not_happen_in_time_is_said(script: Callable[[str], Any], tmp_path: Path) -> None:
    spawned = script("spawned")
    with spawned.Cast(tmp_path) as cast, pytest.raises(SystemExit, match=r"an update did not happen in 0.1 s"):
        cast.wait(lambda: False, "an update", 0.1)


def test_the_last_line_is_the_result(script: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    script("spawned").tell({"updates_per_s": 1.5})
    assert json.loads(capsys.readouterr().out) == {"updates_per_s": 1.5}
