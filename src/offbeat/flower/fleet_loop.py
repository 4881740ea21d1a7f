"""Owns the loop over a Flower fleet: which nodes are connected, which replies came, which tasks go out.

Rules kept here:
- It never waits for a particular node: a reply is mixed when it comes, and its node is sent the next task.
- After every reply the run is saved to the disk, then tasks are sent, then versions are evaluated while nodes train.
- A node that fails gets another task until the coordinator quarantines it; a node that left gets none until it is back.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import MetricRecord

from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.flower.flower_run import FlowerRun
from offbeat.flower.grid_messages import GridMessages, NoUpdate, UpdateReply
from offbeat.protocol.messages import (
    AnswerPush,
    BadUpdateArrived,
    Evaluated,
    Lease,
    LeaseReturned,
    TaskRequested,
    WorkerJoined,
    WorkerLeft,
)

Evaluate = Callable[[int, Model, Model | None], Mapping[str, float] | None]
"""The metrics of a version, and of the averaged model where there is one; None where it is not evaluated."""

log = logging.getLogger("flwr.offbeat")


class Nodes:
    """Which node is which worker: Flower's nodes have long numbers and come and go, workers are 0, 1, 2...

    A node keeps its worker's number for ever, over restarts: the ledger has it. A worker serves the device of its own
    number: a Flower node is both.
    """

    def __init__(self, history: Iterable[WorkerJoined] = ()) -> None:
        self._worker: dict[int, int] = {}
        self._node: dict[int, int] = {}
        self.present: set[int] = set()
        for event in history:
            self._know(int(event.name), event.worker)

    def worker(self, node: int) -> int:
        """The worker of a node; a new node gets the next number."""
        if node not in self._worker:
            self._know(node, len(self._worker))
        return self._worker[node]

    def node(self, worker: int) -> int:
        return self._node[worker]

    def look(self, connected: Iterable[int]) -> tuple[list[int], list[int]]:
        """Note which nodes are connected; returns the workers that came, and those that left."""
        now = {self.worker(node) for node in sorted(connected)}
        came, left = sorted(now - self.present), sorted(self.present - now)
        self.present = now
        return came, left

    def _know(self, node: int, worker: int) -> None:
        self._worker[node], self._node[worker] = worker, node


class TrainMetrics:
    """The metrics that nodes reported with their updates, by the epoch that the update went into."""

    def __init__(self) -> None:
        self.by_epoch: dict[int, MetricRecord] = {}
        self._group: list[tuple[int, MetricRecord]] = []

    def take(self, answer: AnswerPush, metrics: MetricRecord) -> None:
        """Keep the metrics of an applied update; where several make one epoch, their mean weighted by samples."""
        decision = answer.decision
        if decision is None or decision.mix is None or answer.repeated:
            return
        self._group.append((decision.samples, metrics))
        if decision.mix.publish:
            self.by_epoch[decision.t] = metrics if len(self._group) == 1 else _mean(self._group)
            self._group = []


def _mean(group: list[tuple[int, MetricRecord]]) -> MetricRecord:
    """Of the metrics that all of them report as one number."""
    total = sum(samples for samples, _ in group)
    names = [name for name, value in group[0][1].items() if not isinstance(value, list)]
    shared = [name for name in names if all(isinstance(metrics.get(name), int | float) for _, metrics in group)]
    return MetricRecord({n: sum(samples * metrics[n] for samples, metrics in group) / total for n in shared})


@dataclass
class FleetLoop:
    run: FlowerRun
    messages: GridMessages
    nodes: Nodes
    evaluate: Evaluate
    poll_s: float
    nodes_every_s: float
    metrics: TrainMetrics = field(default_factory=TrainMetrics)
    _look_at: float = -1.0

    def run_to_end(self) -> None:
        self._settle()
        while not self.run.coordinator.finished:
            if not self._turn():
                self.run.clock.wait(max(0.0, min(self.poll_s, self.run.wake - self.run.clock.now())))

    def _turn(self) -> bool:
        """Take all replies that are there; was there one?"""
        self._look()
        self._settle()
        came = False
        for reply in self.messages.pull(self.run.clock.now()):
            self._take(reply)
            self._settle()
            came = True
        self.run.pass_time()
        self._settle()
        self._refuse_hopeless()
        return came

    # --- which nodes are connected -----------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self.run.clock.now()
        if now < self._look_at:
            return
        self._look_at = now + self.nodes_every_s
        came, left = self.nodes.look(self.messages.grid.get_node_ids())
        for worker in came:
            self._join(worker)
        for worker in left:
            log.info("Node %d left", self.nodes.node(worker))
            self._leave(worker)

    def _join(self, worker: int) -> None:
        node = self.nodes.node(worker)
        log.info("Node %d joined as worker %d", node, worker)
        self.run.happen(lambda at: WorkerJoined(at, worker, worker, name=str(node)))
        self._request(worker)

    def _leave(self, worker: int) -> None:
        self.nodes.present.discard(worker)
        self.run.happen(lambda at: WorkerLeft(at, worker))

    def _request(self, worker: int) -> None:
        """Ask for a task for the node, if it is connected and owes no reply."""
        if worker in self.nodes.present and worker not in self.messages.busy:
            self.run.happen(lambda at: TaskRequested(at, worker))

    def _refuse_hopeless(self) -> None:
        c, present = self.run.coordinator, self.nodes.present
        quarantined = c.quarantined
        if present and present <= quarantined.keys() and not self.messages.busy and not c.end_reason:
            raise OffbeatError(
                f"every connected node ({len(present)}) sent only bad updates and gets no more tasks; "
                f"the last one: {quarantined[max(present)]}. Mend the ClientApp and run again"
            )

    # --- replies -----------------------------------------------------------------------------------------------------

    def _take(self, reply: UpdateReply | NoUpdate) -> None:
        lease = reply.lease
        if isinstance(reply, UpdateReply):
            answer = self.run.arrive(lease, reply.x_new, reply.samples)
            self.metrics.take(answer, reply.metrics)
            self._tell(answer)
        elif reply.away:
            log.info("Node %d: %s", self.nodes.node(lease.worker), reply.why)
            self.run.happen(lambda at: LeaseReturned(at, lease.worker, lease.task))
            self._leave(lease.worker)
        else:
            self._bad(lease, reply.why)
        self.run.forget(lease.task)
        self._request(lease.worker)

    def _bad(self, lease: Lease, why: str) -> None:
        log.warning("Node %d: %s", self.nodes.node(lease.worker), why)
        self.run.happen(lambda at: BadUpdateArrived(at, lease.worker, lease.task, why))
        self.run.happen(lambda at: LeaseReturned(at, lease.worker, lease.task))

    def _tell(self, answer: AnswerPush) -> None:
        d, node = answer.decision, self.nodes.node(answer.worker)
        if d is None or d.mix is None:
            log.info("Node %d: its update was refused (%s)", node, answer.outcome.value)
            return
        epochs = self.run.method.plan.epochs
        log.info(
            *("[epoch %d%s] node %d, tau %d, staleness %d, alpha_t %.4f", d.t, f"/{epochs}" if epochs else ""),
            *(node, d.lease.tau, d.staleness, d.mix.new),
        )

    # --- tasks that go out -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Save what happened, then send the tasks and do the evaluations that follow from it."""
        self.run.save()
        while self.run.outbox or self.run.unmeasured:
            while self.run.outbox:
                self._push(*self.run.outbox.popleft())
            if self.run.unmeasured:
                self._measure(*self.run.unmeasured.popleft())
            self.run.save()

    def _push(self, lease: Lease, x_tau: Model) -> None:
        if not self.messages.send(lease, x_tau, self.nodes.node(lease.worker)):
            self._bad(lease, "the message with its task could not be pushed")
            self.run.forget(lease.task)
            self._leave(lease.worker)

    def _measure(self, t: int, x: Model, mean: Model | None) -> None:
        metrics = self.evaluate(t, x, mean)
        if metrics is not None:
            log.info("[epoch %d] %s", t, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
            self.run.happen(lambda at: Evaluated(at, t, metrics))
