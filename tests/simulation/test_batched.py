"""The batched executor: trains together what waits together, and a run with it is the run that `inline` gives."""

import heapq
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.core.kernel import Updater, mixed
from offbeat.core.layout import Array, Model
from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue
from offbeat.sim.executors import Batched, Executor, Inline, obstacle
from offbeat.task import Task, Trained, Update, Work, evaluate, start

DEVICES = 12


class Halfway:
    """Every device moves the model halfway to its own number; `train_many` notes who came together."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.batches: list[list[int]] = []

    def initial(self, seed: int) -> Mapping[str, Array]:
        return {"x": np.full(1, float(seed), np.float32)}

    def train(self, model: Model, work: Work) -> Trained:
        model["x"][:] = (model["x"] + np.float32(work.device)) / 2
        return Trained(samples=1, gradients=3)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        return {"x": float(model["x"][0])}

    def batchable(self) -> str | None:
        return self.reason

    def train_many(self, jobs: list[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        self.batches.append([work.device for _, work in jobs])
        results = []
        for x_tau, work in jobs:
            x_new = x_tau.copy()
            results.append((x_new, self.train(x_new, work)))
        return results, -(-len(jobs) // 2)


class Plain:
    """A task that knows nothing of batches."""

    initial, train, evaluate = Halfway.initial, Halfway.train, Halfway.evaluate


def test_nothing_is_trained_before_it_is_needed_and_then_everything() -> None:
    task = Halfway()
    executor, x = Batched(task), start(task, 8)
    jobs = [executor.submit(x, Work(device)) for device in range(5)]
    assert task.batches == []
    executor.finish(jobs[2:3])
    assert task.batches == [[0, 1, 2, 3, 4]]
    executor.finish(jobs)
    assert len(task.batches) == 1
    assert [float(job.update.x_new["x"][0]) for job in jobs if job.update] == [4.0, 4.5, 5.0, 5.5, 6.0]


def test_what_was_cancelled_is_not_trained() -> None:
    task = Halfway()
    executor, x = Batched(task), start(task, 8)
    jobs = [executor.submit(x, Work(device)) for device in range(3)]
    executor.cancel(jobs[1])
    executor.finish(jobs[:1])
    assert task.batches == [[0, 2]]
    assert jobs[1].update is None
    executor.cancel(jobs[0])  # too late, and nothing happens
    executor.finish(jobs)
    assert task.batches == [[0, 2], [1]]


def test_updates_are_frozen_and_belong_to_their_job() -> None:
    task = Halfway()
    executor, x = Batched(task), start(task, 8)
    job = executor.submit(x, Work(3, 1, gamma=0.5))
    executor.finish([job])
    assert isinstance(job.update, Update)
    assert (job.update.work, job.update.trained) == (job.work, Trained(1, 3))
    assert not job.update.x_new.vector.flags.writeable
    assert float(x["x"][0]) == 8


def test_the_report_tells_how_full_the_program_was() -> None:
    task = Halfway()
    executor, x = Batched(task), start(task, 8)
    assert executor.report() == {"lanes_mean": 0.0, "programs": 0}
    for count in (2, 4, 3):  # 1, 2 and 2 runs of a program with two lanes
        executor.finish([executor.submit(x, Work(device)) for device in range(count)])
    assert executor.report() == {"lanes_mean": 9 / 5, "programs": 5}
    assert evaluate(executor.task, x) == {"x": 8.0}
    executor.close()


def test_a_job_survives_a_failure_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Halfway()
    executor, x = Batched(task), start(task, 8)
    jobs = [executor.submit(x, Work(device)) for device in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(task, "train_many", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.finish(jobs[:1])
    executor.finish(jobs[:1])
    assert task.batches == [[0, 1]]


@pytest.mark.parametrize(
    ("task", "reason"), [(Halfway("it is too wild"), "it is too wild"), (Plain(), "Plain has no `train_many`")]
)
def test_a_task_that_cannot_be_batched_is_refused_with_the_reason(task: Task, reason: str) -> None:
    assert obstacle(task) == reason
    with pytest.raises(InvalidValue, match=f"this task cannot be batched: {reason}; use the executor"):
        Batched(task)


def test_importing_the_executor_does_not_import_torch() -> None:
    code = "import sys, offbeat.sim.executors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- a whole run -----------------------------------------------------------------------------------------------------


def fedasync(
    task: Task, executor: Executor, seconds: Array, epochs: int, alpha: float = 0.4
) -> tuple[Model, list[float]]:
    """FedAsync under a virtual clock, as small as it can be: who arrives is mixed in and starts again."""
    updater, x = Updater(1), start(task, 0)
    heap = [(float(s), device, 0, executor.submit(x, Work(device))) for device, s in enumerate(seconds)]
    heapq.heapify(heap)
    curve = []
    for _ in range(epochs):
        at, device, number, job = heapq.heappop(heap)
        executor.finish([job])
        assert job.update is not None
        x = mixed(updater, x, Mix(1 - alpha, alpha, 0.0, True), job.update.x_new, None).freeze()
        curve.append(evaluate(executor.task, x)["loss"])
        again = executor.submit(x, Work(device, number + 1))
        heapq.heappush(heap, (at + float(seconds[device]), device, number + 1, again))
    return x, curve


@pytest.fixture(scope="module")
def digits() -> Task:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from offbeat.tasks.digits import digits

    return digits(DEVICES)


def test_a_run_is_that_of_inline_within_rounding_and_the_same_again(digits: Task) -> None:
    seconds = np.random.default_rng(2).uniform(0.5, 1.5, DEVICES)
    x, curve = fedasync(digits, Inline(digits), seconds, epochs=60)
    executors = [Batched(digits), Batched(digits)]
    runs = [fedasync(digits, executor, seconds, epochs=60) for executor in executors]
    assert np.array_equal(runs[0][0].vector, runs[1][0].vector)
    assert runs[0][1] == runs[1][1]
    np.testing.assert_allclose(runs[0][0].vector, x.vector, rtol=0, atol=1e-5)  # sixty trainings of float32 rounding
    np.testing.assert_allclose(runs[0][1], curve, rtol=1e-4)
    assert curve[-1] < 0.9 * curve[0]
    assert executors[0].report() == executors[1].report()
    assert 1 < executors[0].report()["lanes_mean"] <= DEVICES


def test_runs_that_share_an_executor_get_the_bits_that_they_get_alone(digits: Task) -> None:
    x_0 = [start(digits, seed) for seed in range(3)]
    works = [[Work(device, seed=seed) for device in range(8)] for seed in range(3)]
    alone = []
    for x, some in zip(x_0, works, strict=True):
        executor = Batched(digits)
        jobs = [executor.submit(x, work) for work in some]
        executor.finish(jobs)
        alone += [job.update.x_new.vector.tobytes() for job in jobs if job.update]
    shared = Batched(digits)
    jobs = [shared.submit(x, work) for x, some in zip(x_0, works, strict=True) for work in some]
    shared.finish(jobs[5:6])
    assert [job.update.x_new.vector.tobytes() for job in jobs if job.update] == alone
    assert shared.report() == {"lanes_mean": 12.0, "programs": 2}


def test_spread_over_processes_it_gives_the_bits_of_one_program() -> None:
    def run(executor: str) -> dict[str, Any]:
        return offbeat.simulate("digits", devices=40, in_flight_max=20, epochs=60, seed=3, executor=executor).summary

    one, spread = run("batched"), run("batched+processes:2")
    assert one["x_sha256"] == spread["x_sha256"]
    assert (spread["executor"], spread["processes"]) == ("batched+processes:2", 2)
    assert 1 < spread["lanes_mean"] <= one["lanes_mean"]
    with pytest.raises(offbeat.OffbeatError, match="is unknown"):
        run("inline+processes")
