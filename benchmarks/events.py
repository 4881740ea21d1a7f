"""Owns the benchmark of decisions: events per second through the real coordinator and ledger, without training.

The engine, the fleet of devices, the coordinator and the ledger are those of a simulation with a folder; the plane has
no vectors.
"""

from collections.abc import Mapping, Set
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter

from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.turns import Tell, take_turns
from offbeat import method
from offbeat.core.rules import VectorStep
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Decision, Evaluated, Lease, Spent, UpdateArrived
from offbeat.settings import Settings
from offbeat.sim import event_sources
from offbeat.sim.engine import Engine
from offbeat.sim.executors import Job, PendingEvaluation
from offbeat.storage.ledger import Ledger

IN_FLIGHT_MAX = 1000
NAMES = {10**3: "1e3", 10**5: "1e5", 10**6: "1e6"}


class NoVectors:
    """A plane without vectors, on which every training is finished at once."""

    def lease(self, lease: Lease) -> None:
        pass

    def start(self, lease: Lease) -> None:
        pass

    def awaited_training(self, lease: Lease) -> Job | None:  # noqa: ARG002 (nothing is trained)
        return None

    def arrived(self, lease: Lease, at: float, spent: Spent | None) -> UpdateArrived:
        return UpdateArrived(at, lease.worker, lease.task, samples=1, gradients=1, spent=spent)

    def commit(self, decision: Decision) -> None:
        pass

    def mix(self, decision: Decision) -> None:
        pass

    def close(self, t: int, closing: tuple[VectorStep, ...]) -> None:
        pass

    def forget(self, task: int) -> None:
        pass

    def evaluate(self, t: int) -> None:
        pass

    def awaited_evaluation(self, t: int) -> PendingEvaluation | None:  # noqa: ARG002
        return None

    def metrics(self, t: int) -> Mapping[str, float]:  # noqa: ARG002
        return {}

    def keep(self, t: int, kept: Set[int]) -> None:
        pass


def run(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    """Measure fleets of several sizes in turns."""
    numbers, openings = count(), dict.fromkeys(scale.event_devices, 0.0)

    def once(devices: int) -> float:
        path = folder / f"events-{next(numbers)}.sqlite"
        try:
            openings[devices], speed = handled_per_s(devices, scale.events, path)
        finally:
            for file in folder.glob(f"{path.name}*"):
                file.unlink()
        return speed

    contestants = {_name(devices): partial(once, devices) for devices in scale.event_devices}
    turns = take_turns(contestants, scale.turns, tell, "events")
    for devices in scale.event_devices:
        results.note(f"coordinator and ledger, {_name(devices)} devices", turns.median(_name(devices)), "events/s")
        results.note(f"coordinator and ledger, {_name(devices)} devices, all join", openings[devices], "s")
    if {"1e3", "1e6"} <= contestants.keys():
        results.put("events_1e6", turns.median("1e6"))
        results.put_turns("events_1e6_of_1e3", turns, "1e6", "1e3")


def _name(devices: int) -> str:
    return NAMES.get(devices, str(devices))


def handled_per_s(devices: int, events: int, path: Path) -> tuple[float, float]:
    """Seconds until all devices have joined and the first tasks are out, and events per second from then on."""
    settings = Settings.of(
        {
            "devices": devices,
            "in_flight_max": min(devices, IN_FLIGHT_MAX),
            "epochs": 10**9,
            "device_model": "lognormal:1.5",
            "evaluate_every": 10**9,
        }
    )
    rule = method.rule_of(settings)
    task = object()
    source = event_sources.source_of(task, settings, rule, devices, 0, None)  # type: ignore[arg-type]
    plan = method.plan_of(settings, rule, devices)
    scheduler = method.scheduler_of(task, settings, rule, devices)
    coordinator = Coordinator(rule, plan, scheduler, seed=0, available=source.available)
    with Ledger.create(path) as ledger:
        begun = perf_counter()
        engine = Engine(coordinator, source, NoVectors(), ledger.record)
        engine.feed(Evaluated(0.0, 0, {}))
        engine.advance(handled_max=2)
        opened = perf_counter()
        before = engine.handled
        engine.advance(handled_max=before + events)
        ledger.flush()
        return opened - begun, (engine.handled - before) / (perf_counter() - opened)
