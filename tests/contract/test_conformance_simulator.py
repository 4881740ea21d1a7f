"""The closed forms about a whole run, through the public API: T5, T6, T8, T11, T14, and the one-file oracle."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.settings import Settings
from offbeat.sim.devices import device_model
from offbeat.sim.run import Run, Simulation
from offbeat.task import Work, solve, start
from tests.simulation.quadratic import Quadratic


def simulate(task: Quadratic, **settings: Any) -> Run:
    return offbeat.simulate(task, executor="inline", **{"staleness_fn": "constant", **settings})


@pytest.mark.parametrize(("seeds", "error_max"), [(375, 0.003), pytest.param(1500, 0.0015, marks=pytest.mark.slow)])
def test_t5_the_authors_sampler_has_the_expected_iterate(seeds: int, error_max: float) -> None:
    """E[e_12] = 0.245301 for alpha 0.6, m 0.7, K 4; 1,500 seeds have a standard error of about 0.001."""
    task = Quadratic([0.0], [0.7])
    ends = [simulate(task, alpha=0.6, device_model="sampled:4", epochs=12, seed=s).x["x"][0] for s in range(seeds)]
    error = np.std(ends) / np.sqrt(len(ends))
    assert error < error_max
    assert np.mean(ends) == pytest.approx(0.245301, abs=4 * error)


def test_t6_the_fixed_point_is_weighed_by_how_often_devices_answer() -> None:
    """With every device always busy, f_i is as 1/seconds; x* = sum f P c / sum f P, not sum P c / sum P."""
    centres, spec = [0.0, 1.0, 4.0, 9.0], "lognormal:1"
    progress = 1 - np.array([0.5, 0.7, 0.2, 0.9])
    run = simulate(
        Quadratic(centres, list(1 - progress)),
        alpha=0.02,
        device_model=spec,
        in_flight_max=4,
        epochs=6000,
        evaluate_every=1,
        seed=3,
    )
    model = device_model(spec, 3)
    weight = progress * [1 / model.compute_s(device, 0) for device in range(4)]
    expected = weight @ centres / weight.sum()
    settled = np.mean([point.metrics["x"] for point in run.metrics[1500:]])
    assert abs(expected - progress @ centres / progress.sum()) > 0.3
    assert settled == pytest.approx(expected, abs=0.03)  # the ripple of 2 % mixing between centres 0 and 9


@pytest.mark.parametrize(("delay", "variance"), [(0, 1.0989), (3, 0.6774)])
def test_t8_the_noise_floor_is_the_closed_form(delay: int, variance: float) -> None:
    """20,000 coordinates are as many samples: a standard error of 1 %. Equal devices give a fixed delay of C - 1."""
    devices = delay + 1
    task = Quadratic([0.0] * devices, [0.7] * devices, size=20_000, start=0.0, noise=1.0)
    run = simulate(task, alpha=0.6, device_model="constant", in_flight_max=devices, epochs=120)
    assert [decision.staleness for decision in run.ledger[devices:]] == [delay] * (120 - devices)
    assert run.x["x"].var(dtype=np.float64) == pytest.approx(variance, rel=0.04)


@pytest.mark.parametrize("spec", ["constant", "exponential", "lognormal:1.5", "pareto:1.5"])
@pytest.mark.parametrize("in_flight_max", [1, 7, 20])
def test_t11_staleness_obeys_littles_law_exactly(spec: str, in_flight_max: int) -> None:
    """The staleness of all tasks done and in flight adds up to C - 1 per update, whatever the speeds."""
    settings = Settings(device_model=spec, in_flight_max=in_flight_max, epochs=300, executor="inline", seed=5)
    simulation = Simulation(Quadratic([0.0] * 20, [0.5] * 20), settings)
    run = simulation.run()
    left = [simulation.coordinator.t - lease.tau for lease in simulation.coordinator.leases.values()]
    done = [decision.staleness for decision in run.ledger]
    assert [decision.t for decision in run.ledger] == list(range(1, 301))
    assert len(left) == in_flight_max - 1  # the last one to arrive was not given another task
    assert sum(done) + sum(left) == (in_flight_max - 1) * len(done)


def test_t14_x_t_is_the_weighted_sum_of_all_that_was_pushed() -> None:
    centres = [0.0, 2.0, 5.0, 7.0, 11.0]
    run = simulate(Quadratic(centres, [0.0] * 5), alpha=0.7, staleness_fn="polynomial:0.5", epochs=40, in_flight_max=3)
    weights = [1.0]
    for decision in run.ledger:
        assert decision.mix is not None
        weights = [weight * decision.mix.keep for weight in weights] + [decision.mix.new]
    pushed = [1.0] + [centres[decision.lease.device] for decision in run.ledger]
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert run.x["x"][0] == pytest.approx(np.dot(weights, pushed), rel=1e-6)
    assert min(centres) <= run.x["x"][0] <= max(centres)


def test_hinge_and_constant_are_the_same_run_when_nothing_is_that_stale() -> None:
    task = Quadratic([0.0, 3.0, 5.0], [0.5, 0.6, 0.7])
    runs = [
        simulate(task, alpha=0.9, staleness_fn=fn, device_model="sampled:4", epochs=60).summary["x_sha256"]
        for fn in ("constant", "hinge:10,4", "polynomial:0.5")
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("model", ["lognormal:1", "sampled:6"])
@pytest.mark.parametrize("fn", ["constant", "polynomial:0.5", "hinge:10,4"])
def test_the_one_file_example_gives_the_same_bits_on_the_same_schedule(model: str, fn: str) -> None:
    """The example's updater, led through the simulator's ledger, ends with the simulator's bits."""
    example = _example()
    name, _, numbers = fn.partition(":")
    s = getattr(example, name)(*(float(number) for number in numbers.split(",") if number))
    task = Quadratic([0.1, 3.3, 5.7, 8.9], [0.5, 0.61, 0.7, 0.83], size=33)
    run = simulate(task, alpha=0.6, staleness_fn=fn, device_model=model, epochs=80, seed=2)
    x_0 = start(task, 2)
    versions = [x_0.vector]
    for decision in run.ledger:
        x_tau = x_0.copy()
        x_tau.vector[:] = versions[decision.lease.tau]
        x_new = solve(task, x_tau, Work(decision.lease.device, decision.lease.number, 2)).x_new.vector
        x, _ = example.updater(versions[-1], x_new, decision.lease.tau, decision.t, 0.6, s)
        versions.append(x)
    assert versions[-1].tobytes() == run.x.vector.tobytes()


def _example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "fedasync_one_file.py"
    spec = importlib.util.spec_from_file_location("fedasync_one_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
