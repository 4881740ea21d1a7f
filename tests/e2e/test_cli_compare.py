"""`offbeat compare` as a user calls it: what it leaves, how it is stopped, what it says when something is wrong."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.simulation.comparing import change, written

from offbeat.cli import main
from offbeat.sim.compare import compare
from offbeat.storage.lock import is_held

PATIENCE_S = 60.0


def offbeat(spec: Path, out: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", str(spec), "--dir", str(out), "--processes", "1", *arguments])


# --- what it leaves --------------------------------------------------------------------------------------------------


def test_table_csv_and_json_say_the_same_in_any_readers_words(tmp_path: Path) -> None:
    spec = written(tmp_path, ":many")
    change(spec, ("[1, 2, 3]", "[2]"))
    result = offbeat(spec, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    rows = json.loads(result.stdout.splitlines()[-1], parse_constant=refuse)["rows"]
    assert [row["method"] for row in rows] == ["fast", "slow"]
    assert [(row["seeds"], row["reached_spread"]) for row in rows] == [(1, "nan")] * 2
    with (tmp_path / "out" / "comparison.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for row, line in zip(rows, table, strict=True):
        assert row.keys() == line.keys()
        assert float(line["lanes_mean"]) == row["lanes_mean"] >= 1
        assert line["seeds"] == "1"
    heading = result.stdout.splitlines()[0].split()
    assert (heading[1], heading[-1]) == ("seeds", "lanes")


def test_every_run_is_drawn_also_one_that_was_finished_before(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    spec, out = written(tmp_path), tmp_path / "out"
    compare(spec, out, processes=1, pictures=False)
    assert not list(out.glob("*/*/run.*"))
    (out / "fast" / "seed-1" / "summary.json").unlink()
    result = offbeat(spec, out)
    assert result.exit_code == 0, result.output
    for run in out.glob("*/seed-*"):
        assert {"run.png", "run.svg"} <= {path.name for path in run.iterdir()}
    assert len(list(out.glob("*/seed-*"))) == 6


def test_without_matplotlib_there_is_a_word_and_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "offbeat.plots", raising=False)
    result = offbeat(written(tmp_path), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "No pictures: matplotlib" in result.stderr
    assert not list((tmp_path / "out").rglob("*.png"))


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pull.py", "push.py", "there is no file"),
        ('metric = "x"', 'metric = "y"', "metric is 'y'"),
        ('metric = "x"', "metric = 3", "metric is 3"),
        ("in_flight_max = 3", "in_flight_max = 70", "in_flight_max is 70"),
        ("[1, 2, 3]", "[1, 1]", "more than once"),
    ],
)
def test_a_wrong_spec_is_one_line_and_leaves_no_folder(tmp_path: Path, old: str, new: str, said: str) -> None:
    spec = written(tmp_path)
    change(spec, (old, new))
    result = offbeat(spec, tmp_path / "out" / "deep")
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_failed_runs_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "fail-3").touch()
    result = offbeat(written(tmp_path), tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "Error: 2 of 6 runs failed: fast (seed 3), slow (seed 3): ValueError: no luck (pull.py:"
    )
    assert result.stderr.count("\n") == 1
    (tmp_path / "fail-3").unlink()
    assert offbeat(tmp_path / "spec.toml", tmp_path / "out").exit_code == 0


# --- stopping --------------------------------------------------------------------------------------------------------


def _hear_ctrl_c() -> None:
    """Whoever starts the tests in the background may be deaf to it, and what they start would be, too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def started(folder: Path, processes: int) -> Iterator["subprocess.Popen[str]"]:
    """A comparison in a group of its own, which is ended when this takes too long."""
    arguments = ["compare", str(folder / "spec.toml"), "--dir", str(folder / "out"), "--processes", str(processes)]
    command = [sys.executable, "-m", "offbeat", *arguments]
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **options, preexec_fn=_hear_ctrl_c) as process:
        watchdog = Timer(PATIENCE_S, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            yield process
            assert watchdog.is_alive(), "it took too long"
        finally:
            watchdog.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def trainers(process: "subprocess.Popen[str]", count: int) -> set[int]:
    """The processes that train, once there are so many: they say so before every training."""
    assert process.stdout is not None
    seen: set[int] = set()
    while len(seen) < count:
        line = process.stdout.readline()
        assert line, "it ended too early"
        seen.add(int(line))
    return seen


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_it_goes_on(folder: Path) -> None:
    """It did stop, no run is lost or still held, and the whole comes to the same as one that was never stopped."""
    begun = {path.parent for path in (folder / "out").glob("*/*/settings.json")}
    assert not all((run / "summary.json").exists() for run in begun)
    assert not any(is_held(run / ".lock") for run in begun)
    assert all((run / "checkpoint.safetensors").exists() or (run / "summary.json").exists() for run in begun)
    (folder / "slow").unlink()
    resumed = compare(folder / "spec.toml", folder / "out", processes=1)
    assert resumed.rows() == compare(folder / "spec.toml", folder / "new", processes=1).rows()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("processes", "to_all"), [(1, False), (2, False), (2, True)])
def test_a_signal_stops_all_processes_and_the_same_command_goes_on(
    tmp_path: Path, number: signal.Signals, processes: int, to_all: bool
) -> None:
    """Sent to the parent alone, as by `kill`, or to the whole group, as by Ctrl-C at a terminal."""
    written(tmp_path)
    (tmp_path / "slow").touch()
    with started(tmp_path, processes) as process:
        children = trainers(process, processes)
        (os.killpg if to_all else os.kill)(process.pid, number)
        _, said = process.communicate()
    assert process.returncode == 130, said
    assert said == "Stopped; the same command goes on from there.\n"
    assert not any(is_alive(child) for child in children)
    assert_it_goes_on(tmp_path)


@pytest.mark.slow
def test_when_the_parent_is_killed_its_children_stop(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "slow").touch()
    with started(tmp_path, 2) as process:
        trainers(process, 2)
        process.kill()
        assert process.stdout is not None
        process.stdout.read()  # to its end, which comes when the last child has closed it
        process.wait()
    assert_it_goes_on(tmp_path)


@pytest.mark.slow
def test_a_child_that_is_told_to_stop_stops_all(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "slow").touch()
    with started(tmp_path, 2) as process:
        child, other = trainers(process, 2)
        os.kill(child, signal.SIGTERM)
        _, said = process.communicate()
    assert (process.returncode, said) == (130, "Stopped; the same command goes on from there.\n")
    assert not is_alive(other)
    assert_it_goes_on(tmp_path)


def test_whoever_insists_need_not_wait_for_a_training_that_hangs(tmp_path: Path) -> None:
    written(tmp_path)
    for seed in (1, 2, 3):
        (tmp_path / f"hang-{seed}").touch()
    with started(tmp_path, 2) as process:
        children = trainers(process, 2)
        while process.poll() is None:  # signals that come at once count as one
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode != 0
    until = time.monotonic() + 30
    while any(is_alive(child) for child in children):  # killed, and gone as soon as the system gets to it
        assert time.monotonic() < until
