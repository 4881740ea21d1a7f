"""Owns how a task is found: a built-in name, or `path.py[:name]`.

What is found is a task, or a function that makes one; such a function is given those of `devices`, `partition` and
`seed` that it takes. The task remembers how it was made, so that another process can make it again.
"""

import importlib.util
import inspect
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.settings import Settings
from offbeat.task import Task

BUILT_IN = {"digits": ("offbeat.tasks.digits", "digits")}
DEFAULT_NAME = "task"
OVERRIDES = ("gamma", "rho", "batch_size", "local_passes", "local_iterations")


def load(spec: str, settings: Settings) -> Task:
    """The task that this names, with the settings that concern it."""
    task = adapted(_made(spec, settings), settings)
    task.recipe = (load, (spec, settings), {})  # type: ignore[attr-defined]
    return task


def takes_seed(spec: str) -> bool:
    """Is what this names made anew for every seed?"""
    found = _found(spec)
    return not isinstance(found, Task) and callable(found) and "seed" in inspect.signature(found).parameters


def adapted(task: Task, settings: Settings) -> Task:
    """The task with gamma, rho and so on from the settings, where they are set."""
    changes = {name: value for name in OVERRIDES if (value := getattr(settings, name)) is not None}
    if settings.rule == "sgd":
        task = _ask(task, "pooled", "rule sgd trains on all data at once")(settings.devices)
    if not changes:
        return task
    changed: Task = _ask(task, "with_settings", f"{', '.join(changes)} cannot be set for it from outside")(**changes)
    return changed


def _ask(task: Task, method: str, why: str) -> Any:
    if not hasattr(task, method):
        raise InvalidValue(f"this task has no method `{method}`: {why}")
    return getattr(task, method)


def _made(spec: str, settings: Settings) -> Task:
    found = _found(spec)
    if isinstance(found, Task) and not inspect.isclass(found):
        return found
    if not callable(found):
        raise InvalidValue(f"{spec}: {found!r} is neither a task nor a function that makes one")
    accepted = inspect.signature(found).parameters
    offered = {"devices": settings.devices, "partition": settings.partition, "seed": settings.seed}
    arguments = {name: value for name, value in offered.items() if name in accepted and value is not None}
    task = partial(found, **arguments)()
    if not isinstance(task, Task):
        raise InvalidValue(f"{spec} made {task!r}, which is no task: it needs initial, train and evaluate")
    return task


def _found(spec: str) -> Any:
    path, _, name = spec.partition(":")
    if path in BUILT_IN:
        if name:
            raise InvalidValue(f"{spec!r}: {path} is built in and has no part {name!r}")
        module, attribute = BUILT_IN[path]
        return getattr(importlib.import_module(module), attribute)
    if not path.endswith(".py"):
        raise InvalidValue(f"unknown task {spec!r}; use {', '.join(BUILT_IN)} or a file: path.py or path.py:name")
    module_ = _imported(Path(path))
    if not hasattr(module_, name or DEFAULT_NAME):
        raise InvalidValue(f"{path} has no {name or DEFAULT_NAME!r}; name what to take, as in {path}:NAME")
    return getattr(module_, name or DEFAULT_NAME)


def _imported(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidValue(f"there is no file {path}")
    found = importlib.util.spec_from_file_location(f"offbeat_task_{path.stem}", path)
    if found is None or found.loader is None:
        raise InvalidValue(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except OffbeatError:
        raise
    except Exception as error:
        raise InvalidValue(f"{path} fails when it is imported: {type(error).__name__}: {error}") from error
    return module
