"""Reports: what they say equals what the ledger holds, for runs of every kind, and no name becomes markup."""

import csv
import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import matplotlib as mpl

from offbeat.core.layout import Model
from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.protocol.messages import (
    AnswerPush,
    BadUpdateArrived,
    Command,
    Decision,
    Evaluated,
    Event,
    Finish,
    Lease,
    Outcome,
    Quarantine,
    ReleaseTask,
    SendTask,
    TimePassed,
    UpdateArrived,
    VersionPublished,
    WorkerJoined,
    WorkerReadmitted,
)
from offbeat.report import curve_run, pictures, report, report_curves, run_page
from offbeat.report.facts import read_run, runs_under
from offbeat.report.run_curve import averaged, thinned
from offbeat.report.troubles import LISTED_MAX, REFUSED
from offbeat.settings import Settings
from offbeat.sim.compare import Comparison
from offbeat.sim.curve import CONTRIBUTION, CURVE, CurvePoint, read_curve
from offbeat.sim.run import Run, Simulation, StopRequested
from offbeat.sim.spec import Spec
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import lost_row
from offbeat.storage.run_folder import LEDGER, RunFolder
from tests.simulation.quadratic import Quadratic
from tests.unit.html_page import Page

HOSTILE = (
    "</td></table><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onload='alert(1)",
    "</title></style><b>bold",
    "<!-- ]]> &lt;i&gt; &#60;u",
    "$\\frac{$",
    "a\x00b\ud800c\u202ed\ne",
    "x" * 5000,
)
TASK = Quadratic([float(number) for number in range(10)], [0.5] * 10, noise=0.1)


def simulated(folder: Path, task: Any = TASK, **settings: Any) -> Run:
    return Simulation(task, Settings.of({"epochs": 40, "in_flight_max": 5, **settings}), folder=folder).run()


def page_of(folder: Path, **options: Any) -> Page:
    return Page(report(folder, folder.parent / "page.html", **options).read_text(encoding="utf-8"))


Told = tuple[Event, list[Command]]


def told(folder: Path, messages: Iterable[Told], **settings: object) -> Path:
    """The folder of a served run to which just this has happened."""
    with RunFolder.begin(folder, {"task": "told", "served": True, "rule": "fedasync", **settings}) as run:
        Ledger.create(run.path / LEDGER, verbose=True).close()
        ledger = run.ledger()
        for event, commands in messages:
            ledger.record(event, commands)
    return folder


def decided(number: int, device: int, mix: Mix | None, *, t: int | None = None, **facts: Any) -> Told:
    """The number-th decision, of an update of this device."""
    lease = Lease(number, device, device, 0, max(0, number - 1), number - 1.0, number + 9.0)
    outcome = facts.pop("outcome", Outcome.APPLIED)
    decision = Decision(number, float(number), lease, outcome, t or number, facts.get("staleness", 0), mix, 1, 3)
    return UpdateArrived(float(number), device, number, 1, 3), [AnswerPush(device, number, outcome, decision)]


def published(t: int) -> Told:
    return VersionPublished(float(t), t), []


HALF = Mix(0.5, 0.5, 0.0, True)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_equal_the_ledgers(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", epochs=200, staleness_policy="reject", staleness_max=5, dropout=0.1)
    page = page_of(tmp_path / "run")
    with RunFolder.open(tmp_path / "run").ledger() as ledger:
        mixed = [decision.staleness for decision in ledger.decisions() if decision.mix]
        applied, total, largest = len(mixed), sum(mixed), max(mixed)
        refused = ledger.count("decided") - applied
        tasks = len({row.task for row in ledger.rows("leased")})
    assert refused > 0
    assert page.fact("applied") == applied == run.summary["applied"]
    assert page.fact("refused") == refused
    assert page.fact("t") == run.summary["t"] == 200
    assert page.fact("gradients") == run.summary["gradients"]
    assert page.fact("staleness-mean") == total / applied == run.summary["staleness_mean"]
    assert page.fact("staleness-largest") == largest == run.summary["staleness_largest"]
    assert page.fact("at") == run.summary["virtual_s"]
    assert page.fact("tasks") == tasks
    assert (page.fact("bytes-down"), page.fact("bytes-up")) == (run.summary["bytes_down"], run.summary["bytes_up"])
    assert run.summary["x_sha256"] in page.text
    ((what, _, how_many),) = page.rows("troubles")
    assert (what.text, how_many.value) == ("Refused: too stale", refused)
    _, first, last, lowest, highest = page.rows("metrics")[0]
    values = [point.metrics["x"] for point in run.metrics]
    shown = (first.value, last.value, lowest.value, highest.value)
    assert shown == (values[0], values[-1], min(values), max(values))


KINDS: dict[str, dict[str, Any]] = {
    "fedasync": {"alpha_schedule": "step:20,0.5"},
    "delta": {"rule": "delta:0.2"},
    "fedbuff": {"rule": "fedbuff:3"},
    "fedavg": {"rule": "fedavg:4", "epochs": 12},
    "fedavg, some left behind": {"rule": "fedavg:3", "epochs": 12, "over_selection": 2.0},
    "fedavg with a deadline": {"rule": "fedavg:5", "epochs": 12, "group_deadline_s": 0.9, "device_model": "pareto:1.1"},
    "sampled staleness": {"device_model": "sampled:8", "in_flight_max": None},
    "paced": {"staleness_policy": "pace", "staleness_max": 6},
    "clipped": {"norm_max": 0.5, "norm_policy": "clip"},
    "one machine": {"rule": "sgd"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_runs_of_every_kind_tell_whose_data_count_and_how_the_metric_went(tmp_path: Path, kind: str) -> None:
    run = simulated(tmp_path / "run", PooledQuadratic(TASK.centres, TASK.shrink), **KINDS[kind])
    facts, page = read_run(tmp_path / "run"), page_of(tmp_path / "run")
    assert facts.fold.gradients == run.summary["gradients"]
    curve = facts.curve.metrics["x"]
    there = read_curve(tmp_path / "run" / CURVE)
    told_points = [(int(t), at, int(g), y) for t, at, g, y in zip(*_columns(curve), strict=True)]
    assert told_points == [(point.t, point.at, point.gradients, point.metrics["x"]) for point in there]
    with (tmp_path / "run" / CONTRIBUTION).open() as file:
        rows = {int(row["device"]): (float(row["mass"]), float(row["surviving"])) for row in csv.DictReader(file)}
    whole = sum(surviving for _, surviving in rows.values())
    for part in facts.devices.parts():
        assert part.mass == pytest.approx(rows[part.device][0], rel=1e-12)
        assert part.share == pytest.approx(rows[part.device][1] / whole, rel=1e-9, abs=1e-12)
    shares = [cells[2].value for cells in page.rows("parts")]
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)
    assert sum(facts.devices.weights.values()) == facts.fold.applied


@dataclass(frozen=True)
class PooledQuadratic(Quadratic):
    """Also for one machine that has everybody's data."""

    def pooled(self, devices: int) -> Quadratic:  # noqa: ARG002
        return replace(self, centres=self.centres[:1], shrink=self.shrink[:1])


def _columns(series: Any) -> tuple[Any, ...]:
    return series.t, series.at, series.gradients, series.values


def test_weights_of_a_group_are_shares_of_its_version(tmp_path: Path) -> None:
    simulated(tmp_path / "run", rule="fedavg:4", epochs=6)
    assert read_run(tmp_path / "run").devices.weights == {(0, 0.25): 24}


def test_only_the_largest_parts_are_listed_and_the_rest_is_one_row(tmp_path: Path) -> None:
    simulated(tmp_path / "run", Quadratic([0.0] * 80, [0.5] * 80), epochs=1000, in_flight_max=20)
    facts, rows = read_run(tmp_path / "run"), page_of(tmp_path / "run").rows("parts")
    assert len(rows) == 31
    assert rows[-1][0].text == "50 others (bar: mean)"
    assert sum(cells[2].value for cells in rows) == pytest.approx(1.0)
    assert sum(cells[3].value for cells in rows) == facts.fold.applied
    (smallest,), (rest,) = rows[29][1].all("rect"), rows[30][1].all("rect")
    assert 0 < float(rest.attributes["width"]) <= float(smallest.attributes["width"])


def test_a_lost_update_was_decided_on_but_is_in_no_version(tmp_path: Path) -> None:
    messages = [decided(1, 0, HALF), published(1), decided(2, 1, HALF), published(2)]
    told(tmp_path / "run", messages)
    with Ledger.open(tmp_path / "run" / LEDGER) as ledger:
        ledger.add(lost_row(7.0, 2, 2))
    facts, page = read_run(tmp_path / "run"), page_of(tmp_path / "run")
    assert facts.fold.applied == 2
    assert facts.devices.weights == {(0, 0.5): 1}
    assert [(part.device, part.share) for part in facts.devices.parts()] == [(0, 1.0), (1, 0.0)]
    ((task, decision, at),) = page.rows("lost")
    assert (task.value, decision.value, at.value) == (2, 2, 7.0)
    assert ["Lost updates", 1] in [[cells[0].text, cells[2].value] for cells in page.rows("troubles")]


def test_a_group_that_went_on_without_the_rest_is_a_version(tmp_path: Path) -> None:
    first, second = Mix(0.0, 1.0, 0.0, False), Mix(0.5, 0.5, 0.0, False)
    messages = [decided(1, 0, first, t=1), decided(2, 1, second, t=1), published(1), decided(3, 2, first, t=2)]
    facts = read_run(told(tmp_path / "run", messages, rule="fedavg:3"))
    assert {part.device: part.share for part in facts.devices.parts()} == {0: 0.5, 1: 0.5, 2: 0.0}
    assert facts.devices.weights == {(0, 0.5): 2}
    assert (facts.fold.gradients, facts.t, facts.fold.applied) == (6, 1, 3)


def test_a_version_is_drawn_where_it_was_published_and_not_where_its_evaluation_was_done(tmp_path: Path) -> None:
    evaluated: Told = (Evaluated(9.0, 1, {"loss": 3.0}), [])
    other: Told = (Evaluated(9.5, 1, {"seen": 4.0}), [])
    curve = read_run(told(tmp_path / "run", [decided(1, 0, HALF), published(1), evaluated, other])).curve
    assert {name: [list(column) for column in _columns(series)] for name, series in curve.metrics.items()} == {
        "loss": [[1.0], [1.0], [3.0], [3.0]],
        "seen": [[1.0], [1.0], [3.0], [4.0]],
    }


# --- runs that did not end well ---------------------------------------------------------------------------------------


def interrupted(folder: Path, after: int = 20) -> None:
    def stop(simulation: Simulation) -> None:
        if simulation.coordinator.t >= after:
            raise StopRequested

    with suppress(StopRequested):
        Simulation(TASK, Settings(epochs=100, in_flight_max=5), folder=folder).run(stop)


def test_an_interrupted_run_is_reported_as_far_as_it_came(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    page = page_of(tmp_path / "run")
    assert 20 <= page.fact("t") < 100
    assert "interrupted at epoch" in page.text
    assert "Nothing went wrong" not in page.text
    assert "5 tasks in flight" in page.text or "4 tasks in flight" in page.text


def test_a_run_without_updates_or_metrics_has_a_report(tmp_path: Path) -> None:
    simulated(tmp_path / "run", epochs=None, until_s=1e-6)
    page = page_of(tmp_path / "run")
    assert (page.fact("applied"), page.fact("t"), page.fact("staleness-mean")) == (0, 0, 0)
    assert "No update was applied." in page.text
    empty = page_of(told(tmp_path / "empty", []))
    assert "No version was evaluated." in empty.text
    assert "Nothing was measured" in empty.text


class Odd(Quadratic):
    """Measures what no axis can hold."""

    def evaluate(self, model: Model) -> Mapping[str, float]:
        x = float(model["x"].mean(dtype=np.float64))
        odd = (nan, inf, -inf, 1e308, x, x)[int(abs(x) * 1e6) % 6]
        return {"odd": odd, "never": nan, HOSTILE[0]: x, HOSTILE[5]: 1.0, HOSTILE[6][:3]: -x}


def test_metrics_that_are_no_numbers_are_counted_and_leave_gaps(tmp_path: Path) -> None:
    run = simulated(tmp_path / "run", Odd(TASK.centres, TASK.shrink, noise=0.1), evaluate_every=1)
    page = page_of(tmp_path / "run")
    counted = {cells[0].text: cells[2].value for cells in page.rows("troubles")}
    bad = sum(not np.isfinite(point.metrics["odd"]) for point in run.metrics)
    assert 0 < bad < len(run.metrics)
    assert counted == {"Not a number: odd": bad, "Not a number: never": len(run.metrics)}
    assert [cells[0].text for cells in page.rows("metrics")][:3] == ["odd", "never", HOSTILE[0]]
    never = [cell.text for cell in page.rows("metrics")[1]]
    assert never == ["never", "not a number (epoch 0)", "not a number (epoch 40)", "-", "-"]


def test_what_went_wrong_is_told_by_kind(tmp_path: Path) -> None:
    messages: list[Told] = [(WorkerJoined(0.0, 4, 0, "honest"), []), (WorkerJoined(0.0, 5, 1, "naughty"), [])]
    leases = [Lease(task, 5, 1, task, 0, 0.0, 10.0) for task in range(1, 6)]
    messages += [(TimePassed(0.5), [SendTask(lease) for lease in [*leases, leases[0]]])]
    messages += [(TimePassed(12.0), [ReleaseTask(leases[0], False), ReleaseTask(leases[1], True)])]
    messages += [(TimePassed(3.0), [ReleaseTask(lease, False) for lease in leases[2:4]])]
    messages += [(BadUpdateArrived(13.0, 5, 3, "the header is cut off"), [Quarantine(5, "garbage")])] * 2
    messages += [(WorkerReadmitted(14.0, 5), [])]
    for number, outcome in enumerate((Outcome.BUSY, Outcome.UNKNOWN_TASK, Outcome.NOT_YOURS), 20):
        messages += [(UpdateArrived(15.0, 5, number, 1, 1), [AnswerPush(5, number, outcome)])]
    messages += [(UpdateArrived(16.0, 5, 1, 1, 1), [AnswerPush(5, 1, Outcome.APPLIED, repeated=True)])]
    messages += [decided(30, 1, None, outcome=outcome) for outcome in (Outcome.TOO_LARGE, Outcome.NOT_FINITE)]
    messages += [(TimePassed(40.0), [Finish("enough")])]
    page = page_of(told(tmp_path / "run", messages), trouble="the disk is <full>")
    assert {cells[0].text: cells[2].value for cells in page.rows("troubles")} == {
        "Refused: not finite": 1,
        "Refused: too large": 1,
        "Unreadable updates": 2,
        "Quarantines": 2,
        "Pushes: busy": 1,
        "Pushes: unknown": 1,
        "Pushes: not yours": 1,
        "Pushes: repeated": 1,
        "Leases: expired": 1,
        "Leases: revoked": 1,
        "Leases: given up": 2,
    }
    assert [[cell.text for cell in cells[:3]] for cells in page.rows("quarantines")] == [
        ["5", "naughty", "garbage"]
    ] * 2
    assert page.rows("quarantines")[0][4].value == 14.0
    assert [cell.text for cell in page.rows("unreadable")[0]] == ["the header is cut off", "2"]
    assert "Trouble: the disk is <full>" in page.text
    assert (page.fact("tasks"), read_run(tmp_path / "run").tasks.in_flight) == (5, 1)
    assert "interrupted (enough)" in page.ids["fact-state"].text


def test_every_outcome_has_its_meaning() -> None:
    assert {*REFUSED, Outcome.APPLIED} == set(Outcome)


def test_long_lists_are_cut_and_say_so(tmp_path: Path) -> None:
    messages: list[Told] = [(TimePassed(float(at)), [Quarantine(at, f"reason {at}")]) for at in range(40)]
    messages += [(BadUpdateArrived(50.0, 1, at, f"reason {at}"), []) for at in range(80)]
    page = page_of(told(tmp_path / "run", messages))
    assert len(page.rows("quarantines")) == LISTED_MAX
    assert "And 10 more." in page.text
    assert "And 41 more." in page.text
    assert {cells[0].text: cells[2].value for cells in page.rows("troubles")} == {
        "Unreadable updates": 80,
        "Quarantines": 40,
    }


def test_a_run_that_went_well_says_so(tmp_path: Path) -> None:
    simulated(tmp_path / "run")
    assert "Nothing went wrong." in page_of(tmp_path / "run").text


def test_a_run_under_way_is_read_up_to_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunFolder.begin(tmp_path / "run", {"task": "told", "served": True}) as run:
        ledger, newest = run.ledger(), Ledger.newest

        def write(*messages: Told) -> None:
            for event, commands in messages:
                ledger.record(event, commands)
            ledger.flush()

        def newest_and_on(reading: Ledger) -> int:
            found = newest(reading)
            write(decided(2, 0, HALF), published(2))
            return found

        write(decided(1, 0, HALF), published(1))
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "newest", newest_and_on)
            facts = read_run(tmp_path / "run")
        assert (facts.t, facts.fold.applied, facts.at) == (1, 1, 1.0)
        page = page_of(tmp_path / "run")
        assert page.fact("t") == 2
        assert "The run is under way" in page.text


# --- strangers' words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_becomes_markup(tmp_path: Path, name: str) -> None:
    messages: list[Told] = [(WorkerJoined(0.0, 0, 0, name), [Quarantine(0, name)]), decided(1, 0, HALF), published(1)]
    messages += [(BadUpdateArrived(2.0, 0, 1, name), []), (Evaluated(3.0, 1, {name[:70]: 0.5}), [])]
    messages += [(TimePassed(4.0), [Finish(name)])]
    plain = page_of(told(tmp_path / "plain", [*_with_name(messages, "w")]))
    written = name.encode("utf-8", "replace").decode()  # what settings.json can hold
    folder = told(tmp_path / "run", messages, task=written, staleness_fn=written)
    page = page_of(folder, trouble=name)
    allowed = {element.tag for element in _elements(plain)} | {"strong"}
    assert {element.tag for element in _elements(page)} <= allowed
    assert _places(page) - {"settings-changed"} == _places(plain)
    assert len(page.rows("quarantines")) == 1
    seen = page.rows("quarantines")[0][1].text
    assert seen[:20] == "".join(" " if c.isspace() else c if c.isprintable() else "\ufffd" for c in name)[:20]
    assert len(seen) <= 60


def _with_name(messages: Iterable[Told], name: str) -> Iterable[Told]:
    """The same with a harmless name."""
    for event, commands in messages:
        match event:
            case WorkerJoined():
                yield replace(event, name=name), [Quarantine(0, name)]
            case BadUpdateArrived():
                yield replace(event, why=name), commands
            case Evaluated():
                yield replace(event, metrics={name: 0.5}), commands
            case TimePassed():
                yield event, [Finish(name)]
            case _:
                yield event, commands


def _places(page: Page) -> set[str]:
    """What can be found on a page, the parts of its pictures left out."""
    return {key for key, element in page.ids.items() if element.tag not in ("path", "clippath")}


def _elements(page: Page) -> list[Any]:
    found, waiting = [], [page.root]
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].children
    return found


def test_the_page_forbids_itself_what_it_does_not_need(tmp_path: Path) -> None:
    simulated(tmp_path / "run")
    page = page_of(tmp_path / "run")
    policies = [e.attributes["content"] for e in page.root.all("meta") if "http-equiv" in e.attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_that_differ_from_the_defaults_come_first(tmp_path: Path) -> None:
    simulated(tmp_path / "run", alpha=0.25)
    page = page_of(tmp_path / "run")
    rows = {cells[0].text: (cells[1].text, cells[2].text) for cells in page.rows("settings-changed")}
    assert rows["alpha"] == ("0.25", "0.6")
    assert rows["devices"] == ("10", "not set")
    (others,) = page.ids["settings"].all("ul")
    rest = [item.text.partition(" = ")[0] for item in others.all("li")]
    assert {*rows, *rest} == Settings.names()
    assert not rows.keys() & set(rest)


def test_settings_of_another_version_are_shown_all_the_same(tmp_path: Path) -> None:
    messages = [decided(1, 0, HALF), published(1)]
    page = page_of(told(tmp_path / "run", messages, rule="unheard-of:9", warp=[1, {"x": None}]))
    rows = {cells[0].text: cells[1].text for cells in page.rows("settings-changed")}
    assert (rows["rule"], rows["warp"]) == ("unheard-of:9", '[1, {"x": null}]')


# --- pictures --------------------------------------------------------------------------------------------------------


def test_thinning_keeps_peaks_gaps_and_both_ends() -> None:
    x = np.arange(10_000.0)
    y = np.sin(x / 500)
    y[4321], y[1234], y[5000:6000] = 9.0, -9.0, nan
    few_x, few_y = thinned(x, y, 200)
    assert len(few_x) <= 200
    assert (np.nanmax(few_y), np.nanmin(few_y), few_x[0], few_x[-1]) == (9.0, -9.0, 0.0, 9999.0)
    assert np.isnan(few_y[(few_x >= 5050) & (few_x < 5950)]).all()
    assert all(left < right for left, right in pairwise(few_x))


def test_several_runs_are_one_line_that_ends_at_the_mean_of_their_ends() -> None:
    long = (np.array([0.0, 1.0, 4.0]), np.array([0.0, 2.0, 8.0]))
    short = (np.array([0.0, 2.0]), np.array([0.0, 4.0]))
    at, mean, spread = averaged([long, short, (np.empty(0), np.empty(0))], 100)
    assert at.tolist() == [0.0, 1.0, 2.0, 4.0]
    assert mean.tolist() == [0.0, 1.0, 3.0, 6.0]
    assert spread == pytest.approx([0.0, 2**0.5, 2**0.5, 8**0.5])
    few, _, _ = averaged([(np.arange(1000.0), np.arange(1000.0))] * 2, 50)
    assert (len(few), few[0], few[-1]) == (50, 0.0, 999.0)
    assert [len(column) for column in averaged([], 50)] == [0, 0, 0]


def test_however_much_there_is_a_picture_stays_small() -> None:
    rng = np.random.default_rng(0)
    dots = {(int(u), float(w)): 1 for u, w in zip(rng.integers(0, 3000, 50_000), rng.random(50_000), strict=True)}
    assert len(pictures.weights("weights", dots, [], 3000, "alpha_t", 9)) < 80_000
    x = np.arange(100_000.0)
    assert len(pictures.curve("curve", x, rng.random(100_000), label="epochs", metric="x")) < 30_000
    assert len(pictures.curve("curve", x, np.full(100_000, nan), label="epochs", metric="x")) < 80_000


def test_pictures_take_their_colours_from_the_page_and_leave_matplotlib_alone() -> None:
    with mpl.rc_context({"text.usetex": True, "svg.fonttype": "path", "axes.facecolor": "#123456"}):
        before = dict(mpl.rcParams)
        svg = pictures.staleness("bars", {0: 3, 2: 1}, {5: 2}, 5)
        assert dict(mpl.rcParams) == before
    assert "#" not in svg.replace("url(#bars-", "").replace('href="#bars-', "")
    assert {"var(--ink)", "var(--bars)", "var(--alarm)", "var(--grid)"} <= {
        part.partition(")")[0] + ")" for part in svg.replace("var(", "|var(").split("|")
    }
    assert ">staleness (versions)</text>" in svg


def test_the_line_of_the_rule_runs_through_its_updates(tmp_path: Path) -> None:
    simulated(tmp_path / "run", epochs=60, staleness_fn="hinge:10,2")
    facts = read_run(tmp_path / "run")
    line = dict(run_page._rule_line(facts, 20))
    assert facts.devices.weights
    assert all(line[u] == pytest.approx(weight, rel=1e-2) for u, weight in facts.devices.weights)


# --- several runs ----------------------------------------------------------------------------------------------------


METHODS: dict[str, dict[str, Any]] = {"fast": {"epochs": 40}, "slow & steady": {"epochs": 9, "rule": "fedavg:3"}}


def compared(folder: Path) -> Spec:
    spec = Spec("digits", (1, 2, 3), METHODS, metric="x")
    for entry in spec.entries(folder):
        simulated(entry.folder, **{**METHODS[entry.method], "seed": entry.seed})
    return spec


def test_several_runs_are_compared_over_their_seeds(tmp_path: Path) -> None:
    spec = compared(tmp_path / "all")
    page = page_of(tmp_path / "all")
    expected = {row.method: row for row in Comparison.read(spec, tmp_path / "all").rows()}
    rows = {cells[0].text: cells for cells in page.rows("methods")}
    assert rows.keys() == {"fast", "slow---steady"}
    for name, cells in (("fast", rows["fast"]), ("slow & steady", rows["slow---steady"])):
        row = expected[name]
        assert cells[1].value == 3
        assert cells[2].value == pytest.approx(row.metric, rel=1e-12)
        assert cells[2].text.endswith(f"± {row.metric_spread:.4f}".rstrip("0"))
        assert (cells[3].value, cells[6].value) == (row.t, row.gradients)
        assert cells[7].value == pytest.approx(row.staleness)
    assert [cell.text for cell in page.ids["differing"].all("th")] == ["method", "rule", "epochs"]
    assert [[cell.text for cell in cells[1:]] for cells in page.rows("differing")] == [
        ["fedasync", "40"],
        ["fedavg:3", "9"],
    ]
    assert len(page.rows("each")) == 6
    assert "6 runs of 2 methods, all finished." in page.text
    assert len(page.root.all("figure")) == 3


def test_a_comparison_tells_what_is_not_finished_and_what_cannot_be_read(tmp_path: Path) -> None:
    simulated(tmp_path / "all" / "good")
    interrupted(tmp_path / "all" / "half")
    told(tmp_path / "all" / "none", [])
    simulated(tmp_path / "all" / "broken")
    (tmp_path / "all" / "broken" / LEDGER).write_bytes(b"no ledger at all")
    page = page_of(tmp_path / "all")
    assert [[cell.text for cell in cells[:2]] for cells in page.rows("each")] == [
        ["good", "finished"],
        ["half", "interrupted"],
        ["none", "interrupted"],
    ]
    ((broken, why),) = page.rows("unreadable")
    assert broken.text == "broken"
    assert "cannot be read as a ledger" in why.text
    assert "2 not finished" in page.text


def test_the_same_label_with_other_settings_is_another_line(tmp_path: Path) -> None:
    for seed, alpha in ((1, 0.5), (2, 0.5), (3, 0.9)):
        simulated(tmp_path / "all" / "mine" / f"seed-{seed}", seed=seed, alpha=alpha)
    assert [cells[1].value for cells in page_of(tmp_path / "all").rows("methods")] == [2, 1]


def test_curves_alone_make_a_comparison(tmp_path: Path) -> None:
    points = [CurvePoint(t, 2.0 * t, 10 * t, 0, {"accuracy": 1 - 0.9**t}) for t in range(20)]
    settings = {"task": "cifar10", **Settings(alpha=0.9).as_dict()}
    runs = [curve_run("FedAsync <b>", {**settings, "seed": seed}, points, {"t": 19}) for seed in (1, 2)]
    page = Page(report_curves(tmp_path / "figure.html", "Figure 2 <top>", runs).read_text())
    ((label, count, metric, epochs, time),) = page.rows("methods")
    last = points[-1]
    assert (label.text, count.value, metric.value) == ("FedAsync <b>", 2, last.metrics["accuracy"])
    assert (epochs.value, time.value) == (last.t, last.at)
    assert [cell.text for cell in page.ids["each"].all("th")] == ["run", "state", "seed", "accuracy", "epochs"]
    assert "Figure 2 <top>" in page.text
    with pytest.raises(InvalidValue, match="no run"):
        report_curves(tmp_path / "other.html", "nothing", [])


def test_many_methods_stay_one_readable_file(tmp_path: Path) -> None:
    points = [CurvePoint(t, 2.0 * t, 10 * t, 0, {"accuracy": 1 - 0.9**t}) for t in range(300)]
    runs = [curve_run(f"method {n}", {"alpha": n / 100, "seed": s}, points, {}) for n in range(40) for s in (1, 2, 3)]
    path = report_curves(tmp_path / "figure.html", "Many", runs)
    page = Page(path.read_text())
    assert path.stat().st_size < 500_000
    assert "The last 8 methods are not drawn." in page.text
    assert len(page.rows("methods")) == 40


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "run")
    path = report(tmp_path / "run")
    assert path == tmp_path / "run" / "report.html"
    before = path.read_bytes()

    def fail(*_: object) -> str:
        raise OffbeatError("no")

    with monkeypatch.context() as patch:
        patch.setattr(run_page, "run_page", fail)
        with pytest.raises(OffbeatError, match="no"):
            report(tmp_path / "run")
        patch.setattr(run_page, "run_page", lambda *_: "\ud800")
        with pytest.raises(UnicodeEncodeError):
            report(tmp_path / "run")
    assert path.read_bytes() == before
    assert [file.name for file in (tmp_path / "run").iterdir() if "aside" in file.name] == []
    with pytest.raises(OffbeatError, match="cannot write"):
        report(tmp_path / "run", tmp_path / "nowhere" / "page.html")


def test_the_same_run_at_the_same_moment_is_the_same_file(tmp_path: Path) -> None:
    simulated(tmp_path / "run")
    now = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    first, second = (report(tmp_path / "run", tmp_path / f"{n}.html", now=now).read_bytes() for n in (1, 2))
    assert first == second
    assert b"on 2026-01-02 03:04 UTC." in first


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="no folder"):
        report(tmp_path / "missing")
    with pytest.raises(InvalidValue, match="no run to report on"):
        report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_beside_a_run_is_no_run(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    report(tmp_path / "run")
    assert runs_under(tmp_path) == [tmp_path / "run"]
    simulation = Simulation(TASK, Settings(epochs=100, in_flight_max=5), folder=tmp_path / "run")
    assert simulation.run().summary["t"] == 100  # it can still go on


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_without_its_extra_one_line_says_what_to_install(tmp_path: Path, missing: str) -> None:
    simulated(tmp_path / "run")
    program = f"""
import sys
sys.modules[{missing!r}] = None
from offbeat.report import report
from offbeat.errors import MissingExtra
try:
    report({str(tmp_path / "run")!r})
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{missing} is not installed; run: pip install 'offbeat[plots]'"
    assert not (tmp_path / "run" / "report.html").exists()


# --- size ------------------------------------------------------------------------------------------------------------


def test_what_is_kept_does_not_grow_with_updates(tmp_path: Path) -> None:
    peaks = {}
    for count in (500, 8_000):
        folder = told(tmp_path / f"run-{count}", _many(count))
        tracemalloc.start()
        facts = read_run(folder)
        gc.collect()  # what the interpreter keeps for reuse is not kept by the facts
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        peaks[count] = kept
        assert facts.fold.applied == count
    assert peaks[8_000] - peaks[500] < 40 * 7_500, "bytes per update"


def _many(count: int) -> Iterable[Told]:
    for number in range(1, count + 1):
        yield decided(number, number % 7, HALF, staleness=number % 11)
        yield published(number)


@pytest.mark.slow
def test_a_hundred_thousand_updates_are_a_small_file_made_in_little_memory(tmp_path: Path) -> None:
    folder = told(tmp_path / "run", _large(100_000))
    tracemalloc.start()
    facts = read_run(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert facts.fold.applied == 100_000
    assert peak < 60 << 20
    path = report(folder)
    assert path.stat().st_size < 500_000
    assert Page(path.read_text()).fact("applied") == 100_000


def _large(count: int) -> Iterable[Told]:
    rng = np.random.default_rng(0)
    for number in range(1, count + 1):
        weight = float(rng.random())
        mix = Mix(1 - weight, weight, 0.0, True)
        yield decided(number, int(rng.integers(5000)), mix, staleness=int(rng.integers(300)))
        yield published(number)
        if number % 10 == 0:
            yield Evaluated(number + 0.5, number, {"accuracy": weight, "loss": 1 / weight}), []


def test_a_typical_report_is_small(tmp_path: Path) -> None:
    simulated(tmp_path / "run", epochs=1500, evaluate_every=1, in_flight_max=10)
    size = report(tmp_path / "run").stat().st_size
    assert 20_000 < size < 150_000
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["t"] == 1500
