"""Owns `offbeat.simulate`: all that the command can do, and rules, staleness functions and schedules of your own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

from offbeat import method
from offbeat.core import rules, staleness
from offbeat.core.rules import Rule, Schedule
from offbeat.errors import InvalidValue
from offbeat.protocol.scheduler import GammaSchedule
from offbeat.settings import Settings, SettingsDict
from offbeat.sim.lockstep import draw
from offbeat.sim.run import Run, Simulation
from offbeat.task import StatefulTask, Task


def simulate(
    task: Task | StatefulTask | Path | str,
    *,
    rule: Rule | str = "fedasync",
    alpha: float | Schedule | None = None,
    staleness_fn: Callable[[int], float] | str | None = None,
    gamma: float | GammaSchedule | None = None,
    dir: str | Path | None = None,  # noqa: A002 (the name that the command has, too)
    on_progress: Callable[[Simulation], None] = lambda _: None,
    accept_changed_task: bool = False,
    **settings: Unpack[SettingsDict],
) -> Run:
    """Simulate a task under a virtual clock; settings have the names and defaults of `offbeat simulate`.

    `rule` may be a rule of your own, `staleness_fn` and `alpha` functions of your own (of the staleness, of t), and
    `gamma` a function of t and the evaluations so far. A run in `dir` that was interrupted is resumed; where
    the task is not the one that it began with, only with `accept_changed_task`, and that is recorded.
    """
    values: dict[str, Any] = {**settings}
    if values.get("task_args") and not isinstance(task, str | Path):
        raise InvalidValue("task_args is set, but the task is made already; give its arguments where it is made")
    own_rule = _rule(values, rule, alpha, staleness_fn)
    own_gamma = gamma if callable(gamma) else None
    if own_gamma is not None:
        _refuse_both("gamma", values)
        values["gamma_schedule"] = f"custom:{_name(own_gamma)}"
    else:
        values["gamma"] = gamma
    folder = None if dir is None else Path(dir)
    run = Simulation.of(
        *(task, Settings.of(values)),
        rule=own_rule,
        gamma=own_gamma,
        folder=folder,
        accept_changed_task=accept_changed_task,
    ).run(on_progress)
    if folder is not None:
        draw(folder)
    return run


def _rule(
    values: dict[str, Any],
    rule: Rule | str,
    alpha: float | Schedule | None,
    staleness_fn: Callable[[int], float] | str | None,
) -> Rule | None:
    """The rule, if a part of it is the user's own; what the settings can say goes into `values`."""
    if isinstance(rule, Rule):
        if alpha is not None or staleness_fn is not None:
            raise InvalidValue("a rule of your own has its alpha and staleness function inside; leave those out")
        if values.get("weights") is not None:
            raise InvalidValue("a rule of your own has its weights inside: offbeat.rules.compose(rule, weight)")
        values["rule"] = rule.spec
        return rule
    values["rule"] = rule
    s = None if staleness_fn is None or isinstance(staleness_fn, str) else staleness.checked(staleness_fn)
    if staleness_fn is not None:
        values["staleness_fn"] = s.spec if s is not None else staleness_fn
    if callable(alpha):
        _refuse_both("alpha", values)
        values["alpha_schedule"] = f"custom:{_name(alpha)}"
    elif alpha is not None:
        values["alpha"] = alpha
    if s is None and not callable(alpha):
        return None
    wanted = Settings.of({name: values[name] for name in ("alpha", "alpha_schedule", "staleness_fn") if name in values})
    alpha_at = alpha if callable(alpha) else method.alpha_of(wanted)
    s = s or staleness.from_spec(wanted.staleness_fn)
    return rules.from_spec(rule, alpha_at, s, values.get("weights") or "none")


def _refuse_both(name: str, values: dict[str, Any]) -> None:
    if f"{name}_schedule" in values:
        raise InvalidValue(f"{name} is a function of your own and {name}_schedule is set as well; give one of them")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
