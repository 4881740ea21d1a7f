"""Every benchmark really runs, with sizes that only show that it works; and so does `python -m benchmarks`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks import events, idle, kernel, large, rule_vectors, sim
from benchmarks.bars import BARS
from benchmarks.machine import memory_available
from benchmarks.plain import PlainLoop
from benchmarks.process_tree import cpu_s, family, memory
from benchmarks.results import Results
from benchmarks.run import bench
from benchmarks.scale import QUICK
from benchmarks.served import ours, raw
from benchmarks.tasks import DEVICES, small_cnn
from benchmarks.turns import silent

from offbeat.core.kernel import Updater
from offbeat.sim.executors import Inline
from offbeat.tasks.digits import digits

ROOT = Path(__file__).parents[2]
TRIES = 3
"""A busy moment of the machine is no regression: one is there every time."""
TINY = replace(
    QUICK,
    turns=1,
    kernel_sizes=(10**4, 10**6),
    kernel_s=0.0,
    sim_epochs=120,
    sim_plain_tasks=4,
    sim_seeds=2,
    large_tasks=(2, 2, 2),
    large_iterations=(1, 1, 1),
    event_devices=(10**3, 2 * 10**3),
    events=2_000,
    net_mb=(1,),
    net_s=0.5,
    idle_workers=20,
)


def test_kernel() -> None:
    results = Results(["kernel"])
    kernel.run(results, TINY, silent, Path())
    figure = results.figures["kernel_one_1e6"]
    assert figure.value
    assert figure.reference
    assert figure.ratio == pytest.approx(figure.value / figure.reference)
    assert {note.name for note in results.notes} >= {
        *("kernel, one update, 1e4, threads 1", "kernel, 8 queued, 1e6, threads 2"),
    }


def test_rules_over_several_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_vectors, "SIZE", 10**4)
    results = Results(["kernel"])
    rule_vectors.run(results, TINY, silent)
    assert len(results.notes) == len(rule_vectors.RULES) * len(rule_vectors.THREADS)
    assert results.figures[rule_vectors.KEY].ratio


def test_a_pass_of_the_benchmark_gives_the_bits_of_one_by_one() -> None:
    at_once, single = kernel.Mixing(1000, 4), kernel.Mixing(1000, 4)
    with Updater(2) as updater:
        at_once.one_pass(updater, 4)
        single.one_by_one(updater, 4)
    np.testing.assert_array_equal(at_once.w, single.w)


def test_a_size_without_memory_for_it_is_left_out_and_that_is_said() -> None:
    results = Results(["kernel"])
    size = memory_available() // 4
    kernel.run(results, replace(TINY, kernel_sizes=(size,)), silent, Path())
    assert results.notes == []
    assert all("half of the free memory" in why for why in results.skipped)
    assert results.skipped


def test_a_small_simulation_and_the_plain_loop() -> None:
    lanes: dict[str, float] = {}
    assert sim.simulated(digits(100), "uniform", 120, lanes) > 0
    assert lanes["uniform"] > 1
    assert sim.simulated(sim.Untrained(), "lognormal", 120, {}) > 0
    assert sim.per_processor_second(digits(100), 120, {"weights": "participation", "average": "poly:8"}) > 0
    plain = PlainLoop(digits(100))
    before = [x.clone() for x in plain.x]
    assert plain.rate(3) > 0
    assert any((now != then).any() for now, then in zip(plain.x, before, strict=True))


def test_a_larger_simulation_inline() -> None:
    for make in large.MAKE.values():
        assert make(1).devices == DEVICES
    assert large.simulated(Inline(small_cnn(1)), 2) > 0


def test_events(tmp_path: Path) -> None:
    results = Results(["sim"])
    events.run(results, TINY, silent, tmp_path)
    assert [note.unit for note in results.notes] == ["events/s", "s"] * 2
    assert all(note.value > 0 for note in results.notes)
    assert [*tmp_path.iterdir()] == []


def test_start_up(tmp_path: Path) -> None:
    found = bench(["startup"], TINY, tmp_path).as_json()
    assert 0 < found["startup_help"]["value"] < found["startup_first_epoch"]["value"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_ours_and_raw_exchange_models(tmp_path: Path) -> None:
    for name, found in (
        ("ours", ours(tmp_path / "ours", 250_000, 0.5)),
        ("unsynced", ours(tmp_path / "unsynced", 250_000, 0.5, durable=False)),
        ("tls", ours(tmp_path / "tls", 250_000, 0.5, tls=True)),
        ("raw", raw(tmp_path / "raw", 250_000, 0.5)),
    ):
        assert found.updates_per_s > 0, name
        assert 0 < found.p50_s <= found.p99_s, name
        assert found.memory.peak > 10_000_000, name


def test_idle_workers_are_held(tmp_path: Path) -> None:
    results = Results(["net"])
    idle.run(results, TINY, silent, tmp_path)
    assert [(note.value, note.reference) for note in results.notes] == [(20, 20)]
    assert results.figures["idle_held"].value is None, "twenty say nothing about five thousand"
    assert results.figures["idle_memory"].value is not None


def test_a_tree_of_processes_is_seen_whole() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"1\n"
        assert len(family(parent.pid)) == 2
        assert cpu_s(parent.pid) >= 0
        assert memory(parent.pid).peak > memory(parent.pid).own > 0
        parent.communicate(b"\n")


def quick(folder: Path) -> "subprocess.CompletedProcess[str]":
    """The one-minute version, held against what was recorded."""
    folder.mkdir()
    recorded = ROOT / "benchmarks" / "recorded.json"
    arguments = ("all", "--quick", "--json", "--dir", str(folder), "--against", str(recorded))
    command = [sys.executable, "-m", "benchmarks", *arguments, "--markdown", str(folder / "table.md")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.alone
def test_the_command_prints_every_key_on_its_last_line_and_nothing_regressed_grossly(tmp_path: Path) -> None:
    worse: set[str] | None = None
    for number in range(TRIES):
        done = quick(tmp_path / str(number))
        found = json.loads(done.stdout.splitlines()[-1])
        assert BARS.keys() <= found.keys(), done.stderr
        for key in (key for key in BARS if found[key]["ratio"] is None):
            assert found[key]["why_not"], key
        assert (tmp_path / str(number) / "table.md").read_text().count("\n| ") > len(BARS)
        said = {line.partition(":")[0] for line in done.stderr.splitlines() if "less than half" in line}
        assert bool(said) == bool(done.returncode), done.stderr
        worse = said if worse is None else worse & said
        if not worse:
            return
    raise AssertionError(f"less than half of the recorded ratio, {TRIES} times in a row: {worse}")
