"""The compiled loop: torch's training within rounding, its own bits whatever trains beside it."""

import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("numba", reason="numba is not installed")

from torch import nn  # noqa: E402

import offbeat  # noqa: E402
from offbeat.core.layout import Array, Model  # noqa: E402
from offbeat.errors import InvalidValue, LayoutMismatch  # noqa: E402
from offbeat.task import Trained, Work, solve, start  # noqa: E402
from offbeat.torch import Task  # noqa: E402
from offbeat.train import compiled_chain  # noqa: E402
from offbeat.train.compiled_chain import module_obstacle  # noqa: E402
from offbeat.train.solver import stream  # noqa: E402

FEATURES, CLASSES = 7, 3
SIZES = (1, 4, 11, 30)
"""Samples of the devices: fewer than a batch, whole batches, and some left over."""


def perceptron(*, activation: type[nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(FEATURES, 9, bias=bias), activation()),
        *(nn.Linear(9, 5, bias=bias), activation(), nn.Linear(5, CLASSES, bias=bias)),
    )


def data(*, classes: bool = True, seed: int = 0) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(seed)
    shape = (FEATURES,)
    return [
        (
            rng.standard_normal((size, *shape), np.float32),
            rng.integers(0, CLASSES, size) if classes else rng.standard_normal((size, CLASSES), np.float32),
        )
        for size in SIZES
    ]


def made(**arguments: Any) -> Task:
    settings: dict[str, Any] = {"batch_size": 5, "local_iterations": 6, "gamma": 0.2, "rho": 0.05, **arguments}
    model = settings.pop("model", perceptron)
    loss = settings.pop("loss", nn.functional.cross_entropy)
    return Task(model, loss, settings.pop("data", None) or data(), **settings)


def trained(task: Task, works: list[Work], *, threads: int = 1, seed: int = 0) -> list[tuple[Model, Trained]]:
    x_tau = start(task, seed)
    return task.train_compiled([(x_tau, work) for work in works], threads)


EVERYBODY = [Work(device, number) for number in range(3) for device in range(len(SIZES))]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"model": lambda: perceptron(activation=nn.Tanh)},
        {"model": lambda: perceptron(activation=nn.Sigmoid, bias=False)},
        {"model": lambda: nn.Linear(FEATURES, CLASSES)},
        {"rho": 0.0, "weight_decay": 0.01},
        {"clip": 0.05},
        {"clip": 1e6},
        {"local_iterations": None, "local_passes": 2},
        {"batch_size": 4},
        {"batch_size": 50},
        {"loss": nn.functional.mse_loss, "data": data(classes=False)},
        {"loss": nn.MSELoss(), "data": data(classes=False), "clip": 0.1, "weight_decay": 0.1},
        {"loss": nn.CrossEntropyLoss()},
    ],
    ids=lambda arguments: "-".join(arguments) or "plain",
)
def test_a_training_is_that_of_torch_within_rounding(arguments: dict[str, Any]) -> None:
    task = made(**arguments)
    assert task.compilable() is None
    for (x_new, report), work in zip(trained(task, EVERYBODY), EVERYBODY, strict=True):
        alone = solve(task, start(task, 0), work)
        moved = float(np.abs(alone.x_new.vector - start(task, 0).vector).max())
        assert moved > 1e-3
        assert np.abs(x_new.vector - alone.x_new.vector).max() < 1e-4 * moved + 1e-6
        assert report[:2] == alone.trained[:2]
        assert report.metrics["training_loss"] == pytest.approx(alone.trained.metrics["training_loss"], rel=1e-4)


def test_a_lease_says_how_much_and_how_fast() -> None:
    task = made()
    work = Work(3, local_iterations=2, gamma=0.7)
    ((x_new, report),) = trained(task, [work])
    alone = solve(task, start(task, 0), work)
    assert report.gradients == 2
    assert np.allclose(x_new.vector, alone.x_new.vector, atol=1e-5)


def test_the_bits_depend_on_nothing_beside_a_training() -> None:
    task = made()
    one_by_one = [trained(task, [work])[0] for work in EVERYBODY]
    for threads in (1, 2, 3, 20):  # two of these have less than four trainings for each thread
        for works in (EVERYBODY, EVERYBODY[::-1]):
            together = trained(task, works, threads=threads)
            for (x_new, report), work in zip(together, works, strict=True):
                alone, told = one_by_one[EVERYBODY.index(work)]
                assert x_new.vector.tobytes() == alone.vector.tobytes()
                assert report == told


def test_the_bits_are_those_of_sums_in_their_natural_order() -> None:
    """Plain float32 arithmetic, one operation after the other; no library that sums in an order of its own."""
    samples = data(classes=False)
    task = made(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Linear(6, CLASSES)),
        loss=nn.functional.mse_loss,
        data=samples,
        local_iterations=3,
    )
    work, x_tau = Work(2), start(task, 0)
    ((x_new, _),) = trained(task, [work])
    arrays = {name: array.copy() for name, array in x_tau.items()}
    solver, rng = task.solver, stream(work)
    gamma, pull = np.float32(solver.gamma), np.float32(solver.gamma * solver.rho)
    for batch in solver.batches(len(samples[2][0]), rng):
        inputs, answers = (part[batch] for part in samples[2])
        hidden = summed(inputs, arrays["0.weight"].T, arrays["0.bias"])
        hidden = np.maximum(hidden, np.float32(0))
        outputs = summed(hidden, arrays["2.weight"].T, arrays["2.bias"])
        d = (outputs - answers) * (np.float32(2) / np.float32(outputs.size))
        below = summed(d, arrays["2.weight"], np.zeros(6, np.float32))
        below = np.where(hidden <= 0, np.float32(0), below)
        gradients = {
            "0.weight": summed(inputs.T, below, np.zeros(6, np.float32)).T,
            "0.bias": summed(np.ones((1, len(batch)), np.float32), below, np.zeros(6, np.float32))[0],
            "2.weight": summed(hidden.T, d, np.zeros(CLASSES, np.float32)).T,
            "2.bias": summed(np.ones((1, len(batch)), np.float32), d, np.zeros(CLASSES, np.float32))[0],
        }
        for name, array in arrays.items():
            arrays[name] = (array + pull * (x_tau[name] - array)) - gamma * gradients[name]
    for name, array in arrays.items():
        assert x_new[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def summed(x: Array, w: Array, begin: Array) -> Array:
    """x @ w, term by term."""
    total = np.repeat(begin[np.newaxis], len(x), axis=0)
    for term in range(x.shape[1]):
        total = total + x[:, term : term + 1] * w[term]
    return total


def test_nan_and_infinity_come_through() -> None:
    task = made()
    x_tau = start(task, 0).copy()
    x_tau["1.weight"][0, 0] = np.nan
    ((x_new, _),) = task.train_compiled([(x_tau, Work(3))], 1)
    alone = solve(task, x_tau, Work(3)).x_new
    assert np.isnan(alone.vector).any()
    assert np.array_equal(np.isfinite(x_new.vector), np.isfinite(alone.vector))


def test_x_tau_is_left_alone_and_x_new_is_its_own() -> None:
    task = made()
    x_tau = start(task, 0)
    before = x_tau.vector.tobytes()
    (first, _), (second, _) = task.train_compiled([(x_tau, Work(1)), (x_tau, Work(2))], 2)
    assert x_tau.vector.tobytes() == before
    assert not np.shares_memory(first.vector, second.vector)


def test_more_devices_than_the_pool_holds_are_trained_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = trained(made(), EVERYBODY)
    monkeypatch.setattr("offbeat.train.task.DEVICES_CACHED", 3)
    assert [x.vector.tobytes() for x, _ in trained(made(), EVERYBODY)] == [x.vector.tobytes() for x, _ in everybody]


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda: nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2)), "Conv1d"),
        (lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), "ReLU"),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Tanh()), "Tanh"),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten()), "Flatten"),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)), "Dropout"),
        (lambda: nn.Sequential(nn.Linear(4, 2), nn.GELU()), "GELU"),
        (lambda: nn.Sequential(nn.Identity()), "no nn.Linear"),
    ],
)
def test_what_a_loop_cannot_do_is_said(module: Callable[[], nn.Module], why: str) -> None:
    assert why in (module_obstacle(module()) or "")


def test_hooks_would_not_be_called() -> None:
    module = perceptron()
    module[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    assert "hooks" in (module_obstacle(module) or "")


def test_dropout_of_nothing_and_identity_are_passed_over() -> None:
    task = made(model=lambda: nn.Sequential(nn.Identity(), nn.Linear(FEATURES, CLASSES), nn.Dropout(0.0)))
    assert task.compilable() is None


class Doubled(nn.Sequential):
    """Looks like a chain, and is not."""

    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"model": lambda: Doubled(nn.Linear(FEATURES, CLASSES))}, "Doubled"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "neither"),
        ({"loss": lambda y, t: nn.functional.cross_entropy(y, t) * 2}, "neither"),
        ({"data": [(inputs, np.full(len(inputs), -100)) for inputs, _ in data()]}, "-100"),
    ],
    ids=["another forward", "smoothed", "another loss", "ignored classes"],
)
def test_a_task_that_cannot_be_compiled_says_why(arguments: dict[str, Any], why: str) -> None:
    assert why in (made(**arguments).compilable() or "")


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_chain, "find_spec", lambda _: None)
    task = made()
    assert "offbeat[fast]" in (task.compilable() or "")
    with pytest.raises(InvalidValue, match="cannot be compiled"):
        trained(task, EVERYBODY)


def test_a_device_that_does_not_fit_the_loop_is_trained_by_torch() -> None:
    samples = data()
    samples[2][1][:3] = -100  # a class that torch ignores
    task = made(data=samples)
    assert task.compilable() is None
    both, x_tau = trained(task, [Work(2), Work(3), Work(2, 1)], threads=2), start(task, 0)
    for (x_new, report), work in zip(both[::2], (Work(2), Work(2, 1)), strict=True):
        alone = solve(task, x_tau, work)
        assert x_new.vector.tobytes() == alone.x_new.vector.tobytes()
        assert report == alone.trained
    assert both[1][0].vector.tobytes() == trained(made(), [Work(3)])[0][0].vector.tobytes()


def test_a_class_that_the_model_does_not_have_is_an_error_of_torchs() -> None:
    samples = data()
    samples[2][1][0] = CLASSES
    with pytest.raises(IndexError, match="out of bounds"):
        trained(made(data=samples), EVERYBODY)


def test_a_fork_goes_on_training() -> None:
    task = made()
    expected = [x_new.vector.tobytes() for x_new, _ in trained(task, EVERYBODY, threads=2)]
    read, write = os.pipe()
    child = os.fork()
    if not child:  # nothing of pytest's is run here
        same = [x_new.vector.tobytes() for x_new, _ in trained(task, EVERYBODY, threads=2)] == expected
        os.write(write, b"same" if same else b"other")
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 60)
    if not ready:
        os.kill(child, signal.SIGKILL)
    said = os.read(read, 10) if ready else b"it hangs"
    os.close(read)
    os.waitpid(child, 0)
    assert said == b"same"


def test_no_threads_are_left() -> None:
    before = threading.active_count()
    trained(made(), EVERYBODY, threads=2)
    assert threading.active_count() == before


def test_a_numba_that_cannot_be_loaded_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"{name} needs another numpy")

    monkeypatch.setattr(compiled_chain, "import_module", broken)
    assert "needs another numpy" in (made().compilable() or "")


def test_a_model_of_another_task_is_refused() -> None:
    other = start(made(model=lambda: nn.Linear(FEATURES, CLASSES)), 0)
    with pytest.raises(LayoutMismatch, match="another layout"):
        made().train_compiled([(other, Work(0))], 1)


def test_a_run_is_that_of_inline_within_rounding_and_its_own_to_the_bit() -> None:
    def run(executor: str) -> offbeat.Run:
        return offbeat.simulate(made(), executor=executor, epochs=40, in_flight_max=4, device_model="lognormal:1.5")

    inline, once, again = run("inline"), run("compiled"), run("auto")
    assert again.summary["executor"] == "compiled"
    assert once.summary["x_sha256"] == again.summary["x_sha256"] != inline.summary["x_sha256"]
    assert once.ledger == inline.ledger
    assert np.abs(once.x.vector - inline.x.vector).max() < 1e-4
