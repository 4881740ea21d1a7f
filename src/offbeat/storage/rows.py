"""Owns what a row of the ledger means: protocol messages to rows, and back.

Rules kept here:
- One wide row fits every kind; what does not apply is NULL, and only what applies is bound (binding a NULL costs
  more than all else).
- Rows hold what happened to the last bit: a decision, an arrival or an evaluation reads back equal to the original.
  SQLite has no NaN and no -0.0: a distance that is NaN is named in `detail`, metrics live there, and a coefficient
  of -0.0 reads back as 0.0, which is equal and skips its term all the same.
- `detail` is a JSON object, or NULL.
- What tasks, rules and schedules of a user's say may be numpy's numbers, which SQLite would keep as bytes: they are
  converted.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from math import isnan, nan
from operator import attrgetter
from typing import Any, NamedTuple

from offbeat.core.rules import Mix
from offbeat.protocol import messages
from offbeat.protocol.messages import Command, Decision, Evaluated, Event, Lease, Outcome, UpdateArrived
from offbeat.storage.json_file import number
from offbeat.storage.recorded_steps import answer_in, detail_of, detail_of_closing
from offbeat.storage.row_shapes import NewRow, RowShape, lease_shapes, shape_of


class Row(NamedTuple):
    """One line of the ledger: all columns, None where one does not apply."""

    sequence: int
    at: float
    kind: str
    task: int | None
    worker: int | None
    device: int | None
    number: int | None
    t: int | None
    tau: int | None
    staleness: int | None
    outcome: str | None
    keep: float | None
    new: float | None
    base: float | None
    publish: int | None
    samples: int | None
    gradients: int | None
    local_iterations: int | None
    gamma: float | None
    granted_at: float | None
    """When the task's lease was granted; `at` is when this row happened."""
    deadline: float | None
    finite: int | None
    distance: float | None
    decision: int | None
    """The number of the decision in the coordinator's serial order."""
    detail: str | None
    asked_at: float | None = None
    """Since when the task's worker had waited; ledgers of before there was a chain do not know it."""


KINDS = (
    *("fleet_joined", "joined", "left", "returned", "requested", "request_ended", "heartbeat", "arrived", "mixed"),
    *("published", "restarted", "run_paused", "run_resumed", "bad_update", "barred", "quarantined", "readmitted"),
    *("lost", "evaluated", "time_passed", "leased", "released", "decided", "busy", "unknown", "not_yours", "repeated"),
    *("heard_again", "declared", "task_accepted", "finished", "extended", "truncated", "loss_accepted", "forked"),
    "group_closed",
)


LEASE_COLUMNS = 7
"""Of a lease whose local iterations and gamma the scheduler did not set."""
_DECISION = "at t staleness outcome samples gradients decision"

_PLAIN: dict[type[Event], RowShape] = {
    messages.VersionPublished: shape_of("published", "at t"),
    messages.HeartbeatArrived: shape_of("heartbeat", "at task worker"),
    messages.RequestEnded: shape_of("request_ended", "at worker"),
    messages.FleetJoined: shape_of("fleet_joined", "at detail"),
    messages.BadUpdateArrived: shape_of("bad_update", "at task worker detail"),
    messages.ServerRestarted: shape_of("restarted", "at"),
    messages.LossAccepted: shape_of("loss_accepted", "at detail"),
    messages.RunPaused: shape_of("run_paused", "at"),
    messages.RunResumed: shape_of("run_resumed", "at"),
    messages.RunExtended: shape_of("extended", "at detail"),
    messages.WorkerBarred: shape_of("barred", "at worker detail"),
    messages.WorkerReadmitted: shape_of("readmitted", "at worker"),
    messages.LeaseReturned: shape_of("returned", "at worker task"),
    messages.WorkerDeclared: shape_of("declared", "at worker samples detail"),
    messages.WorkerLeft: shape_of("left", "at worker"),
}
"""Events whose attributes are columns of the same names; `detail` holds the others."""
_PLAIN_VERBOSE: dict[type[Event], RowShape] = {
    messages.TaskRequested: shape_of("requested", "at worker"),
    messages.TimePassed: shape_of("time_passed", "at"),
}
_JOINED = shape_of("joined", "at worker device detail")
_ARRIVED = shape_of("arrived", "at task worker samples gradients finite")
_DESCRIBED = shape_of("arrived", "at task worker samples gradients finite distance detail")
_QUARANTINED = shape_of("quarantined", "at worker detail")
_MIXED = shape_of("mixed", "at decision")
_EVALUATED = shape_of("evaluated", "at t detail")
_LEASED = lease_shapes("leased", "at asked_at")
_LEASED_AGAIN = lease_shapes("leased", "at")
_RELEASED = lease_shapes("released", "at detail")
_HEARD_AGAIN = lease_shapes("heard_again", "at detail")
_REFUSED = lease_shapes("decided", _DECISION)
_APPLIED = lease_shapes("decided", f"{_DECISION} keep new base publish")
_STEPPED = lease_shapes("decided", f"{_DECISION} keep new base publish detail")
_LOST = shape_of("lost", "at task decision")
_TASK_ACCEPTED = shape_of("task_accepted", "at t detail")
_FINISHED = shape_of("finished", "at detail")
_GROUP_CLOSED = shape_of("group_closed", "at t")
_GROUP_FINISHED = shape_of("group_closed", "at t detail")
_TRUNCATED = shape_of("truncated", "at detail")
_FORKED = shape_of("forked", "at detail")
_ANSWERED = {
    Outcome.BUSY.value: shape_of("busy", "at task worker outcome"),
    Outcome.UNKNOWN_TASK.value: shape_of("unknown", "at task worker outcome"),
    Outcome.NOT_YOURS.value: shape_of("not_yours", "at task worker outcome"),
}
_REPEATED = shape_of("repeated", "at task worker outcome")

ToRow = Callable[[Any], NewRow]
AnswerToRow = Callable[[Any, float], NewRow]
RowMaker = Callable[[Event, list[Command]], list[NewRow]]


# --- messages to rows ------------------------------------------------------------------------------------------------


def _plain(event_type: type[Event], shape: RowShape) -> ToRow:
    names = [name for name in shape.columns if name != "detail"]
    others = [field.name for field in fields(event_type) if field.name not in names]
    get = attrgetter(*names) if len(names) > 1 else lambda event: (getattr(event, names[0]),)
    if not others:
        return lambda event: NewRow(shape, get(event))
    return lambda event: NewRow(shape, (*get(event), _detail(**{name: getattr(event, name) for name in others})))


def _joined(event: messages.WorkerJoined) -> NewRow:
    session = {"session": event.session} if event.session else {}
    return NewRow(_JOINED, (event.at, event.worker, event.device, _detail(name=event.name, **session)))


def _arrived(event: UpdateArrived) -> NewRow:
    samples, gradients = int(event.samples), int(event.gradients)
    values = (event.at, event.task, event.worker, samples, gradients, 1 if event.finite else 0)
    described = event.digest or event.base_gone or event.dots is not None
    if event.distance is None and not described and event.spent is None is event.largest:
        return NewRow(_ARRIVED, values)
    distance = None if event.distance is None else float(event.distance)
    facts: dict[str, object] = {"distance": "nan"} if distance is not None and isnan(distance) else {}
    facts |= {"digest": event.digest} if event.digest else {}
    facts |= {"base_gone": True} if event.base_gone else {}
    facts |= {"spent": event.spent} if event.spent is not None else {}
    facts |= {"largest": float(event.largest)} if event.largest is not None else {}
    facts |= {"dots": {name: number(value) for name, value in event.dots.items()}} if event.dots is not None else {}
    return NewRow(_DESCRIBED, (*values, distance, _detail(**facts) if facts else None))


def _evaluated(event: Evaluated) -> NewRow:
    metrics = {name: number(value) for name, value in event.metrics.items()}
    return NewRow(_EVALUATED, (event.at, event.t, _detail(metrics=metrics)))


def _leased(command: messages.SendTask, at: float) -> NewRow:
    lease = _of_lease(command.lease)
    if command.asked_at is None:
        return NewRow(_LEASED_AGAIN[len(lease) > LEASE_COLUMNS], (at, *lease))
    return NewRow(_LEASED[len(lease) > LEASE_COLUMNS], (at, command.asked_at, *lease))


def _released(command: messages.ReleaseTask, at: float) -> NewRow:
    lease = _of_lease(command.lease)
    silent = {"silent": True} if command.silent else {}
    return NewRow(_RELEASED[len(lease) > LEASE_COLUMNS], (at, _detail(revoked=command.revoked, **silent), *lease))


def _heard_again(command: messages.EndSilence, at: float) -> NewRow:
    lease = _of_lease(command.lease)
    return NewRow(_HEARD_AGAIN[len(lease) > LEASE_COLUMNS], (at, _detail(resumed=command.resumed), *lease))


def _answered(command: messages.AnswerPush, at: float) -> NewRow:
    decision, outcome = command.decision, command.outcome.value
    if command.repeated:
        return NewRow(_REPEATED, (at, command.task, command.worker, outcome))
    if decision is None:
        return NewRow(_ANSWERED[outcome], (at, command.task, command.worker, outcome))
    lease, mix = _of_lease(decision.lease), decision.mix
    samples, gradients = int(decision.samples), int(decision.gradients)
    facts = (decision.at, decision.t, decision.staleness, outcome, samples, gradients, decision.sequence)
    if mix is None:
        return NewRow(_REFUSED[len(lease) > LEASE_COLUMNS], facts + lease)
    # + 0.0 makes 0.0 of -0.0, as SQLite does: the chain is over what it gives back
    coefficients = (float(mix.keep) + 0.0, float(mix.new) + 0.0, float(mix.base) + 0.0, 1 if mix.publish else 0)
    if isinstance(mix, Mix):
        return NewRow(_APPLIED[len(lease) > LEASE_COLUMNS], facts + coefficients + lease)
    return NewRow(_STEPPED[len(lease) > LEASE_COLUMNS], (*facts, *coefficients, detail_of(mix), *lease))


def _group_closed(command: messages.PublishVersion, at: float) -> NewRow:
    if not command.closing:
        return NewRow(_GROUP_CLOSED, (at, command.t))
    return NewRow(_GROUP_FINISHED, (at, command.t, detail_of_closing(command.closing)))


def lost_row(at: float, task: int, decision: int) -> NewRow:
    """An acknowledged update is damaged, and an operator has decided to go on without it."""
    return NewRow(_LOST, (at, task, decision))


def truncated_row(at: float, rows: int, head: str) -> NewRow:
    """A run went back to its checkpoint: so many rows after it are gone, the last of which had this head."""
    return NewRow(_TRUNCATED, (at, _detail(rows=rows, head=head)))


def forked_row(at: float, fork: str, run: str, row: int, head: str) -> NewRow:
    """A backup goes on as the run `fork`: it is of `run`, whose ledger had this head at this row."""
    return NewRow(_FORKED, (at, _detail(fork=fork, run=run, row=row, head=head)))


def task_accepted_row(at: float, t: int, task: str) -> NewRow:
    """An operator has decided to go on with another task than the run had: its identity."""
    return NewRow(_TASK_ACCEPTED, (at, t, _detail(task=task)))


def _of_lease(lease: Lease) -> tuple[object, ...]:
    who = (lease.task, lease.worker, lease.device, lease.number, lease.tau, lease.granted_at, lease.deadline)
    if lease.local_iterations is None and lease.gamma is None:
        return who
    iterations = None if lease.local_iterations is None else int(lease.local_iterations)
    # + 0.0 as for coefficients: what SQLite would change is changed before it is chained
    return (*who, iterations, None if lease.gamma is None or isnan(lease.gamma) else float(lease.gamma) + 0.0)


def _detail(**facts: object) -> str:
    return json.dumps(facts)


EVENTS: dict[type[Event], ToRow] = {
    **{event_type: _plain(event_type, shape) for event_type, shape in _PLAIN.items()},
    UpdateArrived: _arrived,
    Evaluated: _evaluated,
    messages.WorkerJoined: _joined,
}
"""Always recorded."""

MIXINGS: dict[type[Event], ToRow] = {messages.UpdateMixed: lambda event: NewRow(_MIXED, (event.at, event.sequence))}
"""Recorded where mixing takes time: else every update is mixed as soon as it is decided on."""

VERBOSE: dict[type[Event], ToRow] = {
    event_type: _plain(event_type, shape) for event_type, shape in _PLAIN_VERBOSE.items()
}
"""Many, and they follow from the others: recorded where asked for."""

COMMANDS: dict[type[Command], AnswerToRow] = {
    messages.AnswerPush: _answered,
    messages.SendTask: _leased,
    messages.ReleaseTask: _released,
    messages.EndSilence: _heard_again,
    messages.PublishVersion: _group_closed,
    messages.Quarantine: lambda command, at: NewRow(_QUARANTINED, (at, command.worker, _detail(why=command.why))),
    messages.Finish: lambda command, at: NewRow(_FINISHED, (at, _detail(reason=command.reason))),
}
"""What the coordinator did; the other commands show in the events that follow them."""


def row_maker(events: Mapping[type[Event], ToRow], answers: Mapping[type[Command], AnswerToRow]) -> RowMaker:
    """Makes the rows of an event and of what the coordinator answered, of these kinds alone."""

    def rows_of(event: Event, commands: list[Command]) -> list[NewRow]:
        entry = events.get(type(event))
        rows = [] if entry is None else [entry(event)]
        for command in commands:
            answer = answers.get(type(command))
            if answer is not None:
                rows.append(answer(command, event.at))
        return rows

    return rows_of


lasting_rows = row_maker(EVENTS, COMMANDS)
lasting_rows_and_mixings = row_maker(EVENTS | MIXINGS, COMMANDS)
every_row = row_maker(EVENTS | MIXINGS | VERBOSE, COMMANDS)


# --- rows to messages ------------------------------------------------------------------------------------------------


def read(stored: tuple[Any, ...]) -> Row:
    row = Row(*stored)
    if row.kind == "arrived" and row.detail is not None and "distance" in json.loads(row.detail):
        return row._replace(distance=nan)
    return row


def as_event(row: Any) -> Event | None:
    """The event that a row holds; None for what the coordinator answered."""
    read_back = READ_BACK.get(row.kind)
    return None if read_back is None else read_back(row)


def as_lease(row: Any) -> Lease:
    """The lease in a row of a kind that has one."""
    who = (row.task, row.worker, row.device, row.number, row.tau)
    return Lease(*who, row.granted_at, row.deadline, row.local_iterations, row.gamma)


def as_decision(row: Any) -> Decision:
    """The decision that a `decided` row holds, its lease included."""
    lease = as_lease(row)
    if row.keep is not None and None in (row.new, row.base):
        raise ValueError(f"row {row.sequence} lacks a coefficient of decision {row.decision}")
    mix = None if row.keep is None else answer_in(row.keep, row.new, row.base, bool(row.publish), row.detail)
    outcome, facts = Outcome(row.outcome), (row.samples, row.gradients)
    return Decision(row.decision, row.at, lease, outcome, row.t, row.staleness, mix, *facts)


def as_arrival(row: Any) -> UpdateArrived:
    detail = {} if row.detail is None else json.loads(row.detail)
    seen = (row.samples, row.gradients, bool(row.finite), row.distance)
    spent = messages.Spent(*detail["spent"]) if "spent" in detail else None
    named = (detail.get("digest", ""), detail.get("base_gone", False), spent, detail.get("largest"))
    return UpdateArrived(row.at, row.worker, row.task, *seen, *named, _dots(detail))


def _dots(detail: Mapping[str, Any]) -> dict[str, float] | None:
    return {name: float(value) for name, value in detail["dots"].items()} if "dots" in detail else None


def as_evaluation(row: Any) -> Evaluated:
    return Evaluated(row.at, row.t, metrics_in(row.detail))


def metrics_in(detail: str) -> dict[str, float]:
    """The metrics in the `detail` of an `evaluated` row."""
    return {name: float(value) for name, value in json.loads(detail)["metrics"].items()}


def _read_back(event_type: type[Event], shape: RowShape) -> Callable[[Any], Event]:
    names = [name for name in shape.columns if name != "detail"]
    if "detail" not in shape.columns:
        return lambda row: event_type(**{name: getattr(row, name) for name in names})
    return lambda row: event_type(**{name: getattr(row, name) for name in names}, **json.loads(row.detail))


READ_BACK: dict[str, Callable[[Any], Event]] = {
    **{shape.kind: _read_back(event_type, shape) for event_type, shape in (_PLAIN | _PLAIN_VERBOSE).items()},
    _JOINED.kind: _read_back(messages.WorkerJoined, _JOINED),
    "arrived": as_arrival,
    "evaluated": as_evaluation,
    "mixed": lambda row: messages.UpdateMixed(row.at, row.decision),
}
"""Kinds of rows that hold events."""
