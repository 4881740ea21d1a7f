"""Executors: where a training runs does not change what comes out."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.core.layout import Array, Model
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.child import CHILD_ENVIRONMENT
from offbeat.hosting.loading import load
from offbeat.hosting.task_host import packed
from offbeat.settings import Settings
from offbeat.sim.choose import executor_of
from offbeat.sim.executors import Inline
from offbeat.sim.processes import Processes
from offbeat.task import Trained, Work, start
from tests.simulation.quadratic import Quadratic

TASK = Quadratic([0.0, 1.0, 4.0, 9.0], [0.5, 0.7, 0.2, 0.9], size=20, noise=0.3)


def simulate(task: Any = TASK, **settings: Any) -> dict[str, Any]:
    return offbeat.simulate(task, **{"device_model": "lognormal:1", "seed": 4, "epochs": 60, **settings}).summary


def test_processes_give_the_bits_of_inline_whatever_their_number() -> None:
    inline = simulate(executor="inline")
    for count in (1, 2, 3):
        summary = simulate(executor=f"processes:{count}")
        assert summary["x_sha256"] == inline["x_sha256"]
        assert summary["executor"] == f"processes:{count}"


def test_a_torch_task_gives_the_same_bits_in_processes_and_tells_how_it_was_made() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    inline, processes = (simulate("digits", executor=name, epochs=40) for name in ("inline", "processes:2"))
    assert inline["x_sha256"] == processes["x_sha256"]


def test_a_task_from_a_notebook_travels_by_cloudpickle() -> None:
    pytest.importorskip("cloudpickle", reason="cloudpickle is not installed")

    class Local:
        def initial(self, seed: int) -> Mapping[str, Array]:
            return Quadratic([0.0], [0.5]).initial(seed)

        def train(self, model: Model, work: Work) -> Trained:  # noqa: ARG002
            model["x"][:] /= 2
            return Trained(1, 1)

        def evaluate(self, model: Model) -> Mapping[str, float]:
            return {"x": float(model["x"][0])}

    both = [simulate(Local(), executor=name, devices=4, epochs=6)["x_sha256"] for name in ("inline", "processes:1")]
    assert both[0] == both[1]


class Unsendable(Quadratic):
    """A task that holds something that no process can send to another."""

    def __reduce__(self) -> str:
        raise TypeError("it holds a lock")


def test_a_task_that_cannot_travel_is_refused_in_words_and_auto_stays_here() -> None:
    task = Unsendable([0.0, 1.0], [0.5, 0.5], size=100_000)
    with pytest.raises(InvalidValue, match=r"cannot be sent to other processes.*it holds a lock"):
        packed(task)
    assert executor_of(task, "auto", parameters=100_000, in_flight_max=2).executor.name == "inline"
    executor, word = executor_of(task, "processes:2", parameters=100_000, in_flight_max=2)
    assert executor.name == "inline"
    assert word is not None
    assert "cannot be sent to other processes" in word


def test_a_task_that_cannot_be_batched_is_trained_inline_with_a_word() -> None:
    executor, word = executor_of(TASK, "batched", parameters=20, in_flight_max=4)
    assert executor.name == "inline"
    assert word == "This task cannot be batched: Quadratic has no `train_many`. It is trained inline."


def test_auto_chooses_from_static_facts() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    task = load("digits", Settings())
    for in_flight_max, otherwise in ((32, "batched"), (1, "inline")):
        chosen = executor_of(task, "auto", parameters=2410, in_flight_max=in_flight_max).executor
        assert chosen.name == ("compiled" if find_spec("numba") else otherwise)
    assert executor_of(TASK, "auto", parameters=20, in_flight_max=4).executor.name == "inline"


def test_children_get_their_environment_and_the_parent_keeps_its_own() -> None:
    before = dict(os.environ)
    executor = Processes(Asking(), 1)
    try:
        job = executor.submit(start(Asking(), 0), Work(0))
        executor.finish([job])
    finally:
        executor.close()
    assert job.update is not None
    assert job.update.trained.gradients == len(CHILD_ENVIRONMENT)
    assert dict(os.environ) == before


class Asking:
    """A task that reports how many of the children's variables it finds set."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        return Quadratic([0.0], [0.5]).initial(seed)

    def train(self, model: Model, work: Work) -> Trained:  # noqa: ARG002
        found = sum(os.environ.get(name) == value for name, value in CHILD_ENVIRONMENT.items())
        return Trained(samples=1, gradients=found)

    def evaluate(self, model: Model) -> Mapping[str, float]:  # noqa: ARG002
        return {}


class Dying(Asking):
    """A task that takes its process with it."""

    def train(self, model: Model, work: Work) -> Trained:  # noqa: ARG002
        os._exit(1)


def test_a_process_that_dies_is_an_error_in_words() -> None:
    with pytest.raises(OffbeatError, match="a training process died"):
        simulate(Dying(), executor="processes:1", devices=2, epochs=3)


def test_an_error_in_the_users_code_comes_through(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n"
        "    def initial(self, seed):\n"
        "        import numpy as np\n"
        "        return {'x': np.zeros(1, np.float32)}\n"
        "    def train(self, model, work):\n"
        "        raise ZeroDivisionError('in my code')\n"
        "    def evaluate(self, model):\n"
        "        return {}\n"
        "task = Mine()\n"
    )
    for executor in ("inline", "processes:1"):
        with pytest.raises(ZeroDivisionError, match="in my code"):
            simulate(str(file), executor=executor, devices=2, epochs=3)


def test_inline_trains_when_the_result_is_needed() -> None:
    executor = Inline(TASK)
    job = executor.submit(start(TASK, 0), Work(0))
    assert job.update is None
    executor.finish([job])
    assert job.update is not None


SCRIPT = """
import sys
sys.modules["cloudpickle"] = None  # as where it is not installed
import offbeat
from tests.simulation.quadratic import Quadratic

class Mine(Quadratic):
    pass

def both(Kind):
    task = Kind([0.0, 1.0], [0.5, 0.7], size=20, noise=0.3)
    for executor in ("inline", "processes:2"):
        summary = offbeat.simulate(task, executor=executor, devices=2, epochs=9).summary
        assert summary["executor"] == executor
        print(summary["x_sha256"])
"""


@pytest.mark.parametrize(
    ("ending", "works"),
    [('if __name__ == "__main__":\n    both(Mine)\n', True), ("both(Mine)\n", False), ("both(Quadratic)\n", False)],
)
def test_a_task_from_a_script_travels_without_cloudpickle_where_the_script_can_be_imported(
    ending: str, works: bool, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + ending)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode == 0) == works, done.stderr
    if works:
        assert len(set(done.stdout.split())) == 1
    else:
        assert 'put the call under `if __name__ == "__main__":`' in done.stderr
