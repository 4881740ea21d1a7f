"""Owns which executor a simulated run gets, and which world.

Rule kept here: `auto` chooses from static facts (layer kinds, parameters, tasks in flight, cores, whether numba is
installed), never from a timing, so the same run is the same everywhere that has as many cores, and again when it is
resumed.
"""

import re
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from offbeat.core.rules import Rule
from offbeat.errors import InvalidValue
from offbeat.hosting.child import cores
from offbeat.hosting.task_host import CannotTravel
from offbeat.method import DEVICES
from offbeat.protocol.messages import Lease
from offbeat.settings import Settings
from offbeat.sim.batched import Batched, Compiled, compiling_obstacle, obstacle
from offbeat.sim.devices import device_model
from offbeat.sim.executors import Executor, Inline
from offbeat.sim.on_ray.executor import Ray, Wishes
from offbeat.sim.processes import Processes
from offbeat.sim.sources import Fleet, Sampled, Source
from offbeat.task import Task, Work

COMPILED_PARAMETERS_MAX = 65_536
BATCHED_PARAMETERS_MAX = 65_536
PROCESSES_PARAMETERS_MIN = 50_000


def window_of(settings: Settings) -> int | None:
    """K, under `sampled:K`."""
    name, _, rest = settings.device_model.partition(":")
    if name != "sampled":
        return None
    if not rest.isdecimal() or int(rest) < 1:
        raise InvalidValue(f"device_model {settings.device_model!r}: K in sampled:K must be a whole number >= 1")
    return int(rest)


def source_of(task: Task, settings: Settings, rule: Rule, devices: int, model_bytes: int, epochs: int | None) -> Source:
    """The simulated world."""
    window = window_of(settings)
    if window is not None:
        _refuse_with_sampled(settings, rule)
        return Sampled(devices, window, seed=settings.seed, epochs=inf if epochs is None else epochs)
    if not 0 <= settings.mix_s < inf:
        raise InvalidValue(f"mix_s is {settings.mix_s!r} but must be >= 0 seconds")
    if settings.on_one_machine:
        return Fleet(1, device_model("constant", settings.seed), seed=settings.seed, amount=_amount(task, 1, settings))
    model = device_model(
        settings.device_model,
        settings.seed,
        down_mbps=settings.down_mbps,
        up_mbps=settings.up_mbps,
        availability=settings.availability,
        availability_period_s=settings.availability_period_s,
        dropout=settings.dropout or None,
    )
    return Fleet(
        devices,
        model,
        seed=settings.seed,
        tasks_per_device=settings.tasks_per_device,
        model_bytes=model_bytes,
        amount=_amount(task, devices, settings),
    )


NOT_SAMPLED = (
    *("staleness_policy", "trigger_every_s", "dropout", "availability", "down_mbps", "up_mbps", "in_flight_max"),
    *("tasks_per_device", "mix_s", "over_selection", "group_deadline_s"),
)
"""Settings that mean nothing where every arrival is one epoch, and nobody waits or is lost."""


def _refuse_with_sampled(settings: Settings, rule: Rule) -> None:
    plain = Settings()
    if rule.group or settings.rule.startswith("fedbuff"):
        raise InvalidValue(
            f"device_model sampled:K draws the staleness of every epoch; rule {settings.rule} has no such"
        )
    for name in NOT_SAMPLED:
        if getattr(settings, name) != getattr(plain, name):
            raise InvalidValue(f"device_model sampled:K leaves no room for {name}; leave it out")


def _amount(task: Task, devices: int, settings: Settings) -> Callable[[Lease], float]:
    """The work of a task relative to the mean over (some of) the devices, where the task can tell."""
    iterations, seed = getattr(task, "iterations", None), settings.seed
    if iterations is None:
        return lambda _: 1.0
    some = range(min(devices, DEVICES))
    ordinary = getattr(task, "ordinary_iterations", None)
    if ordinary is None:
        ordinary = sum(iterations(Work(device, seed=seed)) for device in some) / len(some)

    def amount(lease: Lease) -> float:
        work = Work(lease.device, lease.number, seed, lease.local_iterations, lease.gamma)
        return float(iterations(work) / ordinary)

    return amount


ANYWHERE = {f"ray_{name}": None for name in Wishes._fields}
"""What a run writes down of these: on which cluster it was, and how, makes no other run of it."""


def wishes_of(settings: Settings, executor: str) -> Wishes:
    """What is set about Ray; a wish that would change nothing is refused: one would believe in it."""
    wishes = {name: value for name in Wishes._fields if (value := getattr(settings, f"ray_{name}")) is not None}
    if wishes and not executor.startswith("ray"):
        raise InvalidValue(f"ray_{next(iter(wishes))} is set, but executor is {executor}; set executor to ray, too")
    return Wishes(**wishes)


class Chosen(NamedTuple):
    """An executor, and a word where it is not the one that was asked for."""

    executor: Executor
    word: str | None = None


SPEC = re.compile(
    r"(?P<inline>inline)|(?P<compiled>compiled)|(?P<batched>batched)|(?P<together>batched\+)?(?P<processes>processes)(:(?P<count>[1-9]\d*))?"
    r"|(?P<ray>ray)(:(?P<actors>[1-9]\d*))?(?P<each>\+batched)?"
)


def executor_of(
    task: Task,
    spec: str,
    *,
    parameters: int,
    in_flight_max: int,
    wishes: Wishes = Wishes(),  # noqa: B008 (it cannot change)
) -> Chosen:
    """The executor that is named, or the one that suits; what a task cannot do is done inline, with a word."""
    if spec == "auto":
        return Chosen(_suitable(task, parameters, in_flight_max))
    asked = SPEC.fullmatch(spec)
    if asked is None:
        raise InvalidValue(
            f"executor {spec!r} is unknown; use auto, inline, compiled, batched, processes, processes:N, "
            "batched+processes[:N], ray[:N] or ray[:N]+batched"
        )
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
        return Compiled(task, cores())
    return Batched(task) if asked["batched"] else Inline(task)


def _instead(task: Task, reason: str) -> Chosen:
    return Chosen(Inline(task), f"This task {reason}. It is trained inline.")


def _suitable(task: Task, parameters: int, in_flight_max: int) -> Executor:
    if parameters <= COMPILED_PARAMETERS_MAX and compiling_obstacle(task) is None:
        return Compiled(task, cores())
    if in_flight_max > 1 and parameters <= BATCHED_PARAMETERS_MAX and obstacle(task) is None:
        return Batched(task)
    if in_flight_max > 1 and parameters >= PROCESSES_PARAMETERS_MIN and cores() > 1:
        try:
            return Processes(task)
        except CannotTravel:
            return Inline(task)
    return Inline(task)
