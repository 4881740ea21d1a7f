"""Owns the virtual clock: a heap of (time, sequence, event) drives the one coordinator.

Rules kept here:
- There is no second engine: FedAsync, FedBuff, FedAvg and SGD are a rule and a scheduler policy on this loop, and the
  coordinator is the one that is deployed.
- Ties in time are decided by the sequence number; what a decision causes at the same moment is handled before
  anything else. Mixing takes `mix_s` per update, one after the other; 0, the default, is at once.
- The engine stops where it needs a training that is not done, returns it, and goes on when it is called again. So
  several runs can share one executor and fill its batches together, and the schedule of none of them depends on it.
- An evaluation is awaited at once where decisions depend on it. Otherwise a few may be under way beside the training;
  their results are told in order, at moments that do not depend on how long they took.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Set
from math import inf
from typing import NamedTuple, Protocol, assert_never

from offbeat.core.rules import VectorStep
from offbeat.errors import InvariantBroken
from offbeat.protocol import messages
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.wanted import may_want
from offbeat.sim.event_sources import Arrival, EventSource, Happening
from offbeat.sim.executors import Job, Pending, PendingEvaluation

Recorder = Callable[[messages.Event, list[messages.Command]], object]
EVALUATIONS_AHEAD = 4
"""Evaluations that may be under way beside the training."""


class MixingDone(NamedTuple):
    """The server is done with mixing this update, or with publishing a group, at this moment."""

    at: float
    what: messages.MixUpdate | messages.PublishVersion


class DataPlane(Protocol):
    """What holds the vectors: `plane.Plane`, or `plane.Replayed` where a schedule needs none."""

    def lease(self, lease: messages.Lease) -> None: ...
    def start(self, lease: messages.Lease) -> None: ...
    def awaited_training(self, lease: messages.Lease) -> Job | None: ...
    def arrived(self, lease: messages.Lease, at: float, spent: messages.Spent | None) -> messages.UpdateArrived: ...
    def commit(self, decision: messages.Decision) -> None: ...
    def mix(self, decision: messages.Decision) -> None: ...
    def close(self, t: int, closing: tuple[VectorStep, ...]) -> None: ...
    def forget(self, task: int) -> None: ...
    def evaluate(self, t: int) -> None: ...
    def awaited_evaluation(self, t: int) -> PendingEvaluation | None: ...
    def metrics(self, t: int) -> Mapping[str, float]: ...
    def keep(self, t: int, kept: Set[int]) -> None: ...


class Engine:
    def __init__(
        self, coordinator: Coordinator, source: EventSource, plane: DataPlane, record: Recorder, *, mix_s: float = 0.0
    ) -> None:
        self.coordinator, self.source, self.plane, self.record = coordinator, source, plane, record
        self.mix_s = mix_s
        self.finished = False
        self.handled = 0
        """Events that the coordinator has seen."""
        self.sequence = 0
        self.ending = False
        """The end of the run is known, though what was decided may still have to be mixed and evaluated."""
        self.on_end: Callable[[], None] = lambda: None
        """Called once, when nothing has happened yet that would not have happened in a longer run."""
        self._over, self._until_s = False, coordinator.plan.until_s
        self._heap: list[tuple[float, int, Happening | MixingDone]] = []
        self._now: deque[messages.Event] = deque()
        self._evaluating: deque[int] = deque()
        """Versions whose evaluation is under way."""
        self._unmixed: set[int] = set()
        """Tasks whose update is decided on and not yet mixed."""
        self._held: deque[Arrival] = deque()
        """Updates that arrived while others were unmixed, under a rule that reads what mixing changes."""
        self._mixing_until = 0.0
        self._on_the_way: dict[int, int] = {}
        """How many updates of a task are on their way."""
        self._revoked: set[int] = set()
        """Revoked tasks with an update on its way, which is not delivered."""
        for happening in source.opening():
            self._push(happening)

    def advance(self, handled_max: float = inf) -> list[Pending]:
        """Go on until the run is finished, has handled that many events, or needs a job: that is returned."""
        while not self.finished and self.handled < handled_max:
            needed: Pending | None = None
            if self._evaluating and self._evaluation_is_due():
                needed = self.plane.awaited_evaluation(self._evaluating[0])
                if needed is None:
                    t = self._evaluating.popleft()
                    self.evaluated(t, self.plane.metrics(t))
            elif self._now:
                self.feed(self._now.popleft())
            elif self._held and not (self._unmixed or self._over):
                needed = self.plane.awaited_training(self._held[0].lease)  # only where the run was resumed
                if needed is None:
                    self._arrive(self._held.popleft()._replace(at=self.coordinator.at))
            elif self._over or not self._heap:
                self._over = True
                self.finished = not self._evaluating
            else:
                needed = self._awaited_training(self._heap[0][2])
                if needed is None:
                    self._go_on()
            if needed is not None:
                return [needed]
        return []

    def _go_on(self) -> None:
        """Let the next thing happen; before the first that ends the run, its end is told."""
        if self._heap[0][0] >= self._until_s and not self.ending:
            self._end()
        else:
            self._happen(heapq.heappop(self._heap)[2])

    def _awaited_training(self, happening: Happening | MixingDone) -> Pending | None:
        """The training that must be done before this can happen."""
        if isinstance(happening, Arrival):
            return self.plane.awaited_training(happening.lease)
        if isinstance(happening, MixingDone) and isinstance(happening.what, messages.MixUpdate):
            return self.plane.awaited_training(happening.what.decision.lease)  # only where the run was resumed
        return None

    def _evaluation_is_due(self) -> bool:
        ahead = 0 if self._over or self.coordinator.needs_evaluation else EVALUATIONS_AHEAD
        return len(self._evaluating) > ahead

    def _happen(self, happening: Happening | MixingDone) -> None:
        if isinstance(happening, MixingDone):
            self._mix(happening.what, happening.at)
        elif isinstance(happening, Arrival):
            if self._unmixed and self.coordinator.rule.moving:
                self._held.append(happening)  # it is looked at when all before it are mixed
            else:
                self._arrive(happening)
        else:
            self._now.append(happening)

    def _arrive(self, happening: Arrival) -> None:
        task = happening.lease.task
        if task not in self._revoked:
            self._now.append(self.plane.arrived(happening.lease, happening.at, happening.spent))
        self._on_the_way[task] -= 1
        if not self._on_the_way[task]:
            del self._on_the_way[task]
            self._revoked.discard(task)

    def feed(self, event: messages.Event) -> None:
        commands = self.coordinator.handle(event)
        self.handled += 1
        self.record(event, commands)
        for command in commands:
            self._do(command, event.at)
        if self.coordinator.end_reason and not self.ending:
            self._end()

    def evaluated(self, t: int, metrics: Mapping[str, float]) -> None:
        """A version has these metrics; the plane keeps it if it is wanted when newer ones are there."""
        ending, self.ending = self.ending, True  # the end is told after the version is kept
        self.feed(messages.Evaluated(self.coordinator.at, t, metrics))
        self.ending = ending
        if may_want(self.coordinator):
            self.plane.keep(t, self.coordinator.outcome.kept)
        if self.coordinator.end_reason and not self.ending:
            self._end()

    def extend(self, event: messages.RunExtended) -> None:
        """Go on with other ends, before or right after the event at which the run would have ended."""
        self.feed(event)
        self._over = self.ending = False
        self._until_s = self.coordinator.plan.until_s
        for happening in self.source.extended(inf if event.epochs is None else event.epochs):
            self._push(happening, now=event.at)

    def _end(self) -> None:
        self.ending = True
        self.on_end()

    def _do(self, command: messages.Command, at: float) -> None:
        match command:
            case messages.SendTask():
                self._send(command.lease, at)
            case messages.MixUpdate() | messages.PublishVersion():
                self._mix_later(command, at)
            case messages.AnswerPush():
                self._answer(command, at)
            case messages.WakeAt():
                self._push(messages.TimePassed(max(command.at, at)))
            case messages.EvaluateModel():
                self.plane.evaluate(command.t)
                self._evaluating.append(command.t)
            case messages.ReleaseTask():
                self._release(command, at)
            case messages.EndSilence():
                self._forget_unless(command.lease.task, kept=command.resumed)
            case messages.TellFinished() | messages.TellQuarantined() | messages.Quarantine():
                pass  # a simulated worker that is given nothing does nothing
            case messages.Finish():
                self._over = True
            case _:
                assert_never(command)

    def _send(self, lease: messages.Lease, at: float) -> None:
        self.plane.lease(lease)
        for happening in self.source.started(lease, at):
            if isinstance(happening, Arrival):
                self.plane.start(lease)
            self._push(happening)

    def _mix_later(self, command: messages.MixUpdate | messages.PublishVersion, at: float) -> None:
        """Mix when the server is done with what came before; at once where mixing takes no time.

        The decision is made now, so what the device keeps is committed now: it may be given its next task before.
        """
        if isinstance(command, messages.MixUpdate):
            self.plane.commit(command.decision)
        if not self.mix_s:
            self._mix(command, at)
            return
        self._mixing_until = max(at, self._mixing_until)
        if isinstance(command, messages.MixUpdate):
            self._mixing_until += self.mix_s
            self._unmixed.add(command.decision.lease.task)
        self._push(MixingDone(self._mixing_until, command))

    def _mix(self, command: messages.MixUpdate | messages.PublishVersion, at: float) -> None:
        if isinstance(command, messages.PublishVersion):
            self.plane.close(command.t, command.closing)
            self._now.append(messages.VersionPublished(at, command.t))
            return
        decision = command.decision
        self.plane.mix(decision)
        if decision.mix is not None and decision.mix.publish:
            self._now.append(messages.VersionPublished(at, decision.t))
        self._now.append(messages.UpdateMixed(at, decision.sequence))
        if decision.lease.task in self._unmixed:
            self._unmixed.remove(decision.lease.task)
            self._forget(decision.lease.task)

    def _answer(self, answer: messages.AnswerPush, at: float) -> None:
        for happening in self.source.answered(answer, at):
            self._push(happening, now=at)
        if answer.outcome is not messages.Outcome.BUSY:
            self._forget(answer.task)

    def _release(self, command: messages.ReleaseTask, at: float) -> None:
        """A worker whose task is revoked stops; one whose lease ran out does not know it, and may push late."""
        task = command.lease.task
        if command.revoked:
            if task in self._on_the_way:
                self._revoked.add(task)
            for happening in self.source.revoked(command.lease, at):
                self._push(happening, now=at)
        self._forget_unless(task, kept=command.silent)

    def _forget_unless(self, task: int, *, kept: bool) -> None:
        """A silent lease may be opened again."""
        if not kept:
            self._forget(task)

    def _forget(self, task: int) -> None:
        """Drop a task's vectors, unless an update of it is still on its way or waits to be mixed."""
        if task not in self._unmixed and (task in self._revoked or task not in self._on_the_way):
            self.plane.forget(task)

    def _push(self, happening: Happening | MixingDone, now: float = -inf) -> None:
        if happening.at < self.coordinator.at:
            raise InvariantBroken(f"the clock is at {self.coordinator.at}, and this was to happen before: {happening}")
        if isinstance(happening, Arrival):
            self._on_the_way[happening.lease.task] = self._on_the_way.get(happening.lease.task, 0) + 1
        elif happening.at <= now and not isinstance(happening, MixingDone):
            self._now.append(happening)
            return
        self.sequence += 1
        heapq.heappush(self._heap, (happening.at, self.sequence, happening))
