"""Owns training in other processes: one thread each, started fresh, with the same bits as training here.

Rules kept here:
- Children are spawned, never forked: torch's threads do not survive a fork.
- They start with a malloc that keeps large blocks instead of handing them back to the system after every tensor; on an
  LSTM that saves a hundred thousand page faults per gradient.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from offbeat.core.layout import Layout, Model
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.sim.executors import Evaluation, Job, Pending
from offbeat.sim.holding import Bare, Holder, Pushed, packed
from offbeat.task import Task, Trained, Update, Work, evaluate

PROCESSES_MAX = 256
CHILD_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
    "OMP_NUM_THREADS": "1",
}


class Travelling(Job):
    """A training in another process."""

    __slots__ = ("future",)

    def __init__(self, x_tau: Model, work: Work, future: "Future[Pushed]") -> None:
        super().__init__(x_tau, work)
        self.future = future


class Watched(Evaluation):
    """An evaluation in another process."""

    __slots__ = ("future",)

    def __init__(self, x: Model, future: "Future[Mapping[str, float]]") -> None:
        super().__init__(x)
        self.future = future


class Processes:
    """Trains in `count` processes at once."""

    def __init__(self, task: Task, count: int | None = None) -> None:
        self.name = "processes" if count is None else f"processes:{count}"
        count = cores() if count is None else count
        if not 1 <= count <= PROCESSES_MAX:
            raise InvalidValue(f"processes is {count} but must lie in 1..{PROCESSES_MAX}; one per core is enough")
        self.task, self.count = task, count
        self._payload = _file_of(packed(task))
        self._pool: ProcessPoolExecutor | None = None

    @property
    def batched_name(self) -> str:
        """What `batched` is called that spreads over these."""
        return f"batched+{self.name}"

    def submit(self, x_tau: Model, work: Work) -> Travelling:
        """The next free process takes it."""
        return Travelling(x_tau, work, self._send(_train, x_tau, work))

    def measure(self, x: Model) -> Watched:
        """The next free process takes it."""
        return Watched(x, self._send(_evaluate, x))

    def finish(self, jobs: Sequence[Pending]) -> None:
        """Wait for these."""
        for job in jobs:
            if not job.done:
                try:
                    self._take(job)
                except BrokenProcessPool as error:
                    raise _broken() from error

    def _take(self, job: Pending) -> None:
        if isinstance(job, Watched):
            job.metrics = job.future.result()
        elif isinstance(job, Travelling):
            x_new, trained = job.future.result()
            job.update = Update(Model(job.x_tau.layout, *x_new).freeze(), job.work, trained)

    def train_many(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        """Trainings of a task that can batch them, an equal part in each process; as its own `train_many`."""
        size = -(-len(jobs) // self.count)
        parts = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        layout = jobs[0][0].layout
        sent = [self._submit(layout, _train_many, [(Bare.of(x_tau), work) for x_tau, work in part]) for part in parts]
        try:
            answers = [future.result() for future in sent]
        except BrokenProcessPool as error:
            raise _broken() from error
        pushed = [(Model(layout, *x_new), trained) for results, _ in answers for x_new, trained in results]
        return pushed, sum(programs for _, programs in answers)

    def _send(self, function: Callable[..., Any], x: Model, *arguments: Any) -> "Future[Any]":
        return self._submit(x.layout, function, Bare.of(x), *arguments)

    def _submit(self, layout: Layout, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        with environment(CHILD_ENVIRONMENT):
            try:
                return self._children(layout).submit(function, *arguments)
            except BrokenProcessPool as error:
                raise _broken() from error

    def _children(self, layout: Layout) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.count, get_context("spawn"), initializer=_begin, initargs=(self._payload.name, layout)
            )
        return self._pool

    def cancel(self, job: Job) -> None:
        """One that has not begun will not begin."""
        if isinstance(job, Travelling):
            job.future.cancel()

    def evaluate(self, model: Model) -> Mapping[str, float]:
        """Here, while the others work."""
        return evaluate(self.task, model)

    def report(self) -> dict[str, float]:
        """How many processes there were."""
        return {"processes": self.count}

    def close(self) -> None:
        """End the processes; what has not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._payload.close()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _file_of(payload: bytes) -> Any:
    """A temporary file, gone when it is closed: a pipe could fill up while a child dies, and block for ever."""
    file = NamedTemporaryFile(prefix="offbeat-task-")  # noqa: SIM115 (closed with the executor)
    file.write(payload)
    file.flush()
    return file


_here: Holder | None = None


def _begin(payload: str, layout: Layout) -> None:
    """In a child: make the task."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children in order
    _here = Holder(Path(payload).read_bytes(), layout)


def _held() -> Holder:
    if _here is None:
        raise AssertionError("the child was given no task")
    return _here


def _train(x_tau: Bare, work: Work) -> Pushed:
    """In a child: train."""
    return _held().train(x_tau, work)


def _train_many(jobs: list[tuple[Bare, Work]]) -> tuple[list[Pushed], int]:
    """In a child: train together."""
    return _held().train_many(jobs)


def _evaluate(x: Bare) -> dict[str, float]:
    """In a child: evaluate."""
    return _held().evaluate(x)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """What processes that are started meanwhile find in their environment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _broken() -> OffbeatError:
    return OffbeatError(
        "a training process died, perhaps for want of memory: try --executor processes:1, or inline; "
        'in a script of your own, put the call under `if __name__ == "__main__":`'
    )
