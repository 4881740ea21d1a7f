"""The public names: what `import offbeat` offers, what it does not import, and the error tree."""

import inspect
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

import numpy as np
import pytest

import offbeat
from offbeat import errors
from offbeat.core.layout import Array, Model
from offbeat.core.rules.library import KINDS
from offbeat.settings import Settings
from offbeat.sim.devices import device_model
from offbeat.task import Trained, Work, solve, start

HEAVY = ("torch", "numba", "matplotlib", "sklearn", "numpy", "importlib.metadata")
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def run(program: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_is_sorted_and_every_name_resolves() -> None:
    assert list(offbeat.__all__) == sorted(set(offbeat.__all__))
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None


def test_the_papers_words_are_at_the_top() -> None:
    words = {"constant", "polynomial", "hinge", "exponential", "fedasync", "fedbuff", "Task", "OffbeatError"}
    assert words <= set(offbeat.__all__)
    assert offbeat.__version__


def test_rules_staleness_functions_and_devices_have_namespaces() -> None:
    assert offbeat.rules.fedasync is offbeat.fedasync
    assert offbeat.staleness.hinge is offbeat.hinge
    assert offbeat.devices.lognormal(0.5) == Settings().device_model
    for module in (offbeat.rules, offbeat.staleness):
        assert list(module.__all__) == sorted(set(module.__all__))
        for name in {*module.__all__} & {*offbeat.__all__}:
            assert getattr(offbeat, name) is getattr(module, name)
    assert {*offbeat.staleness.__all__} <= {*offbeat.__all__}
    program = "import offbeat.rules, offbeat.staleness, offbeat.devices; print(offbeat.devices.uniform(1, 2))"
    assert run(program) == "uniform:1,2"


def test_the_namespace_of_rules_has_the_whole_library_and_what_a_rule_of_your_own_needs() -> None:
    functions = {entry.function for entries in KINDS.values() for entry in entries.values()}
    assert functions <= {getattr(offbeat.rules, name) for name in offbeat.rules.__all__}
    own = {"Facts", "Mix", "Rule", "Steps", "Move", "Product", "Larger", "Root", "OnParameters", "Weight", "Finisher"}
    assert own | {"compose", "move"} <= {*offbeat.rules.__all__}


def test_every_device_model_has_a_function_and_a_wrong_one_is_refused() -> None:
    d = offbeat.devices
    made = (d.constant(2), d.lognormal(1, factor=30), d.exponential(), d.uniform(0.5, 1), d.pareto(2), d.sampled(4))
    assert made == ("constant:2", "30*lognormal:1", "exponential:1", "uniform:0.5,1", "pareto:2", "sampled:4")
    for spec in made[:-1]:
        assert device_model(spec, 0).compute_s(0, 0) > 0
    assert d.trace("phones.json") == "trace:phones.json"
    for wrong, numbers in ((d.lognormal, (-1,)), (d.uniform, (2, 1)), (d.pareto, (0,)), (d.sampled, (0,))):
        with pytest.raises(offbeat.OffbeatError, match=r"use a number|whole number >= 1"):
            wrong(*numbers)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fedsync'"):
        _ = offbeat.fedsync


def test_importing_offbeat_imports_nothing_heavy() -> None:
    program = f"import sys, offbeat; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    assert run(program) == ""


def test_the_help_imports_nothing_heavy() -> None:
    program = f"""
import sys
from offbeat.cli import main
main(["--help"], standalone_mode=False)
print(*(name for name in {HEAVY!r} if name in sys.modules))
"""
    assert run(program).splitlines()[0].startswith("Usage:")
    assert not set(run(program).splitlines()[-1].split()) & set(HEAVY)


@NEEDS_TORCH
def test_torchs_task_is_imported_when_first_used() -> None:
    assert run("import offbeat; print(offbeat.torch.Task.__module__)") == "offbeat.train.task"
    assert run("from offbeat.torch import Task, accuracy; print(Task.__name__)") == "Task"


def test_without_torch_one_line_says_what_to_install() -> None:
    program = """
import sys
sys.modules["torch"] = None
import offbeat
try:
    offbeat.torch
except offbeat.OffbeatError as error:
    print(isinstance(error, ImportError), str(error))
"""
    assert run(program) == "True torch is not installed; run: pip install 'offbeat[torch]'"


@NEEDS_TORCH
def test_another_missing_module_is_not_blamed_on_torch() -> None:
    program = """
import sys
sys.modules["offbeat.train.solver"] = None
import offbeat
try:
    offbeat.torch
except ModuleNotFoundError as error:
    print(isinstance(error, offbeat.OffbeatError), error.name)
"""
    assert run(program) == "False offbeat.train.solver"


class Bowl:
    """A quadratic with its bottom at the device's number, in numpy alone."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        return {"x": np.random.default_rng(seed).normal(size=3).astype(np.float32)}

    def train(self, model: Model, work: Work) -> Trained:
        for _ in range(work.local_iterations or 50):
            model["x"][:] -= np.float32(work.gamma or 0.5) * (model["x"] - np.float32(work.device))
        return Trained(samples=1, gradients=work.local_iterations or 50)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        return {"square": float((model["x"] ** 2).sum())}


def test_three_methods_make_a_task_for_any_framework() -> None:
    task = Bowl()
    assert isinstance(task, offbeat.Task)
    assert not isinstance(object(), offbeat.Task)
    x = start(task, seed=4)
    assert not x.vector.flags.writeable
    update = solve(task, x, Work(device=2))
    assert np.allclose(update.x_new["x"], 2)
    assert not update.x_new.vector.flags.writeable
    assert update.trained == Trained(1, 50)
    assert update.work == Work(device=2)
    assert np.array_equal(x.vector, start(task, seed=4).vector)
    assert task.evaluate(update.x_new)["square"] == pytest.approx(12)


def test_a_lease_reaches_the_task() -> None:
    task = Bowl()
    update = solve(task, start(task, 0), Work(device=1, local_iterations=1, gamma=1.0))
    assert update.x_new["x"].tolist() == [1, 1, 1]
    assert update.trained.gradients == 1


def test_a_task_may_start_from_a_model_with_buffers() -> None:
    class Counted(Bowl):
        def initial(self, seed: int) -> Model:
            arrays: dict[str, Array] = {**super().initial(seed), "count": np.asarray(5)}
            return Model.of(arrays, buffers=["count"])

    x = start(Counted(), 0)
    assert x["count"] == 5
    assert solve(Counted(), x, Work(device=0)).x_new["count"] == 5


def test_works_streams_differ_by_seed_device_and_number() -> None:
    works = [Work(device=d, number=n, seed=s) for d in range(3) for n in range(3) for s in range(3)]
    first = [work.rng().integers(2**63) for work in works]
    assert len(set(first)) == len(works)
    assert first == [work.rng().integers(2**63) for work in works]


def error_classes() -> dict[str, type[Exception]]:
    return {
        name: item
        for name, item in vars(errors).items()
        if inspect.isclass(item) and issubclass(item, Exception) and item.__module__ == errors.__name__
    }


def test_the_tree_in_the_errors_docstring_lists_every_class_under_its_parent() -> None:
    above: dict[int, str] = {}
    drawn: dict[str, str | None] = {}
    for line in (errors.__doc__ or "").splitlines():
        branch = line.lstrip("│├└─ ")
        name, depth = branch.split(" ")[0], (len(line) - len(branch)) // 4
        if name in error_classes():
            above[depth] = name
            drawn[name] = above[depth - 1] if depth else None
    assert drawn.keys() == error_classes().keys()
    for name, parent in drawn.items():
        bases = [base.__name__ for base in error_classes()[name].__bases__]
        assert bases[0] == (parent or "Exception")
        assert issubclass(error_classes()[name], offbeat.OffbeatError)
