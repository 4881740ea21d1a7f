"""Simulated devices: right distributions, keyed by device and seed; recorded phones; the paper's sampled staleness."""

import json
import lzma
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
from benchmarks.events import NoVectors

from offbeat.core.rules import fedasync
from offbeat.errors import InvalidValue
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Command, Decision, Event, MixUpdate
from offbeat.protocol.plan import Plan
from offbeat.sim.devices import DeviceModel, device_model, traced
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import EventSource, SampledStaleness, SimulatedFleet
from offbeat.sim.traces import Day, Traces, read_traces
from tests.simulation import invariants

MANY = 4000
"""Devices asked; a mean is then within 4 standard errors of the truth but for one seed in 16,000."""


def seconds(spec: str, *, seed: int = 1, number: int = 0) -> list[float]:
    model = device_model(spec, seed)
    return [model.compute_s(device, number) for device in range(MANY)]


def close(values: list[float], mean: float) -> bool:
    """Is the mean what it should be, within four standard errors?"""
    return abs(fmean(values) - mean) < 4 * stdev(values) / math.sqrt(len(values))


def share_below(values: list[float], limit: float) -> float:
    return sum(value < limit for value in values) / len(values)


HALF = pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(MANY))
"""A share of one half, within four standard errors."""


# --- distributions ---------------------------------------------------------------------------------------------------


def test_constant_devices_are_alike() -> None:
    assert set(seconds("constant")) == {1.0}
    assert set(seconds("constant:2.5")) == {2.5}
    assert set(seconds("lognormal:0")) == {1.0}


@pytest.mark.parametrize("sigma", [0.5, 1.5])
def test_lognormal_devices_have_median_1_and_spread_sigma(sigma: float) -> None:
    drawn = seconds(f"lognormal:{sigma}")
    logs = [math.log(value) for value in drawn]
    assert share_below(drawn, 1.0) == HALF
    assert close(logs, 0.0)
    assert stdev(logs) == pytest.approx(sigma, rel=4 / math.sqrt(2 * MANY))  # of a normal sample
    assert close(drawn, math.exp(sigma**2 / 2))


def test_uniform_devices_fill_their_interval_evenly() -> None:
    drawn = seconds("uniform:0.5,1.5")
    assert close(drawn, 1.0)
    assert 0.5 < min(drawn) < 0.51
    assert 1.49 < max(drawn) < 1.5
    quarters = Counter(int((value - 0.5) * 4) for value in drawn)
    assert [quarters[i] / MANY for i in range(4)] == [pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / MANY))] * 4
    assert set(seconds("uniform:2,2")) == {2.0}


@pytest.mark.parametrize("shape", [0.7, 3.0])
def test_pareto_devices_have_a_heavy_tail(shape: float) -> None:
    drawn = seconds(f"pareto:{shape}")
    assert min(drawn) >= 1.0
    assert share_below(drawn, 2 ** (1 / shape)) == HALF
    assert close([math.log(value) for value in drawn], 1 / shape)  # the logarithm of a Pareto number is exponential
    if shape > 2:
        assert close(drawn, shape / (shape - 1))


@pytest.mark.parametrize(("spec", "mean"), [("exponential", 1.0), ("exponential:3", 3.0)])
def test_exponential_devices_are_memoryless_from_task_to_task(spec: str, mean: float) -> None:
    model = device_model(spec, 1)
    of_one_device = [model.compute_s(7, number) for number in range(MANY)]
    for drawn in (seconds(spec), of_one_device):
        assert close(drawn, mean)
        assert share_below(drawn, mean * math.log(2)) == HALF
        assert stdev(drawn) == pytest.approx(mean, rel=0.2)
        assert min(drawn) > 0
    assert len(set(of_one_device)) == MANY


@pytest.mark.parametrize("spec", ["constant", "lognormal:1", "uniform:1,2", "pareto:2"])
def test_other_devices_keep_their_speed(spec: str) -> None:
    model = device_model(spec, 1)
    assert [model.compute_s(5, number) for number in range(9)] == [model.compute_s(5, 0)] * 9


@pytest.mark.parametrize("spec", ["lognormal:1", "exponential", "uniform:1,2", "pareto:2"])
def test_a_device_depends_on_the_seed_and_its_number_and_on_nothing_else(spec: str) -> None:
    model = device_model(spec, 3)
    forwards = {device: model.compute_s(device, 0) for device in range(50)}
    again = device_model(spec, 3)
    assert {device: again.compute_s(device, 0) for device in reversed(range(1000)) if device < 50} == forwards
    assert len(set(forwards.values())) == 50
    other = device_model(spec, 4)
    assert all(other.compute_s(device, 0) != value for device, value in forwards.items())


def test_distributed_devices_are_always_there_with_links_that_take_no_time() -> None:
    model = device_model("lognormal:1", 0)
    assert model.dropout(3) == 0.0
    assert model.link(3) == (math.inf, math.inf)
    assert model.available_until(3, 1e9) == math.inf
    assert model.available_from(3, 1e9) == 1e9
    assert device_model("constant", 0, down_mbps=8, up_mbps="0.8").link(3) == (1e6, 1e5)


@pytest.mark.parametrize(
    "spec",
    [
        *("", "nonsense", "nonsense:1", "Constant", "constant:0", "constant:-1", "constant:nan", "constant:inf"),
        *("constant:1,2", "lognormal", "lognormal:-1", "lognormal:x", "lognormal:", "lognormal:1,1", "uniform:2,1"),
        *("uniform:1", "uniform:0,1", "uniform:-1,1", "uniform:1,2,3", "uniform:1,", "pareto:0", "pareto:-1", "pareto"),
        *("exponential:0", "exponential:-1", "exponential:1,2", "sampled", "sampled:0", "sampled:5", " constant"),
    ],
)
def test_a_malformed_spec_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        device_model(spec, 0)
    message = str(refused.value)
    assert repr(spec) in message
    for name in ("constant", "lognormal:S", "exponential", "uniform:LO,HI", "pareto:A", "trace:FILE", "sampled:K"):
        assert name in message
    assert "\n" not in message


# --- recorded phones -------------------------------------------------------------------------------------------------


def test_a_day_tells_until_when_a_phone_is_ready() -> None:
    day = Day(100.0, (10.0, 50.0), (20.0, 100.0))
    expected = {0: None, 9.9: None, 10: 20, 19.9: 20, 20: None, 49: None, 50: 100, 99.9: 100}
    for at, until in expected.items():
        assert day.ready_until(at) == (-math.inf if until is None else until)


def test_days_repeat() -> None:
    day = Day(100.0, (10.0, 50.0), (20.0, 100.0))
    for turn in (1, 2, 1000):
        assert day.ready_until(turn * 100.0 + 15) == turn * 100.0 + 20
        assert day.ready_until(turn * 100.0 + 99) == turn * 100.0 + 100
        assert day.ready_until(turn * 100.0) == -math.inf


def test_a_phone_that_is_ready_at_midnight_is_ready_on_both_sides_of_it() -> None:
    day = Day(100.0, (0.0, 90.0), (10.0, 100.0))
    assert day.ready_until(99.0) == 110.0
    assert day.ready_until(100.0) == 110.0
    assert day.ready_until(110.0) == -math.inf
    assert Day(100.0, (0.0,), (100.0,)).ready_until(7.0) == math.inf


def test_a_day_tells_from_when_a_phone_is_ready() -> None:
    day = Day(100.0, (10.0, 50.0), (20.0, 90.0))
    expected = {0: 10, 10: 10, 15: 15, 20: 50, 49.5: 50, 89: 89, 90: 110, 100: 110, 195: 210}
    for at, since in expected.items():
        assert day.ready_from(at) == since


def write(folder: Path, name: str = "trace.json", **changes: Any) -> Path:
    """A trace file of two phones' speeds, two networks and three days, one of them without a usable moment."""
    traces: dict[str, Any] = {
        "availability_flash": {
            "a": {"start": 1000, "end": 1100, "ready": [[1060, 1080], [1010, 1030], [1040, 1040]]},
            "b": {"start": 0, "end": 200, "ready": [[0, 200]]},
            "c": {"start": 0, "end": 100, "ready": [[50, 50], [70, 60]]},
        },
        "flhetbench_training_latency": [
            {"Phone Model": "fast", "ResNet Latency": 20.0},
            {"Phone Model": "unmeasured", "ResNet Latency": 0.0},
            {"Phone Model": "ordinary", "ResNet Latency": 40.0},
            {"Phone Model": "slow", "ResNet Latency": 100.0},
        ],
        "flash_network_speed": {"w": {"down_u": 8000.0, "up_u": 800.0}, "m": {"down_u": 80.0, "up_u": 8.0}},
    }
    raw = json.dumps(traces | changes).encode()
    path = folder / name
    path.write_bytes(lzma.compress(raw) if name.endswith(".xz") else raw)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.xz"])
def test_a_trace_file_is_read(tmp_path: Path, name: str) -> None:
    traces = read_traces(str(write(tmp_path, name)))
    assert traces.seconds == (0.5, 1.0, 2.5)  # relative to the median; 0 was not measured
    assert traces.links == ((1e6, 1e5), (1e4, 1e3))  # kilobits per second in, bytes per second out
    assert traces.days == (Day(100.0, (10.0, 60.0), (30.0, 80.0)), Day(200.0, (0.0,), (200.0,)))


def test_recorded_phones_are_dealt_out_by_seed_and_device(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = device_model(f"trace:{path}", 5)
    dealt = [(model.compute_s(d, 0), model.link(d), model.available_until(d, 12.0)) for d in range(300)]
    again = device_model(f"trace:{path}", 5)
    assert [(again.compute_s(d, 9), again.link(d), again.available_until(d, 12.0)) for d in range(300)] == dealt
    other = device_model(f"trace:{path}", 6)
    assert [(other.compute_s(d, 0), other.link(d), other.available_until(d, 12.0)) for d in range(300)] != dealt
    for part, kinds in ((0, 3), (1, 2)):
        counts = Counter(device[part] for device in dealt)
        assert len(counts) == kinds
        assert min(counts.values()) > 300 / kinds / 2
    assert len({(speed, link) for speed, link, _ in dealt}) == 6  # speed and network are drawn apart


def test_each_phone_begins_somewhere_in_its_day(tmp_path: Path) -> None:
    """Day a is ready 40 of 100 seconds, day b always; so at any moment about 70 in 100 devices are there."""
    model = device_model(f"trace:{write(tmp_path)}", 5)
    for at in (0.0, 33.0, 1e6):
        there = [model.available_until(device, at) > at for device in range(MANY)]
        assert fmean(there) == pytest.approx(0.7, abs=4 * math.sqrt(0.7 * 0.3 / MANY))


def test_a_phone_is_there_until_it_said(tmp_path: Path) -> None:
    model = device_model(f"trace:{write(tmp_path)}", 5)
    for device in range(200):
        until = model.available_until(device, 40.0)
        if 40.0 < until < math.inf:
            assert model.available_until(device, (40.0 + until) / 2) == pytest.approx(until)
            assert until - 40.0 <= 200.0


def test_a_phone_is_back_when_it_said(tmp_path: Path) -> None:
    model = device_model(f"trace:{write(tmp_path)}", 5)
    for device in range(200):
        back = model.available_from(device, 40.0)
        there = model.available_until(device, 40.0) > 40.0
        assert (back == pytest.approx(40.0)) == there
        assert model.available_until(device, back) > back, "else it would ask again at that moment for ever"
        assert there or model.available_until(device, (40.0 + back) / 2) <= 40.0


def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(InvalidValue, match="cannot read the file") as refused:
            device_model(f"trace:{path}", 0)
        assert str(path) in str(refused.value)
    with pytest.raises(InvalidValue, match="trace:"):
        device_model("trace:", 0)


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.json", b"garbage"),
        ("b.json", b""),
        ("c.json", b"\xff\xfe\x00"),
        ("d.json", b"[]"),
        ("e.json", b"{}"),
        ("f.json", b"7"),
        ("g.json.xz", b"not compressed"),
        ("h.json.xz", lzma.compress(b"garbage")),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_what_it_needs(tmp_path: Path, name: str, raw: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(InvalidValue, match="availability_flash, flhetbench_training_latency and flash_network_speed"):
        device_model(f"trace:{path}", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"flhetbench_training_latency": []},
        {"flhetbench_training_latency": [{"ResNet Latency": 0.0}]},
        {"flhetbench_training_latency": [{"Latency": 1.0}]},
        {"flash_network_speed": {"w": {"down_u": 1.0}}},
        {"availability_flash": {"a": {"start": 0, "ready": [[1, 2]]}}},
        {"flash_network_speed": []},
        {"flash_network_speed": {}},
        {"availability_flash": {}},
        {"availability_flash": {"a": {"start": 0, "end": 9, "ready": [[5, 5]]}}},
        {"availability_flash": {"a": {"start": 9, "end": 9, "ready": [[3, 5]]}}},
        {"flash_network_speed": {"w": {"down_u": 0.0, "up_u": 0.0}}},
        {"availability_flash": {"a": {"start": 0, "end": 9, "ready": [[20, 30], [-5, -3], [7, 2]]}}},
    ],
    ids=str,
)
def test_a_trace_without_a_usable_phone_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="not a trace file"):
        device_model(f"trace:{write(tmp_path, **changes)}", 0)


# --- a source, the engine and the coordinator together --------------------------------------------------------------


class Seen:
    """A simulated run without vectors, and what was seen of it."""

    def __init__(self, source: EventSource, plan: Plan, events_max: int) -> None:
        self.coordinator = Coordinator(fedasync(0.5), plan, available=source.available)
        self.decisions: list[Decision] = []
        self.events: list[Event] = []
        self.in_flight: dict[float, int] = {}
        """Leases in flight when everything that happens at a moment has happened."""
        self.engine = Engine(self.coordinator, source, NoVectors(), self.record)
        self.engine.advance(events_max)

    def record(self, event: Event, commands: list[Command]) -> None:
        invariants.check(self.coordinator)
        self.events.append(event)
        self.decisions += [command.decision for command in commands if isinstance(command, MixUpdate)]
        self.in_flight[event.at] = len(self.coordinator.leases)


def sampled_plan(window: int, epochs: int) -> Plan:
    return Plan(in_flight_max=window, tasks_per_device=None, lease_s=math.inf, epochs=epochs, evaluate_every=epochs)


@pytest.mark.parametrize("window", [1, 4, 16])
def test_sampled_staleness_is_uniform_and_never_reaches_before_the_start(window: int) -> None:
    source = SampledStaleness(10, window, seed=2)
    drawn = [source.staleness(t) for t in range(1, MANY + 1)]
    assert drawn[0] == 0
    assert all(0 <= s <= min(t - 1, window - 1) for t, s in enumerate(drawn, start=1))
    counts = Counter(drawn[window:])
    expected = (MANY - window) / window
    assert [counts[s] for s in range(window)] == [pytest.approx(expected, abs=4 * math.sqrt(expected))] * window


def test_sampled_devices_are_drawn_with_replacement_and_apart_from_the_staleness() -> None:
    source = SampledStaleness(10, 4, seed=2)
    devices = [source.device(t) for t in range(1, MANY + 1)]
    counts = Counter(devices)
    assert [counts[d] for d in range(10)] == [pytest.approx(MANY / 10, abs=4 * math.sqrt(MANY / 10))] * 10
    assert any(a == b for a, b in pairwise(devices))
    pairs = Counter((source.device(t), source.staleness(t)) for t in range(5, MANY))
    assert len(pairs) == 40
    assert min(pairs.values()) > MANY / 40 / 2


def test_sampled_draws_are_keyed_by_seed_and_epoch() -> None:
    source = SampledStaleness(10, 4, seed=2)
    backwards = {t: (source.staleness(t), source.device(t)) for t in reversed(range(1, 100))}
    assert backwards == {t: (source.staleness(t), source.device(t)) for t in range(1, 100)}
    other = SampledStaleness(10, 4, seed=3)
    assert backwards != {t: (other.staleness(t), other.device(t)) for t in range(1, 100)}
    assert SampledStaleness(10, 9, seed=2).device(50) == source.device(50)


@pytest.mark.parametrize(("window", "size"), [(1, 3), (4, 2), (16, 50)])
def test_the_unmodified_coordinator_yields_the_sampled_staleness(window: int, size: int) -> None:
    epochs = 600
    source = SampledStaleness(size, window, seed=4, epochs=epochs)
    run = Seen(source, sampled_plan(window, epochs), events_max=20 * epochs)
    assert run.coordinator.finished
    assert [(d.t, d.at) for d in run.decisions] == [(t, float(t)) for t in range(1, epochs + 1)]
    assert [d.staleness for d in run.decisions] == [source.staleness(t) for t in range(1, epochs + 1)]
    assert [d.lease.device for d in run.decisions] == [source.device(t) for t in range(1, epochs + 1)]
    assert all(d.lease.granted_at == d.t - 1 - d.staleness == d.lease.tau for d in run.decisions)


def test_sampled_keeps_half_the_window_in_flight() -> None:
    """A task lasts staleness + 1 seconds, (K+1)/2 on average, and one starts per second: Little's law."""
    window, epochs = 16, 2000
    run = Seen(
        SampledStaleness(50, window, seed=4, epochs=epochs), sampled_plan(window, epochs), events_max=20 * epochs
    )
    steady = [run.in_flight[float(t)] for t in range(window, epochs - window)]
    assert max(steady) <= window
    assert fmean(steady) == pytest.approx((window + 1) / 2, abs=0.5)


def test_a_fleet_takes_as_long_as_link_and_speed_say(tmp_path: Path) -> None:
    always = {"b": {"start": 0, "end": 200, "ready": [[0, 200]]}}
    model = device_model(f"trace:{write(tmp_path, availability_flash=always)}", 5)
    run = Seen(SimulatedFleet(4, model, seed=5, model_bytes=1000), Plan(4, epochs=4, retry_after_s=0.5), events_max=200)
    for decision in run.decisions[:4]:
        down, up = model.link(decision.lease.device)
        took = 1000 / down + model.compute_s(decision.lease.device, 0) + 1000 / up
        assert decision.at - decision.lease.granted_at == pytest.approx(took)


@pytest.mark.parametrize("spec", ["constant", "lognormal:1", "exponential", "uniform:0.5,1.5", "pareto:1.5"])
def test_every_fleet_finishes(spec: str) -> None:
    run = Seen(
        SimulatedFleet(8, device_model(spec, 1, dropout=0.2), seed=1), Plan(4, lease_s=50.0, epochs=50), events_max=5000
    )
    assert run.coordinator.finished
    assert median(decision.staleness for decision in run.decisions) >= 1


def phones(ready: tuple[float, float], compute_s: float) -> DeviceModel:
    """Every phone is there for a part of every 100 seconds."""
    day = Day(100.0, (ready[0],), (ready[1],))
    return traced(Traces((compute_s,), ((math.inf, math.inf),), (day,)), seed=3)


def test_phones_that_come_and_go_finish_what_fits_into_their_time() -> None:
    run = Seen(
        SimulatedFleet(6, phones((10.0, 60.0), 0.5), seed=3), Plan(3, lease_s=30.0, until_s=500.0), events_max=30_000
    )
    assert run.coordinator.finished
    assert len(run.decisions) > 100


def test_phones_that_go_away_with_a_task_do_not_stop_the_clock() -> None:
    """Asking again when it goes, and not when it is back, it would be sent its open lease again without end."""
    run = Seen(
        SimulatedFleet(3, phones((0.0, 3.0), 5.0), seed=3), Plan(3, lease_s=50.0, until_s=500.0), events_max=10_000
    )
    assert run.coordinator.finished
    assert not run.decisions
