"""Owns the words between the coordinator and its drivers: events (what happened) and commands (what to do).

Rules kept here:
- Events are past participles and carry the time `at` on the run's own clock; commands are imperatives.
- Every message is a frozen value of plain numbers and names: it can be logged, compared and replayed.
- A worker is a process that trains for one device; both are numbers. In a fleet, worker i serves device i.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar, dataclass_transform

from offbeat.core.rules import Answer, VectorStep

Message = TypeVar("Message")
TOTAL_MAX = (1 << 63) - 1
"""The largest total: workers claim what is added up, and a sum of 64 bits would fit neither SQLite nor an array."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(cls: type[Message]) -> type[Message]:
    """A dataclass that is frozen for the type checker alone: at run time, that would make it five times as slow."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Outcome(StrEnum):
    APPLIED = "applied"
    TOO_STALE = "too_stale"
    NOT_FINITE = "not_finite"
    TOO_LARGE = "too_large"
    """||x_new - x_tau|| is above what the gate accepts, or a value above value_max."""
    QUARANTINED = "quarantined"
    """The worker is quarantined: its update was not looked at any further."""
    FINISHED = "finished"
    UNKNOWN_TASK = "unknown_task"
    NOT_YOURS = "not_yours"
    BUSY = "busy"
    """The queue is full: nothing was decided; push again later."""


@message
class Lease:
    """A task as it was given to a worker. Staleness is derived from its tau, never told by the worker."""

    task: int
    worker: int
    device: int
    number: int
    """How many tasks the device was given before: the key of its randomness."""
    tau: int
    granted_at: float
    deadline: float
    """When its place is given to others, unless its worker is heard of before."""
    local_iterations: int | None = None
    gamma: float | None = None


@message
class Decision:
    """One serial decision on one pushed update, with the coefficients that are applied."""

    sequence: int
    at: float
    lease: Lease
    outcome: Outcome
    t: int
    """The epoch that the update went into or, where it was refused, would have gone into."""
    staleness: int
    mix: Answer | None
    samples: int
    gradients: int


class Spent(NamedTuple):
    """Where a worker's time went; the rest of the time from its lease to the arrival of its update, it waited."""

    download_s: float
    train_s: float
    upload_s: float


# --- events ----------------------------------------------------------------------------------------------------------


@message
class FleetJoined:
    """Workers 0..size-1 joined at once, all waiting for a task; worker i serves device i modulo `devices`."""

    at: float
    size: int
    devices: int | None = None
    """Where a device has several workers, how many devices there are."""


@message
class WorkerJoined:
    at: float
    worker: int
    device: int
    name: str = ""
    """What the worker calls itself; a server knows it again by this."""
    session: str = ""
    """Digest of the secret that the worker's messages carry."""


@message
class WorkerDeclared:
    """The worker said what its pushes are held to; or its first applied update, where it did not say."""

    at: float
    worker: int
    samples: int | None = None
    """How many samples its device holds."""
    base: str = ""
    """Digest of the layout and the frozen arrays of its model."""


@message
class WorkerLeft:
    """The worker said goodbye, or is known to be gone: its open lease is released."""

    at: float
    worker: int


@message
class LeaseReturned:
    """The worker hands its task back; only the worker that holds the lease can do so."""

    at: float
    worker: int
    task: int


@message
class TaskRequested:
    """The worker waits for a task; one with an open lease is given that lease again."""

    at: float
    worker: int


@message
class RequestEnded:
    """The worker no longer waits: its poll ran out or its connection closed."""

    at: float
    worker: int


@message
class ServerRestarted:
    """All connections are gone, so no worker waits any more; every open lease has its full time anew."""

    at: float


@message
class LossAccepted:
    """Rows of the ledger are missing or changed, and an operator has decided to go on without them."""

    at: float
    tasks: int
    """Up to here, numbers of tasks may have been given out: none of them is given out again."""
    dropped: int
    """Updates that were decided on and not mixed, and whose decisions are gone."""
    what: str


@message
class HeartbeatArrived:
    """The worker of this task is at work on it; a silent one may get its lease back."""

    at: float
    task: int
    worker: int | None = None
    """Missing in ledgers of before it was recorded; nothing is decided by it, since only a lease's worker is heard."""


@message
class UpdateArrived:
    """A pushed update, as the data plane saw it."""

    at: float
    worker: int
    task: int
    samples: int
    gradients: int
    finite: bool = True
    distance: float | None = None
    digest: str = ""
    """Of the update's bytes, where they lie in a file; it says its kind."""
    base_gone: bool = False
    """The data plane no longer has x_tau, which the rule or the gate needs."""
    spent: Spent | None = None
    """For people who look; nothing is decided by it."""
    largest: float | None = None
    """The largest absolute value in it, where that is above value_max; None where it is not."""
    dots: Mapping[str, float] | None = None
    """The inner products that the rule asked for."""


@message
class BadUpdateArrived:
    """An update that could not even be looked at: a wrong shape, garbage. Its lease stays open for another push."""

    at: float
    worker: int
    task: int
    why: str


@message
class WorkerBarred:
    """An operator decided that the worker is given no task from now on."""

    at: float
    worker: int
    why: str


@message
class WorkerReadmitted:
    """An operator decided that a quarantined worker may go on."""

    at: float
    worker: int


@message
class RunPaused:
    """An operator decided that no task is given out until the run is resumed; open leases go on and are judged."""

    at: float


@message
class RunResumed:
    at: float


@message
class UpdateMixed:
    """The data plane applied the decision of this sequence number."""

    at: float
    sequence: int


@message
class VersionPublished:
    """x_t can be read: leases from now on start from it."""

    at: float
    t: int


@message
class Evaluated:
    at: float
    t: int
    metrics: Mapping[str, float]


@message
class RunExtended:
    """The run has these ends from now on, and no others; one that had ended goes on. None is no such end."""

    at: float
    epochs: int | None
    gradients: int | None
    until_s: float | None
    target: str | None
    handled: int | None = None
    """Of a simulated run: how many events came before, so that it is led to this one again."""


@message
class TimePassed:
    """The moment of an earlier `WakeAt` has come."""

    at: float


OfWorker = WorkerJoined | WorkerDeclared | WorkerLeft | TaskRequested | RequestEnded | WorkerBarred | WorkerReadmitted
OfTask = LeaseReturned | HeartbeatArrived | UpdateArrived | BadUpdateArrived
OfRun = FleetJoined | ServerRestarted | LossAccepted | RunPaused | RunResumed | RunExtended
OfPlane = UpdateMixed | VersionPublished | Evaluated | TimePassed
Event = OfWorker | OfTask | OfRun | OfPlane


# --- commands --------------------------------------------------------------------------------------------------------


@message
class SendTask:
    lease: Lease
    asked_at: float | None = field(default=None, compare=False)
    """Since when its worker waited for it, which nothing depends on; None where an open lease is told again."""


@message
class ReleaseTask:
    """The lease is no longer open and its device is free; `revoked` where a late push will be refused."""

    lease: Lease
    revoked: bool
    silent: bool = False
    """Its worker was not heard of for too long; it may get the lease back when it is heard of again."""


@message
class EndSilence:
    """The worker of a silent lease was heard of again: the lease is open again (`resumed`), or released for good."""

    lease: Lease
    resumed: bool


@message
class MixUpdate:
    """Apply this decision's coefficients to the update of its task, in the order of the sequence numbers."""

    decision: Decision


@message
class PublishVersion:
    """Make the working vector x_t although its group is not complete."""

    t: int
    closing: tuple[VectorStep, ...] = ()
    """What the rule does at this publication."""


@message
class AnswerPush:
    """Tell the worker what became of its update; `decision` is missing where nothing was decided."""

    worker: int
    task: int
    outcome: Outcome
    decision: Decision | None = None
    retry_after_s: float | None = None
    repeated: bool = False
    """The task was answered before: this is the first answer again."""
    why: str = ""
    """In words, where the outcome does not say enough."""

    def again(self) -> "AnswerPush":
        facts = (self.worker, self.task, self.outcome, self.decision, self.retry_after_s)
        return AnswerPush(*facts, repeated=True, why=self.why)


@message
class EvaluateModel:
    t: int


@message
class WakeAt:
    at: float


@message
class TellFinished:
    worker: int


@message
class Quarantine:
    """Too many updates of this worker were bad: it is given no task until it is readmitted."""

    worker: int
    why: str


@message
class TellQuarantined:
    """The worker asked for a task, and gets none."""

    worker: int
    why: str


@message
class Finish:
    reason: str


ToWorker = SendTask | ReleaseTask | EndSilence | AnswerPush | TellFinished | TellQuarantined
ToServer = MixUpdate | PublishVersion | EvaluateModel | WakeAt | Quarantine | Finish
Command = ToWorker | ToServer
