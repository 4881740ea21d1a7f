"""Owns the server's side of the process that has the user's task in it: the server itself imports neither it nor torch.

Rules kept here:
- Every method blocks until the child has answered: call them from a thread that may wait. One asks at a time.
- An error in the task is `TaskFailed`, and asking again gives it again. A child that is gone is `TaskDied`; the next
  call starts another one and loads the task into it.
- `close` may be called from any thread at any moment: the child ends, and a thread that waits for it gets `TaskClosed`.
"""

import pickle
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from offbeat.core.layout import Layout
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.child import Child, ChildDied
from offbeat.hosting.loading import load
from offbeat.hosting.task_host import TaskDescription, TaskFailure, serve
from offbeat.settings import Settings

THREADS_MAX = 256
NICE = 5
"""The child's priority is lower by this than that of the server, so that mixing goes first."""
EVALUATE_MAX_S = 3600.0
"""A child that takes longer to evaluate is taken for hung, and ended."""


class TaskFailed(OffbeatError):
    """The task's own code, or what was asked of it, is wrong; the child lives on."""


class TaskDied(OffbeatError):
    """The child was gone, or did not answer in time; the next call starts another one."""


class TaskClosed(TaskDied):
    """The child was ended by `close`; there will be no other."""


class TaskProcess:
    """A task in a process of its own, which is started when it is needed and started again when it is gone."""

    def __init__(
        self, spec: str, settings: Settings, *, threads: int = 1, evaluate_max_s: float = EVALUATE_MAX_S
    ) -> None:
        if not 1 <= threads <= THREADS_MAX:
            raise InvalidValue(f"threads is {threads} but must lie in 1..{THREADS_MAX}; 1 leaves the most to mixing")
        self.spec, self.settings, self.threads, self.evaluate_max_s = spec, settings, threads, evaluate_max_s
        self._payload = pickle.dumps((load, (spec, settings), {}))
        self._folder = Path.cwd()  # a task's path is meant from here, whenever a child is started
        self._asking = threading.Lock()
        self._changing = threading.Lock()
        """Guards the two below; never held while a thread waits for the child."""
        self._child: Child | None = None
        self._closed = False
        self._is_loaded = False
        self._about: TaskDescription | None = None
        self._layout: Layout | None = None

    @property
    def pid(self) -> int | None:
        with self._changing:
            return self._child.pid if self._child is not None and self._child.alive else None

    def about(self) -> TaskDescription:
        if self._about is None:
            with self._asking:
                self._loaded()
        if self._about is None:
            raise AssertionError("a task that is loaded is known")
        return self._about

    def remember(self, about: TaskDescription, layout: Layout) -> None:
        """Know this from before, in a run that goes on: loading makes no x_0 then, and another task is refused."""
        with self._asking:
            self._about, self._layout = about, layout

    def initial(self, seed: int, out: Path) -> Layout:
        """Let x_0 be written to a file, whole and durable; its layout."""
        layout: Layout = self._ask("initial", seed, out.absolute())
        self._layout = layout
        return layout

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]:  # noqa: ARG002 (others who evaluate want to know t)
        """What the task measures of the model in this file; empty where it has no test data."""
        metrics: dict[str, float] = self._ask("evaluate", file.absolute(), patience_s=self.evaluate_max_s)
        return metrics

    def close(self) -> None:
        """End the child, whatever it does; a call under way raises `TaskClosed`, and so does every later one."""
        with self._changing:
            self._closed, child = True, self._child
        if child is not None:
            child.end()
        with self._asking:  # by now a thread that asked has seen the end
            self._drop()

    # --- under the lock `_asking` ------------------------------------------------------------------------------------

    def _ask(self, verb: str, *arguments: Any, patience_s: float = inf) -> Any:
        with self._asking:
            return self._answer(self._loaded(), verb, *arguments, patience_s=patience_s)

    def _loaded(self) -> Child:
        child = self._started()
        if not self._is_loaded:
            self._answer(child, "load", self._payload, self._layout)
            self._learn(*self._answer(child, "describe", self.settings.seed))
            self._is_loaded = True
        return child

    def _learn(self, found: TaskDescription, layout: Layout) -> None:
        if self._about is None:
            self._about, self._layout = found, layout
        elif found.identity != self._about.identity:
            raise TaskFailed(
                f"task {self.spec} is no longer what the run began with ({found.identity}, not "
                f"{self._about.identity}); put its file back, or start the server again with --accept-changed-task"
            )

    def _started(self) -> Child:
        if self._child is not None and not self._child.alive:
            self._drop()  # it died between two calls
        with self._changing:
            if self._closed:
                raise TaskClosed(f"the process of task {self.spec} was closed; make another TaskProcess")
            try:
                self._child = self._child or Child(
                    serve, self.spec, NICE, threads=self.threads, apart=True, folder=self._folder
                )
            except OSError as error:
                raise TaskDied(f"a process for task {self.spec} cannot be started: {error}") from error
            return self._child

    def _answer(self, child: Child, verb: str, *arguments: Any, patience_s: float = inf) -> Any:
        try:
            answer = child.ask(verb, *arguments, patience_s=patience_s)
        except BaseException as error:
            self._drop()  # its answer may still come, and must not be taken for that to another question
            if self._closed:
                raise TaskClosed(f"the process of task {self.spec} was closed while it should {verb}") from error
            if isinstance(error, ChildDied):
                raise TaskDied(f"the process of task {self.spec} {error}") from error
            raise
        if isinstance(answer, TaskFailure):
            sys.stderr.write(answer.story)
            raise TaskFailed(answer.line)
        return answer

    def _drop(self) -> None:
        with self._changing:
            child, self._child, self._is_loaded = self._child, None, False
        if child is not None:
            child.end()
            with suppress(OSError):
                child.line.close()
