"""The arithmetic of the benchmark: turns, medians, ratios, verdicts, and the shape of what comes out."""

import json
from pathlib import Path
from typing import Any

import benchmarks.run
import pytest
from benchmarks import report
from benchmarks.bars import BARS, PARTS, Bar
from benchmarks.machine import Machine, memory_available
from benchmarks.results import Results
from benchmarks.run import bench
from benchmarks.scale import QUICK
from benchmarks.turns import Turns, rate, take_turns

from offbeat.errors import InvalidValue, OffbeatError

ROOT = Path(__file__).parents[2]
IN_THE_ISSUE = {
    "kernel": (
        *("kernel_one_1e6", "kernel_one_1e7", "kernel_one_1e8", "kernel_queued_1e7", "kernel_queued_1e8"),
        "kernel_rule_1e7",
    ),
    "sim": (
        *("sim_s_uniform", "sim_s_lognormal", "sim_s_comparison", "sim_s_averaged"),
        *("sim_m_two_threads", "sim_m_one_thread"),
        *("sim_l_two_threads", "sim_l_one_thread", "sim_l_compiled_torch", "sim_m_channels_last"),
        *("sim_t_two_threads", "events_1e6", "events_1e6_of_1e3"),
    ),
    "net": (
        *("net_10mb_raw", "net_10mb_appfl", "net_10mb_flower", "net_100mb_memory"),
        *("idle_held", "idle_memory"),
    ),
    "startup": ("startup_help", "startup_first_epoch"),
}


def machine() -> dict[str, Any]:
    return Machine().facts()


def test_everybody_runs_once_a_turn_and_each_turn_another_goes_first() -> None:
    order: list[str] = []

    def contestant(name: str) -> float:
        order.append(name)
        return float(len(order))

    turns = take_turns({name: lambda name=name: contestant(name) for name in "abc"}, 3)  # type: ignore[misc]
    assert "".join(order) == "abc" + "bca" + "cab"
    assert turns.seen == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_what_is_measured_is_told() -> None:
    told: list[str] = []
    take_turns({"ours": lambda: 1.0}, 2, told.append, "sim S")
    assert told == ["sim S: ours, turn 1 of 2", "sim S: ours, turn 2 of 2"]


def test_a_ratio_is_the_median_of_the_ratios_and_not_the_ratio_of_the_medians() -> None:
    turns = Turns({"ours": [1.0, 10.0, 100.0], "other": [1.0, 1.0, 1000.0]})
    assert turns.median("ours") / turns.median("other") == 10.0
    assert turns.ratio("ours", "other") == 1.0


def test_a_rate_counts_what_is_done_again() -> None:
    done: list[int] = []
    speed = rate(lambda: done.append(1), 5.0, at_least_s=0.01)
    assert len(done) > 1
    assert 0 < speed <= 5.0 * len(done) / 0.01


@pytest.mark.parametrize(
    ("kind", "value", "reference", "ratio", "met"),
    [
        ("ratio", 9.0, 10.0, 0.9, True),
        ("ratio", 8.9, 10.0, 0.89, False),
        ("at least", 50_000, 40_000, 1.25, True),
        ("at least", 39_999, 40_000, 39_999 / 40_000, False),
        ("at most", 0.25, 0.5, 2.0, True),
        ("at most", 0.6, 0.3, 0.5, False),
    ],
)
def test_a_ratio_is_larger_where_we_are_better(
    kind: Any, value: float, reference: float, ratio: float, met: bool
) -> None:
    bar = Bar("key", "what", "unit", "other", 0.9, kind)
    assert bar.ratio(value, reference) == pytest.approx(ratio)
    assert bar.met(bar.ratio(value, reference)) is met


def test_every_figure_of_the_issue_has_a_bar() -> None:
    assert {part: tuple(bar.key for bar in bars) for part, bars in PARTS.items()} == IN_THE_ISSUE


def test_nothing_is_in_the_json_that_was_not_measured() -> None:
    found = Results().as_json(machine())
    assert found.keys() == {*BARS, "notes", "skipped", "machine"}
    for key in BARS:
        assert (found[key]["value"], found[key]["reference"], found[key]["ratio"]) == (None, None, None)
        assert found[key]["met"] is None
        assert found[key]["bar"] == BARS[key].bar


def test_what_was_measured_is_in_the_json_as_it_was() -> None:
    results = Results(["kernel", "startup"])
    results.put_turns("kernel_one_1e6", Turns({"ours": [30.0, 20.0, 25.0], "t": [30.0, 30.0, 30.0]}), "ours", "t")
    results.put("startup_help", 0.6)
    results.note("beside", 3.0, "s", 2.0)
    results.skip("no room", "kernel_one_1e8")
    found = json.loads(json.dumps(results.as_json(machine())))
    one = found["kernel_one_1e6"]
    assert (one["value"], one["reference"], one["ratio"], one["met"]) == (25.0, 30.0, 0.8333, False)
    assert (found["startup_help"]["reference"], found["startup_help"]["ratio"]) == (0.3, 0.5)
    assert found["notes"] == {"beside": {"value": 3.0, "unit": "s", "reference": 2.0, "ratio": 1.5}}
    assert found["kernel_one_1e8"]["why_not"] == "no room"
    assert found["skipped"] == ["no room"]
    assert "sim_s_uniform" not in found


def test_a_part_that_is_over_says_what_it_left_out() -> None:
    results = Results(["startup"])
    results.put("startup_help", 0.2)
    results.close("startup")
    assert results.figures["startup_help"].why_not is None
    assert results.figures["startup_first_epoch"].why_not


def test_words_and_markdown_show_every_bar_and_where_it_stands() -> None:
    results = Results(["startup"])
    results.put("startup_help", 0.2)
    results.note("beside", 12_345.0, "events/s")
    results.skip("one thing", "startup_first_epoch")
    for text in (report.words(results, machine()), report.markdown(results, machine())):
        for bar in PARTS["startup"]:
            assert bar.what in text
            assert bar.asked in text
        assert "met" in text
        assert "not measured" in text
        assert "12,345 events/s" in text
        assert "Left out: one thing" in text
        assert f"{machine()['cores']} cores" in text
    rows = [line for line in report.markdown(results, machine()).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows[:4]} == {8}


def test_only_gross_regressions_are_named() -> None:
    results = Results(["startup"])
    results.put("startup_help", 0.3 / 0.9)
    results.put("startup_first_epoch", 3 / 0.9)
    found = results.as_json(machine())
    assert report.regressions(found, {"startup_help": 1.7, "startup_first_epoch": 2.0, "gone": 3.0}) == [
        "startup_first_epoch: the ratio is 0.9, less than half of the recorded 2"
    ]
    assert report.regressions(found, {"startup_help": 0.9}) == []
    assert report.ratios(found) == {}, "seconds alone are not worth recording"


def test_what_is_recorded_are_figures_that_exist() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "recorded.json").read_text())
    assert recorded.keys() <= BARS.keys()
    assert all(BARS[key].steady for key in recorded)
    assert len(recorded) > 5


def test_the_machine_says_what_it_is() -> None:
    facts = machine()
    assert facts["cores"] >= 1
    assert {"date", "cpu", "load_at_start", "load_at_end", "commit", "packages"} <= facts.keys()
    assert memory_available() > 1 << 20


def test_a_part_that_fails_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def part(name: str) -> Any:
        def run(results: Results, *_: Any) -> None:
            results.put(next(bar.key for bar in PARTS[name]), 1.0, 2.0)
            if name == "kernel":
                raise OffbeatError("out of order")

        return run

    monkeypatch.setattr(benchmarks.run, "_imported", part)
    found = bench(["kernel", "startup"], QUICK, tmp_path).as_json()
    assert found["kernel_one_1e6"]["value"] == found["startup_help"]["value"] == 1.0
    assert found["kernel_one_1e8"]["why_not"] == "kernel: out of order"
    assert found["startup_first_epoch"]["why_not"] == "not measured at this size"
    assert found["skipped"] == ["kernel: out of order"]


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="kernel, sim, net, startup"):
        bench(["kernels"], QUICK, tmp_path)
