"""A task that another process has loaded: the same runs to the last bit, without torch; and compiled evaluations."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("numba", reason="numba is not installed")

from torch import nn  # noqa: E402

from offbeat.core.layout import Array, Model  # noqa: E402
from offbeat.errors import InvalidValue, LayoutMismatch  # noqa: E402
from offbeat.sim.compare import compare  # noqa: E402
from offbeat.sim.executors import CompiledLoops  # noqa: E402
from offbeat.sim.spec import Spec  # noqa: E402
from offbeat.task import Work, solve, start  # noqa: E402
from offbeat.torch import Task  # noqa: E402
from offbeat.train import compiled_chain  # noqa: E402
from offbeat.train.carried import CarriedTask  # noqa: E402
from offbeat.train.task import WarmUp  # noqa: E402

FEATURES, CLASSES, DEVICES = 6, 4, 5
EITHER = pytest.mark.parametrize("classes", [True, False])


def samples(count: int, *, classes: bool = True) -> tuple[Array, Array]:
    rng = np.random.default_rng(count)
    inputs = rng.standard_normal((count, FEATURES), np.float32)
    return inputs, rng.integers(0, CLASSES, count) if classes else rng.standard_normal((count, CLASSES), np.float32)


def made(*, classes: bool = True, **arguments: Any) -> Task:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)),
        "loss": nn.functional.cross_entropy if classes else nn.functional.mse_loss,
        "data": [samples(3 + device, classes=classes) for device in range(DEVICES)],
        "test": samples(150, classes=classes),
        "batch_size": 4,
        "local_iterations": 3,
        "gamma": 0.2,
        "rho": 0.05,
    }
    return Task(**settings | arguments)


def carried(task: Task, *seeds: int) -> CarriedTask:
    found = task.carried(DEVICES, seeds or (0,))
    assert found is not None
    arrived = pickle.loads(pickle.dumps(found))  # noqa: S301 (our own)
    assert isinstance(arrived, CarriedTask)
    return arrived


# --- evaluating ------------------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 200])
def test_a_loop_evaluates_as_torch_does(count: int, classes: bool) -> None:
    task = made(test=samples(count, classes=classes), classes=classes)
    for seed in range(3):
        x = start(task, seed)
        ours, theirs = task.evaluate_compiled(x), task.evaluate(x)
        assert list(ours) == list(theirs)
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert ours.get("accuracy") == theirs.get("accuracy")


def biased(task: Task, *scores: float) -> Model:
    """A model that gives every sample these scores."""
    x = start(task, 0).copy()
    x.vector[:] = 0.0
    x["2.bias"][:] = scores
    return x


@pytest.mark.parametrize(
    "scores",
    [(1, 2, 2, 0), (0, 0, 0, 0), (1, np.nan, 3, np.nan), (np.nan,) * 4, (0, np.inf, 0, 1), (0, -np.inf, 1, 2)],
)
def test_equal_and_diverged_scores_are_judged_as_torch_judges_them(scores: tuple[float, ...]) -> None:
    task = made()
    x = biased(task, *scores)
    assert task.evaluate_compiled(x) == pytest.approx(task.evaluate(x), nan_ok=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"metrics": {"share": lambda outputs, targets: outputs.argmax(1) == targets}},
        {"test": None},
        {"test": (samples(9)[0], np.full(9, -100))},
        {"test": (samples(9)[0], samples(9)[1].astype(np.uint8))},
    ],
)
def test_what_the_loop_cannot_measure_torch_does(arguments: dict[str, Any]) -> None:
    task = made(**arguments)
    assert task.compilable() is None
    x = start(task, 1)
    assert pickle.dumps(task.evaluate_compiled(x)) == pickle.dumps(task.evaluate(x))
    assert task.test is None or task.carried(DEVICES, [0]) is None


def test_a_large_test_set_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_chain, "EVALUATED_MAX", 150 * start(made(), 0).layout.size - 1)
    task = made()
    assert task.evaluate_compiled(start(task, 1)) == task.evaluate(start(task, 1))
    assert task.carried(DEVICES, [0]) is None


def test_derived_metrics_are_derived_of_it() -> None:
    task = made(derived={"twice": lambda means: 2 * means["loss"]})
    metrics = task.evaluate_compiled(start(task, 0))
    assert metrics["twice"] == 2 * metrics["loss"]
    assert task.carried(DEVICES, [0]) is None


def test_what_is_derived_becomes_a_number_or_is_refused() -> None:
    def measured(value: object) -> Mapping[str, float]:
        task = made(derived={"own": lambda _: value})
        return CompiledLoops(task, 1).evaluate(start(task, 0))

    assert type(measured(torch.tensor(2.0))["own"]) is float
    with pytest.raises(InvalidValue, match="must return numbers"):
        measured("much")


def test_a_model_of_another_task_is_refused() -> None:
    other = made(model=lambda: nn.Linear(FEATURES, CLASSES))
    with pytest.raises(LayoutMismatch):
        made().evaluate_compiled(start(other, 0))


# --- carried ---------------------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("settings", [{}, {"local_passes": 2, "local_iterations": None, "clip": 0.5}])
def test_a_carried_task_has_the_bits_of_the_task(settings: dict[str, Any], classes: bool) -> None:
    task = made(classes=classes, **settings)
    travelled = carried(task, 0, 7)
    assert (travelled.devices, travelled.gamma) == (DEVICES, 0.2)
    jobs = [(start(task, 7), Work(device, number, 7)) for device in range(DEVICES) for number in range(2)]
    jobs += [(start(task, 7), Work(1, 0, 7, local_iterations=5, gamma=0.01))]
    assert start(travelled, 7).vector.tobytes() == start(task, 7).vector.tobytes()
    for (x_tau, work), (x_new, trained) in zip(jobs, task.train_compiled(jobs, 2), strict=True):
        update = solve(travelled, x_tau, work)
        assert update.x_new.vector.tobytes() == x_new.vector.tobytes()
        assert update.trained == trained
        assert travelled.iterations(work) == task.iterations(work) == trained.gradients
        assert travelled.samples(work.device) == trained.samples
        assert travelled.evaluate(x_new) == task.evaluate_compiled(x_new)


def test_without_test_data_it_measures_nothing() -> None:
    task = made(test=None)
    assert carried(task).evaluate(start(task, 0)) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"held_out": [samples(2)] * DEVICES},
        {"warm_up": WarmUp((0,), 1, 0.1)},
        {"model": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))},
        {"data": [samples(3), *[(samples(3)[0], np.full(3, -100))] * (DEVICES - 1)]},
    ],
)
def test_what_needs_torch_is_not_carried(arguments: dict[str, Any]) -> None:
    assert made(**arguments).carried(DEVICES, [0]) is None


def test_much_data_is_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.train.task.CARRIED_BYTES_MAX", 700)
    assert made().carried(1, [0]) is not None
    assert made().carried(DEVICES, [0]) is None


# --- comparisons -----------------------------------------------------------------------------------------------------

TASK = f"""
import os
from pathlib import Path
import numpy as np
from torch import nn
import offbeat.torch

with (Path(__file__).parent / "loaded").open("a") as file:
    print(os.getpid(), file=file)

rng = np.random.default_rng(0)


def samples(count):
    return rng.standard_normal((count, {FEATURES}), np.float32), rng.integers(0, {CLASSES}, count)


def task(devices=5):
    model = lambda: nn.Sequential(nn.Linear({FEATURES}, 8), nn.ReLU(), nn.Linear(8, {CLASSES}))
    data = [samples(9) for _ in range(devices)]
    return offbeat.torch.Task(model, nn.functional.cross_entropy, data, samples(30), batch_size=3, local_iterations=4)
"""


def compared(folder: Path, processes: int) -> dict[str, list[dict[str, Any]]]:
    (folder / "small.py").write_text(TASK)
    methods: dict[str, dict[str, Any]] = {
        "fast": {"epochs": 30, "evaluate_every": 5, "device_model": "lognormal:1"},
        "few": {"epochs": 30, "evaluate_every": 5, "devices": 3, "device_model": "uniform:0.5,1.5"},
        "alone": {"rule": "sgd", "epochs": 10, "evaluate_every": 5},
    }
    spec = Spec(task=str(folder / "small.py"), seeds=[1, 2, 3], methods=methods)
    (folder / "loaded").unlink(missing_ok=True)
    return compare(spec, folder / f"out-{processes}", processes=processes, pictures=False).summaries


def test_processes_of_a_comparison_do_not_load_what_they_need_not(tmp_path: Path) -> None:
    alone = compared(tmp_path, 1)
    several = compared(tmp_path, 2)
    assert len({*(tmp_path / "loaded").read_text().split()}) == 1
    for method, summaries in alone.items():
        for one, other in zip(summaries, several[method], strict=True):
            assert one["executor"] == other["executor"] == "compiled"
            for name in ("x_sha256", "loss", "accuracy", "ledger_head", "task", "virtual_s", "settings"):
                assert one[name] == other[name], (method, name)
    for path in (tmp_path / "out-1").glob("*/*/metrics.csv"):
        assert path.read_bytes() == (tmp_path / "out-2" / path.relative_to(tmp_path / "out-1")).read_bytes()
