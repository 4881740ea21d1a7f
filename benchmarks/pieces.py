"""Where the time of a small simulated task goes: microseconds per task in every piece, without what it calls.

    python -m benchmarks.pieces [--tasks 20000] [--device-model lognormal:1.5]

The task of sim S is simulated in a folder. Every piece has a clock around it, which costs a little itself: the shares
count, not the sum. The clock is processor time of the thread that runs the simulation, so training on other threads is
not in it, and neither is what other programs do.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any

import click

from benchmarks.sim import DEVICES, NEVER
from offbeat import simulate
from offbeat.protocol.coordinator import Coordinator
from offbeat.sim.curve import CurveRecorder
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import SimulatedFleet
from offbeat.sim.executors import Together
from offbeat.sim.plane import Plane
from offbeat.storage.fold import RunFold
from offbeat.storage.ledger import Ledger
from offbeat.tasks.digits import digits
from offbeat.train.layer_chain import Chain
from offbeat.train.samples import SamplePool

PIECES: tuple[tuple[str, type, str], ...] = (
    ("decisions: the coordinator", Coordinator, "handle"),
    ("the clock: engine", Engine, "advance"),
    ("the fleet: when what happens", SimulatedFleet, "started"),
    ("looking at the update", Plane, "arrived"),
    ("mixing", Plane, "mix"),
    ("rows for ledger and curve", CurveRecorder, "record"),
    ("rows for the ledger", Ledger, "record"),
    ("writing the ledger", Ledger, "_write"),
    ("totals", RunFold, "take"),
    ("drawing batches", SamplePool, "drawn"),
    ("training, and waiting for it", Chain, "run"),
    ("starting and handing out trainings", Together, "_train"),
)


class Clocks:
    """What every piece took, without the pieces that it called."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inside: list[float] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun = thread_time()
            self._inside.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                took = thread_time() - begun
                self.spent[name] = self.spent.get(name, 0.0) + took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took

        return timed


@click.command()
@click.option("--tasks", default=20_000, show_default=True)
@click.option("--device-model", default="lognormal:1.5", show_default=True)
def main(tasks: int, device_model: str) -> None:
    """Tell where the time of a small simulated task goes."""
    sys.modules["matplotlib"] = None  # type: ignore[assignment]  # no pictures are drawn of a run's folder
    task, clocks = digits(DEVICES), Clocks()
    settings: dict[str, Any] = {
        "in_flight_max": DEVICES,
        "evaluate_every": NEVER,
        "device_model": device_model,
        "executor": "auto",
    }
    simulate(task, epochs=DEVICES, **settings)  # compiles and loads
    for name, owner, method in PIECES:
        setattr(owner, method, clocks.around(name, getattr(owner, method)))
    with tempfile.TemporaryDirectory() as folder:
        whole = clocks.around("all else", simulate)
        whole(task, dir=Path(folder) / "run", epochs=tasks, **settings)
    total = sum(clocks.spent.values())
    for name, spent in sorted(clocks.spent.items(), key=lambda item: -item[1]):
        click.echo(f"{name:36} {spent / tasks * 1e6:7.1f} us  {spent / total:6.1%}")
    click.echo(f"{'together':36} {total / tasks * 1e6:7.1f} us")


if __name__ == "__main__":
    main()
