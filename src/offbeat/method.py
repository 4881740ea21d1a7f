"""Owns the method of a run, as the settings say it: the rule, the coordinator's plan, the scheduler.

The simulator and the server make theirs here, so the same settings mean the same decisions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from offbeat.core import rules, staleness
from offbeat.core.gate import Gate
from offbeat.core.rules import Average, Rule, average_from_spec
from offbeat.core.rules.trial import tried
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.protocol.answer_book import DecidedTask
from offbeat.protocol.best import BestBy
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.dispatch import Available
from offbeat.protocol.ends import Ends
from offbeat.protocol.led import LedCoordinator
from offbeat.protocol.plan import Plan, Target
from offbeat.protocol.scheduler import GammaSchedule, Scheduler, gamma_schedule
from offbeat.protocol.snapshot import State, restored
from offbeat.settings import EPOCHS, EVALUATIONS, IN_FLIGHT_MAX, Settings
from offbeat.task import keeps_state

DEVICES = 100
EVALUATED_EVERY = 10
NOT_FINITE_PER_TASK = 10
REFUSED_PER_DEVICE = 10
"""Updates of every device, in a row, that are refused before the run is given up: each started from the same model."""
VALUE_MAX = 1e8
OF_THE_RULE = ("rule", "weights", "alpha", "alpha_schedule", "staleness_fn")


@dataclass(frozen=True, slots=True)
class Method:
    """How a run decides: all that its coordinator is made of."""

    rule: Rule
    plan: Plan
    scheduler: Scheduler
    seed: int = 0
    devices: int = 0
    average: Average | None = None
    """The mean of the versions that is kept beside the newest."""

    @property
    def needs_versions(self) -> bool:
        return self.rule.needs_base or self.rule.measures_base or self.plan.gate is not None

    def coordinator(self, available: Available = lambda _worker, _at: True) -> Coordinator:
        return Coordinator(self.rule, self.plan, self.scheduler, seed=self.seed, available=available)

    def led(self) -> LedCoordinator:
        """One that is led through a run of this method that was recorded."""
        return LedCoordinator(self.rule, self.plan, self.scheduler, seed=self.seed)

    def restored(self, state: State, decided: Iterable[DecidedTask]) -> Coordinator:
        """The coordinator as it stood at a checkpoint; `decided` are the last `answers_kept` decisions before it."""
        return restored(state, self.rule, self.plan, self.scheduler, seed=self.seed, decided=decided)


def method_of(
    settings: Settings,
    task: object,
    rule: Rule | None = None,
    gamma: GammaSchedule | None = None,
    window: int | None = None,
) -> Method:
    """The method that the settings say, for this task; `rule` and `gamma` take the place of what they name.

    `window` is K, where the simulator draws the staleness.
    """
    _refuse_several_tasks(task, settings, window)
    rule, devices = rule or rule_of(settings), devices_of(task, settings)
    tried(rule)
    scheduler = scheduler_of(task, settings, rule, devices, gamma)
    plan, average = plan_of(settings, rule, devices, window), average_from_spec(settings.average or "none")
    return Method(rule, plan, scheduler, settings.seed, devices, average)


def _refuse_several_tasks(task: object, settings: Settings, window: int | None) -> None:
    """Two trainings of one device would start from the same state, and one of the states that they bring is lost."""
    if not keeps_state(task):
        return
    if settings.tasks_per_device > 1:
        raise InvalidValue(
            f"this task keeps state on its devices, so a device has one task at a time, but tasks_per_device is "
            f"{settings.tasks_per_device}; leave it out"
        )
    if window is not None and window > 1:
        raise InvalidValue(
            f"this task keeps state on its devices, but with device_model sampled:{window} a device may have several "
            "tasks at once; use another device model, say lognormal:0.5"
        )


def until_stuck(method: Method) -> Method:
    """A simulation's method: no operator would do anything about it if every update were refused for ever."""
    refused_max = REFUSED_PER_DEVICE * max(method.devices, method.plan.in_flight_max) + EVALUATIONS
    return replace(method, plan=replace(method.plan, refused_max=refused_max))


def rule_of(settings: Settings) -> Rule:
    staleness_fn = staleness.from_spec(settings.staleness_fn)
    return rules.from_spec(settings.rule, alpha_of(settings), staleness_fn, settings.weights or "none")


def rule_curve(recorded: Mapping[str, Any], t: int, stalenesses: Iterable[int]) -> list[tuple[int, float]]:
    """What the rule in a run's settings makes an update weigh at epoch t, by its staleness.

    Empty where that is no function of it, or where the rule is a user's own: a folder has only its name.

    >>> rule_curve({"rule": "fedasync", "alpha": 0.5, "staleness_fn": "polynomial:1"}, 9, (0, 1))
    [(0, 0.5), (1, 0.25)]
    """
    try:
        rule = rule_of(Settings.of({name: recorded[name] for name in OF_THE_RULE if name in recorded}))
        if rule.group or rule.measures_base or rule.weights:  # a mean has no weight of its own
            return []
        return [(u, rule.decide(rules.Facts(t, t - 1 - u), rule.memory)[0].new) for u in stalenesses]
    except OffbeatError:
        return []


def alpha_of(settings: Settings) -> float | rules.Schedule:
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


def devices_of(task: object, settings: Settings) -> int:
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


def plan_of(settings: Settings, rule: Rule, devices: int, window: int | None = None) -> Plan:
    """What the coordinator may do, and until when."""
    epochs = ends_of(settings).epochs
    in_flight_max = window or _in_flight_max(settings, devices)
    return Plan(
        in_flight_max=in_flight_max,
        tasks_per_device=settings.tasks_per_device if window is None else None,
        lease_s=settings.lease_s if window is None else inf,
        queue_max=settings.queue_max,
        retry_after_s=settings.retry_after_s,
        **_staleness_limits(settings, rule),
        cancels=rule.cancels,
        starts_in_time=rule.staleness_max is not None,
        pace_wait_s=settings.pace_wait_s,
        epochs=epochs,
        gradients=settings.gradients,
        until_s=inf if settings.until_s is None else settings.until_s,
        target=None if settings.target is None else Target.parse(settings.target),
        evaluate_every=_evaluate_every(settings, rule, epochs),
        not_finite_max=NOT_FINITE_PER_TASK * in_flight_max + EVALUATIONS,
        keep_best=None if settings.keep_best is None else BestBy.parse(settings.keep_best),
        answers_kept=settings.answers_kept,
        released_kept=settings.released_kept,
        gate=_gate(settings),
        value_max=VALUE_MAX if settings.value_max is None else settings.value_max,
        bad_updates_max=settings.bad_updates_max,
    )


def _staleness_limits(settings: Settings, rule: Rule) -> dict[str, Any]:
    """What is too stale: as the settings say, or as the rule does."""
    asked = {"staleness_policy": settings.staleness_policy, "staleness_max": settings.staleness_max}
    if rule.staleness_max is None:
        return asked
    if asked != {"staleness_policy": "weigh", "staleness_max": None}:
        raise InvalidValue(
            f"rule {rule.spec} refuses a staleness above {rule.staleness_max} by itself; leave staleness_policy and "
            "staleness_max out"
        )
    return {"staleness_policy": "reject", "staleness_max": rule.staleness_max}


def _gate(settings: Settings) -> Gate | None:
    if settings.norm_max is None and settings.norm_median_max is None:
        return None
    return Gate(settings.norm_max, settings.norm_policy, settings.norm_median_max)  # type: ignore[arg-type]


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


# --- other ends ------------------------------------------------------------------------------------------------------


def as_begun(settings: Settings, recorded: Mapping[str, Any]) -> Settings:
    """The settings with the ends that the recorded run began with: other ends extend it, other settings do not."""
    ends: dict[str, Any] = {name: recorded.get(name) for name in Ends._fields}
    if isinstance(ends["until_s"], str):  # JSON has no word for infinity
        ends["until_s"] = float(ends["until_s"])
    return replace(settings, **ends)


def ends_of(settings: Settings) -> Ends:
    """What ends a run with these settings."""
    ends = (settings.epochs, settings.gradients, settings.until_s, settings.target)
    epochs = EPOCHS if all(end is None for end in ends) else settings.epochs
    until_s = None if settings.until_s == inf else settings.until_s
    return Ends(epochs, settings.gradients, until_s, settings.target and str(Target.parse(settings.target)))


def unlike_one_long_run(settings: Settings, plan: Plan, rule: Rule, ends: Ends) -> list[str]:
    """What a run that is extended to these ends does otherwise than one that began with them, in words."""
    told = []
    every = _evaluate_every(settings, rule, ends.epochs)
    if every != plan.evaluate_every:
        told.append(
            f"versions are evaluated every {plan.evaluate_every} epochs, as when the run began; "
            f"one that began with this end would evaluate every {every}"
        )
    schedules = {"alpha_schedule": settings.alpha_schedule, "gamma_schedule": settings.gamma_schedule}
    return told + [
        f"{name} {schedule} counts epochs from the beginning, and is not stretched"
        for name, schedule in schedules.items()
        if schedule != "constant"
    ]


def scheduler_of(
    task: object, settings: Settings, rule: Rule, devices: int, gamma: GammaSchedule | None = None
) -> Scheduler:
    """Which devices to trigger, and when; FedAvg's groups come from its rule."""
    gamma_0 = settings.gamma if settings.gamma is not None else getattr(task, "gamma", None)
    scheduler = Scheduler(
        choice=settings.scheduler,  # type: ignore[arg-type]
        trigger_every_s=settings.trigger_every_s,
        group=rule.group,
        over_selection=settings.over_selection,
        group_deadline_s=settings.group_deadline_s,
        gamma=gamma or gamma_schedule(settings.gamma_schedule, gamma_0),
        local_iterations_min=settings.local_iterations_min,
        local_iterations_max=settings.local_iterations_max,
    )
    for name in ("over_selection", "group_deadline_s"):
        if not rule.group and getattr(settings, name) != getattr(Settings(), name):
            raise InvalidValue(f"{name} is for groups, and rule {rule.spec} has none; leave it out, or use fedavg:K")
    if scheduler.quota > devices:
        raise InvalidValue(f"a group starts {scheduler.quota} tasks on different devices, but there are {devices}")
    return scheduler
