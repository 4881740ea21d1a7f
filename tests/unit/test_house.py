"""The package can be walked through: a name means one thing, and no file is too long to read at a sitting."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "offbeat"
LINES_MAX = 400

CLASSES_TWICE = {
    "Task": "`offbeat.Task` is what every task can do, `offbeat.torch.Task` the one for PyTorch: users know both",
}
MODULES_TWICE = {
    "settings": "of a run, of a server, of a worker: each package has its own",
    "app": "the routes of the server, and those of the page",
    "task": "`task` is the protocol of every task, `train.task` the one for PyTorch",
    "staleness": "`offbeat.staleness` is the namespace that users import, `core.staleness` the code",
    "devices": "likewise, of `sim.devices`",
}
"""What may be defined more than once, and why."""


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def defined_twice(names: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Names that are found in more than one place, with those places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, place in names:
        places[name].append(place)
    return {name: found for name, found in places.items() if len(found) > 1}


def public_classes() -> list[tuple[str, str]]:
    return [
        (node.name, f"{path.relative_to(SOURCE)}:{node.lineno}")
        for path in files()
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def modules() -> list[tuple[str, str]]:
    return [(path.stem, str(path.relative_to(SOURCE))) for path in files() if not path.stem.startswith("__")]


def test_a_public_class_name_means_one_thing() -> None:
    assert len(public_classes()) > 200
    assert {name: at for name, at in defined_twice(public_classes()).items() if name not in CLASSES_TWICE} == {}


def test_a_module_name_means_one_thing() -> None:
    assert len(modules()) > 100
    assert {name: at for name, at in defined_twice(modules()).items() if name not in MODULES_TWICE} == {}


def test_what_is_explained_is_still_there() -> None:
    assert defined_twice(public_classes()).keys() >= CLASSES_TWICE.keys()
    assert defined_twice(modules()).keys() >= MODULES_TWICE.keys()


def test_no_file_is_longer_than_can_be_read_at_a_sitting() -> None:
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text("utf-8").splitlines()) for path in files()}
    assert {name: length for name, length in lengths.items() if length > LINES_MAX} == {}


def test_the_list_can_fail() -> None:
    assert defined_twice([("Row", "a.py:1"), ("Row", "b.py:2"), ("Line", "a.py:9")]) == {"Row": ["a.py:1", "b.py:2"]}
