"""Trackers: what a ledger tells them, whoever follows it and when; read back by TensorBoard's and MLflow's readers."""

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from math import isnan, log, nan
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.protocol.messages import AnswerPush, Decision, Evaluated, Lease, Outcome, UpdateArrived, VersionPublished
from offbeat.settings import Settings
from offbeat.sim.curve import CURVE, read_curve
from offbeat.sim.run import Simulation
from offbeat.storage.json_file import write_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import RunFolder
from offbeat.trackers import follower as follower_module
from offbeat.trackers import mlflow as mlflow_module
from offbeat.trackers.follower import Follower, Following, description_of, follow
from offbeat.trackers.mlflow import BATCH, MLflow
from offbeat.trackers.sink import (
    PARTS,
    ProgressReader,
    Report,
    RunDescription,
    Sink,
    TrackedPoint,
    UpdateWindow,
    sink_of,
)
from offbeat.trackers.tensorboard import TensorBoard
from tests.simulation.quadratic import Quadratic

PATIENCE_S = 60.0
TASK = Quadratic([0.0, 1.0, 4.0, 9.0, 2.5, 7.5], [0.5, 0.7, 0.2, 0.9, 0.4, 0.6], size=5, noise=0.3)
WORLD: dict[str, Any] = {"executor": "inline", "device_model": "lognormal:1", "seed": 4, "evaluate_every": 5}
METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {"rule": "fedasync", "epochs": 60},
    "fedbuff": {"rule": "fedbuff:3", "epochs": 20},
    "deadline": {"rule": "fedavg:3", "mix_s": 0.2, "group_deadline_s": 2.0, "epochs": 20},
    "slow server": {"rule": "fedasync", "mix_s": 0.2, "queue_max": 2, "retry_after_s": 0.3, "epochs": 30},
    "too stale": {"rule": "fedasync", "staleness_policy": "reject", "staleness_max": 2, "epochs": 40},
}


class Heard:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.reports: list[TrackedPoint | UpdateWindow] = []
        self.run: RunDescription | None = None
        self.summary: Mapping[str, Any] | None = None
        self.flushed = self.closed = 0
        self.fails_at: int | None = None
        self.changed = threading.Event()

    def begin(self, run: RunDescription) -> int:
        self.about = run
        return len(self.reports)

    def flush(self) -> None:
        self.flushed += 1
        self.changed.set()

    def end(self, summary: Mapping[str, Any]) -> None:
        assert self.summary is None, "a run ends once"
        self.summary = summary

    def close(self) -> None:
        self.closed += 1

    def tell(self, report: Report) -> None:
        if len(self.reports) == self.fails_at:
            raise ConnectionError("the tracker is away")
        self.reports.append(report)

    def ended(self) -> bool:
        return self.summary is not None

    @property
    def points(self) -> list[TrackedPoint]:
        return [report for report in self.reports if isinstance(report, TrackedPoint)]

    @property
    def windows(self) -> list[UpdateWindow]:
        return [report for report in self.reports if isinstance(report, UpdateWindow)]


def heard(folder: Path) -> Heard:
    sink = Heard()
    assert follow(folder, [sink])
    return sink


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small simulated run."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    offbeat.simulate(TASK, dir=folder, **WORLD, **METHODS["fedasync"])
    return folder


# --- what a ledger says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_points_are_those_of_the_curve_and_windows_hold_every_decision(method: str, tmp_path: Path) -> None:
    result = offbeat.simulate(TASK, dir=tmp_path / "run", **WORLD, **METHODS[method])
    told = heard(tmp_path / "run")
    curve = read_curve(tmp_path / "run" / CURVE)
    assert [tuple(point) for point in told.points] == [(p.t, p.at, p.gradients, p.metrics) for p in curve]
    assert [s for window in told.windows for s in window.staleness] == [d.staleness for d in result.ledger]
    assert [a for window in told.windows for a in window.alpha_t] == [d.mix.new for d in result.ledger if d.mix]
    with RunFolder.open(tmp_path / "run").ledger() as ledger:
        refused = [d for d in ledger.decisions() if not d.mix]
    assert sum(window.refused for window in told.windows) == len(refused)
    assert (method == "too stale") <= bool(refused)
    assert max(window.t for window in told.windows if window.staleness) == result.summary["t"]
    assert told.summary is not None
    assert told.summary["x_sha256"] == result.summary["x_sha256"]


def decided(ledger: Ledger, count: int, first: int = 1) -> None:
    for i in range(first, first + count):
        lease = Lease(i, 1, 1, i, i - 1, 0.0, 9.0)
        decision = Decision(i, i / 10, lease, Outcome.APPLIED, i, i % 7, Mix(0.5, 0.5, 0.0, True), 5, 3)
        ledger.record(UpdateArrived(i / 10, 1, i, 5, 3), [AnswerPush(1, i, Outcome.APPLIED, decision)])
        ledger.record(VersionPublished(i / 10, i), [])


def test_many_updates_are_few_windows(tmp_path: Path) -> None:
    """A window is a part of all before it, so their number grows like the logarithm: 100,000 make fewer than 1,443."""
    with RunFolder.begin(tmp_path / "run", {"seed": 1}) as folder:
        decided(folder.ledger(), 20_000)
    sink = Heard()
    assert not follow(tmp_path / "run", [sink]), "it is not finished"
    assert PARTS < len(sink.windows) < PARTS * (1 + log(20_000 / PARTS))
    assert all(len(window.staleness) == 1 for window in sink.windows[:PARTS]), "a short run is seen in detail"
    assert sum(len(window.staleness) for window in sink.windows) >= 20_000 * (1 - 1 / PARTS)


def test_an_old_version_that_is_evaluated_late_has_its_own_numbers(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path / "run", {"seed": 1}) as folder:
        decided(folder.ledger(), 20)
        for t in (0, 20, 7):
            folder.ledger().record(Evaluated(9.0, t, {"loss": float(t)}), [])
    points = _interrupted(tmp_path / "run").points
    assert points == [
        TrackedPoint(0, 0.0, 0, {"loss": 0}),
        TrackedPoint(20, 2.0, 60, {"loss": 20}),
        TrackedPoint(7, 0.7, 21, {"loss": 7}),
    ]


def _interrupted(folder: Path) -> Heard:
    sink = Heard()
    assert not follow(folder, [sink])
    return sink


def test_what_is_committed_while_others_read_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind by kind is read, so of one kind there may be rows already that belong to missing ones of another."""
    with RunFolder.begin(tmp_path / "run", {"seed": 1}) as folder:
        mine = folder.ledger()
        decided(mine, 5)
        mine.flush()
        select, pending = Ledger.select, [6]

        def while_another_writes(ledger: Ledger, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
            if "'published'" in query and pending:
                decided(mine, 5, pending.pop())
                mine.record(Evaluated(9.0, 10, {"loss": 0.5}), [])
                mine.flush()
            return select(ledger, query, values)

        monkeypatch.setattr(Ledger, "select", while_another_writes)
        reader = ProgressReader()
        with RunFolder.open(tmp_path / "run").ledger() as ledger:
            first, second = reader.news(ledger), reader.news(ledger)
    assert not pending
    assert [report.t for report in first] == [1, 2, 3, 4, 5]
    assert [report.t for report in second] == [6, 7, 8, 9, 10, 10]
    assert second[-1] == TrackedPoint(10, 1.0, 30, {"loss": 0.5})


def test_the_last_window_is_told_when_the_run_is_finished(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path / "run", {"seed": 1}) as folder:
        decided(folder.ledger(), PARTS + 101)
    sink = Heard()
    assert not follow(tmp_path / "run", [sink])
    assert sum(len(window.staleness) for window in sink.windows) == PARTS + 100, "it may become larger"
    write_json(tmp_path / "run" / "summary.json", {"t": PARTS + 101})
    assert follow(tmp_path / "run", [sink])
    assert sum(len(window.staleness) for window in sink.windows) == PARTS + 101
    assert sink.windows[-1].t == PARTS + 101


# --- who follows, and when -------------------------------------------------------------------------------------------


def test_a_run_that_is_followed_live_is_told_like_a_finished_one(run: Path, tmp_path: Path) -> None:
    sink = Heard()
    simulation = Simulation(TASK, Settings.of({**WORLD, **METHODS["fedasync"]}), folder=tmp_path / "run")
    follower = Follower(tmp_path / "run", [sink])
    while not simulation.finished:
        simulation.executor.finish(simulation.engine.advance(handled_max=simulation.engine.handled + 3))
        assert simulation.ledger is not None
        simulation.ledger.flush()
        assert not follower.catch_up()
    simulation.result()
    simulation.close()
    assert not sink.ended()
    assert follower.catch_up()
    assert follower.catch_up(), "and that is that"
    follower.close()
    whole = heard(run)
    assert sink.reports == whole.reports
    assert sink.ended()
    assert sink.closed == 1


def test_a_simulation_that_went_back_to_its_checkpoint_is_told_once(run: Path, tmp_path: Path) -> None:
    sink = Heard()
    follower = Follower(tmp_path / "run", [sink])
    for stop in (40, 90):
        simulation = Simulation(TASK, Settings.of({**WORLD, **METHODS["fedasync"]}), folder=tmp_path / "run")
        _go(simulation, stop)
        simulation.checkpoint()
        _go(simulation, stop + 30)
        simulation.close()
        follower.catch_up()
    offbeat.simulate(TASK, dir=tmp_path / "run", **WORLD, **METHODS["fedasync"])
    assert follower.catch_up()
    assert sink.reports == heard(run).reports


def _go(simulation: Simulation, handled: int) -> None:
    while simulation.engine.handled < handled and not simulation.finished:
        simulation.executor.finish(simulation.engine.advance(handled_max=handled))


def test_a_tracker_that_was_away_hears_the_rest_and_nobody_else_twice(run: Path) -> None:
    away, there = Heard(), Heard()
    away.fails_at = 20
    follower = Follower(run, [away, there])
    for _ in range(2):
        with pytest.raises(OffbeatError, match=r"Heard was not told of .*small: the tracker is away"):
            follower.catch_up()
    assert len(away.reports) == 20
    away.fails_at = None
    assert follower.catch_up()
    assert away.reports == there.reports == heard(run).reports
    assert away.summary is not None


def test_a_folder_without_a_ledger_is_waited_for(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path / "run", {"seed": 1}):
        assert not Follower(tmp_path / "run", [Heard()]).catch_up()
    with pytest.raises(InvalidValue, match="not the folder of a run"):
        Follower(tmp_path, [Heard()]).catch_up()


def test_a_run_is_known_by_its_folder_and_its_beginning(run: Path, tmp_path: Path) -> None:
    mine = description_of(RunFolder.open(run))
    assert mine.name == "small"
    assert mine.settings["rule"] == "fedasync"
    assert mine.begun_at == pytest.approx((run / "settings.json").stat().st_mtime)
    with RunFolder.begin(tmp_path / "small", mine.settings):
        pass
    assert description_of(RunFolder.open(tmp_path / "small")).key != mine.key


def test_a_live_follower_stays_until_the_run_is_over(run: Path, tmp_path: Path) -> None:
    simulation = Simulation(TASK, Settings.of({**WORLD, **METHODS["fedasync"]}), folder=tmp_path / "run")
    _go(simulation, 60)
    simulation.checkpoint()
    sink, ended = Heard(), []
    thread = threading.Thread(target=lambda: ended.append(follow(tmp_path / "run", [sink], live=True, every_s=0.01)))
    thread.start()
    assert sink.changed.wait(PATIENCE_S)
    simulation.run()
    thread.join(PATIENCE_S)
    assert ended == [True]
    assert sink.reports == heard(run).reports


def test_a_live_follower_does_not_wait_for_a_run_that_was_interrupted(tmp_path: Path) -> None:
    simulation = Simulation(TASK, Settings.of({**WORLD, **METHODS["fedasync"]}), folder=tmp_path / "run")
    _go(simulation, 60)
    simulation.close()
    sink = Heard()
    assert not follow(tmp_path / "run", [sink], live=True)
    assert sink.points
    assert sink.closed == 1


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """The tracker that `heard:` names."""
    sink = Heard()
    monkeypatch.setattr(follower_module, "sink_of", lambda _spec: sink)
    return sink


def test_a_run_is_followed_while_it_runs(run: Path, tmp_path: Path, followed: Heard) -> None:
    simulation = Simulation(TASK, Settings.of({**WORLD, **METHODS["fedasync"]}), folder=tmp_path / "run")
    with Following(tmp_path / "run", ["heard:"], every_s=0.01):
        _go(simulation, 60)
        simulation.checkpoint()
        followed.changed.clear()
        assert followed.changed.wait(PATIENCE_S)
        simulation.run()
    assert followed.reports == heard(run).reports
    assert followed.summary is not None
    assert followed.closed == 1


def test_a_tracker_that_fails_is_a_warning_and_not_one_every_few_seconds(
    run: Path, followed: Heard, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.fails_at = 3
    tries = threading.Semaphore(0)
    catch_up = Follower.catch_up

    def counted(follower: Follower) -> bool:
        tries.release()
        return catch_up(follower)

    monkeypatch.setattr(Follower, "catch_up", counted)
    with caplog.at_level(logging.WARNING), Following(run, ["heard:"], every_s=0.001):
        for _ in range(5):
            assert tries.acquire(timeout=PATIENCE_S)
    assert [record.getMessage() for record in caplog.records] == [
        f"Heard was not told of {run}: the tracker is away",
    ]
    assert len(followed.reports) == 3


@pytest.mark.parametrize("spec", ["tensorboard", "tensorboard:", "wandb:x", "", "/some/where"])
def test_an_unknown_tracker_is_refused(spec: str) -> None:
    with pytest.raises(InvalidValue, match="use tensorboard:DIR or mlflow:URI"):
        sink_of(spec)


@pytest.mark.parametrize(("spec", "module"), [("tensorboard:x", "tensorboard"), ("mlflow:sqlite:///x", "mlflow")])
def test_a_missing_package_is_named_before_anything_runs(
    spec: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'offbeat\[{module}\]'"):
        Following(Path(), [spec])


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def accumulated(folder: Path) -> Any:
    """What TensorBoard reads, all of it."""
    reader = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    found = reader(str(folder), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    return found


def test_tensorboard_sees_the_curves(run: Path, tmp_path: Path) -> None:
    assert follow(run, [sink_of(f"tensorboard:{tmp_path / 'tb'}")])
    told, seen = heard(run), accumulated(tmp_path / "tb" / "small")
    begun_at = (run / "settings.json").stat().st_mtime
    curve = read_curve(run / CURVE)
    assert len(curve) > 10
    scalars = seen.Scalars("x")
    assert [event.step for event in scalars] == [point.t for point in curve]
    assert [event.value for event in scalars] == pytest.approx([point.metrics["x"] for point in curve], rel=1e-6)
    assert [event.wall_time - begun_at for event in scalars] == pytest.approx([p.at for p in curve], abs=1e-3)
    assert [event.value for event in seen.Scalars("offbeat/gradients")] == [point.gradients for point in curve]
    means = [sum(w.staleness) / len(w.staleness) for w in told.windows if w.staleness]
    assert [event.value for event in seen.Scalars("offbeat/staleness_mean")] == pytest.approx(means, rel=1e-6)
    histograms = [event.histogram_value for event in seen.Histograms("offbeat/alpha_t")]
    assert sum(histogram.num for histogram in histograms) == sum(len(w.alpha_t) for w in told.windows)
    assert sum(sum(histogram.bucket) for histogram in histograms) == sum(histogram.num for histogram in histograms)
    assert max(h.max for h in histograms) == pytest.approx(max(a for w in told.windows for a in w.alpha_t))


def test_tensorboard_knows_the_settings(run: Path, tmp_path: Path) -> None:
    follow(run, [TensorBoard(str(tmp_path))])
    content = accumulated(tmp_path / "small").PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"rule" in content
    assert b"fedasync" in content


def test_whoever_follows_again_leaves_no_second_curve_in_tensorboard(run: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "small" / "notes.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    for _ in range(3):
        follow(run, [TensorBoard(str(tmp_path))])
    steps = [event.step for event in accumulated(tmp_path / "small").Scalars("x")]
    assert steps == [point.t for point in read_curve(run / CURVE)]
    assert foreign.read_text() == "mine"
    assert len(list(tmp_path.rglob("*tfevents*"))) == 1


def test_two_runs_of_one_name_are_two_runs_in_tensorboard(run: Path, tmp_path: Path) -> None:
    offbeat.simulate(TASK, dir=tmp_path / "small", **WORLD, **METHODS["slow server"])
    for folder in (run, tmp_path / "small", run):
        follow(folder, [TensorBoard(str(tmp_path / "tb"))])
    first, second = sorted((tmp_path / "tb").iterdir())
    assert first.name == "small"
    assert second.name.startswith("small-")
    assert len(accumulated(first).Scalars("x")) == len(read_curve(run / CURVE))
    assert len(accumulated(second).Scalars("x")) == len(read_curve(tmp_path / "small" / CURVE))


def test_a_window_without_applied_updates_and_a_diverged_metric_are_shown(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path))
    assert sink.begin(RunDescription("odd", "k", 1e9, {"none": None, "list": [1, 2], "on": True})) == 0
    sink.tell(UpdateWindow(3, 1.0, (), (), 4))
    sink.tell(UpdateWindow(4, 1.5, (2, 2, 2), (0.5, 0.5, 0.5), 0))
    sink.tell(TrackedPoint(4, 1.5, 9, {"loss": nan}))
    sink.flush()
    live = accumulated(tmp_path / "odd")
    sink.close()
    sink.close()
    assert [event.value for event in live.Scalars("offbeat/refused")] == [4, 0]
    assert [event.step for event in live.Scalars("offbeat/staleness_mean")] == [4]
    assert isnan(live.Scalars("loss")[0].value)
    assert live.Histograms("offbeat/staleness")[0].histogram_value.num == 3


# --- MLflow ----------------------------------------------------------------------------------------------------------

NOLOAD = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")
"""MLflow's own; it has not heard of SQLAlchemy 2.1."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An MLflow store, which takes a while to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def runs_of(store: str, name: str) -> tuple[Any, list[Any]]:
    """MLflow's reader, and the runs of this name."""
    client = import_module("mlflow.tracking").MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("offbeat")
    assert experiment is not None
    return client, [r for r in client.search_runs([experiment.experiment_id]) if r.info.run_name == name]


@NOLOAD
@pytest.mark.slow  # MLflow takes seconds to make its store
def test_mlflow_sees_the_curves_once_however_often_they_are_told(run: Path, store: str) -> None:
    for _ in range(2):
        assert follow(run, [sink_of(f"mlflow:{store}")])
    client, found = runs_of(store, "small")
    assert len(found) == 1
    info, data, curve = found[0].info, found[0].data, read_curve(run / CURVE)
    history = sorted(client.get_metric_history(info.run_id, "x"), key=lambda metric: metric.step)
    assert [(metric.step, metric.value) for metric in history] == [(p.t, p.metrics["x"]) for p in curve]
    begun_ms = (run / "settings.json").stat().st_mtime * 1000
    assert [metric.timestamp - begun_ms for metric in history] == pytest.approx([p.at * 1000 for p in curve], abs=2)
    gradients = client.get_metric_history(info.run_id, "offbeat/gradients")
    assert sorted(metric.value for metric in gradients) == [point.gradients for point in curve]
    windows = [window for window in heard(run).windows if window.staleness]
    means = client.get_metric_history(info.run_id, "offbeat/staleness_mean")
    assert len(means) == len(windows)
    assert (data.params["rule"], data.params["epochs"]) == ("fedasync", "60")
    summary = json.loads((run / "summary.json").read_text())
    assert data.tags["offbeat.x_sha256"] == summary["x_sha256"]
    assert info.status == "FINISHED"
    assert info.end_time - info.start_time == pytest.approx(summary["virtual_s"] * 1000, abs=2)


@NOLOAD
@pytest.mark.slow  # MLflow takes seconds to make its store
def test_in_mlflow_another_follower_goes_on_where_one_was_cut_off(
    run: Path, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_module, "BATCH", 40)
    offbeat.simulate(TASK, dir=tmp_path / "cut", **WORLD, **METHODS["fedasync"])
    sink, batches = MLflow(store), iter(range(4))
    log_batch = sink._client.log_batch

    def cut(*arguments: Any, **named: Any) -> None:
        if "params" not in named and next(batches, None) is None:
            raise ConnectionError("cut off")
        log_batch(*arguments, **named)

    monkeypatch.setattr(sink._client, "log_batch", cut)
    with pytest.raises(OffbeatError, match=r"MLflow was not told of .*: cut off"):
        follow(tmp_path / "cut", [sink])
    client, (begun,) = runs_of(store, "cut")
    assert begun.info.status == "RUNNING"
    assert 0 < int(begun.data.tags["offbeat.told"]) < len(heard(run).reports)
    assert follow(tmp_path / "cut", [MLflow(store)])
    client, (ended,) = runs_of(store, "cut")
    assert (ended.info.run_id, ended.info.status) == (begun.info.run_id, "FINISHED")
    assert int(ended.data.tags["offbeat.told"]) == len(heard(run).reports)
    for name in ("x", "offbeat/at_s"):
        steps = sorted(metric.step for metric in client.get_metric_history(ended.info.run_id, name))
        assert steps == [point.t for point in read_curve(run / CURVE)]


@NOLOAD
@pytest.mark.slow  # MLflow takes seconds to make its store
def test_mlflow_takes_many_numbers_odd_names_and_nan(store: str) -> None:
    sink = MLflow(store)
    odd = {f"setting {i} (%)": "x" * 10_000 for i in range(150)} | {"none": None, "nested": {"a": [1]}}
    assert sink.begin(RunDescription("odd", "it's", 1e9, odd)) == 0
    sink.tell(TrackedPoint(1, 0.5, 3, {"top-5 (%)": 0.5, "../loss": nan, "": 1.0, "a//b": 2.0, "..": 3.0}))
    sink.tell(TrackedPoint(2, 0.6, 3, {f"m{i}": float(i) for i in range(2 * BATCH + 5)}))
    sink.tell(UpdateWindow(2, 0.7, (), (), 1))
    sink.flush()
    sink.flush()
    sink.close()
    again = MLflow(store)
    assert again.begin(RunDescription("odd", "it's", 1e9, odd)) == 3
    _, (found,) = runs_of(store, "odd")
    metrics = dict(found.data.metrics)
    assert isnan(metrics.pop("_.._loss"))
    assert [metrics[name] for name in ("top-5 ___", "_", "_a__b", "_.._"[:-1])] == [0.5, 1.0, 2.0, 3.0]
    assert metrics[f"m{2 * BATCH + 4}"] == 2 * BATCH + 4
    assert len(found.data.params) == 151


@NOLOAD
@pytest.mark.slow  # MLflow takes seconds to make its store
def test_the_experiment_is_the_one_that_mlflow_is_told(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    MLflow(store).begin(RunDescription("elsewhere", "k", 1e9, {}))
    assert runs_of(store, "elsewhere")[1] == []


def test_a_store_that_mlflow_cannot_use_is_refused() -> None:
    with pytest.raises(InvalidValue, match="MLflow cannot use this store"):
        sink_of("mlflow:nowhere://x")


@pytest.mark.slow  # MLflow takes seconds to make its store
def test_mlflow_reports_to_nobody_but_the_store(tmp_path: Path) -> None:
    """In a process that looks like a user's, for in tests MLflow is silent by itself; nothing could get out of it."""
    program = (
        "from offbeat.trackers.sink import sink_of; sink_of('mlflow:http://127.0.0.1:9')\n"
        "from mlflow.telemetry import get_telemetry_client; print(get_telemetry_client())"
    )
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    env |= {"HOME": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.stdout.strip() == "None", done.stderr
    assert not list(tmp_path.rglob("telemetry.json"))


def test_every_tracker_is_a_sink(tmp_path: Path) -> None:
    sinks: list[Sink] = [Heard(), TensorBoard(str(tmp_path)), MLflow("http://127.0.0.1:9")]
    for sink in sinks:
        sink.close()
