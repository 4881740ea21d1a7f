"""Owns the server's side of the process that has the user's task in it: the server itself imports neither it nor torch.

Rules kept here:
- Every method blocks until the child has answered: call them from a thread that may wait. One asks at a time.
- An error in the task is `TaskFailed`, and asking again gives it again. A child that is gone is `TaskDied`; the next
  call starts another one and loads the task into it.
- `close` may be called from any thread at any moment: the child ends, and whoever waits for it is told.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from offbeat.core.layout import Layout, layout_from, layout_to
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.settings import Settings

MODULE = "offbeat.server.task_child"
THREADS_MAX = 256
EVALUATE_MAX_S = 3600.0
"""A child that takes longer to evaluate is taken for hung, and ended."""
END_S = 5.0
"""What a child that is told to end has time for, before it is made to."""
LOOK_S = 0.5
"""How often a silent child is looked at: one that it started may hold its end of the pipe open when it is dead."""
MEMORY_KEPT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
"""A malloc that keeps large blocks: without it, every evaluation takes its memory from the system anew."""


class TaskFailed(OffbeatError):
    """The task's own code, or what was asked of it, is wrong; the child lives on."""


class TaskDied(OffbeatError):
    """The child was gone, or did not answer in time; the next call starts another one."""


class TaskClosed(TaskDied):
    """The child was ended by `close`; there will be no other."""


@dataclass(frozen=True, slots=True)
class About:
    """What a server knows of a task; the names are the task's own, so that it can stand in for one."""

    identity: str
    devices: int | None
    made_for: int | None
    gamma: float | None
    batch_norm: str | None
    refreshes: bool
    """Would it run its own code whenever an update is mixed? That is in another process than mixing."""
    metrics: tuple[str, ...]
    """What it measures on its test data; empty where it has none."""


class Child:
    """One process with the task in it, from its start to its end."""

    def __init__(self, spec: str, threads: int, folder: Path) -> None:
        self.loaded = self._ended = False
        self._spec, self._received = spec, bytearray()
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        self._process = subprocess.Popen(  # noqa: S603 (this interpreter, this package)
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env={**os.environ, **MEMORY_KEPT, **limits},
            process_group=0,  # a terminal's Ctrl-C must not reach it, not even before it can say so itself
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise AssertionError("pipes were asked for")
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._ready = select.poll()
        self._ready.register(self._answers, select.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        """The answer to a request; after any error the child must not be asked again."""
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            answer: dict[str, Any] = json.loads(self._line(patience_s))
        except TimeoutError:
            why = f"took more than {patience_s:g} s to {request['do']}; if it needs that long, allow it more"
            raise TaskDied(f"the process of task {self._spec} {why}") from None
        except (OSError, EOFError, ValueError) as error:
            raise TaskDied(f"the process of task {self._spec} {self._fate()} when asked to {request['do']}") from error
        return answer

    def _line(self, patience_s: float) -> bytes:
        until = monotonic() + patience_s
        while b"\n" not in self._received:
            if self._ready.poll(LOOK_S * 1000):
                self._received += self._some()
            elif self._ended or (not self.alive and not self._ready.poll(0)):
                raise EOFError
            elif monotonic() > until:
                raise TimeoutError
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    def _some(self) -> bytes:
        some = os.read(self._answers.fileno(), 1 << 16)
        if not some:
            raise EOFError
        return some

    def _fate(self) -> str:
        """How it ended, in words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        status = self._process.returncode
        if status is None:
            return "no longer answered"
        if status >= 0:
            return f"ended with exit status {status}"
        hint = ", perhaps for want of memory," if status == -signal.SIGKILL else ""
        return f"was killed by {_name(-status)}{hint}"

    def end(self) -> None:
        """Tell it to end, and make it, if it does not; from any thread."""
        self._ended = True
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)

    def release(self) -> None:
        """Let go of the pipes; from the thread that asks."""
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()


class TaskProcess:
    """A task in a process of its own, which is started when it is needed and started again when it is gone."""

    def __init__(
        self, spec: str, settings: Settings, *, threads: int = 1, evaluate_max_s: float = EVALUATE_MAX_S
    ) -> None:
        if not 1 <= threads <= THREADS_MAX:
            raise InvalidValue(f"threads is {threads} but must lie in 1..{THREADS_MAX}; 1 leaves the most to mixing")
        self.spec, self.settings, self.threads, self.evaluate_max_s = spec, settings, threads, evaluate_max_s
        self._folder = Path.cwd()  # a task's path is meant from here, whenever a child is started
        self._asking = threading.Lock()
        self._changing = threading.Lock()
        """Guards the two below; never held while anybody waits."""
        self._child: Child | None = None
        self._closed = False
        self._about: About | None = None
        self._layout: Layout | None = None

    @property
    def pid(self) -> int | None:
        """The child's, while there is one."""
        with self._changing:
            return self._child.pid if self._child is not None and self._child.alive else None

    def about(self) -> About:
        """What is known of the task, which is loaded for it, once."""
        if self._about is None:
            with self._asking:
                self._loaded()
        if self._about is None:
            raise AssertionError("a task that is loaded is known")
        return self._about

    def remember(self, about: About, layout: Layout) -> None:
        """Know this from before, in a run that goes on: loading makes no x_0 then, and another task is refused."""
        with self._asking:
            self._about, self._layout = about, layout

    def initial(self, seed: int, out: Path) -> Layout:
        """Let x_0 be written to a file, whole and durable; its layout."""
        answer = self._ask({"do": "initial", "seed": seed, "out": str(out.absolute())})
        self._layout = layout_from(answer["layout"])
        return self._layout

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]:
        """What the task measures of the model in this file; empty where it has no test data."""
        answer = self._ask({"do": "evaluate", "t": t, "file": str(file.absolute())}, self.evaluate_max_s)
        metrics: dict[str, float] = answer["metrics"]
        return metrics

    def close(self) -> None:
        """End the child, whatever it does; who waits for it hears `TaskClosed`, and so does every later call."""
        with self._changing:
            self._closed, child = True, self._child
        if child is not None:
            child.end()
        with self._asking:  # by now whoever asked has seen the end
            self._drop()

    # --- under the lock `_asking` ------------------------------------------------------------------------------------

    def _ask(self, request: Mapping[str, Any], patience_s: float = inf) -> dict[str, Any]:
        with self._asking:
            return self._answer(self._loaded(), request, patience_s)

    def _loaded(self) -> Child:
        child = self._started()
        if not child.loaded:
            request = {"do": "load", "task": self.spec, "settings": self.settings.as_dict(), "path": sys.path}
            if self._layout is not None:  # it was loaded before: x_0 and its metrics are known
                request["layout"] = layout_to(self._layout)
            answer = self._answer(child, request, inf)
            self._learn(answer)
            child.loaded = True
        return child

    def _learn(self, answer: Mapping[str, Any]) -> None:
        found = About(**{**answer["about"], "metrics": tuple(answer["about"]["metrics"])})
        if self._about is None:
            self._about, self._layout = found, layout_from(answer["layout"])
        elif found.identity != self._about.identity:
            raise TaskFailed(
                f"task {self.spec} is no longer what the run began with ({found.identity}, not "
                f"{self._about.identity}); put its file back, or start the server again"
            )

    def _started(self) -> Child:
        if self._child is not None and not self._child.alive:
            self._drop()  # it died while nobody asked anything
        with self._changing:
            if self._closed:
                raise TaskClosed(f"the process of task {self.spec} was closed; make another TaskProcess")
            try:
                self._child = self._child or Child(self.spec, self.threads, self._folder)
            except OSError as error:
                raise TaskDied(f"a process for task {self.spec} cannot be started: {error}") from error
            return self._child

    def _answer(self, child: Child, request: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        try:
            answer = child.ask(request, patience_s)
        except BaseException as error:
            self._drop()  # its answer may still come, and must not be taken for that to another question
            if self._closed:
                raise TaskClosed(
                    f"the process of task {self.spec} was closed while it should {request['do']}"
                ) from error
            raise
        if "error" in answer:
            raise TaskFailed(answer["error"])
        return answer

    def _drop(self) -> None:
        with self._changing:
            child, self._child = self._child, None
        if child is not None:
            child.end()
            child.release()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
