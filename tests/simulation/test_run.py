"""Runs as a user starts them: one seed one run, whatever executor; folders; interruption and resumption."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.settings import Settings
from offbeat.sim.run import Run, Simulation
from offbeat.storage.run_folder import RunFolder
from offbeat.task import solve, start
from tests.simulation.quadratic import Quadratic

TASK = Quadratic([0.0, 1.0, 4.0, 9.0, 2.5, 7.5], [0.5, 0.7, 0.2, 0.9, 0.4, 0.6], size=50, noise=0.3)
METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {"rule": "fedasync", "epochs": 150},
    "fedbuff": {"rule": "fedbuff:3", "epochs": 40},
    "delta": {"rule": "delta", "alpha": 0.3, "epochs": 150},
    "fedavg": {"rule": "fedavg:4", "epochs": 30},
    "over-selected": {"rule": "fedavg:3", "over_selection": 1.5, "epochs": 30},
    "sampled": {"rule": "fedasync", "device_model": "sampled:5", "epochs": 150},
    "lossy": {"rule": "fedasync", "dropout": 0.3, "lease_s": 5.0, "epochs": 150},
    "paced": {"rule": "fedasync", "staleness_policy": "pace", "staleness_max": 2, "pace_wait_s": 2.0, "epochs": 100},
    "slow server": {"rule": "fedasync", "mix_s": 0.2, "queue_max": 2, "retry_after_s": 0.3, "epochs": 60},
    "slow fedavg": {"rule": "fedavg:3", "mix_s": 0.2, "group_deadline_s": 2.0, "epochs": 25},
    "awaited": {"rule": "fedasync", "gamma": 0.1, "gamma_schedule": "plateau:x,0.9", "evaluate_every": 1, "epochs": 60},
    "come and go": {"rule": "fedasync", "availability": 0.6, "availability_period_s": 9.0, "epochs": 100},
    "two each": {"rule": "fedasync", "tasks_per_device": 2, "in_flight_max": 9, "epochs": 150},
    "fair": {"rule": "fedasync", "scheduler": "fair", "in_flight_max": 3, "epochs": 150},
}


def simulate(**settings: Any) -> Run:
    return offbeat.simulate(TASK, **{"executor": "inline", "device_model": "lognormal:1", "seed": 4, **settings})


@pytest.mark.parametrize("method", METHODS)
def test_one_seed_is_one_run(method: str) -> None:
    first, again, other = simulate(**METHODS[method]), simulate(**METHODS[method]), simulate(**METHODS[method], seed=5)
    assert first.summary["x_sha256"] == again.summary["x_sha256"] != other.summary["x_sha256"]
    assert first.ledger == again.ledger
    assert first.summary["t"] == METHODS[method]["epochs"]


@pytest.mark.parametrize(
    ("stop_at", "method"),
    [(60, method) for method in METHODS]
    + [(stop_at, method) for stop_at in (1, 130) for method in ("fedbuff", "lossy", "slow fedavg")]
    + [
        pytest.param(stop_at, method, marks=pytest.mark.slow)
        for stop_at in (1, 130)
        for method in sorted({*METHODS} - {"fedbuff", "lossy", "slow fedavg"})
    ],
)
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(
    method: str, stop_at: int, tmp_path: Path
) -> None:
    """The run is dropped on the floor twice after a checkpoint, having gone on a little further each time."""
    settings = {"executor": "inline", "device_model": "lognormal:1", "seed": 4, **METHODS[method]}
    for stop in (stop_at, stop_at + 40):
        simulation = Simulation(TASK, Settings.of(settings), folder=tmp_path / "run")
        _go(simulation, stop)
        simulation.checkpoint()
        _go(simulation, stop + 13)
        simulation.close()
    resumed = offbeat.simulate(TASK, dir=tmp_path / "run", **settings)
    whole = offbeat.simulate(TASK, dir=tmp_path / "whole", **settings)
    assert resumed.summary["x_sha256"] == whole.summary["x_sha256"]
    assert resumed.ledger == whole.ledger
    assert resumed.metrics == whole.metrics
    rows = [list(RunFolder.open(tmp_path / name).ledger().rows()) for name in ("run", "whole")]
    assert [row[1:] for row in rows[0] if row.kind != "truncated"] == [row[1:] for row in rows[1]]


def _go(simulation: Simulation, handled: int) -> None:
    while simulation.engine.handled < handled and not simulation.finished:
        simulation.executor.finish(simulation.engine.advance(handled_max=handled))


def test_a_run_that_was_interrupted_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    simulation = Simulation(TASK, Settings(executor="inline", epochs=50), folder=tmp_path)
    _go(simulation, 30)
    simulation.close()
    assert offbeat.simulate(TASK, dir=tmp_path, executor="inline", epochs=50).summary["t"] == 50


def test_a_folder_holds_everything_about_its_run(tmp_path: Path) -> None:
    run = simulate(dir=tmp_path / "new" / "run", epochs=40)
    folder = RunFolder.open(tmp_path / "new" / "run")
    assert folder.state == "finished"
    assert folder.summary is not None
    assert folder.summary["x_sha256"] == run.summary["x_sha256"]
    assert folder.settings == {"task": run.summary["task"], **run.summary["settings"]}
    applied = [decision for decision in folder.ledger().decisions() if decision.mix]
    assert applied == run.ledger
    assert np.array_equal(folder.model(run.x.layout).vector, run.x.vector)
    assert (tmp_path / "new" / "run" / "metrics.csv").read_text().startswith("t,at,gradients,bytes,x\n")


def test_a_finished_run_and_other_settings_are_refused(tmp_path: Path) -> None:
    simulate(dir=tmp_path, epochs=10)
    with pytest.raises(offbeat.OffbeatError, match="finished"):
        simulate(dir=tmp_path, epochs=10)


def test_the_ends() -> None:
    assert simulate(gradients=33).summary["gradients"] == 33
    timed = simulate(until_s=7.5).summary
    assert (timed["virtual_s"], timed["ended"]) == (7.5, "7.5 s")
    reached = simulate(target="x>=2", epochs=500, evaluate_every=1).summary
    assert reached["x"] >= 2
    assert reached["t"] < 500


def test_bytes_and_gradients_are_counted() -> None:
    run = simulate(epochs=25)
    assert run.summary["gradients"] == run.summary["applied"] == 25
    assert run.summary["bytes_up"] == 25 * 50 * 4
    assert run.summary["bytes_down"] >= run.summary["bytes_up"]
    assert [point.gradients for point in run.metrics] == [point.t for point in run.metrics]


def test_staleness_never_exceeds_the_bound_under_pace_and_reject() -> None:
    for policy in ("pace", "reject"):
        run = simulate(staleness_policy=policy, staleness_max=2, pace_wait_s=2.0, epochs=100)
        assert run.summary["staleness_largest"] <= 2


def test_adding_a_device_changes_no_other_devices_stream() -> None:
    """Under sampled staleness with one device more, trainings of the same (device, number) give the same model."""
    six, seven = TASK, Quadratic([*TASK.centres, 3.0], [*TASK.shrink, 0.5], size=50, noise=0.3)
    x = start(six, 0)
    for device in range(6):
        work = offbeat.Work(device, 3, 9)
        alone, beside = (solve(task, x, work).x_new.vector for task in (six, seven))
        assert np.array_equal(alone, beside)


def test_fedavg_waits_for_the_slowest_and_over_selection_does_not() -> None:
    plain = simulate(rule="fedavg:4", epochs=20, device_model="lognormal:1.5").summary["virtual_s"]
    over = simulate(rule="fedavg:4", over_selection=1.5, epochs=20, device_model="lognormal:1.5").summary["virtual_s"]
    cut = simulate(rule="fedavg:4", group_deadline_s=1.0, epochs=20, device_model="lognormal:1.5").summary["virtual_s"]
    assert over < plain
    assert cut < plain


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rule": "fedsgd"}, "rule 'fedsgd' is unknown"),
        ({"rule": "fedavg:0"}, "k is 0"),
        ({"alpha": 7}, r"alpha is 7.*\(0, 1\]"),
        ({"device_model": "sampled:0"}, "sampled:K"),
        ({"device_model": "gauss:1"}, "device_model 'gauss:1' is unknown"),
        ({"staleness_fn": "sqrt"}, "staleness_fn 'sqrt' is unknown"),
        ({"in_flight_max": 0}, "in_flight_max is 0"),
        ({"in_flight_max": 7}, r"1\.\.6"),
        ({"devices": 7}, r"1\.\.6"),
        ({"epochs": 0}, "epochs is 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"target": "good"}, "accuracy>=0.95"),
        ({"target": "y>=0.95"}, "the task's metrics are x"),
        ({"staleness_policy": "reject"}, "staleness_max"),
        ({"executor": "gpu"}, "executor 'gpu' is unknown"),
        ({"gama": 0.1}, "did you mean gamma"),
        ({"gamma": 0.1}, "with_settings"),
        ({"rule": "sgd"}, "pooled"),
    ],
)
def test_wrong_settings_are_refused_and_leave_no_folder(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(offbeat.OffbeatError, match=said):
        simulate(**{"dir": tmp_path / "run", **wrong})
    assert not (tmp_path / "run").exists()


def test_the_executor_that_was_chosen_is_kept_when_a_run_goes_on(tmp_path: Path) -> None:
    simulation = Simulation(TASK, Settings(executor="inline", epochs=50), folder=tmp_path)
    simulation.close()
    assert offbeat.simulate(TASK, dir=tmp_path, executor="auto", epochs=50).summary["executor"] == "inline"


def test_whose_data_count_is_told(tmp_path: Path) -> None:
    run = simulate(alpha=0.5, staleness_fn="constant", epochs=40, dir=tmp_path)
    assert sum(mass for mass, _ in run.contribution.values()) == pytest.approx(0.5 * 40)
    assert sum(left for _, left in run.contribution.values()) == pytest.approx(1 - 0.5**40)
    assert (tmp_path / "contribution.csv").read_text().startswith("device,mass,surviving\n0,")


def test_links_take_their_time() -> None:
    fast, slow = (simulate(epochs=30, down_mbps=rate, up_mbps=rate).summary["virtual_s"] for rate in (None, 0.01))
    per_task = 2 * 50 * 4 / (0.01 * 125_000)
    assert slow == pytest.approx(fast + per_task * 30 / 6, rel=0.5)  # six devices work side by side


def test_a_rule_object_brings_its_groups() -> None:
    named, built = simulate(rule="fedavg:4", epochs=10), simulate(rule=offbeat.fedavg(4), epochs=10)
    assert named.summary["x_sha256"] == built.summary["x_sha256"]
    assert built.summary["staleness_largest"] == 0


def test_a_group_has_every_device_once() -> None:
    run = simulate(rule="fedavg:4", over_selection=1.4, epochs=30)
    for t in range(1, 31):
        devices = [decision.lease.device for decision in run.ledger if decision.t == t]
        assert len(set(devices)) == len(devices) == 4
    with pytest.raises(offbeat.OffbeatError, match="a group starts 8 tasks on different devices, but there are 6"):
        simulate(rule="fedavg:8")


def test_a_run_that_diverges_ends() -> None:
    task = Quadratic([0.0, 1.0], [float("nan")] * 2)
    summary = offbeat.simulate(task, epochs=20, executor="inline").summary
    assert summary["t"] == 0
    assert "diverged" in summary["ended"]


@pytest.mark.parametrize(
    "lossy", [{"over_selection": 1.5, "rule": "fedavg:3"}, {"rule": "fedavg:4", "group_deadline_s": 1.0}]
)
def test_a_lost_and_revoked_task_is_sent_once(lossy: dict[str, Any], tmp_path: Path) -> None:
    simulate(dropout=0.5, epochs=80, dir=tmp_path, **lossy)
    assert RunFolder.open(tmp_path).ledger().count("repeated") == 0


@pytest.mark.parametrize(
    "other",
    [{"rule": "fedbuff:5"}, {"rule": "fedavg:2"}, {"staleness_policy": "reject", "staleness_max": 4}, {"dropout": 0.1}],
)
def test_sampled_staleness_goes_with_fedasync_alone(other: dict[str, Any]) -> None:
    with pytest.raises(offbeat.OffbeatError, match="sampled:K"):
        simulate(device_model="sampled:4", **other)


def test_your_own_rule_and_staleness_function(tmp_path: Path) -> None:
    def patient(staleness: int) -> float:
        return 1.0 if staleness < 2 else 0.5

    run = simulate(staleness_fn=patient, alpha=0.5, epochs=60, dir=tmp_path)
    assert {decision.mix.new for decision in run.ledger if decision.mix} == {0.5, 0.25}
    assert run.summary["settings"]["staleness_fn"] == "custom:patient"
    own = offbeat.Rule("halves", lambda _facts, memory: (offbeat.Mix(0.5, 0.5, 0.0, True), memory))
    assert simulate(rule=own, epochs=9).summary["settings"]["rule"] == "halves"


def test_a_folder_knows_its_task(tmp_path: Path) -> None:
    """The same settings with another task, or with a file that was changed, are another run."""
    file = tmp_path / "mine.py"
    file.write_text(NUMPY_TASK)
    offbeat.simulate(file, epochs=5, dir=tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    file.write_text(NUMPY_TASK.replace("/ 2", "/ 3"))
    with pytest.raises(offbeat.OffbeatError, match=r"task is .*mine\.py:task"):
        offbeat.simulate(str(file), epochs=5, dir=tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").settings["task"].startswith("mine.py:task ")


def test_a_task_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("HALF = 2\n")
    (tmp_path / "mine.py").write_text("from beside_it import HALF\n" + NUMPY_TASK.replace("/ 2", "/ HALF"))
    assert offbeat.simulate(tmp_path / "mine.py", epochs=3).summary["t"] == 3


def test_a_setting_that_would_change_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NUMPY_TASK)
    with pytest.raises(offbeat.OffbeatError, match=r"partition is set, but task .* does not take it"):
        offbeat.simulate(tmp_path / "mine.py", partition="dirichlet:0.3")
    with pytest.raises(offbeat.OffbeatError, match="width is set, but task digits"):
        offbeat.simulate("digits", width=3)
    with pytest.raises(offbeat.OffbeatError, match="over_selection is for groups"):
        simulate(over_selection=1.5)


def test_a_function_that_makes_a_task_for_some_devices_is_taken_at_its_word(tmp_path: Path) -> None:
    code = NUMPY_TASK.replace("task = Pull()", "def task(devices=7):\n    return Pull()")
    (tmp_path / "mine.py").write_text(code)
    assert offbeat.simulate(tmp_path / "mine.py", epochs=3).summary["settings"]["devices"] == 7
    assert offbeat.simulate(tmp_path / "mine.py", epochs=3, devices=4).summary["settings"]["devices"] == 4


def test_a_run_in_which_nothing_can_be_trained_can_be_stopped() -> None:
    """A device that is there for a tenth of a second at a time never finishes a task of one second."""
    settings = Settings(availability=0.1, availability_period_s=1.0, device_model="constant", epochs=5)
    simulation = Simulation(TASK, settings)
    for _ in range(3):
        assert simulation.advance() == []
    assert not simulation.finished


@pytest.mark.parametrize("answer", ["None", "(1, 2)"])
def test_a_task_that_returns_something_else_is_told_what_to_return(answer: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NUMPY_TASK.replace("Trained(samples=1, gradients=1)", answer))
    with pytest.raises(offbeat.OffbeatError, match=r"must return offbeat\.Trained"):
        offbeat.simulate(tmp_path / "mine.py", epochs=3)
    (tmp_path / "other.py").write_text(NUMPY_TASK.replace('{"x": float(model["x"][0])}', answer))
    with pytest.raises(offbeat.OffbeatError, match="must return a mapping"):
        offbeat.simulate(tmp_path / "other.py", epochs=3)


@pytest.mark.parametrize("nothing", [None, object()])
def test_what_is_no_task_is_refused(nothing: Any) -> None:
    with pytest.raises(offbeat.OffbeatError, match="is no task"):
        offbeat.simulate(nothing)


NUMPY_TASK = """
import numpy as np
from offbeat import Trained


class Pull:
    def initial(self, seed):
        return {"x": np.full(3, 1.0, np.float32)}

    def train(self, model, work):
        model["x"][:] = model["x"] / 2
        return Trained(samples=1, gradients=1)

    def evaluate(self, model):
        return {"x": float(model["x"][0])}


task = Pull()
"""
