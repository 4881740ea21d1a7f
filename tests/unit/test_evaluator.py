"""When versions are evaluated: the newest that there is, the last one always, and nobody waits for it."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.hosting.task_process import TaskClosed, TaskDied, TaskFailed
from offbeat.server import evaluator as evaluator_module
from offbeat.server.evaluator import FILE, MEAN_FILE, Evaluator
from offbeat.wire import body_of, header_of

PATIENCE_S = 60.0
MOMENT_S = 0.05
SIZE = (1 << 18) + 17
"""More than a file buffers."""

Outcome = Mapping[str, float] | Exception


def model(t: int) -> Model:
    return Model.of({"x": np.full(SIZE, t, np.float32), "n": np.array([t])}, buffers=["n"]).freeze()


class Scripted:
    """Says what it is asked, and answers what the test says."""

    def __init__(self) -> None:
        self.asked: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self.answers: SimpleQueue[Outcome] = SimpleQueue()
        self.pauses: list[float] = []
        self.evaluator: Evaluator | None = None

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]:
        if self.evaluator is not None:
            self.pauses.append(self.evaluator._again_at)
        self.asked.put((t, file.read_bytes()))
        answer = self.answers.get(timeout=PATIENCE_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.answers.put(TaskClosed("closed"))

    def next(self) -> int:
        """The version that is asked for next."""
        return self.asked.get(timeout=PATIENCE_S)[0]

    def rests(self) -> bool:
        """Is nothing asked, for a moment?"""
        try:
            self.asked.get(timeout=MOMENT_S)
        except Empty:
            return True
        return False


class Told:
    """What came of it all."""

    def __init__(self) -> None:
        self.done: list[tuple[int, Mapping[str, float]]] = []
        self.failed: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def take(self, t: int, metrics: Mapping[str, float]) -> None:
        self.done.append((t, metrics))

    def fail(self, t: int, why: str) -> None:
        self.failed.put((t, why))

    def failure(self) -> tuple[int, str]:
        return self.failed.get(timeout=PATIENCE_S)


@pytest.fixture
def child() -> Scripted:
    return Scripted()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def evaluator(child: Scripted, told: Told, tmp_path: Path) -> Iterator[Evaluator]:
    made = Evaluator(child, tmp_path, model(0).layout, told.take, told.fail, pause_s=0.001)
    yield made
    made.stop()


def test_the_file_is_the_model_and_nobody_holds_it_meanwhile(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    x = model(3)
    expected, held = header_of(x.layout) + b"".join(body_of(x)), weakref.ref(x.vector)
    evaluator.put(3, x)
    assert child.asked.get(timeout=PATIENCE_S) == (3, expected)
    del x
    gc.collect()
    assert held() is None
    child.answers.put({"loss": 1.0})
    assert evaluator.wait(PATIENCE_S)
    assert told.done == [(3, {"loss": 1.0})]


def test_the_newest_wins(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    evaluator.put(1, model(1))
    assert child.next() == 1
    for t in (2, 3, 7, 5):
        evaluator.put(t, model(t))
    child.answers.put({})
    assert child.next() == 7
    child.answers.put({})
    assert evaluator.wait(PATIENCE_S)
    assert told.done == [(1, {}), (7, {})]


def test_the_last_makes_way_for_nobody(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    evaluator.put(1, model(1))
    assert child.next() == 1
    evaluator.put(9, model(9))
    evaluator.put(8, model(8), last=True)
    evaluator.put(10, model(10))
    child.answers.put({})
    assert child.next() == 8
    evaluator.put(11, model(11))
    child.answers.put(TaskDied("once"))
    assert child.next() == 8
    child.answers.put({"loss": 8.0})
    assert child.next() == 11
    child.answers.put({})
    assert evaluator.wait(PATIENCE_S)
    assert [t for t, _ in told.done] == [1, 8, 11]
    assert told.failed.empty()


def test_a_version_becomes_the_last_while_it_is_under_way_and_none_is_measured_twice(
    evaluator: Evaluator, child: Scripted, told: Told
) -> None:
    evaluator.put(4, model(4))
    assert child.next() == 4
    evaluator.put(4, model(4), last=True)
    evaluator.put(5, model(5))
    child.answers.put(TaskDied("once"))
    assert child.next() == 4  # and not 5
    child.answers.put({})
    assert child.next() == 5
    child.answers.put({})
    assert evaluator.wait(PATIENCE_S)
    evaluator.put(5, model(5), last=True)
    assert evaluator.wait(0)
    assert [t for t, _ in told.done] == [4, 5]


def test_three_tries_then_it_has_failed(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    evaluator.put(1, model(1))
    for _ in range(3):
        assert child.next() == 1
        child.answers.put(TaskDied("gone"))
    assert told.failure() == (1, "gone (try 3 of 3)")
    assert evaluator.wait(PATIENCE_S)
    assert child.rests()


def test_a_newer_version_is_tried_instead_of_the_same_again(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    evaluator.put(1, model(1))
    assert child.next() == 1
    evaluator.put(2, model(2))
    child.answers.put(TaskDied("gone"))
    assert told.failure() == (1, "gone (try 1 of 3)")
    assert child.next() == 2
    child.answers.put({})
    assert evaluator.wait(PATIENCE_S)
    assert [t for t, _ in told.done] == [2]


def test_an_error_of_the_task_is_not_tried_again(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    for error in (TaskFailed("ZeroDivisionError"), RuntimeError("whatever")):
        evaluator.put(1, model(1))
        assert child.next() == 1
        child.answers.put(error)
        assert told.failure() == (1, str(error))
        assert evaluator.wait(PATIENCE_S)
    assert child.rests()


def test_pauses_double_up_to_their_limit_until_one_succeeds(
    evaluator: Evaluator, child: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator_module, "monotonic", lambda: 0.0)
    child.evaluator, evaluator._pause_max_s = evaluator, 0.004
    deaths: list[Outcome] = [TaskDied("gone")] * 3
    good: list[Outcome] = [{}]
    for t, answers in enumerate([deaths, deaths, good, deaths]):
        for answer in answers:
            child.answers.put(answer)
        evaluator.put(t, model(t))
        assert evaluator.wait(PATIENCE_S)
    assert child.pauses == [0.0, 0.001, 0.002, 0.004, 0.004, 0.004, 0.004, 0.0, 0.001, 0.002]


def test_a_pause_is_kept_and_stopping_ends_it(child: Scripted, told: Told, tmp_path: Path) -> None:
    evaluator = Evaluator(child, tmp_path, model(0).layout, told.take, told.fail, pause_s=1000.0, pause_max_s=1000.0)
    evaluator.put(1, model(1))
    assert child.next() == 1
    child.answers.put(TaskDied("gone"))
    assert child.rests()
    evaluator.put(2, model(2))
    assert told.failure() == (1, "gone (try 1 of 3)")  # it need not wait to be told
    assert child.rests()
    assert not evaluator.wait(0)
    before = monotonic()
    evaluator.stop()
    assert monotonic() - before < PATIENCE_S
    assert told.done == []
    assert told.failed.empty()


def test_stopping_abandons_what_is_under_way_and_closes_the_process(
    evaluator: Evaluator, child: Scripted, told: Told, tmp_path: Path
) -> None:
    evaluator.put(1, model(1))
    assert child.next() == 1
    assert (tmp_path / FILE).exists()
    evaluator.put(2, model(2), last=True)
    evaluator.stop()
    evaluator.put(3, model(3))
    assert evaluator.wait(0)
    assert child.rests()
    assert (told.done, told.failed.empty()) == ([], True)
    assert not (tmp_path / FILE).exists()


def test_a_process_that_somebody_else_closed_is_a_failure(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    evaluator.put(1, model(1))
    assert child.next() == 1
    child.close()
    assert told.failure() == (1, "closed")


def test_it_is_idle_when_whoever_waits_has_been_told(child: Scripted, tmp_path: Path) -> None:
    seen: list[bool] = []
    made = Evaluator(child, tmp_path, model(0).layout, lambda *_: seen.append(made.wait(0)), lambda *_: made.stop())
    assert made.wait(0)
    made.put(1, model(1))
    assert not made.wait(MOMENT_S)
    child.answers.put({})
    assert made.wait(PATIENCE_S)
    assert seen == [False]
    made.put(2, model(2))
    child.answers.put(RuntimeError())
    assert made.wait(PATIENCE_S)
    made.stop()  # as `failed` did, on the evaluator's own thread


def test_who_is_told_may_fail_and_the_next_version_is_evaluated(
    child: Scripted, told: Told, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def take(t: int, metrics: Mapping[str, float]) -> None:
        if t == 1:
            raise RuntimeError("the driver is gone")
        told.take(t, metrics)

    evaluator = Evaluator(child, tmp_path, model(0).layout, take, told.fail)
    for t in (1, 2):
        child.answers.put({})
        evaluator.put(t, model(t))
        assert evaluator.wait(PATIENCE_S)
    evaluator.stop()
    assert told.done == [(2, {})]
    assert "the evaluation of version 1 could not be recorded" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_a_failure(child: Scripted, told: Told, tmp_path: Path) -> None:
    evaluator = Evaluator(child, tmp_path / "nowhere", model(0).layout, told.take, told.fail)
    evaluator.put(1, model(1))
    t, why = told.failure()
    assert (t, why.startswith("cannot write")) == (1, True)
    evaluator.stop()


# --- the averaged model ----------------------------------------------------------------------------------------------


def test_the_averaged_model_is_evaluated_after_its_version_and_told_with_it(
    evaluator: Evaluator, child: Scripted, told: Told, tmp_path: Path
) -> None:
    evaluator.put(3, model(3), model(2))
    for number, loss in ((3, 1.0), (2, 0.5)):
        assert child.asked.get(timeout=PATIENCE_S) == (3, header_of(model(0).layout) + b"".join(body_of(model(number))))
        child.answers.put({"loss": loss})
    assert evaluator.wait(PATIENCE_S)
    assert told.done == [(3, {"loss": 1.0, "loss_average": 0.5})]
    evaluator.stop()
    assert not (tmp_path / MEAN_FILE).exists()


def test_a_death_in_between_means_both_again(evaluator: Evaluator, child: Scripted, told: Told) -> None:
    evaluator.put(3, model(3), model(2), last=True)
    for answer in ({"loss": 1.0}, TaskDied("gone"), {"loss": 1.0}, {"loss": 0.5}):
        assert child.next() == 3
        child.answers.put(answer)
    assert evaluator.wait(PATIENCE_S)
    assert told.done == [(3, {"loss": 1.0, "loss_average": 0.5})]


def test_an_averaged_model_that_cannot_be_evaluated_is_a_failure_and_the_next_version_is_tried(
    evaluator: Evaluator, child: Scripted, told: Told
) -> None:
    evaluator.put(3, model(3), model(2))
    for answer in ({"loss": 1.0}, TaskFailed("no")):
        assert child.next() == 3
        child.answers.put(answer)
    assert told.failure() == (3, "no")
    evaluator.put(4, model(4))
    assert child.next() == 4
    child.answers.put({"loss": 2.0})
    assert evaluator.wait(PATIENCE_S)
    assert told.done == [(4, {"loss": 2.0})]
