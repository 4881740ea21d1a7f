"""A server's evaluations, said by the test: which version is looked at, and what comes out."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue

from offbeat.hosting.task_process import TaskClosed
from tests.server.serving import PATIENCE_S, Running
from tests.server.speaking import until


class SaidByTest:
    """In the place of the task's own process: it says what it is asked, and answers what the test says."""

    def __init__(self, running: Running) -> None:
        """The first model is evaluated as usual: from then on the test answers."""
        evaluator = running.server.evaluator
        assert evaluator is not None
        until(lambda: bool(running.server.run.coordinator.evaluations) and evaluator.wait(0))
        self.asked: SimpleQueue[int] = SimpleQueue()
        self.answers: SimpleQueue[Mapping[str, float] | None] = SimpleQueue()
        evaluator._process = self

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]:  # noqa: ARG002 (the test knows what it holds)
        self.asked.put(t)
        answer = self.answers.get(timeout=PATIENCE_S)
        if answer is None:
            raise TaskClosed("closed")
        return answer

    def close(self) -> None:
        self.answers.put(None)

    def next(self) -> int:
        return self.asked.get(timeout=PATIENCE_S)

    def say(self, t: int, size: float, running: Running) -> None:
        """Version t, which is asked for next, has this size; returns when that is in the ledger."""
        assert self.next() == t
        self.answers.put({"size": size})
        until(lambda: any(e.t == t for e in running.server.run.coordinator.evaluations))


def as_killed(running: Running, folder: Path) -> Path:
    """The run's folder as it would be found if the server were killed now, in another place."""
    folder.mkdir()
    shutil.copy(running.folder.parent / "line.py", folder)
    shutil.copytree(running.folder, folder / "run", ignore=shutil.ignore_patterns(".lock", "server.json"))
    return folder
