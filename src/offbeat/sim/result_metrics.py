"""Owns the metrics of a simulated run's result: which names they may have, and how the worst-served devices do."""

from collections.abc import Mapping

from offbeat.core.layout import Model
from offbeat.core.rules import Average
from offbeat.core.rules.average import refuse_best_average
from offbeat.errors import InvalidValue
from offbeat.protocol.plan import Plan, Target
from offbeat.protocol.scheduler import Plateau, Scheduler
from offbeat.protocol.worst_served import worst_served
from offbeat.task import Task, checked_metrics

RESULTS = (
    *("t", "epochs", "applied", "gradients", "virtual_s", "wall_s", "staleness_mean", "staleness_largest"),
    *("x_sha256", "bytes_down", "bytes_up", "ended", "executor", "lanes_mean", "programs", "processes"),
    *("actors", "redone", "dir", "task", "settings", "result_t", "average_t", "best_t", "best_value", "failed"),
    *("devices_evaluated", "ledger_head", "file_sha256", "files_sha256"),
)
"""What a summary says; a task's metrics must have other names."""
DEVICES_MAX = 1_000
"""Devices that the result is evaluated on, evenly chosen where there are more."""


def worst_devices(task: Task, x: Model, devices: int) -> dict[str, float]:
    """How the worst-served tenth of devices do with a model, each on what it holds out; empty where none does."""
    evaluate_on = getattr(task, "evaluate_on", None)
    if not callable(evaluate_on):
        return {}
    chosen = [number * devices // min(devices, DEVICES_MAX) for number in range(min(devices, DEVICES_MAX))]
    reports = [report for device in chosen if (report := checked_metrics(evaluate_on(x, device)))]
    return {**worst_served(reports), "devices_evaluated": len(reports)} if reports else {}


def check_target(target: Target | None, metrics: Mapping[str, float]) -> None:
    if target and target.metric not in metrics:
        known = ", ".join(metrics) or "none: it has no test data"
        raise InvalidValue(f"target is {target} but the task's metrics are {known}; the run would never end")


def check_metrics(metrics: Mapping[str, float], plan: Plan, scheduler: Scheduler, average: Average | None) -> None:
    """Nothing may wait for a metric that will never come, or have the name of a result."""
    known = ", ".join(metrics) or "none: it has no test data"
    best, gamma = plan.keep_best, scheduler.gamma
    check_target(plan.target, metrics)
    if best and average is not None:
        refuse_best_average(best.metric)
    if best and best.metric not in metrics:
        raise InvalidValue(f"keep_best is {best.metric} but the task's metrics are {known}")
    if isinstance(gamma, Plateau) and gamma.metric not in metrics:
        raise InvalidValue(f"gamma_schedule looks at {gamma.metric!r} but the task's metrics are {known}")
    for name in RESULTS:
        if name in metrics:
            raise InvalidValue(f"the task calls a metric {name!r}, which is the name of a result; rename it")
