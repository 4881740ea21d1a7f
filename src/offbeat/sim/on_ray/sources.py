"""Owns how a task's own files come to a node that does not share the driver's disk.

Rules kept here:
- A task that was loaded from a file takes that file with it, and the modules beside it that it has imported.
- A node that has the same files in the same places uses those; another gets copies of its own.
- Data do not travel: what a task reads must be on every node.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from offbeat.hosting.loading import BUILT_IN, load
from offbeat.hosting.task_host import Recipe
from offbeat.settings import Settings
from offbeat.task import Task


class Sources(NamedTuple):
    """Which task it is, and its files by their place below `folder`; none for a built-in one."""

    spec: str
    folder: str = ""
    files: dict[str, bytes] = {}  # noqa: RUF012 (it is never changed)


def sources_of(spec: str) -> Sources:
    """What another node needs to load this; the task must have been loaded here."""
    path, colon, name = spec.partition(":")
    if path in BUILT_IN or not Path(path).is_file():
        return Sources(spec)
    file = Path(path).resolve()
    files = {str(found.relative_to(file.parent)): found.read_bytes() for found in {file, *_imported_from(file.parent)}}
    return Sources(f"{file.name}{colon}{name}", str(file.parent), files)


def placed(sources: Sources) -> str:
    """On a node: the spec to load."""
    if not sources.files:
        return sources.spec
    folder = Path(sources.folder)
    if not all(_holds(folder / name, contents) for name, contents in sources.files.items()):
        folder = Path(mkdtemp(prefix="offbeat-task-"))
        for name, contents in sources.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(contents)
    return str(folder / sources.spec)


def travelling(task: Task) -> Recipe | None:
    """How a task that was loaded is loaded on another node; None for one that was made in some other way."""
    recipe: Recipe | None = getattr(task, "recipe", None)
    if recipe is None or recipe[0] is not load:
        return recipe
    spec, settings = recipe[1]
    return (_load_sent, (sources_of(spec), settings), {})


def _load_sent(sources: Sources, settings: Settings) -> Task:
    return load(placed(sources), settings)


def _imported_from(folder: Path) -> set[Path]:
    """The files of the modules that are imported and that Python finds in this folder."""
    found = set()
    for name, module in [*sys.modules.items()]:
        place = folder.joinpath(*name.split("."))
        if getattr(module, "__file__", None) in (str(place.with_suffix(".py")), str(place / "__init__.py")):
            found.add(Path(str(module.__file__)))
    return found


def _holds(path: Path, contents: bytes) -> bool:
    try:
        return path.read_bytes() == contents
    except OSError:
        return False
