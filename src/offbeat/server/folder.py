"""Owns how a served run comes to be in its folder, and how it is found there again.

    settings.json    what the user set, as in every run's folder
    run.json         the run's own name, what the task said about itself, and when a worker is silent
    x_0.safetensors  the first model
    server.json      where the server is to be found, while it runs

Rules kept here:
- A run has begun when its first checkpoint is on the disk; what a crash left before that is made anew.
- The settings of a run never change; another end is an event in its ledger.
- Settings that only a simulated world has are no part of a served run.
"""

import json
import secrets
import shutil
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from offbeat.core.layout import Layout, Model, layout_from
from offbeat.core.rules.average import AVERAGED, refuse_averaged_names, refuse_best_average, with_average
from offbeat.digests import digest_of_file
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.task_host import TaskDescription
from offbeat.hosting.task_identity import TaskNames, identities, names_in
from offbeat.hosting.task_process import TaskProcess
from offbeat.method import Method, as_begun, ends_of, method_of
from offbeat.protocol.ends import Ends
from offbeat.protocol.plan import Plan, Target
from offbeat.server.capture import forget_held
from offbeat.server.served_run import ServedRun
from offbeat.settings import QUEUE_MAX, Settings, room_for
from offbeat.storage.backup_marker import BackupMarker, named_fork
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json, sealed
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import LEDGER, SETTINGS, X_0, RunFolder
from offbeat.storage.vector_room import VectorRoom, vector_room
from offbeat.wire import body_of, header_of, mapped

RUN, WHERE = "run.json", "server.json"
BAD_UPDATES_MAX = 5
EVALUATIONS_KEPT = 100
"""Besides as many as updates may wait: a run may have any number of evaluations, and they are in its ledger."""
HEARTBEAT_MAX_S = 30.0
HEARTBEATS_MISSED = 3
"""A worker that has missed this many is silent."""
WORLD = (
    *("device_model", "down_mbps", "up_mbps", "availability", "availability_period_s", "dropout", "mix_s"),
    *("executor", "ray_address", "ray_gpus", "ray_results_max"),
)
"""Settings of a simulated world: a real one brings its own."""


@dataclass(frozen=True)
class Begun:
    folder: RunFolder
    run_id: str
    about: TaskDescription
    method: Method
    task: TaskNames
    ends: Ends
    """What the run is to end with; the method has what it began with."""
    room: VectorRoom
    fork: BackupMarker | None = None
    """The backup that is started here for the first time, as a run of its own."""


def begin(
    path: Path,
    spec: str,
    settings: Settings,
    process: TaskProcess,
    x_0: Path | None,
    *,
    accept_changed_task: bool = False,
) -> Begun:
    """Begin a run, or find the one that is there; nothing of it is left where it cannot be begun."""
    if settings.on_one_machine:
        raise InvalidValue("rule sgd trains on one machine; simulate it, or serve another rule")
    ends, settings = ends_of(settings), _as_begun(path, settings)
    recorded = {name: value for name, value in settings.as_dict().items() if name not in WORLD}
    names = names_in(path, identities(spec), accept_changed=accept_changed_task)
    folder = RunFolder.begin(path, {"task": names.recorded, "served": True, **recorded}, reopen=True)
    try:
        if not list((path / "checkpoints").glob("*.json")):
            _refuse_lost(path)
            _first(path, settings, process, x_0)
        else:
            _refuse_another(path, x_0)
        facts = read_json(path / RUN)
        about = TaskDescription(**{**facts["about"], "metrics": tuple(facts["about"]["metrics"])})
        method = served_method(settings, about, facts.get("silent_s"), facts.get("queue_max"))
        room = room_of(method, settings, layout_from(read_json(path / "layout.json")), path)
        forget_held(path)
        fork = named_fork(path, facts["run"], Disk())
        return Begun(folder, fork.fork if fork else facts["run"], about, method, names, ends, room, fork)
    except BaseException:
        folder.close()
        raise


def room_of(method: Method, settings: Settings, layout: Layout, path: Path) -> VectorRoom:
    """What the rule's vectors take in this run; refused where they do not fit."""
    return vector_room(method.rule, method.average, method.devices, layout.size, settings.device_cache, path)


def _as_begun(path: Path, settings: Settings) -> Settings:
    return as_begun(settings, read_json(path / SETTINGS)) if (path / SETTINGS).is_file() else settings


def silent_s_of(settings: Settings) -> float | None:
    """After how long a worker of a new run is silent; None where a lease has no end.

    It is written down, since a redo must decide alike: runs of before there was silence go on without it.
    """
    silent_s = HEARTBEATS_MISSED * HEARTBEAT_MAX_S if settings.silent_s is None else settings.silent_s
    held_s = replace(Plan(), silent_s=silent_s, lease_s=settings.lease_s).hold_s  # which refuses what makes no sense
    return held_s if isfinite(held_s) else None


def served_method(
    settings: Settings, about: TaskDescription, silent_s: float | None, queue_max: int | None = None
) -> Method:
    """The method of a served run; what a server cannot do is refused.

    `queue_max` is what was written down when it began; a run of before, which has none, keeps that of its settings.
    """
    if about.refreshes:
        raise InvalidValue(
            f"batch_norm is {about.batch_norm!r}, which runs the task's code at every mixing; "
            "a server can do mix, keep_local and recompute"
        )
    method = method_of(settings, about)
    plan = method.plan
    if queue_max is not None:
        plan = replace(plan, queue_max=queue_max)
    if plan.bad_updates_max is None:
        plan = replace(plan, bad_updates_max=BAD_UPDATES_MAX)
    if method.average is not None:
        refuse_averaged_names(about.metrics)
        if plan.keep_best is not None:
            refuse_best_average(plan.keep_best.metric)
    check_target(plan.target, about, method)
    if plan.keep_best is not None and plan.keep_best.metric not in about.metrics:
        known = ", ".join(about.metrics) or "measured by its workers, when the version that they measured is gone"
        raise InvalidValue(f"keep_best is {plan.keep_best.metric} but the task's metrics are {known}")
    kept = EVALUATIONS_KEPT + plan.queue_max  # the one at the target among them: what is queued is mixed after it
    plan = replace(plan, silent_s=inf if silent_s is None else silent_s, evaluations_kept=kept)
    return replace(method, plan=plan)


def heartbeat_s_of(plan: Plan) -> float:
    """How often a worker says that it is at work."""
    return min(HEARTBEAT_MAX_S, plan.hold_s / HEARTBEATS_MISSED)


def check_target(target: Target | None, about: TaskDescription, method: Method) -> None:
    """Nothing may wait for a metric that will never come."""
    if target is None:
        return
    if not about.metrics and method.average is not None and target.metric.endswith(AVERAGED):
        raise InvalidValue(
            f"target is {target}, but workers measure the model that they receive, never the averaged one; "
            f"name a metric without {AVERAGED}, or give the task test data"
        )
    values = dict.fromkeys(about.metrics, 0.0)
    names = list(values if method.average is None else with_average(values, values))
    if names and target.metric not in names:
        known = ", ".join(names)
        raise InvalidValue(f"target is {target} but the task's metrics are {known}; the run would never end")


def _refuse_lost(path: Path) -> None:
    """A run that has given out tasks has had a checkpoint: where it is gone, nothing is begun over it."""
    if not (path / LEDGER).is_file():
        return
    with Ledger.open(path / LEDGER, read_only=True) as ledger:
        if ledger.count("leased"):
            raise OffbeatError(f"{path / 'checkpoints'} holds no checkpoint of this run; restore one from a copy")


def _refuse_another(path: Path, x_0: Path | None) -> None:
    if x_0 is not None:
        raise InvalidValue(f"{path} holds a run that has begun; --init is for a new one")


def _first(path: Path, settings: Settings, process: TaskProcess, x_0: Path | None) -> None:
    disk = Disk()
    _tidy(path)
    try:
        about = process.about()
        silent_s = silent_s_of(settings)
        method = served_method(settings, about, silent_s)
        queue_max = settings.queue_max
        if queue_max == QUEUE_MAX:
            queue_max = room_for(method.plan.in_flight_max)
            method = served_method(settings, about, silent_s, queue_max)
        layout = process.initial(settings.seed, path / X_0)
        if x_0 is not None:
            _keep(path / X_0, _model(x_0, layout), disk)
        model = _model(path / X_0, layout)
        room_of(method, settings, layout, path)  # refused before anything is written
        facts: dict[str, Any] = {"run": secrets.token_hex(8), "about": asdict(about), "silent_s": silent_s}
        facts |= {"queue_max": queue_max, "x_0_sha256": digest_of_file(path / X_0)}
        disk.write_whole(path / RUN, [sealed(json.dumps(facts, indent=2))])
        ServedRun.begin(path, model, method, disk)
    except BaseException:
        _tidy(path)
        (path / "settings.json").unlink(missing_ok=True)
        raise


def _keep(path: Path, x_0: Model, disk: Disk) -> None:
    disk.write_whole(path, [header_of(x_0.layout), *body_of(x_0)])


def _model(path: Path, layout: Layout) -> Model:
    try:
        return mapped(path, layout)
    except (OSError, InvalidValue) as error:
        raise InvalidValue(f"{path} cannot be the first model: {error}") from error


def _tidy(path: Path) -> None:
    """Remove what a beginning left that came to nothing."""
    for name in ("checkpoints", "updates", "versions"):
        shutil.rmtree(path / name, ignore_errors=True)
    for file in (*path.glob(f"{LEDGER}*"), path / RUN, path / X_0, path / "layout.json"):
        file.unlink(missing_ok=True)
