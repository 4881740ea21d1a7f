"""Owns the actor that runs a share of a comparison on a node, and is asked for its news.

Rules kept here:
- Runs are written to the node's own disk. A finished run goes back to the driver whole, at once, and is deleted here.
  When the share is stopped, unfinished runs go back, too, with their checkpoints.
- At most FOLDERS_WAITING_MAX folders wait to be fetched; then the share waits.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, Queue
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import NamedTuple

from offbeat.hosting.loading import described
from offbeat.sim.choose import ExecutorPool
from offbeat.sim.lockstep import Failure, run_share
from offbeat.sim.on_ray.folders import Files, packed_folder, unpack
from offbeat.sim.on_ray.on_node import ErrorAnswer, go_to, packages, told
from offbeat.sim.on_ray.task_files import TaskFiles
from offbeat.sim.run import StopRequested
from offbeat.sim.spec import ComparedRun
from offbeat.storage.run_folder import SUMMARY

FOLDERS_WAITING_MAX = 2
NEWS_EVERY_S = 0.5


class ShareNews(NamedTuple):
    """How many runs of a share are done, in parts, too; perhaps a run that comes back; the failures, at the end."""

    far: float
    number: int | None = None
    """The run that comes back, by its number in the share."""
    files: Files = {}  # noqa: RUF012 (it is never changed)
    failures: list[Failure] | None = None


class ShareActor:
    """A share of a comparison on some node."""

    def __init__(
        self, task: TaskFiles, share: Sequence[ComparedRun], begun: Sequence[Files], pictures: bool, folder: str
    ) -> None:
        """`begun` holds the files of the runs that go on."""
        go_to(folder)
        self._task, self._share, self._pictures = task, share, pictures
        self._news: Queue[ShareNews] = Queue(FOLDERS_WAITING_MAX)
        self._is_asked_to_stop = Event()
        self._far, self._looked_at = 0.0, 0.0
        Thread(target=self._live, args=(begun,), daemon=True).start()

    def hello(self) -> ErrorAnswer[dict[str, str]]:
        return None, packages()

    def news(self) -> ErrorAnswer[ShareNews]:
        """The next news; where there is none for a while, how far the share is."""
        try:
            return None, self._news.get(timeout=NEWS_EVERY_S)
        except Empty:
            return None, ShareNews(self._far)

    def stop(self) -> ErrorAnswer[None]:
        """Stop at the next safe moment; then the unfinished runs come back."""
        self._is_asked_to_stop.set()
        return None, None

    # --- in a thread of its own --------------------------------------------------------------------------------------

    def _live(self, begun: Sequence[Files]) -> None:
        with TemporaryDirectory(prefix="offbeat-share-") as folder:
            self._here = {number: Path(folder) / str(number) for number in range(len(self._share))}
            error, failures = told(lambda: self._run(begun))
            for number in [*self._here]:
                self._send(number)
        if error is not None:
            why = described(error, self._task.spec)
            failures = [Failure(entry.method, entry.seed, why) for entry in self._share]
        self._news.put(ShareNews(self._far, failures=failures or []))

    def _run(self, begun: Sequence[Files]) -> list[Failure]:
        for number, files in enumerate(begun):
            unpack(files, self._here[number])
        entries = [entry._replace(folder=self._here[number]) for number, entry in enumerate(self._share)]
        try:
            executors = ExecutorPool(self._task.placed(), alone=False)
            return run_share(executors, entries, self._tell, pictures=self._pictures)
        except StopRequested:
            return []

    def _tell(self, far: float) -> None:
        self._far = far
        if self._is_asked_to_stop.is_set():
            raise StopRequested
        if time.monotonic() - self._looked_at > NEWS_EVERY_S:
            self._looked_at = time.monotonic()
            for number in [number for number, folder in self._here.items() if (folder / SUMMARY).exists()]:
                self._send(number)

    def _send(self, number: int) -> None:
        folder = self._here.pop(number)
        files = packed_folder(folder)
        if files:
            shutil.rmtree(folder)
            self._news.put(ShareNews(self._far, number, files))
