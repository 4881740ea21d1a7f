"""Owns how the files of a task come to a node that does not share the driver's disk.

Rules kept here:
- A task that was loaded from a file takes that file along, and the modules beside it that it imports.
- A node that has the same files in the same places uses those; another node gets copies of its own.
- Data do not travel: the data that a task reads must be on every node.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from offbeat.hosting.loading import load
from offbeat.hosting.task_host import Recipe
from offbeat.hosting.task_identity import BUILT_IN, local_modules
from offbeat.settings import Settings
from offbeat.task import Task


class TaskFiles(NamedTuple):
    """The spec of a task, and its files by their place below `folder`; a built-in task has none."""

    spec: str
    folder: str = ""
    files: dict[str, bytes] = {}  # noqa: RUF012 (it is never changed)

    @classmethod
    def of(cls, spec: str) -> "TaskFiles":
        """The files that another node needs to load a task; the task must have been loaded here."""
        path, colon, name = spec.partition(":")
        if path in BUILT_IN or not Path(path).is_file():
            return cls(spec)
        file = Path(path).resolve()
        found = {file, *_imported_from(file.parent), *local_modules(file).values()}
        files = {str(path.relative_to(file.parent)): path.read_bytes() for path in found}
        return cls(f"{file.name}{colon}{name}", str(file.parent), files)

    def placed(self) -> str:
        """On a node: the spec to load."""
        if not self.files:
            return self.spec
        folder = Path(self.folder)
        if not all(_holds(folder / name, contents) for name, contents in self.files.items()):
            folder = Path(mkdtemp(prefix="offbeat-task-"))
            for name, contents in self.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(contents)
        return str(folder / self.spec)


def travelling(task: Task) -> Recipe | None:
    """The recipe that makes a task on another node; None for a task that was not made by a recipe."""
    recipe: Recipe | None = getattr(task, "recipe", None)
    if recipe is None or recipe[0] is not load:
        return recipe
    spec, settings = recipe[1]
    return (_load_sent, (TaskFiles.of(spec), settings), {})


def _load_sent(files: TaskFiles, settings: Settings) -> Task:
    return load(files.placed(), settings)


def _imported_from(folder: Path) -> set[Path]:
    """The files of imported modules that Python finds in this folder."""
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
