"""Owns the arguments of a function that makes a task: `--task-arg width=16`, or `task_args={"width": 16}`.

Rules kept here:
- A function is given the arguments that it takes; any other name is refused with the list of those that it takes.
- A value becomes what the parameter's annotation says, else the type of its default: bool, int, float, a path or text.
- A setting that is offered to such functions anyway (`devices`, `seed`, ...) has its own flag, and is not given here.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from offbeat.errors import InvalidValue
from offbeat.settings import DEPRECATED, Scalar, Settings

KINDS = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", str: "text"}
SETTINGS_OF_TASKS = ("devices", "partition", "partition_sizes", "seed")
NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def parsed(texts: Sequence[str]) -> dict[str, Scalar]:
    """What the command line says: a value is a number, true or false only where its text can be told from it.

    >>> parsed(["width=16", "rate=0.5", "deep=true", "code=007"])
    {'width': 16, 'rate': 0.5, 'deep': True, 'code': '007'}
    """
    found: dict[str, Scalar] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.isidentifier() or not equals:
            raise InvalidValue(f"--task-arg is {text!r} but must be NAME=VALUE, such as width=16")
        if name in found:
            raise InvalidValue(f"--task-arg gives {name} twice; give it once")
        found[name] = _scalar(value)
    return found


def _scalar(text: str) -> Scalar:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            number: float = kind(text)
            if isfinite(number) and str(number) == text:
                return number
    return text


def task_arguments(
    spec: str, function: Callable[..., Any], settings: Settings, offered: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments for the function that makes task `spec`: those from the settings (`offered`), and `task_args`."""
    parameters, given = _parameters(function), settings.task_args or {}
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in NAMED}
    own: dict[str, Any] = {}
    for name, value in given.items():
        _refuse_setting(name, settings)
        if name not in named and not takes_any:
            raise InvalidValue(f"task {spec} takes no argument {name!r}; {_listed(named)}")
        own[name] = _converted(name, value, named.get(name))
    arguments = {**offered, **own}
    missing = [name for name, p in named.items() if p.default is Parameter.empty and name not in arguments]
    if missing:
        raise InvalidValue(f"task {spec} needs its argument {missing[0]!r}: give --task-arg {missing[0]}=VALUE")
    return arguments


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    try:
        return inspect.signature(function, eval_str=True).parameters
    except Exception:  # an annotation that only a type checker can read
        return inspect.signature(function).parameters


def _refuse_setting(name: str, settings: Settings) -> None:
    if name in SETTINGS_OF_TASKS:
        raise InvalidValue(f"{name} is a setting of its own, not a task argument; use --{name.replace('_', '-')}")
    if name in DEPRECATED and getattr(settings, name) is not None:
        raise InvalidValue(f"{name} is set twice, as a setting and as a task argument; leave out the setting")


def _listed(named: Mapping[str, Parameter]) -> str:
    names = [name for name in named if name not in SETTINGS_OF_TASKS]
    return f"it takes {', '.join(names)}" if names else "it takes none"


def _converted(name: str, value: Scalar, parameter: Parameter | None) -> Any:
    kinds = _kinds(parameter) if parameter is not None else []
    for kind in kinds:
        with suppress(ValueError):
            return _as(kind, value)
    if kinds:
        raise InvalidValue(f"task argument {name} is {value!r} but must be {' or '.join(KINDS[k] for k in kinds)}")
    return value


def _kinds(parameter: Parameter) -> list[type]:
    """The types that a parameter may have, as far as they are known."""
    hint = parameter.annotation
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [kind for kind in KINDS if kind in hints] or [kind for kind in KINDS if type(parameter.default) is kind]


def _as(kind: type, value: Scalar) -> Any:
    """The value as this type; a ValueError where it is of another."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is bool or (isinstance(value, bool) and kind in (int, float)):
        raise ValueError(text)
    return kind(text)
