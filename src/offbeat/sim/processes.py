"""Owns training in other processes: one thread each, started fresh, with the same bits as training here.

Rules kept here:
- The next free process takes what was submitted first. One that died is replaced for the next training.
- A program (`compiled-torch`, `channels-last`) is made in the processes, when they load the task; its bits are its own,
  and do not depend on the number of processes.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

from offbeat.core.layout import Layout, Model
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.child import Child, ChildDied, cores
from offbeat.hosting.task_host import Bare, CannotTravel, TaskFailure, packed, serve, unpacked
from offbeat.sim.executors import STATEFUL, Job, Pending, PendingEvaluation, Programmable
from offbeat.task import DeviceState, Task, Trained, Update, Work, keeps_state

PROCESSES_MAX = 256


def process_count(asked: int | None) -> int:
    """As many as are asked for; one per core where that is not said."""
    count = min(cores(), PROCESSES_MAX) if asked is None else asked
    if not 1 <= count <= PROCESSES_MAX:
        raise InvalidValue(f"processes is {count} but must lie in 1..{PROCESSES_MAX}; one per core is enough")
    return count


class Processes:
    """Trains in `count` processes at once; each has a thread here that asks it."""

    def __init__(self, task: Task, count: int | None = None) -> None:
        self.name = "processes" if count is None else f"processes:{count}"
        self.task, self.count = task, process_count(count)
        self._payload = packed(task)
        self._threads = ThreadPoolExecutor(self.count, "processes")
        self._own = threading.local()  # the child that a thread asks
        self._starting = threading.Lock()
        """Guards the two below."""
        self._children: set[Child] = set()
        self._closed = False

    @property
    def batched_name(self) -> str:
        return f"batched+{self.name}"

    def submit(self, x_tau: Model, work: Work, state: DeviceState | None = None) -> Job:
        job = Job(x_tau, work, state)
        job.handle = self._send("train", x_tau.layout, Bare.of(x_tau), work, state)
        return job

    def measure(self, x: Model) -> PendingEvaluation:
        evaluation = PendingEvaluation(x)
        evaluation.handle = self._send("evaluate", x.layout, Bare.of(x))
        return evaluation

    def finish(self, jobs: Sequence[Pending]) -> None:
        for job in jobs:
            if isinstance(job, PendingEvaluation):
                job.metrics = job.handle.result()
            elif not job.done:
                x_new, trained, brought = job.handle.result()
                job.update = Update(Model(job.x_tau.layout, *x_new).freeze(), job.work, trained, brought)

    def train_many(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        """Trainings of a task that can batch them, an equal part in each process; as its own `train_many`."""
        size = -(-len(jobs) // self.count)
        parts = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        layout = jobs[0][0].layout
        sent = [self._send("train_many", layout, [(Bare.of(x_tau), work) for x_tau, work in part]) for part in parts]
        answers = [future.result() for future in sent]
        pushed = [(Model(layout, *x_new), trained) for results, _ in answers for x_new, trained in results]
        return pushed, sum(programs for _, programs in answers)

    def cancel(self, job: Job) -> None:
        job.handle.cancel()

    def report(self) -> dict[str, float]:
        return {"processes": self.count}

    def close(self) -> None:
        with self._starting:
            self._closed = True
        for child in self._children:
            child.end()
        self._threads.shutdown(cancel_futures=True)

    def _send(self, verb: str, layout: Layout, *arguments: Any) -> "Future[Any]":
        return self._threads.submit(self._ask, verb, layout, *arguments)

    # --- in a thread that has a child --------------------------------------------------------------------------------

    def _ask(self, verb: str, layout: Layout, *arguments: Any) -> Any:
        try:
            answer = self._child(layout).ask(verb, *arguments)
        except ChildDied as error:
            self._own.child = None
            raise OffbeatError(
                "a training process died, perhaps for want of memory: try --executor processes:1, or inline"
            ) from error
        if isinstance(answer, TaskFailure):
            raise answer.error()
        return answer

    def _child(self, layout: Layout) -> Child:
        child: Child | None = getattr(self._own, "child", None)
        if child is None:
            child = self._started()
            failed: TaskFailure | None = child.ask("load", self._payload, layout)
            if failed is not None:
                child.end()
                why = f"{type(failed.error()).__name__}: {failed.error()}"
                raise InvalidValue(f"the task could not be made in another process: {why}")
            self._own.child = child
        return child

    def _started(self) -> Child:
        with self._starting:
            if self._closed:
                raise ChildDied("was closed")
            child = Child(serve)
            self._children.add(child)
            return child


class ProgramProcesses(Processes):
    """Trains by a program of the task's, in `count` processes; they evaluate as ever."""

    def __init__(self, task: Task, program: str, named: int | None = None, count: int | None = None) -> None:
        """`count` processes where it is said, without a word of it in the name."""
        reason = program_reason(task, program)
        if reason is not None:
            raise InvalidValue(f"executor {program} is not possible: {reason}")
        try:
            super().__init__(task, named or count)
        except CannotTravel as error:
            raise InvalidValue(f"executor {program} is not possible: this task {error}") from error
        self.program, self.name = program, program if named is None else f"{program}:{named}"
        self._payload = packed(task, (task_trained_by, (self._payload, program), {}))

    @property
    def compiles(self) -> bool:
        """Does it take long before the first training, the first time?"""
        return self.program == "compiled-torch"

    def warm_up(self, layout: Layout) -> float:
        """Start all processes, and return when their programs are ready, with the seconds that it took."""
        begun, together = perf_counter(), threading.Barrier(self.count)
        try:
            for future in [self._threads.submit(self._warm_child, layout, together) for _ in range(self.count)]:
                future.result()
        except BaseException:
            self.close()
            raise
        return perf_counter() - begun

    def _warm_child(self, layout: Layout, together: threading.Barrier) -> None:
        together.wait()  # every thread takes one
        self._child(layout)


def program_reason(task: Task, program: str) -> str | None:
    """Why this task cannot be trained by a program; None where it can."""
    if keeps_state(task):
        return STATEFUL
    if not isinstance(task, Programmable):
        return f"{type(task).__name__} has no `train_by`; it is for tasks of offbeat.torch"
    return task.program_obstacle(program)


def task_trained_by(payload: bytes, program: str) -> Task:
    """In a child: the task, ready to train by this program."""
    task = unpacked(payload)
    if not isinstance(task, Programmable):
        raise InvalidValue(f"{type(task).__name__} has no `train_by`")
    task.train_by(program)
    return task
