"""Owns the virtual clock: a heap of (time, sequence, event) drives the one coordinator.

Rules kept here:
- There is no second engine: FedAsync, FedBuff, FedAvg and SGD are a rule and a scheduler policy on this loop, and the
  coordinator is the one that is deployed.
- Ties in time are decided by the sequence number. Mixing takes no virtual time: what a decision causes at the same
  moment is handled before anything else.
- The engine stops where it needs a training that is not done, says which, and goes on when it is called again. So
  several runs can share one executor and fill its batches together, and none of them changes its schedule for it.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Protocol, assert_never

from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    Decision,
    Evaluated,
    EvaluateModel,
    Event,
    Finish,
    Lease,
    MixUpdate,
    Outcome,
    PublishVersion,
    ReleaseTask,
    SendTask,
    TellFinished,
    TimePassed,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
    WakeAt,
)
from offbeat.sim.executors import Job
from offbeat.sim.sources import Arrival, Happening, Source

Recorder = Callable[[Event, list[Command]], None]


class DataPlane(Protocol):
    """What the engine asks of whoever holds the vectors: `plane.Plane`, or `replay.Replayed` where none are needed."""

    def lease(self, lease: Lease) -> None: ...
    def start(self, lease: Lease) -> None: ...
    def awaited(self, lease: Lease) -> Job | None: ...
    def arrived(self, lease: Lease, at: float) -> UpdateArrived: ...
    def mix(self, decision: Decision) -> None: ...
    def publish(self) -> None: ...
    def forget(self, task: int) -> None: ...
    def evaluate(self) -> Mapping[str, float]: ...


class Engine:
    """One simulated run."""

    def __init__(self, coordinator: Coordinator, source: Source, plane: DataPlane, record: Recorder) -> None:
        self.coordinator, self.source, self.plane, self.record = coordinator, source, plane, record
        self.finished = False
        self.handled = 0
        """Events that the coordinator has seen."""
        self.sequence = 0
        self._heap: list[tuple[float, int, Happening]] = []
        self._now: deque[Event] = deque()
        self._coming: dict[int, int] = {}
        """How many updates of a task are on their way."""
        self._stopped: set[int] = set()
        """Revoked tasks whose updates will not be sent after all."""
        for happening in source.opening():
            self._push(happening)

    def advance(self, handled_max: float = inf) -> list[Job]:
        """Go on until the run is finished, or stopped here, or needs a training that is not done: that is returned."""
        while True:
            while self._now:
                self._handle(self._now.popleft())
            if self.finished or not self._heap:
                self.finished = True
                return []
            if self.handled >= handled_max:
                return []
            happening = self._heap[0][2]
            job = self.plane.awaited(happening.lease) if isinstance(happening, Arrival) else None
            if job is not None:
                return [job]
            heapq.heappop(self._heap)
            self._happen(happening)

    def feed(self, event: Event) -> None:
        """Let something happen now that does not come from the source."""
        self._handle(event)

    def _happen(self, happening: Happening) -> None:
        if not isinstance(happening, Arrival):
            self._now.append(happening)
            return
        task = happening.lease.task
        if task not in self._stopped:
            self._now.append(self.plane.arrived(happening.lease, happening.at))
        self._coming[task] -= 1
        if not self._coming[task]:
            del self._coming[task]
            self._stopped.discard(task)

    def _handle(self, event: Event) -> None:
        commands = self.coordinator.handle(event)
        self.handled += 1
        self.record(event, commands)
        for command in commands:
            self._do(command, event.at)

    def _do(self, command: Command, at: float) -> None:  # noqa: C901 (one line per kind of command)
        match command:
            case SendTask():
                self._send(command.lease, at)
            case MixUpdate():
                self.plane.mix(command.decision)
                mix = command.decision.mix
                if mix is not None and mix.publish:
                    self._publish(command.decision.t, at)
                self._now.append(UpdateMixed(at, command.decision.sequence))
            case AnswerPush():
                self._answer(command, at)
            case WakeAt():
                self._push(TimePassed(max(command.at, at)))
            case EvaluateModel():
                self._now.append(Evaluated(at, command.t, self.plane.evaluate()))
            case PublishVersion():
                self._publish(command.t, at)
            case ReleaseTask():
                self._release(command, at)
            case TellFinished():
                pass
            case Finish():
                self.finished = True
            case _:
                assert_never(command)

    def _send(self, lease: Lease, at: float) -> None:
        self.plane.lease(lease)
        for happening in self.source.started(lease, at):
            if isinstance(happening, Arrival):
                self.plane.start(lease)
            self._push(happening)

    def _publish(self, t: int, at: float) -> None:
        self.plane.publish()
        self._now.append(VersionPublished(at, t))

    def _answer(self, answer: AnswerPush, at: float) -> None:
        for happening in self.source.answered(answer, at):
            self._push(happening, now=at)
        if answer.outcome is not Outcome.BUSY:
            self._forget(answer.task)

    def _release(self, command: ReleaseTask, at: float) -> None:
        """A worker whose task is revoked stops; one whose lease ran out does not know, and may push late."""
        task = command.lease.task
        if command.revoked:
            if task in self._coming:
                self._stopped.add(task)
            for happening in self.source.revoked(command.lease, at):
                self._push(happening, now=at)
        self._forget(task)

    def _forget(self, task: int) -> None:
        """Let go of a task's vectors, unless an update of it is still on its way."""
        if task in self._stopped or task not in self._coming:
            self.plane.forget(task)

    def _push(self, happening: Happening, now: float = -inf) -> None:
        if isinstance(happening, Arrival):
            self._coming[happening.lease.task] = self._coming.get(happening.lease.task, 0) + 1
        elif happening.at <= now:
            self._now.append(happening)
            return
        self.sequence += 1
        heapq.heappush(self._heap, (happening.at, self.sequence, happening))
