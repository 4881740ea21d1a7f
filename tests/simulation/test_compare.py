"""Comparisons: what they come to, that they are checked first, go on after anything, and what the table says."""

import json
import os
from pathlib import Path

import pytest

import offbeat
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.sim.compare import Comparison, compare
from offbeat.sim.spec import Spec
from offbeat.storage.lock import Lock
from tests.simulation.comparing import change, written


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return written(tmp_path)


def finished(out: Path) -> set[str]:
    return {f"{path.parts[-3]} {path.parts[-2]}" for path in out.glob("*/*/summary.json")}


def test_a_comparison_gives_the_runs_that_simulate_gives(spec: Path, tmp_path: Path) -> None:
    result = compare(Spec.read(spec), tmp_path / "out", processes=1)
    alone = offbeat.simulate(
        str(tmp_path / "pull.py"), device_model="lognormal:1", in_flight_max=3, epochs=30, seed=2, executor="inline"
    )
    assert result.summaries["fast"][1]["x_sha256"] == alone.summary["x_sha256"]
    fast, slow = result.rows()
    assert (fast.t, fast.gradients, slow.t, slow.gradients) == (30, 60, 4, 24)
    assert fast.reached_s is not None
    assert slow.reached_s is not None
    assert fast.reached_s < slow.reached_s == pytest.approx(slow.virtual_s)


def test_processes_change_nothing(spec: Path, tmp_path: Path) -> None:
    one = compare(Spec.read(spec), tmp_path / "one", processes=1).rows()
    two = compare(Spec.read(spec), tmp_path / "two", processes=2).rows()
    assert one == two


def test_from_python_paths_will_do(spec: Path, tmp_path: Path) -> None:
    result = compare(str(spec), str(tmp_path / "out"), processes=1)
    assert result.rows() == Comparison.read(Spec.read(spec), tmp_path / "out").rows()
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert all(path.stat().st_size for path in result.plot(str(tmp_path)))


# --- going on --------------------------------------------------------------------------------------------------------


def test_an_interrupted_comparison_goes_on(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = compare(Spec.read(spec), out, processes=1).rows()
    (out / "fast" / "seed-2" / "summary.json").unlink()
    untouched = (out / "fast" / "seed-1" / "summary.json").stat().st_mtime_ns
    seen: list[tuple[float, int]] = []
    again = compare(Spec.read(spec), out, processes=1, on_progress=lambda done, total: seen.append((done, total)))
    assert again.rows() == whole
    assert [seen[0], seen[-1]] == [(5, 6), (6, 6)]
    assert (out / "fast" / "seed-1" / "summary.json").stat().st_mtime_ns == untouched


@pytest.mark.parametrize("is_finished", [True, False])
def test_runs_of_another_spec_are_not_taken_for_this_ones(spec: Path, tmp_path: Path, is_finished: bool) -> None:
    compare(Spec.read(spec), tmp_path / "out", processes=1)
    if not is_finished:
        (tmp_path / "out" / "fast" / "seed-1" / "summary.json").unlink()
    change(spec, ("epochs = 30", "epochs = 31"))
    with pytest.raises(InvalidValue, match=r"epochs = 30, not 31; choose another --dir"):
        compare(Spec.read(spec), tmp_path / "out", processes=1)


def test_what_a_run_fills_in_itself_does_not_make_it_another(spec: Path, tmp_path: Path) -> None:
    """SGD has one device whatever is set, infinity is a word in JSON, and a task that cannot be batched is not."""
    change(
        spec,
        ('rule = "fedasync"', 'rule = "sgd"'),
        ("in_flight_max = 3", 'in_flight_max = 3\ndevices = 5\nlease_s = inf\nexecutor = "batched"'),
    )
    once = compare(spec, tmp_path / "out", processes=1)
    before = (tmp_path / "out" / "fast" / "seed-1" / "summary.json").stat().st_mtime_ns
    assert compare(spec, tmp_path / "out", processes=1).rows() == once.rows()
    assert (tmp_path / "out" / "fast" / "seed-1" / "summary.json").stat().st_mtime_ns == before


def test_one_comparison_at_a_time_writes_a_folder(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    lock = Lock.take(tmp_path / "out" / ".lock")
    with pytest.raises(InvalidValue, match=f"is being written by process {os.getpid()}"):
        compare(spec, tmp_path / "out", processes=1)
    lock.release()
    compare(spec, tmp_path / "out", processes=1)
    assert not (tmp_path / "out" / ".lock").exists()


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("pull.py", "push.py", "there is no file"),
        ("pull.py", "pull.py:push", "has no 'push'"),
        ('metric = "x"', 'metric = "y"', "metric is 'y' but fast has x"),
        ("in_flight_max = 3", "in_flight_max = 7", "method 'fast': in_flight_max is 7 but must lie in 1..6"),
        ("epochs = 4", "devices = 7", "method 'slow': devices is 7"),
        ("epochs = 4", 'executor = "cloud"', "method 'slow': executor 'cloud' is unknown"),
        ("epochs = 4", 'target = "y>=3"', "method 'slow': target is y>=3"),
        ("epochs = 4", "gamma = 0.1", "method 'slow': this task has no method `with_settings`"),
        ('device_model = "lognormal:1"', 'device_model = "lognormal"', "method 'fast': "),
        ('rule = "fedavg:3"', 'rule = "fedavg:9"', "method 'slow': a group starts 9 tasks"),
    ],
)
def test_what_is_wrong_for_all_runs_is_found_before_the_first(
    spec: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    change(spec, (old, new))
    with pytest.raises(InvalidValue) as error:
        compare(spec, tmp_path / "out", processes=2)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_task_that_fails_at_once_is_said_in_one_line_with_the_place(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "fail-evaluating").touch()
    with pytest.raises(InvalidValue, match=r"method 'fast': ValueError: cannot tell \(pull.py:\d+\)$"):
        compare(spec, tmp_path / "out", processes=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("processes", [0, -1, 1000])
def test_a_number_of_processes_that_makes_no_sense_is_refused(spec: Path, tmp_path: Path, processes: int) -> None:
    with pytest.raises(InvalidValue, match=rf"processes is {processes} but must lie in 1\.\.256"):
        compare(spec, tmp_path / "out", processes=processes)


def test_a_folder_that_cannot_be_written_is_said_once(spec: Path) -> None:
    with pytest.raises(OffbeatError, match="cannot write to /dev/null/x: Not a directory; choose another folder"):
        compare(spec, "/dev/null/x", processes=1)


@pytest.mark.parametrize(
    ("processes", "told", "said"),
    [
        (1, "fail-2", "no luck (pull.py:"),
        (2, "fail-2", "no luck (pull.py:"),
        (2, "die-2", "its process was killed by SIGKILL"),
    ],
)
def test_runs_that_fail_leave_the_others_and_are_named_at_the_end(
    spec: Path, tmp_path: Path, processes: int, told: str, said: str
) -> None:
    """Of two processes, one has the runs with seed 1 and the other those with seed 2."""
    change(spec, ("[1, 2, 3]", "[1, 2]"))
    (tmp_path / told).touch()
    with pytest.raises(OffbeatError) as error:
        compare(spec, tmp_path / "out", processes=processes)
    assert str(error.value).startswith("2 of 4 runs failed: fast (seed 2), slow (seed 2): ")
    assert said in str(error.value)
    assert str(error.value).endswith("kept; the same command takes up what is missing")
    assert "\n" not in str(error.value)
    assert finished(tmp_path / "out") == {"fast seed-1", "slow seed-1"}
    (tmp_path / told).unlink()
    assert compare(spec, tmp_path / "out", processes=1).rows() == compare(spec, tmp_path / "new", processes=1).rows()


def test_only_the_first_few_failures_are_named_and_each_reason_once(spec: Path, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        (tmp_path / f"fail-{seed}").touch()
    with pytest.raises(OffbeatError) as error:
        compare(spec, tmp_path / "out", processes=1)
    said = str(error.value)
    assert said.startswith("6 of 6 runs failed: fast (seed 1), fast (seed 2), fast (seed 3) and 3 more: ValueError")
    assert said.count("no luck") == 1


# --- the table -------------------------------------------------------------------------------------------------------


def test_a_task_that_takes_a_seed_is_made_for_every_seed(spec: Path, tmp_path: Path) -> None:
    file = tmp_path / "pull.py"
    made = file.read_text().replace(
        "task = Pull()", "def task(seed=0):\n    made = Pull()\n    made.made_for = seed\n    return made"
    )
    file.write_text(made.replace('{"x": float(model["x"][0])}', '{"x": float(self.made_for)}'))
    rows = [compare(Spec.read(spec), tmp_path / str(count), processes=count).rows() for count in (1, 2)]
    assert rows[0] == rows[1]
    assert rows[0][0].metric == 2.0


def test_lower_may_be_better(spec: Path, tmp_path: Path) -> None:
    change(spec, ('metric = "x"', 'metric = "x"\nlower_is_better = true'))
    result = compare(Spec.read(spec), tmp_path / "out", processes=1)
    assert [row.reached_s for row in result.rows()] == [0.0, 0.0]  # x rises, so x_0 is the lowest
    again = Comparison.read(result.spec, tmp_path / "out")
    assert json.dumps(again.rows()) == json.dumps(result.rows())


def test_the_table_tells_seeds_and_lanes(tmp_path: Path) -> None:
    result = compare(written(tmp_path, ":many"), tmp_path / "out", processes=1)
    fast, slow = result.rows()
    assert (fast.seeds, slow.seeds) == (3, 3)
    told = [summary["lanes_mean"] for summary in result.summaries["fast"]]
    assert fast.lanes_mean == pytest.approx(sum(told) / 3)
    heading, line, _ = result.table.splitlines()
    assert heading.split()[:3] == ["method", "seeds", "x"]
    assert heading.split()[-1] == "lanes"
    assert line.split()[:2] == ["fast", "3"]
    assert line.split()[-1] == f"{fast.lanes_mean:.1f}"


def test_where_nothing_was_batched_there_is_no_column_for_it(spec: Path, tmp_path: Path) -> None:
    result = compare(spec, tmp_path / "out", processes=1)
    assert [row.lanes_mean for row in result.rows()] == [None, None]
    assert "lanes" not in result.table


def test_one_seed_has_no_spread_and_the_table_says_none(spec: Path, tmp_path: Path) -> None:
    change(spec, ("[1, 2, 3]", "[2]"))
    table = compare(spec, tmp_path / "out", processes=1).table
    assert "nan" not in table
    assert "±" not in table


def test_runs_that_diverge_are_in_the_table(spec: Path, tmp_path: Path) -> None:
    (tmp_path / "diverge").touch()
    result = compare(spec, tmp_path / "out", processes=1)
    assert [row.metric for row in result.rows()] == [float("inf")] * 2
    assert "inf" in result.table
