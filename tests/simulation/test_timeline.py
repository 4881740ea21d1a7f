"""Scale: a million devices over a virtual day, training stubbed, in bounded memory."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import offbeat
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import UpdateArrived
from offbeat.protocol.plan import Plan
from offbeat.sim.devices import device_model
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import SimulatedFleet


class NoVectors:
    def lease(self, lease): pass
    def start(self, lease): pass
    def awaited_training(self, lease): return None
    def arrived(self, lease, at, spent): return UpdateArrived(at, lease.worker, lease.task, 1, 10)
    def commit(self, decision): pass
    def mix(self, decision): pass
    def publish(self): pass
    def forget(self, task): pass
    def evaluate(self, t): pass
    def awaited_evaluation(self, t): return None
    def metrics(self, t): return {}


source = SimulatedFleet(1_000_000, device_model("exponential:900", 1, dropout=0.05), seed=1)
plan = Plan(in_flight_max=1000, lease_s=3600.0, until_s=86_400.0, evaluate_every=10**9)
coordinator = Coordinator(offbeat.fedasync(0.6), plan, seed=1, available=source.available)
Engine(coordinator, source, NoVectors(), lambda event, commands: None).advance()
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss counts the parent
print(coordinator.t, coordinator.finished, int(peak.split()[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_million_devices_over_a_virtual_day_in_bounded_memory() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    epochs, finished, megabytes = done.stdout.split()
    assert finished == "True"
    assert int(epochs) > 80_000
    assert int(megabytes) < 300
