"""Owns a run on Flower's fleet except its messages: the coordinator, the vectors, the ledger, the checkpoints.

    settings.json, ledger.sqlite, summary.json, x.safetensors    as in every run's folder, average.safetensors too
    checkpoints/                                                 the newest two, until the run is finished

Rules kept here:
- Everything that happens is an event with the run's time, and goes through one coordinator in one order on one thread.
  An accepted update is mixed at once, so there is no queue.
- With `checkpoint_every` = 1 a mixed update is in a checkpoint before a node trains on it. After a kill, the run and
  its ledger go back to the newest checkpoint.
- A resumed run is another run of Flower's: replies to the old one never come, so its leases are released. Quarantined
  nodes have a new ClientApp and may try again.
"""

import logging
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import assert_never

from offbeat.core.kernel import Updater
from offbeat.core.layout import Model
from offbeat.core.rules import VectorStep, uses_base
from offbeat.core.vectors import Order, Standing, Vectors
from offbeat.errors import InvariantBroken
from offbeat.method import Method
from offbeat.protocol import messages
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.snapshot import snapshot
from offbeat.server.driver import Clock
from offbeat.storage.backup_marker import fork_without_id
from offbeat.storage.checkpoints import Checkpoint, Checkpoints
from offbeat.storage.disk import Disk
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import RunFolder

Happened = Callable[[float], messages.Event]

log = logging.getLogger("flwr.offbeat")  # Flower shows the lines of its own loggers


class PollingClock(Clock):
    """The run's clock, and the pause between two looks at the Grid, which cannot call."""

    def wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)


class FlowerRun:
    """Feeds the coordinator and carries out its commands; messages to send wait in `outbox`."""

    def __init__(
        self,
        folder: RunFolder,
        method: Method,
        x_0: Model,
        clock_from: Callable[[float], PollingClock],
        *,
        checkpoint_every: int,
        threads: int = 1,
    ) -> None:
        self.folder, self.method = folder, method
        self.ledger: Ledger = folder.ledger(durable=True)
        self.checkpoints = Checkpoints(folder.path / "checkpoints", x_0.layout, Disk())
        self.updater = Updater(threads)
        self.outbox: deque[tuple[messages.Lease, Model]] = deque()
        """Leases whose message is not pushed yet, each with its x_tau."""
        self.unmeasured: deque[tuple[int, Model, Model | None]] = deque()
        """Versions to evaluate, each with the averaged model up to it."""
        self.answers: list[messages.AnswerPush] = []
        """The answer to the update that has just come."""
        self.wake = inf
        self._now: deque[Happened] = deque()
        self._bases: dict[int, Model] = {}
        """x_tau by task, where the rule or the gate needs it."""
        self._arrived: tuple[int, Model] | None = None
        self._every, self._checkpointed, self._marked = checkpoint_every, 0, -1
        found = self.checkpoints.newest() if self.checkpoints.marks() else None
        standing = found.standing if found else Standing.first(x_0)
        self.vectors = Vectors(standing, self.updater, method.average, found.caches if found else None)
        self.coordinator = self._found(found) if found else self._first(x_0)
        self.wake = self.coordinator.woken_at
        self.clock = clock_from(self.coordinator.at)
        if found:
            self._take_up()
        fork_without_id(folder.path, self.ledger, self.coordinator.at, self.checkpoint)

    # --- beginning and resuming --------------------------------------------------------------------------------------

    def _first(self, x_0: Model) -> Coordinator:
        self.ledger.truncate_after(0)
        self.unmeasured.append((0, x_0.freeze(), self.vectors.mean))
        return self.method.coordinator()

    def _found(self, found: Checkpoint) -> Coordinator:
        self.checkpoints.remove_after(found.mark)
        self.ledger.truncate_after(found.mark)
        decided = self.ledger.latest_decisions(self.method.plan.answers_kept, found.mark)
        self._checkpointed, self._marked = found.state["applied"], found.mark
        return self.method.restored(found.state, decided)

    @property
    def x(self) -> Model:
        return self.vectors.x

    def _take_up(self) -> None:
        """Release what was under way when the run stopped; an evaluation is done again."""
        c = self.coordinator
        asked = {0, int(c.evaluated_t)}
        if c.t in asked and (not c.evaluations or c.evaluations[-1].t != c.t):
            self.unmeasured.append((c.t, self.x, self.vectors.mean))
        if c.finished:
            return
        self.happen(messages.ServerRestarted)
        for lease in list(c.leases.values()):
            self.happen(lambda at, worker=lease.worker: messages.WorkerLeft(at, worker))  # type: ignore[misc]
        for worker in list(c.quarantined):
            self.happen(lambda at, worker=worker: messages.WorkerReadmitted(at, worker))  # type: ignore[misc]

    # --- events ------------------------------------------------------------------------------------------------------

    def happen(self, happened: Happened) -> None:
        """Give the coordinator an event, carry out its commands, and handle the events that follow from them."""
        self._now.append(happened)
        while self._now:
            event = self._now.popleft()(self.clock.now())
            commands = self.coordinator.handle(event)
            self.ledger.record(event, commands)
            for command in commands:
                self._do(command)

    def arrive(self, lease: messages.Lease, x_new: Model, samples: int) -> messages.AnswerPush:
        finite, distance, base_gone, excess = self._seen(lease, x_new)
        names, base = self.method.rule.dots, self._bases.get(lease.task)
        dots = self.vectors.dots(names, x_new, base) if names and base is not None else None
        self._arrived = (lease.task, x_new)
        seen = (samples, 0, finite, distance, "", base_gone, None, excess, dots)
        self.happen(lambda at: messages.UpdateArrived(at, lease.worker, lease.task, *seen))
        self._arrived = None
        return self.answers.pop()

    def pass_time(self) -> None:
        if self.clock.now() >= self.wake:
            self.wake = inf
            self.happen(messages.TimePassed)

    def forget(self, task: int) -> None:
        self._bases.pop(task, None)

    def save(self) -> None:
        """Bring the ledger to the disk, and write a checkpoint when enough updates were mixed."""
        if self.coordinator.applied - self._checkpointed >= self._every or self._marked < 0:
            self.checkpoint()
        self.ledger.flush()

    def checkpoint(self) -> None:
        """Write a checkpoint, unless nothing has happened since the last one."""
        mark = self.ledger.mark()
        if mark != self._marked:
            state, stands = snapshot(self.coordinator, answers=False), self.vectors.standing
            self.checkpoints.write(Checkpoint(mark, state, stands, caches=dict(self.vectors.caches)))
            self.checkpoints.prune()
        self._checkpointed, self._marked = self.coordinator.applied, mark

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the results and remove the checkpoints: a finished run is not resumed."""
        self.folder.finish(summary, self.x, average=self.vectors.mean)
        shutil.rmtree(self.checkpoints.path, ignore_errors=True)

    # --- commands ----------------------------------------------------------------------------------------------------

    def _do(self, command: messages.Command) -> None:  # noqa: C901 (one line per kind of command)
        match command:
            case messages.SendTask():
                self._send(command.lease)
            case messages.MixUpdate():
                self._mix(command.decision)
            case messages.PublishVersion():
                self._publish(command.t, command.closing)
            case messages.AnswerPush():
                self.answers.append(command)
            case messages.EvaluateModel():
                self.unmeasured.append((command.t, self.x, self.vectors.mean))
            case messages.WakeAt():
                self.wake = min(self.wake, command.at)
            case messages.ReleaseTask():
                log.info("Task %d of worker %d is not waited for any more", command.lease.task, command.lease.worker)
            case messages.Quarantine():
                log.warning("Worker %d gets no more tasks: %s", command.worker, command.why)
            case messages.Finish():
                log.info("Finished: %s", command.reason)
            case messages.TellFinished() | messages.TellQuarantined() | messages.EndSilence():
                pass  # a node without a message does nothing
            case _:
                assert_never(command)

    def _send(self, lease: messages.Lease) -> None:
        if self.coordinator.needs_base or self.coordinator.needs_distance:
            self._bases[lease.task] = self.x
        self.outbox.append((lease, self.x))

    def _mix(self, decision: messages.Decision) -> None:
        task, mix = decision.lease.task, decision.mix
        if mix is None or self._arrived is None or self._arrived[0] != task:
            raise InvariantBroken(f"there is no update of task {task} to mix: {decision}")
        x_tau, t = self._bases[task] if uses_base(mix) else None, decision.t if mix.publish else None
        self.vectors.apply([Order(mix, self._arrived[1], x_tau, t)])
        if t is not None:
            self._now.append(lambda at: messages.VersionPublished(at, t))
        self._now.append(lambda at: messages.UpdateMixed(at, decision.sequence))

    def _publish(self, t: int, closing: tuple[VectorStep, ...]) -> None:
        self.vectors.apply([Order(publishes=t, closing=closing)])
        self._now.append(lambda at: messages.VersionPublished(at, t))

    def _seen(self, lease: messages.Lease, x_new: Model) -> tuple[bool, float | None, bool, float | None]:
        """Is it finite, how far from x_tau, is x_tau gone, is a value too large? Each only where that matters."""
        c, base = self.coordinator, self._bases.get(lease.task)
        if base is None or not c.needs_distance:
            gone = base is None and (c.needs_base or c.needs_distance)
            largest = self.updater.largest(x_new.vector)
            return isfinite(largest), None, gone, c.plan.excess(largest)
        distance, largest = self.updater.measured(x_new.vector, base.vector)
        return isfinite(distance), distance, False, c.plan.excess(largest)
