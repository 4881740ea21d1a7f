"""Links, availability and dropout of simulated devices; a server that takes time; evaluation beside training."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import offbeat
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Evaluated, Lease, Outcome
from offbeat.protocol.plan import Plan
from offbeat.settings import Settings
from offbeat.sim.devices import device_model, distribution
from offbeat.sim.event_sources import SimulatedFleet
from offbeat.sim.run import Run, Simulation
from offbeat.storage.run_folder import RunFolder
from offbeat.task import Trained, Work
from tests.simulation.quadratic import Quadratic
from tests.simulation.test_engine import Played, fleet

TASK = Quadratic([0.0, 1.0, 4.0, 9.0, 2.5, 7.5], [0.5, 0.7, 0.2, 0.9, 0.4, 0.6], size=50, noise=0.3)


def simulate(**settings: Any) -> Run:
    return offbeat.simulate(TASK, **{"executor": "inline", "device_model": "lognormal:1", "seed": 4, **settings})


# --- devices ---------------------------------------------------------------------------------------------------------


def test_links_are_drawn_once_per_device_and_good_networks_are_good_both_ways() -> None:
    model = device_model("constant", 3, down_mbps="uniform:8,16", up_mbps="0.5*uniform:8,16")
    links = [model.link(device) for device in range(500)]
    assert all(1e6 < down < 2e6 and up == pytest.approx(down / 2) for down, up in links)
    assert fmean(down for down, _ in links) == pytest.approx(1.5e6, rel=0.03)
    assert links == [model.link(device) for device in range(500)]


def test_a_device_is_there_for_its_share_of_every_period() -> None:
    model = device_model("constant", 3, availability=0.25, availability_period_s=100.0)
    moments = [model.available_until(device, float(at)) > at for device in range(50) for at in range(400)]
    assert fmean(moments) == pytest.approx(0.25, abs=0.01)
    for device in range(50):
        begin = model.available_from(device, 1000.0)
        assert begin - 1000.0 <= 75.0
        inside = begin + 1e-6
        assert model.available_until(device, inside) - inside <= 25.0
        assert model.available_from(device, inside) == pytest.approx(inside)
    assert len({model.available_from(device, 0.0) for device in range(50)}) > 30, "each has its own hours"
    assert device_model("constant", 3, availability=1).available_until(7, 5.0) == math.inf


def test_a_run_with_devices_that_come_and_go_finishes() -> None:
    run = simulate(availability="uniform:0.3,0.9", availability_period_s=20.0, lease_s=10.0, epochs=100)
    always = simulate(epochs=100)
    assert run.summary["t"] == 100
    assert run.summary["virtual_s"] > always.summary["virtual_s"]


def test_dropout_is_each_devices_own_and_another_device_changes_nothing() -> None:
    model = device_model("constant", 3, dropout="uniform:0,0.5")
    risks = [model.dropout(device) for device in range(500)]
    assert fmean(risks) == pytest.approx(0.25, abs=0.02)
    small, large = SimulatedFleet(5, model, seed=3), SimulatedFleet(50, model, seed=3)
    lost = [
        [
            type(next(iter(world.started(lease(task, device, number), 0.0))))
            for device in range(5)
            for number in range(40)
        ]
        for task, world in ((1, small), (99, large))
    ]
    assert lost[0] == lost[1]
    assert len(set(lost[0])) == 2


def lease(task: int, device: int, number: int) -> Lease:
    return Lease(task, device, device, number, 0, 0.0, 10.0)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"down_mbps": 0}, "down_mbps is 0"),
        ({"up_mbps": "-3"}, "up_mbps is -3"),
        ({"up_mbps": "fast"}, "up_mbps is 'fast' but must be a number, uniform:LO,HI"),
        ({"down_mbps": "uniform:0,0"}, "at least a byte per second"),
        ({"down_mbps": 1e-300}, "at least a byte per second"),
        ({"dropout": 1}, r"dropout is 1.0 but must lie in \[0, 1\)"),
        ({"dropout": "uniform:0,1"}, r"dropout is 'uniform:0,1' but must lie in \[0, 1\) on every device"),
        ({"dropout": "lognormal:1"}, "dropout"),
        ({"availability": 0}, r"availability is 0.0 but must lie in \(0, 1\]"),
        ({"availability": "uniform:0.5,1.5"}, "availability"),
        ({"availability_period_s": 0, "availability": 0.5}, "availability_period_s is 0"),
        ({"tasks_per_device": 0}, "tasks_per_device is 0"),
        ({"mix_s": -1}, "mix_s is -1"),
        ({"retry_after_s": 0}, "retry_after_s is 0"),
        ({"alpha_schedule": "step:5"}, "alpha_schedule 'step:5' is unknown"),
        ({"alpha_schedule": "step:5,7"}, "alpha is"),
        ({"gamma_schedule": "step:5,0.5"}, "needs gamma"),
        ({"executor": "processes:0"}, "executor 'processes:0' is unknown"),
    ],
)
def test_a_world_that_cannot_be_is_refused(setting: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        simulate(**setting)


@pytest.mark.parametrize(
    "spec", ["nan", "inf", "2*", "*2", "0*lognormal:1", "uniform:3", "uniform:3,1", "exponential:0"]
)
def test_a_distribution_that_cannot_be_read_is_no_distribution(spec: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        distribution(spec)


@pytest.mark.parametrize("spec", ["lognormal:1000", "pareto:0.001"])
def test_however_wide_a_distribution_is_its_values_can_be_counted(spec: str) -> None:
    values = [distribution(spec).inverse(u) for u in (1e-16, 0.5, 1 - 1e-16)]
    assert all(0 < value < 1e30 for value in values)


def test_a_device_may_have_several_tasks() -> None:
    run = simulate(tasks_per_device=2, in_flight_max=12, epochs=200)
    open_at_once = max(
        sum(a.lease.granted_at <= b.lease.granted_at < a.at and a.lease.device == b.lease.device for a in run.ledger)
        for b in run.ledger
    )
    assert open_at_once == 2
    with pytest.raises(InvalidValue, match=r"1\.\.12, the number of devices"):
        simulate(tasks_per_device=2, in_flight_max=13)


# --- the server takes time -------------------------------------------------------------------------------------------


def test_a_slow_server_worked_out_by_hand() -> None:
    """Three devices arrive at 2; the server mixes one per second, and two may wait: the third comes back until 3."""
    plan = Plan(3, queue_max=2, retry_after_s=0.5, epochs=3)
    run = Played(offbeat.fedasync(0.5), fleet(2.0, 2.0, 2.0), plan, mix_s=1.0)
    assert [(d.t, d.staleness) for d in run.decisions] == [(1, 0), (2, 1), (3, 2)]
    assert [d.at for d in run.decisions[:2]] == [2.0, 2.0]
    assert 3.0 <= run.decisions[2].at < 3.75
    refused = run.answered.count(Outcome.BUSY)
    assert 1 <= refused <= 4
    applied, busy, finished = Outcome.APPLIED, Outcome.BUSY, Outcome.FINISHED
    assert run.answered == [applied, applied, *[busy] * refused, applied, finished, finished]
    assert run.published == [(3.0, 1), (4.0, 2), (5.0, 3)]


def test_a_lease_starts_from_what_is_published_while_others_wait_to_be_mixed() -> None:
    run = Played(offbeat.fedasync(0.5), fleet(1.0, 1.5), Plan(2, until_s=4.0), mix_s=1.0)
    assert [(d.at, d.lease.device, d.lease.tau, d.staleness) for d in run.decisions] == [
        (1.0, 0, 0, 0),
        (1.5, 1, 0, 1),
        (2.0, 0, 0, 2),  # asked at 1.0, when x_1 was decided on and not published
        (3.0, 1, 0, 3),  # asked at 1.5
        (3.0, 0, 1, 3),  # asked at 2.0, when x_1 had just been published and two more were decided on
    ]


def test_back_pressure_bounds_the_queue_of_a_run(tmp_path: Path) -> None:
    simulate(mix_s=0.4, queue_max=2, retry_after_s=0.3, epochs=60, dir=tmp_path)
    assert RunFolder.open(tmp_path).ledger().count("busy") > 10


def test_a_slow_server_changes_what_is_fresh() -> None:
    at_once, slow = simulate(epochs=100), simulate(epochs=100, mix_s=0.3)
    assert slow.summary["virtual_s"] > at_once.summary["virtual_s"]
    assert slow.summary["x_sha256"] != at_once.summary["x_sha256"]


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_the_curve_says_when_a_version_was_there_and_not_when_its_evaluation_was_done(tmp_path: Path) -> None:
    run = simulate(epochs=40, evaluate_every=1, dir=tmp_path)
    published = {row.t: row.at for row in RunFolder.open(tmp_path).ledger().rows("published")}
    assert {point.t: point.at for point in run.metrics} == {0: 0.0, **published}
    assert [point.gradients for point in run.metrics] == list(range(41))


def test_evaluations_run_ahead_only_where_nothing_depends_on_them(tmp_path: Path) -> None:
    def order(name: str, **settings: Any) -> list[str]:
        simulate(epochs=30, evaluate_every=1, dir=tmp_path / name, **settings)
        return [
            row.kind
            for row in RunFolder.open(tmp_path / name).ledger().rows()
            if row.kind in ("published", "evaluated")
        ]

    free, awaited = order("free"), order("awaited", target="x>=1000")
    assert awaited == ["evaluated", *["published", "evaluated"] * 30]
    assert free == ["evaluated", *["published"] * 4, *["published", "evaluated"] * 26, *["evaluated"] * 4]


class Rated(Quadratic):
    """A task that tells its rate, and which rates it was given."""

    gamma = 0.5

    def train(self, model: Any, work: Work) -> Trained:
        trained = super().train(model, work)
        return trained._replace(metrics={"gamma": work.gamma or 0.0})


def test_gamma_follows_evaluations_and_no_lease_runs_ahead_of_them() -> None:
    seen: list[tuple[int, int]] = []

    def gamma(t: int, evaluations: list[Evaluated]) -> float:
        seen.append((t, evaluations[-1].t))
        return 1.0 / (1 + t)

    run = simulate(gamma=gamma, epochs=40, evaluate_every=1)
    assert all(t == newest for t, newest in seen)
    assert [d.lease.gamma for d in run.ledger] == [1.0 / (1 + d.lease.tau) for d in run.ledger]
    assert run.summary["settings"]["gamma_schedule"] == "custom:gamma"


def test_gamma_and_alpha_change_at_their_epochs() -> None:
    task = Rated(TASK.centres, TASK.shrink)
    run = offbeat.simulate(
        task, gamma_schedule="step:20,0.5", alpha=0.8, alpha_schedule="step:30,0.25", staleness_fn="constant", epochs=60
    )
    assert {(d.lease.tau >= 20, d.lease.gamma) for d in run.ledger} == {(False, 0.5), (True, 0.25)}
    assert {(d.t >= 30, d.mix.new) for d in run.ledger if d.mix} == {(False, 0.8), (True, 0.2)}


def test_a_plateau_must_be_of_a_metric_that_there_is() -> None:
    with pytest.raises(InvalidValue, match="looks at 'loss' but the task's metrics are x"):
        offbeat.simulate(Rated(TASK.centres, TASK.shrink), gamma_schedule="plateau:loss,0.5", epochs=5)


def test_a_schedule_holds_beside_a_staleness_function_of_your_own() -> None:
    run = simulate(alpha=0.8, alpha_schedule="step:5,0.5", staleness_fn=lambda _s: 1.0, epochs=8)
    assert [d.mix.new for d in run.ledger if d.mix] == [0.8] * 4 + [0.4] * 4
    with pytest.raises(InvalidValue, match="give one of them"):
        simulate(alpha=lambda _t: 0.5, alpha_schedule="step:5,0.5")
    with pytest.raises(InvalidValue, match="give one of them"):
        simulate(gamma=lambda _t, _e: 0.5, gamma_schedule="step:5,0.5")


def test_alpha_may_be_a_function_of_t_also_in_a_folder(tmp_path: Path) -> None:
    def halving(t: int) -> float:
        return 1.0 / t

    run = simulate(alpha=halving, staleness_fn="constant", epochs=8, dir=tmp_path)
    assert [d.mix.new for d in run.ledger if d.mix] == [1 / t for t in range(1, 9)]
    assert run.summary["settings"]["alpha_schedule"] == "custom:halving"
    with pytest.raises(InvalidValue, match="leave those out"):
        simulate(rule=offbeat.fedasync(0.5), alpha=0.3)


def test_a_metric_must_not_have_the_name_of_a_result() -> None:
    class Clash(Quadratic):
        def evaluate(self, model: Any) -> Mapping[str, float]:  # noqa: ARG002
            return {"gradients": 1.0}

    with pytest.raises(InvalidValue, match="calls a metric 'gradients'"):
        offbeat.simulate(Clash([0.0], [0.5]), epochs=3)


# --- one machine -----------------------------------------------------------------------------------------------------


def test_one_machine_has_the_clock_of_an_ordinary_device_and_stays_near_nothing() -> None:
    sgd = Simulation.of("digits", Settings(rule="sgd", epochs=7, devices=50, device_model="lognormal:2"))
    assert sgd.task.solver.rho == 0.0  # type: ignore[attr-defined]
    assert sgd.run().summary["virtual_s"] == 7.0
    passes = Simulation.of("digits", Settings(rule="sgd", epochs=2, devices=50, local_passes=1, batch_size=10))
    # 1,437 images on one machine are 143 or 144 batches; on a device, 28 or 29 images are 2
    assert passes.run().summary["virtual_s"] == pytest.approx(2 * 143.5 / 2.5, rel=0.3)


def test_a_shared_executor_is_left_open() -> None:
    first = Simulation.of("digits", Settings(epochs=2, executor="processes:1", devices=4))
    Simulation(first.task, Settings(epochs=2, devices=4, seed=1), first.executor).run()
    assert first.run().summary["t"] == 2
