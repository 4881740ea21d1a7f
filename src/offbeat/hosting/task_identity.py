"""Owns what a task is called in a run's folder, so that going on with another task is noticed.

    line.py:task 3f2a90c1d2e4     a file, and the digest of its code and of the modules beside it that it imports
    digits                        a built-in task
    __main__.Mine 0b1c2d3e4f50    an object of a script or a notebook: layout, x_0, frozen arrays, and source

Rules kept here:
- Comments, docstrings and formatting do not count: the digest is of what Python parses. It is the same under every
  version of Python that reads the code alike.
- Of the modules that a file imports, those count that lie in its folder or below, and what these import in turn.
  Modules that are only named while the program runs (`importlib.import_module(name)`) are not seen.
- Earlier versions called a file by the digest of its bytes, and an object by its class. A folder that says so is known.
"""

import ast
import dataclasses
import hashlib
import inspect
import json
import re
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from offbeat.core.layout import Array, Model
from offbeat.core.model_base import base_of
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import LEDGER, RunFolder
from offbeat.task import Task

BUILT_IN = ("digits", "cifar10", "wikitext2")
DEFAULT_NAME = "task"
DIGEST_LETTERS = 12
INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Where code lies that is not the user's own; it may be upgraded in the course of a run."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
PLAIN_MAX = 1000
Scalar = bool | int | float | str | None


def identity(task: Task | str) -> str:
    """What a run's folder calls a task that was loaded, or that a text names."""
    if not isinstance(task, str):
        own: str = getattr(task, "identity", _class_of(task))
        return own
    path, _, name = task.partition(":")
    return path if path in BUILT_IN else _called(path, name, code_of(Path(path)))


def identities(task: Task | str) -> tuple[str, ...]:
    """All names under which a folder may know this task: the one of today, and those of earlier versions."""
    if not isinstance(task, str):
        known_as: tuple[str, ...] = getattr(task, "known_as", (identity(task),))
        return known_as
    path, _, name = task.partition(":")
    if path in BUILT_IN:
        return (path,)
    contents = Path(path).read_bytes() if Path(path).is_file() else b""
    return identity(task), _called(path, name, hashlib.sha256(contents).hexdigest())


def identity_of_object(task: Task, x_0: Model, frozen: Mapping[str, Array]) -> str:
    """What a folder calls a task that no file holds; the model that it makes is a part of it."""
    facts = [base_of(x_0.layout, frozen).digest, *_digests(x_0), *sorted(_sources(task))]
    return f"{_class_of(task)} {_digest(*facts)[:DIGEST_LETTERS]}"


class TaskNames(NamedTuple):
    """What a run that begins or goes on calls its task."""

    recorded: str
    """In its settings."""
    now: str
    """Since the task was changed and accepted the last time; otherwise as recorded."""
    changed: bool
    """Is it a change that is accepted just now, and to be recorded?"""


def names_in(folder: Path | None, known_as: Sequence[str], *, accept_changed: bool) -> TaskNames:
    """The names of a task in the folder of a run, which may be new. What is not accepted differs, and is refused later.

    `known_as` are all names that the task may have there, that of today first.
    """
    there = None if folder is None else RunFolder.recorded(folder, "task")
    if folder is None or there is None or there in known_as:
        name = there if isinstance(there, str) else known_as[0]
        return TaskNames(name, name, changed=False)
    known = any(name in known_as for name in accepted_in(folder))
    if known or accept_changed:
        return TaskNames(str(there), known_as[0], changed=not known)
    return TaskNames(known_as[0], known_as[0], changed=False)


def accepted_in(folder: Path) -> list[str]:
    """The changed tasks that an operator has accepted for the run in this folder, in their order."""
    if not (folder / LEDGER).is_file():
        return []
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        return [str(json.loads(row.detail or "{}").get("task")) for row in ledger.rows("task_accepted")]


def _called(path: str, name: str, digest: str) -> str:
    return f"{Path(path).name}:{name or DEFAULT_NAME} {digest[:DIGEST_LETTERS]}"


def _class_of(task: object) -> str:
    return f"{type(task).__module__}.{type(task).__qualname__}"


def _digests(x_0: Model) -> Iterator[str]:
    for array in (x_0.vector, *x_0.carried.values()):
        yield hashlib.sha256(array.tobytes()).hexdigest()


def _digest(*facts: str) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


# --- files -----------------------------------------------------------------------------------------------------------


def code_of(file: Path) -> str:
    """The digest of a file's code, and of all modules beside it that it imports; of nothing where there is no file."""
    if not file.is_file():
        return _digest()
    files = local_modules(file)
    own = _parsed_digest(file)
    return _digest(own, *(f"{name} {_parsed_digest(path)}" for name, path in files.items())) if files else own


def local_modules(file: Path) -> dict[str, Path]:
    """The files in the folder of this one that it imports, directly or not, by their place below the folder."""
    file = file.resolve()
    folder, found, waiting = file.parent, dict[str, Path](), [file]
    while waiting:
        for path in _imported(waiting.pop(), folder):
            place = path.relative_to(folder).as_posix()
            if place not in found and path != file:
                found[place] = path
                waiting.append(path)
    return dict(sorted(found.items()))


def _imported(file: Path, folder: Path) -> Iterator[Path]:
    """The files below the folder that one file imports."""
    tree = _tree(file.read_bytes())
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            above = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else folder
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from (path for path in _files(above, [*parts, alias.name]) if path.is_relative_to(folder))


def _files(root: Path, parts: list[str]) -> Iterator[Path]:
    """Packages on the way to a module, and the module; the last part may be a name inside the module instead."""
    if parts and parts[0] in sys.stdlib_module_names:
        return
    for count in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:count])
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                yield path


def _parsed_digest(file: Path) -> str:
    contents = file.read_bytes()
    return _source_digest(contents) or hashlib.sha256(contents).hexdigest()


def _source_digest(source: str | bytes) -> str:
    """The digest of what Python parses; empty where it cannot."""
    tree = _tree(source)
    try:
        return "" if tree is None else _digest(_written(tree))
    except RecursionError:
        return ""


_PARSING = threading.Lock()
"""Python 3.11 counts the depth of a tree for all threads together: two that parse at once may fail for it."""


def _tree(source: str | bytes) -> ast.Module | None:
    try:
        with _PARSING:
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # it is told when it is imported
        return None


def _written(node: Any) -> str:
    """A tree as text: like `ast.dump`, without docstrings and without what is empty, which differs between versions."""
    match node:
        case ast.Constant():
            return repr(node.value)
        case ast.AST():
            fields = ((name, getattr(node, name, None)) for name in node._fields)
            kept = (f"{name}={_written(value)}" for name, value in fields if value is not None and value != [])
            return f"{type(node).__name__}({','.join(kept)})"
        case list():
            return f"[{','.join(map(_written, _without_docstring(node)))}]"
    return repr(node)


def _without_docstring(body: list[Any]) -> list[Any]:
    """Texts that stand alone are documentation: a docstring, or one under an attribute."""
    return [one for one in body if not (isinstance(one, ast.Expr) and _is_text(one.value))]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# --- objects ---------------------------------------------------------------------------------------------------------


def _sources(task: Any) -> Iterator[str]:
    """Digests of the user's code in a task, and its plain settings, as far as they can be had."""
    arguments: Mapping[str, Any] = getattr(task, "_arguments", {})
    if dataclasses.is_dataclass(task):
        arguments = {one.name: getattr(task, one.name) for one in dataclasses.fields(task)}
    seen: set[int] = set()
    yield from _source_of(type(task), seen)
    for name, value in arguments.items():
        if _is_plain(value):
            yield f"{name} = {value!r}"
        for one in value.values() if isinstance(value, Mapping) else (value,):
            yield from _source_of(_code(one), seen)
    model = arguments.get("model")
    if model is not None and not isinstance(model, FunctionType | MethodType | partial | type):
        yield ADDRESS.sub("", repr(model))  # of a module, its layers


def _is_plain(value: Any) -> bool:
    """A number, a text, or a few of them."""
    several = isinstance(value, tuple | list) and len(value) <= PLAIN_MAX
    return isinstance(value, Scalar) or (several and all(isinstance(one, Scalar) for one in value))


def _code(thing: Any) -> FunctionType | type:
    """The function or the class in which the code of a thing stands."""
    if isinstance(thing, partial):
        return _code(thing.func)
    if isinstance(thing, MethodType):
        return _code(thing.__func__)
    return thing if isinstance(thing, FunctionType) or inspect.isclass(thing) else type(thing)


def _source_of(thing: FunctionType | type, seen: set[int]) -> Iterator[str]:
    """Digests of the source of a function or a class of the user's, and of those of its module that it uses."""
    if id(thing) in seen or not _is_users(thing):
        return
    seen.add(id(thing))
    if source := _text_of(thing):
        yield _source_digest(source) or _digest(" ".join(source.split()))
    elif not isinstance(thing, FunctionType):  # of a class in a notebook, Python finds the methods alone
        yield from (f"{name} = {value!r}" for name, value in vars(thing).items() if _is_own(name, value))
    functions = [thing] if isinstance(thing, FunctionType) else _functions(thing)
    bases = () if isinstance(thing, FunctionType) else thing.__bases__
    parts: list[FunctionType | type] = [*bases, *([] if source else functions)]
    for part in parts:
        yield from _source_of(part, seen)
    for function in functions:
        for name in _names(function.__code__):
            used = function.__globals__.get(name)
            if isinstance(used, FunctionType | type) and used.__module__ == function.__module__:
                yield from _source_of(used, seen)


def _text_of(thing: FunctionType | type) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # typed at a prompt, or not written in Python
        return ""


def _is_own(name: str, value: object) -> bool:
    return _is_plain(value) and not (name.startswith("__") and name.endswith("__"))


def _is_users(thing: FunctionType | type) -> bool:
    module = sys.modules.get(thing.__module__ or "")
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return thing.__module__ == "__main__"  # of a notebook; else it is built into Python
    return thing.__module__.partition(".")[0] != "offbeat" and not file.startswith(INSTALLED)


def _functions(class_: type) -> list[FunctionType]:
    return [value for value in vars(class_).values() if isinstance(value, FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
