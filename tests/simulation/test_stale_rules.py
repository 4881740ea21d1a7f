"""Under the virtual clock: Ringmaster's stops, Rennala's fresh updates, and the order of `shuffled`."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.core.rules import rennala, ringmaster
from offbeat.protocol.messages import Lease, Outcome, ReleaseTask, SendTask
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.sim.event_sources import SimulatedFleet
from offbeat.storage.run_folder import RunFolder
from tests.simulation.test_engine import Played, fleet
from tests.simulation.test_run import simulate


def refusing(staleness_max: int, **limits: Any) -> Plan:
    return Plan(staleness_policy="reject", staleness_max=staleness_max, starts_in_time=True, **limits)


class Told(Played):
    """A run, and what its devices were told: task, device, tau and moment of every start and every stop."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.starts: list[tuple[float, int, int]] = []
        self.stops: list[tuple[float, int, int]] = []
        super().__init__(*arguments, **named)

    def _record(self, event: Any, commands: Any) -> None:
        super()._record(event, commands)
        for command in commands:
            if isinstance(command, SendTask):
                self.starts.append((event.at, command.lease.device, command.lease.tau))
            elif isinstance(command, ReleaseTask) and command.revoked:
                self.stops.append((event.at, command.lease.device, command.lease.tau))


# --- Ringmaster ------------------------------------------------------------------------------------------------------


def test_ringmaster_worked_out_by_hand() -> None:
    """Device 0 takes 1 s, device 1 takes 3.5 s, and is stopped at 2 and 4, when two versions have passed it by."""
    run = Told(ringmaster(1.0, 2), fleet(1.0, 3.5), refusing(1, in_flight_max=2, cancels=True, epochs=4), seed=8)
    assert sorted(run.starts) == [(0.0, 0, 0), (0.0, 1, 0), (1.0, 0, 1), (2.0, 0, 2), (2.0, 1, 2), (3.0, 0, 3)]
    assert run.stops == [(2.0, 1, 0), (4.0, 1, 2)]
    assert run.answered == [Outcome.APPLIED] * 4, "a device that was stopped pushes nothing"
    assert run.plane.x["x"][0] == 0.5  # device 0 halves x_0 = 8 four times
    assert run.coordinator.gradients == 4 * 3
    assert run.coordinator.contribution.mass == {0: 4.0}


def test_ringmaster_takes_what_comes_in_time() -> None:
    """Device 1 takes 1.25 s: its first updates are 1 stale at most, so it is not stopped."""
    run = Told(ringmaster(1.0, 2), fleet(1.0, 1.25), refusing(1, in_flight_max=2, cancels=True, epochs=6), seed=8)
    assert run.stops == []
    assert {decision.staleness for decision in run.decisions} <= {0, 1}
    assert Counter(decision.lease.device for decision in run.decisions) == {0: 3, 1: 3}


def test_a_slow_server_starts_no_task_that_would_be_refused() -> None:
    """Mixing takes 10 s, tasks about 1 s: between decision and publication nothing new could be accepted."""
    plan = refusing(0, in_flight_max=3, epochs=5, refused_max=20)
    run = Told(rennala(1), fleet(1.0, 1.1, 1.2), plan, mix_s=10.0)
    assert run.coordinator.end_reason == "5 epochs"
    assert all(tau == number // 3 for number, (_, _, tau) in enumerate(run.starts[:9]))
    assert run.answered.count(Outcome.TOO_STALE) == 2 * 4


@pytest.mark.parametrize("mix_s", [0.0, 0.3])
def test_ringmaster_stops_and_goes_on_whatever_devices_do(mix_s: float, tmp_path: Path) -> None:
    run = simulate(rule="ringmaster:2", alpha=0.5, mix_s=mix_s, dropout=0.2, lease_s=5.0, epochs=80, dir=tmp_path)
    assert run.summary["staleness_largest"] <= 1
    assert run.summary["gradients"] == run.summary["applied"] == 80
    with RunFolder.open(tmp_path).ledger() as ledger:
        stopped = {row.task for row in ledger.rows("released") if '"revoked": true' in str(row.detail)}
        decided = {row.task for row in ledger.rows("decided")}
    assert len(stopped) > 20
    assert not stopped & decided


# --- Rennala ---------------------------------------------------------------------------------------------------------


def test_rennala_worked_out_by_hand() -> None:
    """Devices take 1, 1.5 and 10 s; two fresh updates make a version, and all others are refused.

    x_0 = 8. At 1 device 0 pushes 4 and begins again; at 1.5 device 1 pushes 4.5: x_1 = 8 - (4 + 3.5)/2 = 4.25. At 2 the
    second update of device 0 is refused. At 3 devices 0 and 1 push 2.125 and 2.625: x_2 = 4.25 - (2.125 + 1.625)/2.
    """
    run = Told(rennala(2), fleet(1.0, 1.5, 10.0), refusing(0, in_flight_max=3, epochs=2), seed=8)
    assert run.answered == [Outcome.APPLIED, Outcome.APPLIED, Outcome.TOO_STALE, Outcome.APPLIED, Outcome.APPLIED]
    assert [(decision.at, decision.t, decision.staleness) for decision in run.decisions] == [
        (1.0, 1, 0),
        (1.5, 1, 0),
        (3.0, 2, 0),
        (3.0, 2, 0),
    ]
    assert run.stops == []
    assert run.plane.x["x"][0] == 2.375
    assert run.coordinator.gradients == 4 * 3


def test_rennala_goes_on_although_most_is_refused() -> None:
    run = simulate(rule="rennala:2", epochs=60, device_model="lognormal:1.5")
    assert (run.summary["t"], run.summary["staleness_largest"], run.summary["applied"]) == (60, 0, 120)


@pytest.mark.parametrize("rule", ["rennala:2", "ringmaster:3", "fedbuff:2"])
def test_a_run_whose_updates_are_all_refused_ends_and_says_so(rule: str) -> None:
    summary = simulate(rule=rule, norm_max=1e-9, epochs=20).summary
    assert summary["ended"].startswith("stuck: the last 160 updates were refused")
    assert (summary["failed"], summary["t"], summary["applied"], summary["gradients"]) == (True, 0, 0, 0)


@pytest.mark.parametrize("rule", ["rennala:2", "ringmaster:3"])
@pytest.mark.parametrize("other", [{"staleness_policy": "pace", "staleness_max": 2}, {"staleness_max": 1}])
def test_the_limit_of_the_rule_is_the_only_one(rule: str, other: dict[str, Any]) -> None:
    with pytest.raises(offbeat.OffbeatError, match="leave staleness_policy and staleness_max out"):
        simulate(rule=rule, **other)


# --- shuffled --------------------------------------------------------------------------------------------------------


def devices_in(folder: Path) -> list[int]:
    with RunFolder.open(folder).ledger() as ledger:
        return [int(row.device or 0) for row in ledger.rows("leased") if row.at == row.granted_at]


@pytest.mark.parametrize("devices", ["constant", "lognormal:1"])
@pytest.mark.parametrize("in_flight_max", [1, 2, 6])
def test_shuffled_gives_every_device_one_task_a_round(devices: str, in_flight_max: int, tmp_path: Path) -> None:
    simulate(scheduler="shuffled", device_model=devices, in_flight_max=in_flight_max, epochs=90, dir=tmp_path)
    tasks = devices_in(tmp_path)
    assert len(tasks) >= 90
    assert all(len(set(tasks[begin : begin + 6])) == 6 for begin in range(0, 90, 6))


def test_shuffled_is_as_slow_as_its_slowest_device() -> None:
    """Six devices side by side, of which one takes ten times as long: every round of six takes that long."""
    slow = {"device_model": "lognormal:1.5", "epochs": 120}
    random, shuffled = (simulate(scheduler=name, **slow).summary["virtual_s"] for name in ("random", "shuffled"))
    assert shuffled > 1.5 * random


@pytest.mark.parametrize(
    "world",
    [
        {"dropout": 0.3, "lease_s": 5.0},
        {"availability": 0.5, "availability_period_s": 9.0},
        {"rule": "fedavg:4"},
        {"rule": "ringmaster:3"},
        {"tasks_per_device": 2, "in_flight_max": 9},
        {"trigger_every_s": 0.7},
        {"mix_s": 0.2, "queue_max": 2},
    ],
)
def test_shuffled_finishes_in_every_world(world: dict[str, Any], tmp_path: Path) -> None:
    run = simulate(scheduler="shuffled", epochs=60, dir=tmp_path, **world)
    assert run.summary["t"] == 60
    assert set(devices_in(tmp_path)) == set(range(6))


def test_a_device_that_is_never_there_does_not_stop_shuffled() -> None:
    class Dead(SimulatedFleet):
        def started(self, lease: Lease, at: float) -> Any:
            return () if lease.device == 1 else super().started(lease, at)

    source = Dead(3, fleet(1.0, 1.0, 1.0).model, seed=0)
    run = Told(offbeat.fedasync(0.5), source, Plan(2, lease_s=10.0, epochs=30), Scheduler("shuffled"))
    assert run.coordinator.t == 30
    assert Counter(device for _, device, _ in run.starts)[1] == 1, "it does not ask again"
    assert run.coordinator.at < 10.0 + 30


def test_shuffled_has_no_say_where_devices_are_drawn() -> None:
    with pytest.raises(offbeat.OffbeatError, match="scheduler shuffled has no say in it"):
        simulate(scheduler="shuffled", device_model="sampled:4")
