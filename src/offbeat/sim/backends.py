"""Owns where the runs of a comparison go: over the processes of this machine, or to a Ray cluster.

Rules kept here:
- Where a run goes changes nothing about it, and its folder does not tell.
- Every process runs a share of the runs. When its connection to the parent is closed, because the parent wants to stop
  or is dead, it stops at its next safe moment and leaves checkpoints.
- Ctrl-C and SIGTERM reach the whole group: a child leaves Ctrl-C to its parent, and stops in order at SIGTERM.
- A child that dies takes its own runs with it, and no others.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from offbeat.errors import InvalidValue
from offbeat.hosting.child import Child, listen_to_signals, signals_blocked
from offbeat.sim.choose import CarriedTasks, ExecutorPool
from offbeat.sim.lockstep import Failure, Tell, run_share
from offbeat.sim.on_ray.cluster import installed
from offbeat.sim.on_ray.shares import run_on_ray
from offbeat.sim.processes import process_count
from offbeat.sim.run import StopRequested
from offbeat.sim.spec import ComparedRun
from offbeat.storage.run_folder import SUMMARY

HERE, RAY = "here", "ray"
PROGRESS_EVERY_S = 0.5
LISTEN_S = 0.1
"""How long a parent listens before it looks whether it should stop."""


class Backend(NamedTuple):
    on: str = HERE
    processes: int | None = None
    """How many shares there are; one per core or, on Ray, per CPU of the cluster, where it is not said."""
    ray_address: str | None = None

    def check(self, runs: Sequence[ComparedRun]) -> None:
        if self.on not in (HERE, RAY):
            raise InvalidValue(f"on is {self.on!r} but must be {HERE} or {RAY}")
        process_count(self.processes)
        if self.ray_address is not None and self.on != RAY:
            raise InvalidValue("ray_address is set, but the runs stay here; say --on ray, too")
        if self.on == RAY:
            installed()
            for run in runs:
                if run.settings.executor.startswith(RAY):
                    raise InvalidValue(
                        f"method {run.method!r}: executor is {run.settings.executor}, and the whole run goes to "
                        "Ray already; leave out the executor, or --on ray"
                    )

    def run(
        self,
        task_spec: str,
        runs: Sequence[ComparedRun],
        tell: Tell,
        *,
        carried: CarriedTasks | None = None,
        pictures: bool = False,
    ) -> list[Failure]:
        """Run these and return what failed; `tell` hears how many are done, and may raise `StopRequested`.

        `carried` has the tasks that processes of this machine need not load.
        """
        if not runs:
            return []
        if self.on == RAY:
            return run_on_ray(task_spec, runs, tell, pictures=pictures, address=self.ray_address, count=self.processes)
        count = process_count(self.processes)
        shares = [share for number in range(count) if (share := runs[number::count])]
        if len(shares) == 1:
            return run_share(ExecutorPool(task_spec), runs, tell, pictures=pictures)
        return _run_in_processes(shares, tell, task_spec, carried or {}, pictures)


# --- the processes of this machine, as their parent sees them --------------------------------------------------------


class ShareProcess:
    def __init__(self, share: Sequence[ComparedRun], task_spec: str, carried: CarriedTasks, pictures: bool) -> None:
        self.share, self.done = share, 0.0
        self.failures: list[Failure] = []
        self.child = Child(_run_share, share, task_spec, carried, pictures)

    def hear(self) -> bool:
        """Take one piece of news. Has the share ended?"""
        try:
            news = self.child.line.recv()
        except (EOFError, OSError):
            news = self._orphaned()
        match news:
            case float():
                self.done = news
                return False
            case None:  # somebody sent SIGTERM to this child alone
                raise StopRequested
        self.failures, self.done = news, len(self.share)
        return True

    def _orphaned(self) -> list[Failure]:
        why = f"its process {self.child.fate().rstrip(',')}: try fewer --processes"
        return [Failure(run.method, run.seed, why) for run in self.share if not (run.folder / SUMMARY).exists()]


def _run_in_processes(
    shares: Sequence[Sequence[ComparedRun]], tell: Tell, task_spec: str, carried: CarriedTasks, pictures: bool
) -> list[Failure]:
    processes: list[ShareProcess] = []
    try:
        with signals_blocked():
            for share in shares:
                processes.append(ShareProcess(share, task_spec, carried, pictures))  # noqa: PERF401 (if one fails, the others must be ended)
        speaking = [*processes]
        while speaking:
            news = wait([process.child.line for process in speaking], LISTEN_S)
            speaking = [process for process in speaking if process.child.line not in news or not process.hear()]
            tell(sum(process.done for process in processes))
    finally:
        _end([process.child for process in processes])
    return [failure for process in processes for failure in process.failures]


def _end(children: Sequence[Child]) -> None:
    """Hang up and wait until they have stopped; a signal meanwhile kills them."""
    try:
        for child in children:
            child.line.close()
        for child in children:
            child.process.wait()
    except BaseException:
        with signals_blocked():
            for child in children:
                child.process.kill()
            for child in children:
                child.process.wait()
        raise


# --- in such a process -----------------------------------------------------------------------------------------------


def _run_share(
    parent: "Connection[Any, Any]",
    share: Sequence[ComparedRun],
    task_spec: str,
    carried: CarriedTasks,
    pictures: bool,
) -> None:
    asked: list[int] = []
    listen_to_signals(lambda number, _frame: asked.append(number))
    told = 0.0

    def tell(done: float) -> None:
        nonlocal told
        if asked or parent.poll():  # the parent says nothing more: there is something to read when it hangs up
            raise StopRequested
        if time.monotonic() - told > PROGRESS_EVERY_S:
            told = time.monotonic()
            _send(parent, float(done))

    try:
        executors = ExecutorPool(task_spec, carried, alone=False)
        failures: list[Failure] | None = run_share(executors, share, tell, pictures=pictures)
    except StopRequested:
        failures = None
    _send(parent, failures)


def _send(parent: "Connection[Any, Any]", news: Any) -> None:
    with suppress(OSError):  # the parent has hung up; that is noticed the next time
        parent.send(news)
