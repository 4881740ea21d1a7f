"""The virtual clock: causality, Little's law, determinism, and a run worked out by hand."""

from collections.abc import Mapping

import numpy as np
import pytest

import offbeat
from offbeat.core.layout import Array, Model
from offbeat.sim.engine import History, lognormal_seconds, run
from offbeat.task import Trained, Work


class Halfway:
    """Every device moves the model halfway to its own number: a quadratic that can be done in the head."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        return {"x": np.full(1, float(seed), np.float32)}

    def train(self, model: Model, work: Work) -> Trained:
        model["x"][:] = (model["x"] + np.float32(work.device)) / 2
        return Trained(samples=1, gradients=3)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        return {"x": float(model["x"][0])}


def race(rule: offbeat.Rule, seconds: list[float], **settings: object) -> History:
    return run(Halfway(), rule, seconds, **{"in_flight_max": len(seconds), "until_s": 100.0, **settings})  # type: ignore[arg-type]


def test_a_run_worked_out_by_hand() -> None:
    """Device 0 takes 2 s, device 1 takes 3 s. Arrivals: 0 at 2, 1 at 3, 0 at 4, then 0 and 1 at 6."""
    history = race(offbeat.fedasync(0.5), [2.0, 3.0], until_s=5.0)
    story = [(u.at_s, u.t, u.device, u.tau, u.staleness, u.mix.new) for u in history.updates]
    assert story == [(2.0, 1, 0, 0, 0, 0.5), (3.0, 2, 1, 0, 1, 0.5), (4.0, 3, 0, 1, 1, 0.5)]
    # x: 0; device 0 pushes 0 -> 0; device 1 pushes 0.5 -> 0.25; device 0, from x_1 = 0, pushes 0 -> 0.125
    assert history.x["x"][0] == 0.125
    assert history.gradients == 9
    assert history.left_in_flight == [1, 0]  # device 1 since x_2, device 0 since x_3


def test_synchronous_groups_wait_for_the_slowest() -> None:
    history = race(offbeat.fedavg(2), [2.0, 3.0], until_s=7.0, grouped=True)
    assert [(u.at_s, u.t, u.staleness, u.mix.publish) for u in history.updates] == [
        (2.0, 1, 0, False),
        (3.0, 1, 0, True),
        (5.0, 2, 0, False),
        (6.0, 2, 0, True),
    ]
    assert history.x["x"][0] == 0.375  # mean of (0, 0.5) = 0.25, then mean of (0.125, 0.625)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("in_flight_max", [1, 7, 30])
def test_staleness_obeys_littles_law_exactly(sigma: float, in_flight_max: int) -> None:
    """With C always busy, the staleness of all tasks done and in flight adds up to C - 1 per update."""
    seconds = lognormal_seconds(30, sigma, seed=5)
    history = race(offbeat.fedasync(0.5), seconds, in_flight_max=in_flight_max, until_s=40.0)
    total = sum(update.staleness for update in history.updates) + sum(history.left_in_flight)
    assert len(history.updates) > 20
    assert len(history.left_in_flight) == in_flight_max
    assert total == (in_flight_max - 1) * len(history.updates)


def test_no_device_has_two_tasks_and_no_update_is_lost_or_doubled() -> None:
    seconds = lognormal_seconds(20, 1.0, seed=1)
    history = race(offbeat.fedasync(0.5), seconds, in_flight_max=10, until_s=30.0)
    assert [update.t for update in history.updates] == list(range(1, history.t + 1))
    arrivals: dict[int, float] = {}
    for update in history.updates:
        assert update.at_s - arrivals.get(update.device, 0.0) >= seconds[update.device] - 1e-9
        arrivals[update.device] = update.at_s


def test_evaluation_sees_the_version_that_was_newest_then() -> None:
    history = race(offbeat.fedasync(1.0), [2.0, 3.0], until_s=4.5, evaluate_every_s=1.0, seed=8)
    seen = [(e.at_s, e.t, e.metrics["x"]) for e in history.evaluations]
    assert seen == [(0.0, 0, 8.0), (1.0, 0, 8.0), (2.0, 0, 8.0), (3.0, 1, 4.0), (4.0, 2, 4.5)]


def test_an_added_device_changes_no_other_devices_speed() -> None:
    assert lognormal_seconds(11, 1.0, seed=3)[:10] == lognormal_seconds(10, 1.0, seed=3)


@pytest.mark.parametrize("in_flight_max", [0, 3])
def test_a_limit_that_no_devices_fill_is_refused(in_flight_max: int) -> None:
    with pytest.raises(offbeat.OffbeatError, match="in_flight_max"):
        race(offbeat.fedasync(0.5), [1.0, 1.0], in_flight_max=in_flight_max)
