"""Owns which executor a simulated run gets, and how runs whose trainings are of one task and one kind share theirs.

Rules kept here:
- What has bits of its own and needs more than the task (`compiled-torch`, `channels-last`) is never chosen, only asked
  for; where it is not possible, the run is refused instead of trained otherwise.
- So is a run whose task keeps state, where trainings are asked for together: only some executors carry states.
- `auto` chooses from static facts (layer kinds, parameters, tasks in flight, cores, whether numba is installed), never
  from a timing, so the same run is the same everywhere that has as many cores, and again when it is resumed.
- An executor that no run uses any more is closed.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from offbeat.errors import InvalidValue
from offbeat.hosting.child import cores
from offbeat.hosting.loading import OFFERED, OVERRIDES, load, takes_seed
from offbeat.hosting.task_host import CannotTravel
from offbeat.method import devices_of, method_of
from offbeat.settings import Settings
from offbeat.sim.event_sources import window_of
from offbeat.sim.executors import (
    STATEFUL,
    Batched,
    Carriable,
    CompiledLoops,
    Executor,
    Inline,
    compiling_obstacle,
    obstacle,
)
from offbeat.sim.on_ray.executor import Ray, Wishes
from offbeat.sim.processes import Processes, ProgramProcesses
from offbeat.task import Task, keeps_state, start

COMPILED_PARAMETERS_MAX = 65_536
BATCHED_PARAMETERS_MAX = 65_536
PROCESSES_PARAMETERS_MIN = 50_000
ANYWHERE = {f"ray_{name}": None for name in Wishes._fields}
"""What a run writes down of these: on which cluster it was, and how, makes no other run of it."""
Key = tuple[Any, ...]
CarriedTasks = Mapping[Key, Task]
"""Tasks that another process has loaded, and needs no torch for: by what runs of them have in common."""
OF_TASK = (*(name for name in OFFERED if name != "seed"), *OVERRIDES, "on_one_machine")
OF_EXECUTOR = ("executor", *ANYWHERE, "in_flight_max", "tasks_per_device", "device_model")
"""The settings that decide which task it is, beside the seed where it takes one, and which executor suits it."""


def wishes_of(settings: Settings, executor: str) -> Wishes:
    """What is set about Ray; refused where another executor is used, for it would change nothing."""
    wishes = {name: value for name in Wishes._fields if (value := getattr(settings, f"ray_{name}")) is not None}
    if wishes and not executor.startswith("ray"):
        raise InvalidValue(f"ray_{next(iter(wishes))} is set, but executor is {executor}; set executor to ray, too")
    return Wishes(**wishes)


class Chosen(NamedTuple):
    """An executor, and what is said where it is not the one that was asked for."""

    executor: Executor
    word: str | None = None


SPEC = re.compile(
    r"(?P<inline>inline)|(?P<compiled>compiled)|(?P<batched>batched)|(?P<together>batched\+)?(?P<processes>processes)(:(?P<count>[1-9]\d*))?"
    r"|(?P<ray>ray)(:(?P<actors>[1-9]\d*))?(?P<each>\+batched)?"
    r"|(?P<program>compiled-torch|channels-last)(:(?P<programs>[1-9]\d*))?"
)


def executor_of(
    task: Task,
    spec: str,
    *,
    parameters: int,
    in_flight_max: int,
    wishes: Wishes = Wishes(),  # noqa: B008 (it cannot change)
    alone: bool = True,
) -> Chosen:
    """The executor that is named, or the one that suits; what a task cannot do is done inline, and that is said.

    `alone` where no other process of a comparison runs beside this one.
    """
    if spec == "auto":
        return Chosen(_suitable(task, parameters, in_flight_max))
    asked = SPEC.fullmatch(spec)
    if asked is None:
        raise InvalidValue(
            f"executor {spec!r} is unknown; use auto, inline, compiled, batched, processes, processes:N, "
            "batched+processes[:N], compiled-torch[:N], channels-last[:N], ray[:N] or ray[:N]+batched"
        )
    if keeps_state(task) and (asked["batched"] or asked["together"] or asked["each"] or asked["compiled"]):
        raise InvalidValue(f"executor {spec} is not possible for this task: {STATEFUL}; use one of these, or auto")
    if asked["program"]:
        named = int(asked["programs"]) if asked["programs"] else None
        return Chosen(ProgramProcesses(task, asked["program"], named, None if alone else 1))
    reason = obstacle(task) if asked["batched"] or asked["together"] or asked["each"] else None
    if reason is not None:
        return _instead(task, f"cannot be batched: {reason}")
    reason = compiling_obstacle(task) if asked["compiled"] else None
    if reason is not None:
        return _instead(task, f"cannot be compiled: {reason}")
    try:
        return Chosen(_named(task, asked, wishes))
    except CannotTravel as error:
        return _instead(task, str(error))


def _named(task: Task, asked: re.Match[str], wishes: Wishes) -> Executor:
    if asked["ray"]:
        ray = Ray(task, int(asked["actors"]) if asked["actors"] else None, wishes)
        return Batched(task, ray) if asked["each"] else ray
    if asked["processes"]:
        processes = Processes(task, int(asked["count"]) if asked["count"] else None)
        return Batched(task, processes) if asked["together"] else processes
    if asked["compiled"]:
        return CompiledLoops(task, cores())
    return Batched(task) if asked["batched"] else Inline(task)


def _instead(task: Task, reason: str) -> Chosen:
    return Chosen(Inline(task), f"This task {reason}. It is trained inline.")


def _suitable(task: Task, parameters: int, in_flight_max: int) -> Executor:
    if parameters <= COMPILED_PARAMETERS_MAX and compiling_obstacle(task) is None:
        return CompiledLoops(task, cores())
    if in_flight_max > 1 and parameters <= BATCHED_PARAMETERS_MAX and obstacle(task) is None:
        return Batched(task)
    if in_flight_max > 1 and parameters >= PROCESSES_PARAMETERS_MIN and cores() > 1:
        try:
            return Processes(task)
        except CannotTravel:
            return Inline(task)
    return Inline(task)


# --- shared between runs ---------------------------------------------------------------------------------------------


def _key(settings: Settings) -> Key:
    """Runs with equal keys share a task, if it is the same one for every seed."""
    return tuple(getattr(settings, name) for name in (*OF_TASK, *OF_EXECUTOR))


class ExecutorPool:
    """The executors of one process, one per task and kind."""

    def __init__(self, task_spec: str, carried: CarriedTasks | None = None, *, alone: bool = True) -> None:
        """`alone` where no other process of the comparison runs beside this one; `carried` has tasks made elsewhere."""
        self.task_spec, self.alone, self._carried = task_spec, alone, carried or {}
        self._made: dict[Key, Executor] = {}

    @cached_property
    def _seeded(self) -> bool:
        """Is the task another one for every seed? To know it is to load it."""
        return takes_seed(self.task_spec)

    def lend(self, settings: Settings) -> Executor:
        """The executor for a run of these settings; made, with its task, where it is the first."""
        key = _key(settings)
        if key not in self._carried:
            key = (*key, settings.seed if self._seeded else None)
        if key not in self._made:
            self._made[key] = self._make(settings, self._carried.get(key) or load(self.task_spec, settings))
        return self._made[key]

    def carry(self, runs: Iterable[Settings]) -> CarriedTasks:
        """The tasks of these runs, as far as their executors are made here and can train elsewhere without torch."""
        groups: dict[Key, list[Settings]] = {}
        for settings in runs if not self._seeded else ():
            groups.setdefault(_key(settings), []).append(settings)
        found: dict[Key, Task] = {}
        for key, group in groups.items():
            executor = self._made.get((*key, None))
            if isinstance(executor, CompiledLoops) and isinstance(executor.task, Carriable):
                devices, seeds = devices_of(executor.task, group[0]), {settings.seed for settings in group}
                task = executor.task.carried(devices, seeds)
                if task is not None:
                    found[key] = task
        return found

    def _make(self, settings: Settings, task: Task) -> Executor:
        """Where other processes run beside this one, no core is free for an executor that would take all."""
        is_auto = settings.executor == "auto"
        executor = executor_of(
            task,
            settings.executor,
            parameters=start(task, settings.seed).layout.size if is_auto else 0,
            in_flight_max=method_of(settings, task, window=window_of(settings)).plan.in_flight_max,
            wishes=wishes_of(settings, settings.executor),
            alone=self.alone,
        ).executor
        if is_auto and isinstance(executor, Processes) and not self.alone:
            executor.close()
            return Inline(task)
        if isinstance(executor, CompiledLoops) and not self.alone:
            executor.threads = 1
        return executor

    def keep(self, used: Iterable[Executor]) -> None:
        """Close the others."""
        kept = {id(executor) for executor in used}
        for key, executor in [*self._made.items()]:
            if id(executor) not in kept:
                del self._made[key]
                executor.close()

    def close(self) -> None:
        self.keep(())
