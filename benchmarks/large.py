"""Owns the benchmark of simulations with larger models, which train in processes: M, L and T.

Rules kept here:
- Ours runs as `auto` chooses: one process per core, one thread each. The time to start them is a figure of its own.
- Executors that have to be asked for run beside it where the model allows them; their warm-up is such a figure, too.
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
PROGRAMS = {"m": "channels-last", "l": "compiled-torch"}
"""Executors that have to be asked for, and the model that each is measured with."""
OURS, INLINE, ONE, TWO = "2 cores", "inline", "plain, 1 thread", "plain, 2 threads"


def run(results: Results, scale: Scale, tell: Tell) -> None:
    """Measure all three."""
    for name, tasks, iterations in zip(NAMES, scale.large_tasks, scale.large_iterations, strict=True):
        program = PROGRAMS.get(name) if scale.large_programs else None
        _measure(results, name, MAKE[name](iterations), tasks, scale.large_turns, tell, program)


def _measure(
    results: Results, name: str, task: Task, tasks: int, count: int, tell: Tell, program: str | None = None
) -> None:
    plain, starts, warm_ups = PlainLoop(task), list[float](), list[float]()
    contestants: dict[str, Contestant] = {
        ONE: partial(plain.rate, tasks, 1),
        TWO: partial(plain.rate, tasks, 2),
        INLINE: lambda: simulated(Inline(task), tasks),
        OURS: lambda: in_processes(task, tasks, starts),
    }
    what = f"sim {name.upper()}"
    if program and (reason := task.program_obstacle(program)):
        results.skip(f"{what}, {program}: {reason}", _key(name, program))
    elif program:
        contestants[program] = lambda: in_processes(task, tasks, warm_ups, program)
    plain.rate(1)
    turns = take_turns(contestants, count, tell, f"sim {name.upper()}")
    results.put_turns(f"sim_{name}_two_threads", turns, OURS, TWO)
    if f"sim_{name}_one_thread" in results.figures:
        results.put_turns(f"sim_{name}_one_thread", turns, OURS, ONE)
    if program in contestants:
        results.put_turns(_key(name, program), turns, program, TWO)
        results.note_turns(f"{what}, {program} against what auto chooses", "tasks/s", turns, program, OURS)
        results.note(f"{what}, {program}, first start of the processes", warm_ups[0], "s")
        results.note(f"{what}, {program}, later starts", min(warm_ups), "s")
    results.note_turns(f"{what}, inline against the plain loop on one thread", "tasks/s", turns, INLINE, ONE)
    results.note_turns(f"{what}, plain loop on two threads against one", "tasks/s", turns, TWO, ONE)
    results.note(f"{what}, start of the processes", min(starts), "s")
    results.note(f"{what}, model", start(task, 0).layout.size / 1e6, "million parameters")


def _key(name: str, program: str) -> str:
    return f"sim_{name}_{program.replace('-', '_')}"


def in_processes(task: Task, tasks: int, starts: list[float], named: str = "auto") -> float:
    """Tasks per second of a run in the processes that `auto` chooses, or of the executor of this name, once started."""
    begun = perf_counter()
    x_0 = start(task, 0)
    executor = executor_of(task, named, parameters=x_0.layout.size, in_flight_max=IN_FLIGHT_MAX).executor
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
