"""Owns how a task is found: a built-in name, or `path.py[:name]`.

What is found is a task, or a function that makes one; such a function is given those settings in `OFFERED` that it
takes. The task remembers how it was made, so that another process can make it again.
"""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Collection
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.task_identity import BUILT_IN, DEFAULT_NAME, identities
from offbeat.settings import Settings
from offbeat.task import Task
from offbeat.task_arguments import task_arguments

SHOWN_MAX = 400
"""Letters of an error that are shown."""
OFFERED = ("devices", "partition", "partition_sizes", "seed", "width", "vocabulary", "test_max", "task_args")
"""Settings that a function which makes a task is given, if it takes them."""
OVERRIDES = (
    *("gamma", "rho", "weight_decay", "batch_norm", "warm_up"),
    *("batch_size", "local_passes", "local_iterations"),
)
"""Settings that take the place of the task's own."""


def load(spec: str, settings: Settings) -> Task:
    task = adapted(_made(spec, settings), settings)
    task.recipe = (load, (spec, settings), {})  # type: ignore[attr-defined]
    task.known_as = identities(spec)  # type: ignore[attr-defined]
    task.identity = task.known_as[0]  # type: ignore[attr-defined]
    return task


def takes_seed(spec: str) -> bool:
    """Is the task that `spec` names another one for every seed?"""
    found = _found(spec)
    return not isinstance(found, Task) and callable(found) and "seed" in inspect.signature(found).parameters


def adapted(task: Task, settings: Settings) -> Task:
    changes = {name: value for name in OVERRIDES if (value := getattr(settings, name)) is not None}
    if settings.gamma_schedule != "constant":
        changes.pop("gamma", None)  # then every lease says its own
    if settings.on_one_machine and hasattr(task, "with_settings"):
        changes = {"rho": 0.0, **changes}  # there is no older model to stay near to
    if changes:
        task = _ask(task, "with_settings", f"{', '.join(changes)} cannot be set for it from outside")(**changes)
    if settings.on_one_machine:
        task = _ask(task, "pooled", "rule sgd trains on all data at once")(settings.devices)
    return task


def _ask(task: Task, method: str, why: str) -> Any:
    if not hasattr(task, method):
        raise InvalidValue(f"this task has no method `{method}`: {why}")
    return getattr(task, method)


def _made(spec: str, settings: Settings) -> Task:
    found = _found(spec)
    if isinstance(found, Task) and not inspect.isclass(found):
        _refuse_unused(spec, settings, taken=())
        return found
    if not callable(found):
        raise InvalidValue(f"{spec}: {found!r} is neither a task nor a function that makes one")
    accepted = inspect.signature(found).parameters
    _refuse_unused(spec, settings, taken=(*accepted, "task_args"))
    offered = {name: value for name in OFFERED if name in accepted and (value := getattr(settings, name)) is not None}
    arguments = task_arguments(spec, found, settings, offered)
    task = partial(found, **arguments)()
    if not isinstance(task, Task):
        raise InvalidValue(f"{spec} made {task!r}, which is no task: it needs initial, train and evaluate")
    if "devices" in accepted and getattr(task, "devices", None) is None:
        task.made_for = arguments.get("devices", accepted["devices"].default)  # type: ignore[attr-defined]
    return task


def _refuse_unused(spec: str, settings: Settings, taken: Collection[str]) -> None:
    """A setting that the task does not take would change nothing, and is refused."""
    plain = Settings()
    for name in OFFERED:
        if name in ("devices", "seed") or name in taken:
            continue
        if getattr(settings, name) != getattr(plain, name):
            raise InvalidValue(f"{name} is set, but task {spec} does not take it; leave it out")


def _found(spec: str) -> Any:
    path, _, name = spec.partition(":")
    if path in BUILT_IN:
        if name:
            raise InvalidValue(f"{spec!r}: {path} is built in and has no part {name!r}")
        return getattr(importlib.import_module(f"offbeat.tasks.{path}"), path)
    if not path.endswith(".py"):
        raise InvalidValue(f"unknown task {spec!r}; use {', '.join(BUILT_IN)} or a file: path.py or path.py:name")
    module_ = _imported(Path(path))
    if not hasattr(module_, name or DEFAULT_NAME):
        raise InvalidValue(f"{path} has no {name or DEFAULT_NAME!r}; name what to take, as in {path}:NAME")
    return getattr(module_, name or DEFAULT_NAME)


def described(error: BaseException, task_spec: str, *, anywhere: bool = False) -> str:
    """An error in one line, with the place in the task's own file that it came from, if it did; else `anywhere`."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."
    ours, file = isinstance(error, OffbeatError), Path(task_spec.partition(":")[0]).resolve()
    frames = [*traceback.extract_tb(error.__traceback__)]
    if error.__cause__ is not None:  # it is where things went wrong first
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == file]
    places = own or (frames if anywhere and not ours else [])
    where = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{shown}{where}" if ours else f"{type(error).__name__}: {shown}{where}"


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidValue(f"there is no file {path}")
    name = f"offbeat_task_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise InvalidValue(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # it may import what lies beside it
    try:
        found.loader.exec_module(module)
    except OffbeatError:
        raise
    except Exception as error:
        raise InvalidValue(f"{path} fails when it is imported: {type(error).__name__}: {error}") from error
    return module
