"""The runs of one process: lockstep, how many are open at once, failures, stops."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.hosting import child
from offbeat.sim import lockstep
from offbeat.sim.choose import ExecutorPool
from offbeat.sim.executors import Pending
from offbeat.sim.lockstep import Failure, run_share
from offbeat.sim.run import Simulation, StopRequested
from offbeat.sim.spec import Spec
from offbeat.storage.json_file import read_json
from tests.simulation.comparing import change, written


def run(folder: Path, part: str = "", **options: Any) -> list[Failure]:
    """Run the whole comparison as one share, in `folder / out`."""
    spec = Spec.read(written(folder, part))
    return run_share(ExecutorPool(spec.task), spec.entries(folder / "out"), **options)


def bits(folder: Path) -> dict[str, str]:
    """The digest of every finished run's model."""
    found = (folder / "out").glob("*/*/summary.json")
    return {str(path.relative_to(folder)): read_json(path)["x_sha256"] for path in found}


@pytest.fixture
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder) == []
    return bits(folder)


@pytest.mark.parametrize("part", ["", ":many", ":seeded"])
@pytest.mark.parametrize("open_max", [1, 2, 4])
def test_few_are_open_at_once_and_that_changes_no_bits(
    open_max: int, part: str, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "OPEN_MAX", open_max)
    seen: list[int] = []
    told: list[float] = []

    def tell(far: float) -> None:
        seen.append(len(list((tmp_path / "out").glob("*/*/.lock"))))
        told.append(far)

    assert run(tmp_path, part, tell=tell) == []
    assert max(seen) == (open_max if part == ":many" else 1), "only batched trainings gain by it"
    assert bits(tmp_path) == whole
    assert told == sorted(told)
    assert told[-1] == len(whole) == 6


def test_no_more_files_are_open_than_a_process_may_have() -> None:
    assert lockstep.OPEN_MAX * 4 < 1024 / 2  # a ledger with its WAL, an index and a lock


def test_runs_under_way_fill_the_batches_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = {}
    for open_max in (1, 6):
        (folder := tmp_path / str(open_max)).mkdir()
        monkeypatch.setattr(lockstep, "OPEN_MAX", open_max)
        assert run(folder, ":many") == []
        lanes[open_max] = read_json(folder / "out" / "slow" / "seed-3" / "summary.json")["lanes_mean"]
    assert lanes[6] > 2 * lanes[1]


@pytest.mark.parametrize("part", ["", ":many", ":seeded"])
@pytest.mark.parametrize(("told", "line"), [("fail-2", "ValueError: no luck (pull.py:"), ("fail-at-first-2", "no beg")])
def test_a_run_that_fails_is_noted_and_the_others_go_on(
    told: str, line: str, part: str, whole: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / told).touch()
    failures = run(tmp_path, part)
    assert sorted((failure.method, failure.seed) for failure in failures) == [("fast", 2), ("slow", 2)]
    for failure in failures:
        assert line in failure.message
        assert "\n" not in failure.message
    assert bits(tmp_path) == {name: digest for name, digest in whole.items() if "seed-2" not in name}
    assert not list((tmp_path / "out").glob("*/*/.lock"))
    (tmp_path / told).unlink()
    spec = Spec.read(tmp_path / "spec.toml")
    again = [entry for entry in spec.entries(tmp_path / "out") if entry.seed == 2]
    assert run_share(ExecutorPool(spec.task), again) == []
    assert bits(tmp_path) == whole


@pytest.mark.parametrize("part", ["", ":many"])
def test_a_failure_at_the_end_is_noted_too(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, _points: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("offbeat.sim.run.write_curve", full)
    assert [failure.message for failure in run(tmp_path, part)] == ["OSError: the disk is full"] * 6
    assert bits(tmp_path) == {}


def test_nothing_is_trained_any_more_for_a_run_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[int] = []

    class Failing(Simulation):
        def advance(self) -> list[Pending]:
            jobs = super().advance()
            if self.settings.seed == 2 and self.coordinator.t > 3:
                monkeypatch.setattr(self.task, "train_many", self.noting(self.task.train_many))  # type: ignore[attr-defined]
                raise ValueError("enough")
            return jobs

        def noting(self, train_many: Callable[..., Any]) -> Callable[..., Any]:
            def noted(jobs: list[Any]) -> Any:
                later.extend(work.seed for _, work in jobs)
                return train_many(jobs)

            return noted

    monkeypatch.setattr(lockstep, "Simulation", Failing)
    spec = written(tmp_path, ":many")
    change(spec, ('reach = "slow"\n', ""), ('[methods.slow]\nrule = "fedavg:3"\nepochs = 4\n', ""))
    read = Spec.read(spec)
    assert [failure.message for failure in run_share(ExecutorPool(read.task), read.entries(tmp_path / "out"))] == [
        "ValueError: enough"
    ]
    assert set(later) == {1, 3}


@pytest.mark.parametrize("part", ["", ":many"])
@pytest.mark.parametrize("moment", [1, 3, 12])
def test_a_share_that_is_stopped_goes_on_with_the_same_bits(
    moment: int, part: str, whole: dict[str, str], tmp_path: Path
) -> None:
    count = 0

    def stop(_far: float) -> None:
        nonlocal count
        count += 1
        if count == moment:
            raise StopRequested

    with pytest.raises(StopRequested):
        run(tmp_path, part, tell=stop)
    begun = list((tmp_path / "out").glob("*/*/settings.json"))
    assert len(begun) == (min(moment, 6) if part == ":many" else 1)
    for settings in begun:
        assert settings.with_name("checkpoint.safetensors").exists()
        assert not settings.with_name(".lock").exists()
    assert run(tmp_path, part) == []
    assert bits(tmp_path) == whole


def test_ctrl_c_is_no_failure_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "interrupt-2").touch()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert not list((tmp_path / "out").glob("*/*/.lock"))


def test_processes_are_born_deaf_to_signals_until_they_say_what_they_do_then() -> None:
    program = "import signal; print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    with child.signals_blocked():
        born = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {str(int(number)) for number in child.SIGNALS} == set(born.stdout.split())


def test_an_executor_that_no_run_uses_any_more_is_closed(tmp_path: Path) -> None:
    spec = Spec.read(written(tmp_path, ":seeded"))
    executors = ExecutorPool(spec.task)
    one, two, *_, other = (executors.lend(entry.settings) for entry in spec.entries(tmp_path / "out"))
    assert len({id(lent) for lent in (one, two, other)}) == 3
    closed: list[int] = []
    for seed, lent in enumerate((one, two, other), 1):
        lent.close = lambda seed=seed: closed.append(seed)  # type: ignore[method-assign, misc]
    executors.keep([two])
    assert sorted(closed) == [1, 3]
    assert executors.lend(spec.entries(tmp_path)[1].settings) is two
    executors.close()
    assert sorted(closed) == [1, 2, 3]
