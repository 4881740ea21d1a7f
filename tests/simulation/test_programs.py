"""`compiled-torch` and `channels-last`: close to torch's usual way, the same bits again, and refused in words."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")

import torch
from torch import Tensor, nn

import offbeat
from offbeat.core.layout import Model
from offbeat.errors import InvalidValue
from offbeat.settings import Settings
from offbeat.sim.choose import ExecutorPool, executor_of
from offbeat.sim.processes import ProgramProcesses
from offbeat.sim.run import Simulation, StopRequested
from offbeat.train import programs
from offbeat.train.compiled_layers import weight_gradient
from offbeat.train.task import Task
from tests.simulation.quadratic import Quadratic

CHANNELS = 16


def images(*, norm: bool = False, view: bool = False, batch_size: int = 6, samples: int = 20) -> Task:
    """A small network with all that is calculated otherwise in compiled code; the last batch of a pass is short."""
    rng = np.random.default_rng(5)
    data = [(rng.standard_normal((samples, 3, 8, 8), np.float32), rng.integers(0, 4, samples)) for _ in range(4)]
    return Task(
        model=lambda: Network(norm, view),
        loss=nn.functional.cross_entropy,
        data=data,
        test=data[0],
        gamma=0.05,
        rho=0.1,
        batch_size=batch_size,
        local_passes=1,
        accelerator="cpu",
    )


class Network(nn.Module):
    def __init__(self, norm: bool, view: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS) if norm else nn.Identity()
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.pool, self.dropout = nn.MaxPool2d(2), nn.Dropout(0.25)
        self.out, self.view = nn.Linear(CHANNELS * 16, 4), view

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.pool(self.second(self.norm(torch.relu(self.first(x))))))
        scores: Tensor = self.out(x.view(len(x), -1) if self.view else x.flatten(1))
        return scores


def simulate(task: Any, executor: str, **settings: Any) -> Any:
    return offbeat.simulate(task, **{"devices": 4, "epochs": 12, "seed": 3, "executor": executor, **settings})


def close(one: Model, other: Model) -> None:
    np.testing.assert_allclose(one.vector, other.vector, rtol=0, atol=1e-4)
    assert not np.array_equal(one.vector, other.vector), "the bits would be those of inline, and nothing was tested"


# --- channels-last ---------------------------------------------------------------------------------------------------


def test_channels_last_ends_close_to_inline_and_with_the_same_bits_on_any_number_of_processes() -> None:
    inline, *two = (simulate(images(), name) for name in ("inline", "channels-last:1", "channels-last:2"))
    assert two[0].summary["executor"] == "channels-last:1"
    assert two[0].summary["x_sha256"] == two[1].summary["x_sha256"]
    close(two[0].x, inline.x)
    assert two[0].summary["loss"] == pytest.approx(inline.summary["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (images(norm=True), r"layer 'norm' is BatchNorm2d, which torch calculates inexactly"),
        (Task(nn.Linear(2, 2), nn.functional.mse_loss, [([[1.0, 2.0]], [[1.0, 2.0]])]), "the model has no convolution"),
        (Quadratic([0.0], [0.5]), "Quadratic has no `train_by`"),
    ],
    ids=["BatchNorm", "no convolution", "not torch"],
)
def test_channels_last_is_refused_in_words(task: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=f"executor channels-last is not possible: {words}"):
        executor_of(task, "channels-last", parameters=1, in_flight_max=4)


def test_a_model_whose_code_does_not_take_channels_last_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"the model does not take it \(view size is not compatible"):
        images(view=True).train_by("channels-last")


# --- compiled-torch: refused -----------------------------------------------------------------------------------------


def test_compiled_torch_is_refused_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        InvalidValue,
        match=r"executor compiled-torch is not possible: there is no C\+\+ compiler 'no-such-compiler' on this machine",
    ):
        simulate(images(), "compiled-torch")


def test_compiled_torch_is_refused_without_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    assert "needs Python's headers" in str(images().program_obstacle("compiled-torch"))


def test_compiled_torch_is_refused_where_no_batch_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_compiler_obstacle", lambda: None)
    with pytest.raises(InvalidValue, match="no device has the 21 samples of a full batch; choose a smaller batch_size"):
        executor_of(images(batch_size=21), "compiled-torch", parameters=1, in_flight_max=4)


def test_auto_never_chooses_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_compiler_obstacle", lambda: None)
    task = images()
    assert task.program_obstacle("channels-last") is None
    for parameters in (10, 100_000, 10**8):
        executor = executor_of(task, "auto", parameters=parameters, in_flight_max=4).executor
        assert not isinstance(executor, ProgramProcesses)
        executor.close()


def test_beside_other_processes_of_a_comparison_there_is_one_process_and_the_name_stays(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.simulation.test_programs import images\ntask = images()\n")
    for alone, name, count in (
        (True, "channels-last:2", 2),
        (False, "channels-last", 1),
        (False, "channels-last:2", 2),
    ):
        executors = ExecutorPool(str(file), alone=alone)
        executor = executors.lend(Settings(executor=name, devices=4))
        assert isinstance(executor, ProgramProcesses)
        assert (executor.name, executor.count) == (name, count)
        executors.close()


# --- resumed ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_its_executor_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    check_resumed("channels-last:1", tmp_path)


def check_resumed(executor: str, folder: Path) -> None:
    whole = simulate(images(), executor)

    def stop(simulation: Simulation) -> None:
        if simulation.coordinator.t >= 5:
            raise StopRequested

    with pytest.raises(StopRequested):
        simulate(images(), executor, dir=folder, on_progress=stop)
    resumed = simulate(images(), "auto", dir=folder)
    assert resumed.summary["executor"] == executor
    assert resumed.summary["x_sha256"] == whole.summary["x_sha256"]


# --- compiled-torch --------------------------------------------------------------------------------------------------


def test_the_weight_gradient_by_columns_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(1)
    for (height, width), padding in (((3, 3), [1, 1]), ((2, 5), [0, 2]), ((3, 3), [2, 0])):
        x = torch.randn(7, 5, 9, 8, generator=generator, dtype=torch.float64)
        weight = torch.randn(4, 5, height, width, generator=generator, dtype=torch.float64, requires_grad=True)
        out = nn.functional.conv2d(x, weight, padding=padding)
        gradient = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        out.backward(gradient)  # type: ignore[no-untyped-call]
        for form in (torch.contiguous_format, torch.channels_last):
            found = weight_gradient(
                x.contiguous(memory_format=form), gradient.contiguous(memory_format=form), [*weight.shape], padding
            )
            torch.testing.assert_close(found, weight.grad, rtol=1e-12, atol=1e-12)


needs_compiler = pytest.mark.skipif(
    programs._compiler_obstacle() is not None, reason="torch cannot compile on this machine"
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiled code of these tests is kept."""
    return tmp_path_factory.mktemp("kept")


@pytest.mark.slow
@needs_compiler
def test_compiled_torch_ends_close_to_inline_and_is_compiled_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(kept))
    inline = simulate(images(norm=True), "inline")
    first = simulate(images(norm=True), "compiled-torch:1")
    close(first.x, inline.x)
    for point, usual in zip(first.metrics, inline.metrics, strict=True):
        assert point.metrics["loss"] == pytest.approx(usual.metrics["loss"], rel=1e-3)
    code = {path: path.stat().st_mtime_ns for path in kept.rglob("*.so")}
    assert code
    second = simulate(images(norm=True), "compiled-torch:2")
    assert second.summary["x_sha256"] == first.summary["x_sha256"]
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*.so")} == code


@pytest.mark.slow
@needs_compiler
def test_a_resumed_run_is_compiled_torchs_again(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(kept))
    check_resumed("compiled-torch:1", tmp_path)


@pytest.mark.slow
@needs_compiler
def test_the_command_tells_of_compiling_and_when_it_is_done(kept: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from tests.simulation.test_programs import images\ntask = images(norm=True)\n")
    command = [
        sys.executable,
        "-m",
        "offbeat",
        "simulate",
        str(file),
        "--executor",
        "compiled-torch:1",
        "--epochs",
        "3",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OFFBEAT_DATA": str(kept)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Torch compiles the model" in done.stderr
    assert "Ready after" in done.stderr
    assert "compiled-torch:1" in done.stdout


COMPILED = """
import sys
from offbeat.errors import InvalidValue
from offbeat.task import Work, start
from offbeat.train.compiled_layers import ConvolvedByColumns, PooledApart
from tests.simulation.test_programs import Turning, images

task = images(norm=True, view=True)
before = task.frozen(), {name: value.clone() for name, value in task._flat.module.state_dict().items()}
task.train_by("compiled-torch")
after = task._flat.module.state_dict()
assert all((after[name] == value).all() for name, value in before[1].items()), "the warm-up has left something behind"
assert isinstance(task._flat.module.pool, PooledApart)
model = start(task, 0).copy()
trained = task.train(model, Work(0))
assert trained.gradients == 4  # the last batch is short, and not compiled

turning = Turning.task()
turning.train_by("compiled-torch")
try:
    turning.train(start(turning, 0).copy(), Work(0))
except InvalidValue as error:
    print(error)
"""


class Turning(nn.Linear):
    """A model whose code differs from batch to batch."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.batches = 0

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.batches += 1
        return super().forward(input) * self.batches

    @classmethod
    def task(cls) -> Task:
        data = [(np.ones((8, 2), np.float32), np.ones((8, 2), np.float32))]
        return Task(cls, nn.functional.mse_loss, data, batch_size=4, local_iterations=8, accelerator="cpu")


@pytest.mark.slow
@needs_compiler
def test_warming_up_leaves_no_trace_and_code_that_would_be_compiled_again_is_refused(kept: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OFFBEAT_DATA": str(kept)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "would have to be compiled again; use the executor processes" in done.stdout
