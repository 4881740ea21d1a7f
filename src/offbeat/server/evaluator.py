"""Owns when versions are evaluated: on a thread of its own, one at a time, the newest that there is.

Where an averaged model is kept, it is evaluated after its version, and both are one evaluation.

Rules kept here:
- `put` never blocks, and one version waits at most: a newer one takes its place. Mixing never waits for an evaluation.
- A version that was begun ends in one call, of `done` or of `failed`, unless it is stopped. One that made way while it
  waited ends in none.
- The last version of a run makes way for no other.
- A child that died is started again after a pause, which doubles with every death until an evaluation succeeds.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol

from offbeat.core.layout import Layout, Model
from offbeat.core.rules import with_average
from offbeat.hosting.task_process import TaskClosed, TaskDied
from offbeat.storage.disk import cannot_write
from offbeat.wire import body_of, header_of

FILE, MEAN_FILE = "evaluating.safetensors", "evaluating_average.safetensors"
TRIES = 3
PAUSE_S = 1.0
PAUSE_MAX_S = 60.0

log = logging.getLogger("offbeat.server")


class Measures(Protocol):
    """Evaluates a model in a file; `TaskProcess` does."""

    def evaluate(self, t: int, file: Path) -> Mapping[str, float]: ...
    def close(self) -> None: ...


class WaitingVersion(NamedTuple):
    t: int
    model: Model
    mean: Model | None
    """The averaged model of the same moment, where there is one."""
    last: bool


class Evaluator:
    """Evaluates what is put; `done`, `failed` and `died` are called on its thread.

    `died` hears of every death of the child, also where the version is tried again.
    """

    def __init__(
        self,
        process: Measures,
        folder: Path,
        layout: Layout,
        done: Callable[[int, Mapping[str, float]], None],
        failed: Callable[[int, str], None],
        *,
        died: Callable[[int, str], None] = lambda _t, _why: None,
        pause_s: float = PAUSE_S,
        pause_max_s: float = PAUSE_MAX_S,
    ) -> None:
        self._process, self._folder, self._header = process, folder, header_of(layout)
        self.file = folder / FILE
        """Holds the version that is evaluated, from before that to the return of `done`."""
        self.mean_file: Path | None = None
        """Likewise the averaged model, where there is one."""
        self._done, self._failed, self._died = done, failed, died
        self._pause_s, self._pause_max_s = pause_s, pause_max_s
        self._next_pause_s, self._again_at = pause_s, 0.0
        self._changed = threading.Condition()
        """Guards all below."""
        self._waiting: WaitingVersion | None = None
        self._under_way: int | None = None
        self._last = False
        """Is the one that is under way the last of the run?"""
        self._measured: int | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="evaluator", daemon=True)
        self._thread.start()

    # --- from other threads ------------------------------------------------------------------------------------------

    def put(self, t: int, model: Model, mean: Model | None = None, *, last: bool = False) -> None:
        """Evaluate this version, unless a newer one is put before it is begun; the last version always is."""
        with self._changed:
            if self._stopping or t == self._measured:  # a version never changes
                return
            if t == self._under_way:
                self._last = self._last or last
            elif self._waiting is None or (last, t) >= (self._waiting.last, self._waiting.t):
                self._waiting = WaitingVersion(t, model, mean, last)
            self._changed.notify_all()

    def wait(self, patience_s: float) -> bool:
        """Wait until nothing waits or is under way, so that `done` or `failed` has returned for what was begun.

        False if that takes longer than `patience_s`.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._under_way is None, patience_s)

    def pause(self, seconds: float) -> bool:
        """Wait, for `done` to try again what failed; True where it is time to end."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, seconds)

    def stop(self) -> None:
        """Drop what waits, abandon what is under way, and close the process."""
        with self._changed:
            self._stopping, self._waiting = True, None
            self._changed.notify_all()
        self._process.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while (begun := self._begin()) is not None:
            t, trouble = begun
            try:
                self._tell(t, trouble or self._outcome(t))
            except Exception:  # in `done` or `failed`; the next version must not suffer for it
                log.exception("the evaluation of version %s could not be recorded", t)
            finally:
                with self._changed:
                    self._under_way, self._last = None, False
                    self._changed.notify_all()
        for name in (FILE, MEAN_FILE):
            (self._folder / name).unlink(missing_ok=True)

    def _begin(self) -> tuple[int, str | None] | None:
        """Wait for something to do, and for the end of a pause, and write that version to the file.

        Its number, and why it could not be written, if so; None when it is time to end.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting is not None)
            self._changed.wait_for(lambda: self._stopping, self._again_at - monotonic())
            if self._waiting is None:
                return None
            begun, self._waiting = self._waiting, None
            self._under_way, self._last = begun.t, begun.last
        self.mean_file = None if begun.mean is None else self._folder / MEAN_FILE
        return begun.t, self._write(self.file, begun.model) or self._write(self.mean_file, begun.mean)

    def _write(self, path: Path | None, model: Model | None) -> str | None:
        """Write a model, where there is one; why that is not possible, if so."""
        if path is not None and model is not None:
            try:
                with path.open("wb") as file:
                    file.writelines([self._header, *body_of(model)])
            except OSError as error:
                return str(cannot_write(path, error))
        return None

    def _outcome(self, t: int) -> Mapping[str, float] | str | None:
        """Metrics, or why there are none; None when it was stopped."""
        for tries in range(1, TRIES + 1):
            try:
                return self._measured_in_files(t)
            except TaskClosed as error:
                return None if self._stopping else str(error)
            except TaskDied as error:
                why = f"{error} (try {tries} of {TRIES})"
                self._note_death(t, why)
            except Exception as error:  # the task's: asked again it would say the same
                return str(error) or repr(error)
            self._again_at = monotonic() + self._next_pause_s
            self._next_pause_s = min(2.0 * self._next_pause_s, self._pause_max_s)
            if tries == TRIES or self._makes_way():
                break
        return None if self._stopping else why

    def _measured_in_files(self, t: int) -> Mapping[str, float]:
        metrics = self._process.evaluate(t, self.file)
        return metrics if self.mean_file is None else with_average(metrics, self._process.evaluate(t, self.mean_file))

    def _note_death(self, t: int, why: str) -> None:
        with self._changed:
            if self._stopping:
                return
        self._died(t, why)

    def _makes_way(self) -> bool:
        """Pause; True where a newer version is to be tried instead, or none."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._stopping or (self._waiting is not None and not self._last), self._again_at - monotonic()
            )

    def _tell(self, t: int, outcome: Mapping[str, float] | str | None) -> None:
        if isinstance(outcome, str):
            self._failed(t, outcome)
        elif outcome is not None:
            self._next_pause_s, self._again_at = self._pause_s, 0.0
            with self._changed:
                self._measured = t
            self._done(t, outcome)
