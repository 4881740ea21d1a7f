"""The virtual clock: runs worked out by hand, ties, one task per device, and what is let go of."""

import math
from collections.abc import Mapping

import numpy as np
import pytest

import offbeat
from offbeat.core.kernel import Updater
from offbeat.core.layout import Array, Model
from offbeat.core.rules import Rule
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import AnswerPush, Command, Decision, Event, MixUpdate, Outcome, VersionPublished
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.sim.devices import DeviceModel
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import EventSource, SampledStaleness, SimulatedFleet
from offbeat.sim.executors import Inline
from offbeat.sim.plane import Plane
from offbeat.task import Trained, Work, start
from tests.simulation.invariants import check


class Halfway:
    """Every device moves the model halfway to its own number: a quadratic that can be done in the head."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        return {"x": np.full(1, float(seed), np.float32)}

    def train(self, model: Model, work: Work) -> Trained:
        model["x"][:] = (model["x"] + np.float32(work.device)) / 2
        return Trained(samples=1, gradients=3)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        return {"x": float(model["x"][0])}


class Played:
    """A run, played to its end and checked after every event."""

    def __init__(
        self,
        rule: Rule,
        source: EventSource,
        plan: Plan,
        scheduler: Scheduler | None = None,
        seed: int = 0,
        mix_s: float = 0.0,
    ):
        self.decisions: list[Decision] = []
        self.answered: list[Outcome] = []
        self.published: list[tuple[float, int]] = []
        self.coordinator = Coordinator(rule, plan, scheduler, seed=seed, available=source.available)
        task, executor = Halfway(), Inline(Halfway())
        self.plane = Plane(start(task, seed), rule, executor, Updater(compiled=False), seed=seed)
        engine = Engine(self.coordinator, source, self.plane, self._record, mix_s=mix_s)
        while not engine.finished:
            executor.finish(engine.advance())

    def _record(self, event: Event, commands: list[Command]) -> None:
        check(self.coordinator)
        self.answered += [command.outcome for command in commands if isinstance(command, AnswerPush)]
        self.published += [(event.at, event.t)] if isinstance(event, VersionPublished) else []
        self.decisions += [command.decision for command in commands if isinstance(command, MixUpdate)]


def fleet(*seconds: float) -> SimulatedFleet:
    return SimulatedFleet(len(seconds), DeviceModel(lambda device, _number: seconds[device]), seed=0)


def test_a_run_worked_out_by_hand() -> None:
    """Device 0 takes 2 s, device 1 takes 3 s. Arrivals: 0 at 2, 1 at 3, 0 at 4."""
    run = Played(offbeat.fedasync(0.5), fleet(2.0, 3.0), Plan(2, until_s=5.0))
    story = [(d.at, d.t, d.lease.device, d.lease.tau, d.staleness) for d in run.decisions]
    assert story == [(2.0, 1, 0, 0, 0), (3.0, 2, 1, 0, 1), (4.0, 3, 0, 1, 1)]
    # x_0 = 0; device 0 pushes 0, x_1 = 0; device 1 pushes 0.5, x_2 = 0.25; device 0, from x_1, pushes 0, x_3 = 0.125
    assert run.plane.x["x"][0] == 0.125
    assert run.coordinator.gradients == 9
    assert [(lease.device, lease.tau) for lease in run.coordinator.leases.values()] == [(1, 2), (0, 3)]
    assert run.coordinator.at == 5.0


def test_synchronous_groups_wait_for_the_slowest() -> None:
    run = Played(offbeat.fedavg(2), fleet(2.0, 3.0), Plan(2, epochs=2), Scheduler(group=2))
    assert [(d.at, d.t, d.staleness, d.mix and d.mix.publish) for d in run.decisions] == [
        (2.0, 1, 0, False),
        (3.0, 1, 0, True),
        (5.0, 2, 0, False),
        (6.0, 2, 0, True),
    ]
    assert run.plane.x["x"][0] == 0.375  # mean of (0, 0.5) = 0.25, then mean of (0.125, 0.625)


def test_a_buffer_publishes_every_second_update() -> None:
    """Both push from x_0 = 0: the deltas 0 and 0.5, halved by k = 2, the second one fresh as well."""
    run = Played(offbeat.fedbuff(2, staleness_fn=offbeat.constant()), fleet(2.0, 3.0), Plan(2, epochs=1))
    assert [(d.t, d.staleness) for d in run.decisions] == [(1, 0), (1, 0)]
    assert run.plane.x["x"][0] == 0.25


def test_ties_are_decided_by_the_order_of_sending_and_answers_come_before_the_next_arrival() -> None:
    """Three equal devices: after the first turn everybody's staleness is 2, not 0, 1, 2."""
    run = Played(offbeat.fedasync(0.5), fleet(1.0, 1.0, 1.0), Plan(3, epochs=9))
    assert [d.staleness for d in run.decisions] == [0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert [d.at for d in run.decisions] == [1.0] * 3 + [2.0] * 3 + [3.0] * 3


def test_no_device_has_two_tasks_and_no_update_is_lost_or_doubled() -> None:
    seconds = [0.3, 0.7, 1.1, 1.9, 2.3, 4.1]
    run = Played(offbeat.fedasync(0.5), fleet(*seconds), Plan(4, epochs=120))
    assert [d.t for d in run.decisions] == list(range(1, 121))
    last: dict[int, float] = {}
    for decision in run.decisions:
        assert decision.lease.granted_at >= last.get(decision.lease.device, 0.0)
        assert decision.at == pytest.approx(decision.lease.granted_at + seconds[decision.lease.device])
        last[decision.lease.device] = decision.at


def test_sampled_staleness_is_what_the_coordinator_sees() -> None:
    source = SampledStaleness(5, 4, seed=7, epochs=50)
    run = Played(offbeat.fedasync(0.5), source, Plan(4, tasks_per_device=None, lease_s=math.inf, epochs=50), seed=7)
    assert [(d.t, d.at) for d in run.decisions] == [(t, float(t)) for t in range(1, 51)]
    assert [d.staleness for d in run.decisions] == [source.staleness(t) for t in range(1, 51)]
    assert [d.lease.device for d in run.decisions] == [source.device(t) for t in range(1, 51)]


def test_what_is_over_is_let_go_of() -> None:
    run = Played(offbeat.fedasync(0.5), fleet(*[1.0 + i / 10 for i in range(8)]), Plan(8, epochs=200))
    assert len(run.plane.models()) <= 2 + 8
    assert len(run.coordinator.leases) == 7
