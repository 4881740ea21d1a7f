"""Owns the jobs of one task on a Ray cluster: those that wait, that run, or whose answer is not yet needed.

Rules kept here:
- A job is a pure function of what it is sent. One that is lost with its process or node is sent again, before all
  others; one that is lost more than LOST_MAX times ends the run.
- At most `results_max` jobs are begun and not yet asked for. The job that is asked for goes first. The last place is
  kept for it, so that it can always begin.
- A model that is not small is put into the object store once, however many jobs start from it. It is freed when the
  last of them is over. The newest stays, for the next job will start from it.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.hosting.task_host import Bare
from offbeat.sim.on_ray.cluster import Cluster, RemoteCall, RemoteCallLost, places_of
from offbeat.sim.on_ray.on_node import TaskParcel, be_ready, do_on_node

LOST_MAX = 5
"""How often one job may be lost."""
ROOM_WAIT_S = 300.0
"""How long the first job may wait for a node that has room for it."""
LISTEN_S = 1.0
SMALL_BYTES_MAX = 64 * 1024
"""A model up to this size travels with its job. Then Ray gives a process its next job without asking the scheduler of
the node, which it asks for every object that a job needs."""
AHEAD = 2
"""Jobs that are sent for each that can run, so that no process waits for its next."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class StoredModel:
    """A model that jobs start from, and its reference once it is in the object store."""

    model: Model
    """Kept, so that no other model gets its id."""
    reference: Any = None


@dataclass(eq=False, slots=True)
class RemoteJob:
    """Something to be done with the task, on any node."""

    do: Callable[..., Any]
    """A function of the task, the models and the other arguments."""
    models: list[StoredModel] = field(default_factory=list)
    arguments: tuple[Any, ...] = ()
    call: RemoteCall | None = None
    error: Exception | None = None
    answer: Any = None
    is_over: bool = False
    is_dropped: bool = False
    lost: int = 0


class RemoteJobs:
    """A task that was sent to a cluster, and all jobs of it, of which `count` run at once."""

    def __init__(self, cluster: Cluster, parcel: TaskParcel, count: int | None, gpus: float, results_max: int) -> None:
        """Without a count: as many as the cluster has room for."""
        self._cluster, self._gpus, self._results_max = cluster, gpus, results_max
        self.count = count or cluster.places(gpus)
        is_limited = self.count < places_of(cluster.resources(), gpus)
        self._running_max = self.count if is_limited else AHEAD * self.count
        packed = pickle.dumps(parcel)
        self._key = hashlib.sha256(packed).hexdigest()
        self._parcel = cluster.put(np.frombuffer(packed, np.uint8))
        self._on_node = cluster.function(do_on_node, gpus)
        self.redone = 0
        self._stored: WeakValueDictionary[int, StoredModel] = WeakValueDictionary()
        self._newest: StoredModel | None = None
        self._waiting: dict[RemoteJob, None] = {}
        self._running: dict[RemoteCall, RemoteJob] = {}
        self._begun: set[RemoteJob] = set()
        """Sent, and not yet asked for."""
        self._asked_for: RemoteJob | None = None
        self._some_ended, self._silent_s = False, 0.0
        self._begin(RemoteJob(be_ready, is_dropped=True))  # when it is over, some node has room

    def add(self, do: Callable[..., Any], models: Sequence[Model], *arguments: Any) -> RemoteJob:
        """A new job; it begins at once where there is room."""
        job = RemoteJob(do, [self._keep(model) for model in models], arguments)
        self._waiting[job] = None
        self._send()
        if self._waiting:
            self._go_on(0.0)
        return job

    def drop(self, job: RemoteJob) -> None:
        """Nobody will ask for this job; where it has not begun, it will not begin."""
        job.is_dropped = True
        job.models = []
        self._waiting.pop(job, None)
        if job.call not in self._running:
            self._begun.discard(job)

    def answer(self, job: RemoteJob) -> Any:
        """Wait for the job's answer; raises its error."""
        self._asked_for = job
        try:
            self._send()
            while not self._is_fetched(job):
                self._go_on(LISTEN_S)
        finally:
            self._asked_for = None
        job.models, job.call = [], None
        self._begun.discard(job)
        self._send()
        if job.error is not None:
            raise job.error
        return job.answer

    def close(self) -> None:
        for call in self._running:
            self._cluster.cancel(call)

    # --- sending -----------------------------------------------------------------------------------------------------

    def _go_on(self, wait_s: float) -> None:
        self._listen(wait_s)
        self._send()

    def _send(self) -> None:
        while len(self._running) < self._running_max and (job := self._next()) is not None:
            del self._waiting[job]
            self._begin(job)

    def _next(self) -> RemoteJob | None:
        if self._asked_for in self._waiting:
            return self._asked_for
        return next(iter(self._waiting), None) if len(self._begun) < self._results_max - 1 else None

    def _begin(self, job: RemoteJob) -> None:
        models = [self._sendable(stored) for stored in job.models]
        job.call = self._cluster.call(self._on_node, job.do, self._key, self._parcel, *models, *job.arguments)
        self._running[job.call] = job
        self._begun.add(job)

    def _keep(self, model: Model) -> StoredModel:
        stored = self._stored.get(id(model))
        if stored is None:
            self._newest = self._stored[id(model)] = stored = StoredModel(model)
        return stored

    def _sendable(self, stored: StoredModel) -> Any:
        """A small model itself, or the reference to one in the object store."""
        if stored.model.vector.nbytes <= SMALL_BYTES_MAX:
            return Bare.of(stored.model)
        if stored.reference is None:
            stored.reference = self._cluster.put(Bare.of(stored.model))
        return stored.reference

    # --- listening ---------------------------------------------------------------------------------------------------

    def _listen(self, wait_s: float) -> None:
        ended = self._cluster.ended([*self._running], wait_s)
        for call in ended:
            self._end(self._running.pop(call), call)
        self._some_ended = self._some_ended or bool(ended)
        self._silent_s = 0.0 if ended else self._silent_s + wait_s
        if self._silent_s >= ROOM_WAIT_S:
            self._check_silence()

    def _end(self, job: RemoteJob, call: RemoteCall) -> None:
        try:
            job.error = self._cluster.error(call)
            job.is_over = True
        except RemoteCallLost as lost:
            self._send_again(job, lost)
        if job.is_dropped:
            self._begun.discard(job)

    def _is_fetched(self, job: RemoteJob) -> bool:
        """Is the job over, and its answer here? An answer may be lost with the node that keeps it."""
        if job.is_over and job.error is None and job.call is not None:
            try:
                job.answer = self._cluster.answer(job.call)
            except RemoteCallLost as lost:
                self._send_again(job, lost)
        return job.is_over

    def _send_again(self, job: RemoteJob, lost: RemoteCallLost) -> None:
        job.is_over, job.call = False, None
        self._begun.discard(job)
        if job.is_dropped:
            return
        job.lost += 1
        if job.lost > LOST_MAX:
            raise OffbeatError(f"a training was lost {job.lost} times, perhaps for want of memory: {lost}")
        self.redone += 1
        self._waiting = {job: None, **self._waiting}

    def _check_silence(self) -> None:
        """A training may take longer than this, unless no process has ever begun or all nodes are gone."""
        self._cluster.places(self._gpus)
        if not self._some_ended:
            raise OffbeatError(
                f"no node of the Ray cluster had room for a training in {ROOM_WAIT_S:.0f} s; is it busy?"
            )
        self._silent_s = 0.0
