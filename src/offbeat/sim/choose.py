"""Owns which executor a run gets, and how a run is put together from its settings.

Rule kept here: `auto` chooses from static facts (layer kinds, parameters, tasks in flight, cores), never from a timing,
so the same run is the same everywhere that has as many cores, and again when it is resumed.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from offbeat.core import rules, staleness
from offbeat.core.rules import Rule
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Lease
from offbeat.protocol.plan import Plan, Target
from offbeat.protocol.scheduler import GammaSchedule, Scheduler
from offbeat.protocol.schedules import gamma_schedule
from offbeat.settings import EPOCHS, EVALUATIONS, IN_FLIGHT_MAX, Settings
from offbeat.sim.batched import Batched, obstacle
from offbeat.sim.devices import device_model
from offbeat.sim.executors import Executor, Inline
from offbeat.sim.processes import CannotTravel, Processes, cores
from offbeat.sim.sources import Fleet, Sampled, Source
from offbeat.task import Task, Work

BATCHED_PARAMETERS_MAX = 65_536
PROCESSES_PARAMETERS_MIN = 50_000
DEVICES = 100
EVALUATED_EVERY = 10
NOT_FINITE_PER_TASK = 10


def rule_of(settings: Settings) -> Rule:
    """The mixing rule."""
    return rules.from_spec(settings.rule, alpha_of(settings), staleness.from_spec(settings.staleness_fn))


def alpha_of(settings: Settings) -> float | rules.Schedule:
    """alpha, or its schedule."""
    name, _, rest = settings.alpha_schedule.partition(":")
    epoch, _, factor = rest.partition(",")
    if name == "constant" and not rest:
        return settings.alpha
    try:
        if name == "step":
            return rules.scaled_from(settings.alpha, int(epoch), float(factor))
    except InvalidValue:
        raise
    except ValueError:
        pass
    raise InvalidValue(
        f"alpha_schedule {settings.alpha_schedule!r} is unknown; use constant or step:T,F, for instance step:800,0.5"
    )


def devices_of(task: Task, settings: Settings) -> int:
    """How many devices there are: as set, else as many as the task has, else 100."""
    if settings.on_one_machine:
        return 1
    own: int | None = getattr(task, "devices", None)
    made_for = getattr(task, "made_for", None)
    usual = made_for if isinstance(made_for, int) else DEVICES
    devices = settings.devices if settings.devices is not None else own or usual
    if devices < 1 or (own is not None and devices > own):
        raise InvalidValue(f"devices is {devices} but must lie in 1..{own or 'any number'}, what the task has data for")
    return devices


def window_of(settings: Settings) -> int | None:
    """K, under `sampled:K`."""
    name, _, rest = settings.device_model.partition(":")
    if name != "sampled":
        return None
    if not rest.isdecimal() or int(rest) < 1:
        raise InvalidValue(f"device_model {settings.device_model!r}: K in sampled:K must be a whole number >= 1")
    return int(rest)


def plan_of(settings: Settings, rule: Rule, devices: int) -> Plan:
    """What the coordinator may do, and until when."""
    window = window_of(settings)
    ends = (settings.epochs, settings.gradients, settings.until_s, settings.target)
    epochs = EPOCHS if all(end is None for end in ends) else settings.epochs
    in_flight_max = window or _in_flight_max(settings, devices)
    return Plan(
        in_flight_max=in_flight_max,
        tasks_per_device=settings.tasks_per_device if window is None else None,
        lease_s=settings.lease_s if window is None else inf,
        queue_max=settings.queue_max,
        retry_after_s=settings.retry_after_s,
        staleness_policy=settings.staleness_policy,  # type: ignore[arg-type]
        staleness_max=settings.staleness_max,
        pace_wait_s=settings.pace_wait_s,
        epochs=epochs,
        gradients=settings.gradients,
        until_s=inf if settings.until_s is None else settings.until_s,
        target=None if settings.target is None else Target.parse(settings.target),
        evaluate_every=_evaluate_every(settings, rule, epochs),
        not_finite_max=NOT_FINITE_PER_TASK * in_flight_max + EVALUATIONS,
        answers_kept=settings.answers_kept,
        released_kept=settings.released_kept,
    )


def _in_flight_max(settings: Settings, devices: int) -> int:
    if settings.on_one_machine:
        return 1
    if settings.tasks_per_device < 1:
        raise InvalidValue(f"tasks_per_device is {settings.tasks_per_device} but must be a whole number >= 1")
    workers = devices * settings.tasks_per_device
    in_flight_max = min(IN_FLIGHT_MAX, workers) if settings.in_flight_max is None else settings.in_flight_max
    if not 1 <= in_flight_max <= workers:
        raise InvalidValue(f"in_flight_max is {in_flight_max} but must lie in 1..{workers}, the number of devices")
    return in_flight_max


def _evaluate_every(settings: Settings, rule: Rule, epochs: int | None) -> int:
    if settings.evaluate_every is not None:
        return settings.evaluate_every
    if epochs is None:
        return 1 if rule.group else EVALUATED_EVERY
    return max(1, epochs // EVALUATIONS)


def scheduler_of(
    task: Task, settings: Settings, rule: Rule, devices: int, gamma: GammaSchedule | None = None
) -> Scheduler:
    """Whom to trigger, and when; FedAvg's groups come from its rule."""
    scheduler = Scheduler(
        choice=settings.scheduler,  # type: ignore[arg-type]
        trigger_every_s=settings.trigger_every_s,
        group=rule.group,
        over_selection=settings.over_selection,
        group_deadline_s=settings.group_deadline_s,
        gamma=gamma or _gamma(task, settings),
        local_iterations_min=settings.local_iterations_min,
        local_iterations_max=settings.local_iterations_max,
    )
    for name in ("over_selection", "group_deadline_s"):
        if not rule.group and getattr(settings, name) != getattr(Settings(), name):
            raise InvalidValue(f"{name} is for groups, and rule {rule.spec} has none; leave it out, or use fedavg:K")
    if scheduler.quota > devices:
        raise InvalidValue(f"a group starts {scheduler.quota} tasks on different devices, but there are {devices}")
    return scheduler


def _gamma(task: Task, settings: Settings) -> GammaSchedule | None:
    gamma = settings.gamma if settings.gamma is not None else getattr(task, "gamma", None)
    return gamma_schedule(settings.gamma_schedule, gamma)


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


class Chosen(NamedTuple):
    """An executor, and a word where it is not the one that was asked for."""

    executor: Executor
    word: str | None = None


def executor_of(task: Task, spec: str, *, parameters: int, in_flight_max: int) -> Chosen:
    """The executor that is named, or the one that suits; what a task cannot do is done inline, with a word."""
    together, plus, rest = spec.rpartition("+")
    name, _, count = rest.partition(":")
    processes = name == "processes" and (not count or (count.isdecimal() and int(count) > 0))
    try:
        if spec == "auto":
            return Chosen(_suitable(task, parameters, in_flight_max))
        if spec == "inline":
            return Chosen(Inline(task))
        if spec == "batched" or (together == "batched" and processes):
            reason = obstacle(task)
            if reason is not None:
                return _instead(task, f"cannot be batched: {reason}")
            return Chosen(Batched(task, Processes(task, int(count) if count else None) if plus else None))
        if processes and not plus:
            return Chosen(Processes(task, int(count) if count else None))
    except CannotTravel as error:
        return _instead(task, str(error))
    raise InvalidValue(
        f"executor {spec!r} is unknown; use auto, inline, batched, processes, processes:N or batched+processes[:N]"
    )


def _instead(task: Task, reason: str) -> Chosen:
    return Chosen(Inline(task), f"This task {reason}. It is trained inline.")


def _suitable(task: Task, parameters: int, in_flight_max: int) -> Executor:
    if in_flight_max > 1 and parameters <= BATCHED_PARAMETERS_MAX and obstacle(task) is None:
        return Batched(task)
    if in_flight_max > 1 and parameters >= PROCESSES_PARAMETERS_MIN and cores() > 1:
        try:
            return Processes(task)
        except CannotTravel:
            return Inline(task)
    return Inline(task)
