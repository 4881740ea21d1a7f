"""Owns the benchmark of simulations with larger models, which train in processes: M, L and T.

Rules kept here:
- Ours runs as `auto` chooses: one process per core, one thread each. The time to start them is a figure of its own.
- The plain loop runs in this process, as a user would run it, on one thread and on two.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter

from benchmarks.plain import PlainLoop
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.tasks import DEVICES, lstm, paper_cnn, small_cnn
from benchmarks.turns import Contestant, Tell, take_turns
from offbeat.hosting.child import cores
from offbeat.settings import Settings
from offbeat.sim.choose import executor_of
from offbeat.sim.executors import Executor, Inline
from offbeat.sim.run import Simulation
from offbeat.task import Work, start
from offbeat.train.task import Task

IN_FLIGHT_MAX = 4
NAMES = ("m", "l", "t")
MAKE: dict[str, Callable[[int], Task]] = {"m": small_cnn, "l": paper_cnn, "t": lstm}
OURS, INLINE, ONE, TWO = "2 cores", "inline", "plain, 1 thread", "plain, 2 threads"


def run(results: Results, scale: Scale, tell: Tell) -> None:
    """Measure all three."""
    for name, tasks, iterations in zip(NAMES, scale.large_tasks, scale.large_iterations, strict=True):
        _measure(results, name, MAKE[name](iterations), tasks, scale.large_turns, tell)


def _measure(results: Results, name: str, task: Task, tasks: int, count: int, tell: Tell) -> None:
    plain, starts = PlainLoop(task), list[float]()
    contestants: dict[str, Contestant] = {
        ONE: partial(plain.rate, tasks, 1),
        TWO: partial(plain.rate, tasks, 2),
        INLINE: lambda: simulated(Inline(task), tasks),
        OURS: lambda: in_processes(task, tasks, starts),
    }
    plain.rate(1)
    turns = take_turns(contestants, count, tell, f"sim {name.upper()}")
    results.put_turns(f"sim_{name}_two_threads", turns, OURS, TWO)
    if f"sim_{name}_one_thread" in results.figures:
        results.put_turns(f"sim_{name}_one_thread", turns, OURS, ONE)
    what = f"sim {name.upper()}"
    results.note_turns(f"{what}, inline against the plain loop on one thread", "tasks/s", turns, INLINE, ONE)
    results.note_turns(f"{what}, plain loop on two threads against one", "tasks/s", turns, TWO, ONE)
    results.note(f"{what}, start of the processes", min(starts), "s")
    results.note(f"{what}, model", start(task, 0).layout.size / 1e6, "million parameters")


def in_processes(task: Task, tasks: int, starts: list[float]) -> float:
    """Tasks per second of a run in the processes that `auto` chooses, after they have started."""
    begun = perf_counter()
    x_0 = start(task, 0)
    executor = executor_of(task, "auto", parameters=x_0.layout.size, in_flight_max=IN_FLIGHT_MAX).executor
    try:
        executor.finish([executor.submit(x_0, Work(device)) for device in range(cores())])
        starts.append(perf_counter() - begun)
        return simulated(executor, tasks)
    finally:
        executor.close()


def simulated(executor: Executor, tasks: int) -> float:
    """Tasks per second of one run, from when as many are applied as are in flight: the work ahead is then constant."""
    simulation = Simulation(executor.task, _settings(IN_FLIGHT_MAX + tasks), executor)
    seen: list[tuple[int, float]] = []

    def watch(now: Simulation) -> None:
        if now.coordinator.t >= IN_FLIGHT_MAX:
            seen.append((now.coordinator.t, perf_counter()))

    simulation.run(watch)
    (first, begun), (last, ended) = seen[0], seen[-1]
    return (last - first) / (ended - begun)


def _settings(epochs: int) -> Settings:
    return Settings.of(
        {
            "epochs": epochs,
            "devices": DEVICES,
            "in_flight_max": IN_FLIGHT_MAX,
            "device_model": "uniform:0.5,1.5",
            "evaluate_every": 10**9,
        }
    )
