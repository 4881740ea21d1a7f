"""What a task is called: its code counts, wherever it lies; how it is written does not; and a change is told."""

import hashlib
import json
import linecache
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import offbeat
from offbeat.cli import main
from offbeat.core.layout import Array, Model
from offbeat.core.model_base import base_of, difference
from offbeat.errors import InvalidValue
from offbeat.hosting.loading import load
from offbeat.hosting.task_identity import (
    accepted_in,
    code_of,
    identities,
    identity,
    identity_of_object,
    local_modules,
)
from offbeat.settings import Settings
from offbeat.sim.run import Simulation, StopRequested
from offbeat.storage.json_file import read_json
from offbeat.storage.run_folder import RunFolder
from offbeat.task import samples_of, start_with_frozen

TASK = '''
"""A task that follows what a module beside it says."""
import numpy as np
from offbeat import Trained
from steps import step  # beside this file


class Line:
    devices = 4

    def initial(self, seed):
        return {"x": np.zeros(3, np.float32)}

    def train(self, model, work):
        """Goes one step."""
        model["x"][:] += step(work)
        return Trained(samples=5, gradients=1)

    def evaluate(self, model):
        return {"size": float(np.abs(model["x"]).sum())}


task = Line()
'''
STEPS = "def step(work):\n    return 1 + work.device\n"
SAME = {
    "comments": lambda text: text.replace("import numpy", "# numbers\nimport numpy") + "\n# the end\n",
    "formatting": lambda text: text.replace('float(np.abs(model["x"]).sum())', "float( np.abs(model['x']).sum( ) )"),
    "docstrings": lambda text: text.replace("Goes one step.", "Goes on.").replace('"""A task', '"""The task'),
    "blank lines": lambda text: text.replace("\n\n", "\n\n\n"),
    "line ends": lambda text: text.replace("\n", "\r\n"),
}
OTHER = {
    "a number": lambda text: text.replace("samples=5", "samples=6"),
    "a name": lambda text: text.replace('"size"', '"sum"'),
    "an operator": lambda text: text.replace("+=", "-="),
    "nothing for a constant": lambda text: text.replace("gradients=1", "gradients=None"),
}
Change = Callable[[str], str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "line.py").write_text(TASK)
    return tmp_path / "line.py"


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAME)
def test_how_it_is_written_does_not_matter(file: Path, name: str) -> None:
    before = identity(str(file))
    changed = SAME[name](TASK)
    assert changed != TASK
    file.write_bytes(changed.encode())
    assert identity(str(file)) == before


@pytest.mark.parametrize("name", OTHER)
def test_what_it_does_matters(file: Path, name: str) -> None:
    before = identity(str(file))
    changed = OTHER[name](TASK)
    assert changed != TASK
    file.write_text(changed)
    assert identity(str(file)) != before


def test_a_module_beside_it_counts_and_its_comments_do_not(file: Path) -> None:
    before = identity(str(file))
    (file.parent / "steps.py").write_text(f"# a comment\n{STEPS}")
    assert identity(str(file)) == before
    (file.parent / "steps.py").write_text(STEPS.replace("1 +", "2 +"))
    assert identity(str(file)) != before


def test_a_file_without_modules_beside_it_is_known_by_its_name_and_code_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.py").write_text("x = 1\n")
    (tmp_path / "other" / "unused.py").write_text("y = 1\n")
    assert identity(f"{tmp_path}/a.py:x") == identity(f"{tmp_path}/other/a.py:x")
    assert identity(f"{tmp_path}/a.py:x").startswith("a.py:x ")


@pytest.mark.parametrize(
    ("importing", "found"),
    [
        ("import steps", ["steps.py"]),
        ("import deep.inner.most", ["deep/__init__.py", "deep/inner.py"]),
        ("from deep import inner", ["deep/__init__.py", "deep/inner.py"]),
        ("from deep.inner import name", ["deep/__init__.py", "deep/inner.py"]),
        ("import numpy, os, steps", ["steps.py"]),
        ("def later():\n    import steps", ["steps.py"]),
        ("import chain", ["chain.py", "steps.py"]),
        ("from deep import sibling", ["deep/__init__.py", "deep/inner.py", "deep/sibling.py"]),
        ("import circle", ["circle.py"]),
        ("import nowhere", []),
        ("import json", []),
        ("from . import steps", ["steps.py"]),
        ("from .... import steps", []),
        ("import )", []),
    ],
)
def test_the_modules_of_its_own_folder_are_found(tmp_path: Path, importing: str, found: list[str]) -> None:
    (tmp_path / "deep").mkdir()
    files = {
        "steps.py": STEPS,
        "json.py": "",
        "chain.py": "import steps",
        "circle.py": "import task, circle",
        "deep/__init__.py": "",
        "deep/inner.py": "name = 1",
        "deep/sibling.py": "from .inner import name\nfrom ..nothing import x\n",
        "task.py": importing,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert [*local_modules(tmp_path / "task.py")] == found
    assert [path.relative_to(tmp_path) for path in local_modules(tmp_path / "task.py").values()] == [*map(Path, found)]


def test_what_cannot_be_parsed_is_known_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = (")
    assert code_of(tmp_path / "a.py") == hashlib.sha256(b"x = (").hexdigest()
    (tmp_path / "a.py").write_text("x = " + "(" * 20_000 + ")" * 20_000)
    assert len(code_of(tmp_path / "a.py")) == 64


def test_the_digest_is_the_same_under_other_versions_of_python(tmp_path: Path) -> None:
    """A worker or a resumed run may have another one: the words of the tree must not depend on it."""
    (tmp_path / "a.py").write_text(
        "import os\n\n\ndef f(a, *, b=None, **c):\n    return f'{a!r:>3}' if b else [*c, 1.5]\n"
    )
    assert code_of(tmp_path / "a.py") == "a0649bd6bf91880b68aefb300de6b11b2b6b16262b3dfc33a94cd6b4f05c373b"


def test_built_in_tasks_have_their_names(tmp_path: Path) -> None:
    assert identities("digits") == ("digits",)
    assert identity(str(tmp_path / "missing.py")).startswith("missing.py:task ")


def test_a_loaded_task_is_known_by_both_names(file: Path) -> None:
    task = load(str(file), Settings())
    old = f"line.py:task {hashlib.sha256(TASK.encode()).hexdigest()[:12]}"
    assert identities(task) == identities(str(file)) == (identity(str(file)), old)
    assert identity(task) == identity(str(file))


# --- going on --------------------------------------------------------------------------------------------------------


def begun(file: Path, folder: Path) -> None:
    """A run that was interrupted after some epochs."""

    def stop(simulation: Simulation) -> None:
        if simulation.coordinator.t >= 5:
            raise StopRequested

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.sim.run.EVENTS_AT_ONCE", 10)
        simulation = Simulation.of(str(file), Settings(epochs=40, executor="inline"), folder=folder)
        with pytest.raises(StopRequested):
            simulation.run(stop)


def resumed(file: Path, folder: Path, *flags: str) -> Any:
    command = ["simulate", str(file), "--dir", str(folder), "--epochs", "40", "--executor", "inline", "--json", *flags]
    return CliRunner().invoke(main, command)


def test_a_changed_comment_resumes_without_a_word(file: Path, tmp_path: Path) -> None:
    begun(file, tmp_path / "run")
    file.write_text(f"{TASK}\n# changed\n")
    result = resumed(file, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "changed task" not in result.output
    assert accepted_in(tmp_path / "run") == []


def test_a_changed_module_is_refused_and_accepted_and_recorded_once(file: Path, tmp_path: Path) -> None:
    begun(file, tmp_path / "run")
    before = identity(str(file))
    (file.parent / "steps.py").write_text(STEPS.replace("1 +", "2 +"))
    result = resumed(file, tmp_path / "run")
    assert result.exit_code == 2
    assert f'task is "{before}" there and "{identity(str(file))}" here' in result.output
    assert "--accept-changed-task goes on with it" in result.output
    result = resumed(file, tmp_path / "run", "--accept-changed-task")
    assert result.exit_code == 0, result.output
    assert f"with a changed task, {identity(str(file))}" in result.output
    assert accepted_in(tmp_path / "run") == [identity(str(file))]
    run = RunFolder.open(tmp_path / "run")
    assert run.settings["task"] == before, "what the run began with stays"
    summary = run.summary
    assert summary is not None
    assert summary["task"] == identity(str(file))
    (row,) = run.ledger().rows("task_accepted")
    assert row.t is not None
    assert 5 <= row.t < 40


def test_what_was_accepted_once_is_known_from_then_on_also_after_a_kill(file: Path, tmp_path: Path) -> None:
    begun(file, tmp_path / "run")
    (file.parent / "steps.py").write_text(STEPS.replace("1 +", "2 +"))
    settings = Settings(epochs=40, executor="inline")
    Simulation.of(str(file), settings, folder=tmp_path / "run", accept_changed_task=True).close()  # as if it was killed
    result = resumed(file, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert accepted_in(tmp_path / "run") == [identity(str(file))]


def test_a_folder_of_the_version_before_resumes_where_the_file_is_unchanged(file: Path, tmp_path: Path) -> None:
    begun(file, tmp_path / "run")
    old = f"line.py:task {hashlib.sha256(TASK.encode()).hexdigest()[:12]}"
    path = tmp_path / "run" / "settings.json"
    path.write_text(json.dumps(read_json(path) | {"task": old}))
    result = resumed(file, tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["task"] == old


def test_accepting_a_changed_task_accepts_no_other_settings(file: Path, tmp_path: Path) -> None:
    begun(file, tmp_path / "run")
    file.write_text(OTHER["a number"](TASK))
    result = resumed(file, tmp_path / "run", "--accept-changed-task", "--alpha", "0.5")
    assert result.exit_code == 2
    assert "alpha is 0.6 there and 0.5 here" in result.output
    assert accepted_in(tmp_path / "run") == []


# --- objects ---------------------------------------------------------------------------------------------------------


def in_notebook(monkeypatch: pytest.MonkeyPatch, *cells: str) -> Any:
    """The object `task` that these cells make, as a notebook runs them: with sources that `inspect` can find."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    for number, cell in enumerate(cells):
        name = f"<cell {number} {hashlib.sha256(cell.encode()).hexdigest()}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        exec(compile(cell, name, "exec"), vars(module))  # noqa: S102 (what a notebook does)
    return module.__dict__["task"]


CELLS = (
    "import numpy as np\nfrom offbeat import Trained\n\ndef step(work):\n    return 1 + work.device\n",
    TASK.partition("from steps import step  # beside this file")[2],
)


def called(task: Any) -> str:
    return identity_of_object(task, *start_with_frozen(task, 0))


def test_a_task_of_a_notebook_is_known_by_its_source_and_the_functions_that_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = called(in_notebook(monkeypatch, *CELLS))
    assert before.startswith("__main__.Line ")
    assert called(in_notebook(monkeypatch, f"# again\n{CELLS[0]}", CELLS[1])) == before
    assert called(in_notebook(monkeypatch, CELLS[0].replace("1 +", "2 +"), CELLS[1])) != before
    assert called(in_notebook(monkeypatch, CELLS[0], OTHER["a number"](CELLS[1]))) != before


def test_x_0_the_layout_and_frozen_arrays_are_parts_of_it() -> None:
    plain = Frozen()
    assert called(plain) == called(Frozen())
    assert len({called(task) for task in (plain, Frozen(x=1.0), Frozen(size=4), Frozen(base=2.0))}) == 4


@dataclass
class Frozen:
    """Adapters beside a base that is frozen, in plain numpy."""

    x: float = 0.0
    size: int = 3
    base: float = 1.0
    devices = 2

    def initial(self, seed: int) -> Model:  # noqa: ARG002
        arrays = {"x": np.full(self.size, self.x, np.float32), "base": np.full(5, self.base, np.float32)}
        return Model.of(arrays, frozen=["base"])

    def train(self, model: Model, work: offbeat.Work) -> offbeat.Trained:  # noqa: ARG002
        return offbeat.Trained(3, 1)

    def evaluate(self, model: Model) -> dict[str, float]:  # noqa: ARG002
        return {}


def test_resuming_a_run_with_another_object_is_refused(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"epochs": 40, "executor": "inline", "dir": tmp_path}

    def stop(simulation: Simulation) -> None:
        if simulation.coordinator.t >= 5:
            raise StopRequested

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.sim.run.EVENTS_AT_ONCE", 10)
        with pytest.raises(StopRequested):
            offbeat.simulate(Frozen(), on_progress=stop, **facts)
    with pytest.raises(InvalidValue, match=r"task is .* there and .* here"):
        offbeat.simulate(Frozen(base=2.0), **facts)
    path = tmp_path / "settings.json"
    recorded = read_json(path)
    path.write_text(json.dumps(recorded | {"task": f"{__name__}.Frozen"}))  # as the version before wrote it
    Simulation.of(Frozen(), Settings(epochs=40, executor="inline"), folder=tmp_path).close()
    path.write_text(json.dumps(recorded))
    run = offbeat.simulate(Frozen(base=2.0), accept_changed_task=True, **facts)
    assert run.summary["task"] == called(Frozen(base=2.0))
    assert accepted_in(tmp_path) == [run.summary["task"]]


def test_a_torch_task_is_known_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    cell = """
import torch
from torch import nn
from offbeat.torch import Task

def make():
    return nn.Linear(2, 2)

def loss(output, target):
    return nn.functional.mse_loss(output, target)

data = [(torch.zeros(4, 2), torch.zeros(4, 2))] * 2
task = Task(make, loss, data, gamma=0.1)
"""
    before = called(in_notebook(monkeypatch, cell))
    assert called(in_notebook(monkeypatch, f"{cell}\n# a comment")) == before
    assert before.startswith("offbeat.train.task.Task ")
    for old, new in (
        ("gamma=0.1", "gamma=0.2"),
        ("mse_loss", "l1_loss"),
        ("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)"),
    ):
        assert called(in_notebook(monkeypatch, cell.replace(old, new))) != before
    layers = (f"Task(nn.Sequential(nn.Linear(2, 2), nn.{word}())" for word in ("ReLU", "Tanh"))
    modules = {called(in_notebook(monkeypatch, cell.replace("Task(make", made))) for made in layers}
    assert len(modules) == 2


# --- the base of a model ---------------------------------------------------------------------------------------------


def test_the_base_is_the_layout_and_every_bit_of_what_is_frozen() -> None:
    def base(**changes: Any) -> Any:
        x_0, frozen = start_with_frozen(Frozen(**changes), 0)
        return base_of(x_0.layout, frozen)

    assert base() == base(x=7.0), "what travels comes from the server, whatever a worker would begin with"
    assert base().digest != base(size=4).digest
    assert base().digest != base(base=np.nextafter(np.float32(1), np.float32(2))).digest
    assert difference(base().frozen, base(base=2.0).frozen) == (
        "the frozen array 'base' holds other values than the server's"
    )
    assert difference({"a": "1"}, {}) == "the frozen array 'a' is missing from the worker's model"
    assert difference({}, {"a": "1"}) == "the frozen array 'a' is not part of the server's model"
    assert difference({"a": "1"}, {"a": "1"}) == ""


def test_the_base_sees_shape_and_dtype_and_any_kind_of_array() -> None:
    layout = start_with_frozen(Frozen(), 0)[0].layout
    arrays: list[Array] = [
        np.zeros((2, 3), np.float32),
        np.zeros((3, 2), np.float32),
        np.zeros(6, np.int32),
        np.zeros(0, np.int8),
    ]
    arrays += [np.asarray(np.float32(0)), np.zeros((6, 6), np.float32)[::2, ::2], np.asfortranarray(np.ones((2, 3)))]
    digests = {base_of(layout, {"a": array}).digest for array in arrays}
    assert len(digests) == len(arrays)
    assert base_of(layout, {"a": arrays[-1]}) == base_of(layout, {"a": np.ones((2, 3))})


def test_a_frozen_array_is_not_kept_in_memory_with_x_0() -> None:
    x_0, frozen = start_with_frozen(Frozen(), 0)
    assert [*frozen] == ["base"]
    assert not x_0.frozen


def test_a_torch_task_says_what_is_frozen_and_how_many_samples_a_device_holds() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def make() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        model[0].requires_grad_(False)
        return model

    data = [(torch.zeros(n, 2), torch.zeros(n, 2)) for n in (4, 7)]
    task = offbeat.torch.Task(make, torch.nn.functional.mse_loss, data, batch_size=3)
    frozen = start_with_frozen(task, 5)[1]
    assert [*frozen] == ["0.weight", "0.bias"]
    assert base_of(start_with_frozen(task, 6)[0].layout, frozen) == base_of(
        start_with_frozen(task, 5)[0].layout, frozen
    )
    assert [samples_of(task, device) for device in (0, 1)] == [4, 7]
    assert (task.batch_size, task.local_passes, task.local_iterations) == (3, 1, None)
    asked = task.with_settings(local_iterations=9)
    assert (asked.local_passes, asked.local_iterations) == (None, 9)
    assert samples_of(Frozen(), 0) is None


def test_another_process_gives_the_same_names(file: Path) -> None:
    """Nothing of it depends on the order of sets or on addresses."""
    program = f"from offbeat.hosting.task_identity import identities; print(*identities({str(file)!r}), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert tuple(done.stdout.splitlines()) == identities(str(file))
    shutil.copytree(file.parent, file.parent / "copy", ignore=lambda *_: ["copy"])
    assert identities(str(file.parent / "copy" / "line.py")) == identities(str(file))
