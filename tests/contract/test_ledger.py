"""The ledger keeps everything that happened, to the last bit, for whoever reads it later, now, or after a crash."""

import heapq
import json
import math
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.rules import Larger, Mix, Move, OnParameters, Product, Root, Steps, fedasync
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.method import rule_of
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import (
    AnswerPush,
    BadUpdateArrived,
    Command,
    Decision,
    EndSilence,
    Evaluated,
    EvaluateModel,
    Event,
    Finish,
    FleetJoined,
    HeartbeatArrived,
    Lease,
    LeaseReturned,
    LossAccepted,
    MixUpdate,
    Outcome,
    PublishVersion,
    Quarantine,
    ReleaseTask,
    RequestEnded,
    RunExtended,
    RunPaused,
    RunResumed,
    SendTask,
    ServerRestarted,
    Spent,
    TaskRequested,
    TellFinished,
    TellQuarantined,
    TimePassed,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
    WakeAt,
    WorkerBarred,
    WorkerDeclared,
    WorkerJoined,
    WorkerLeft,
    WorkerReadmitted,
)
from offbeat.protocol.plan import Plan
from offbeat.settings import Settings
from offbeat.sim.run import Simulation
from offbeat.storage import ledger as ledger_module
from offbeat.storage.ledger import Ledger
from offbeat.storage.ledger_schema import SCHEMA
from offbeat.storage.recorded_steps import answer_in, closing_in, detail_of, detail_of_closing
from offbeat.storage.rows import KINDS, Row, as_arrival, as_event, lost_row, task_accepted_row
from tests.simulation.rule_cases import RULE_CASES
from tests.simulation.test_run import TASK

WHOLE = st.integers(0, 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
AT = st.floats(min_value=0.0, allow_infinity=False)
LEASES = st.builds(
    Lease,
    *(WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, AT, st.floats(min_value=0.0)),
    local_iterations=st.none() | WHOLE,
    gamma=st.none() | FINITE,
)
MIXES = st.builds(Mix, FINITE, FINITE, FINITE, st.booleans())
VECTORS = st.sampled_from(["w", "x", "new", "base", "own", "m", "_d"])
MOVES = st.builds(Move, VECTORS, st.lists(st.tuples(VECTORS, FINITE), max_size=4).map(tuple))
ELEMENTWISE = st.one_of(
    MOVES,
    st.builds(Product, VECTORS, FINITE, FINITE, VECTORS, VECTORS),
    st.builds(Larger, VECTORS, VECTORS),
    st.builds(Root, VECTORS, FINITE, VECTORS, VECTORS, FINITE),
)
ON_PARAMETERS = st.builds(OnParameters, st.lists(ELEMENTWISE, max_size=3).map(tuple))
LISTED = st.lists(ELEMENTWISE | ON_PARAMETERS, max_size=4).map(tuple)
STEPS = st.builds(Steps, FINITE, FINITE, FINITE, st.booleans(), LISTED, LISTED, st.none() | WHOLE)
UNDECIDED = {Outcome.BUSY, Outcome.UNKNOWN_TASK, Outcome.NOT_YOURS}
JUDGED = st.sampled_from([outcome for outcome in Outcome if outcome not in UNDECIDED])
DECISIONS = st.builds(Decision, WHOLE, AT, LEASES, JUDGED, WHOLE, WHOLE, st.none() | MIXES | STEPS, WHOLE, WHOLE)
DISTANCES = st.floats(min_value=0.0) | st.just(math.nan)
SEEN = (st.booleans(), st.none() | DISTANCES, st.sampled_from(["", "d1ge57"]), st.booleans())
DOTS = st.dictionaries(st.sampled_from(["D.D", "D.L", "L.L"]), st.floats())
ARRIVALS = st.builds(UpdateArrived, AT, WHOLE, WHOLE, WHOLE, WHOLE, *SEEN, dots=st.none() | DOTS)
EVALUATIONS = st.builds(Evaluated, AT, WHOLE, st.dictionaries(st.text(), st.floats()))

LEASE = Lease(7, 3, 5, 2, 11, 1.5, 3601.5, 20, 0.125)
OF_LEASE = {"task": 7, "worker": 3, "device": 5, "number": 2, "tau": 11} | {
    "granted_at": 1.5,
    "deadline": 3601.5,
    "local_iterations": 20,
    "gamma": 0.125,
}
DECIDED = Decision(4, 9.0, LEASE, Outcome.APPLIED, 15, 3, Mix(0.7, 0.3, 0.0, True), 50, 10)
REFUSED = Decision(5, 9.0, LEASE, Outcome.TOO_STALE, 15, 3, None, 50, 10)
STEPPED = Decision(
    *(6, 9.0, LEASE, Outcome.APPLIED, 15, 3),
    Steps(
        *(1.0, 0.25, -0.25, True),
        (Move("_d", (("new", 1.0), ("base", -1.0))), Move("own", (("_d", 1.0),))),
        (OnParameters((Root("g", 0.1, "m", "v", 1e-08),)), Move("g", ())),
        cache=3,
    ),
    *(50, 10),
)
OF_DECISION = OF_LEASE | {"t": 15, "staleness": 3, "samples": 50, "gradients": 10, "kind": "decided"}
PUSHED = {"task": 7, "worker": 3}

STORIES: list[tuple[Event, list[Command], list[dict[str, Any]]]] = [
    (FleetJoined(9.0, 10, 5), [], [{"kind": "fleet_joined", "detail": '{"size": 10, "devices": 5}'}]),
    (WorkerJoined(9.0, 3, 5, "lab"), [], [{"kind": "joined", "worker": 3, "device": 5, "detail": '{"name": "lab"}'}]),
    (
        WorkerJoined(9.0, 3, 5, "lab", "d1ge57"),
        [],
        [{"kind": "joined", "worker": 3, "device": 5, "detail": '{"name": "lab", "session": "d1ge57"}'}],
    ),
    (
        BadUpdateArrived(9.0, 3, 7, 'no "w"'),
        [Quarantine(3, 'no "w"'), ReleaseTask(LEASE, revoked=True)],
        [
            PUSHED | {"kind": "bad_update", "detail": r'{"why": "no \"w\""}'},
            {"kind": "quarantined", "worker": 3, "detail": r'{"why": "no \"w\""}'},
            OF_LEASE | {"kind": "released", "detail": '{"revoked": true}'},
        ],
    ),
    (ServerRestarted(9.0), [], [{"kind": "restarted"}]),
    (
        LossAccepted(9.0, 7, 2, "it ends"),
        [],
        [{"kind": "loss_accepted", "detail": '{"tasks": 7, "dropped": 2, "what": "it ends"}'}],
    ),
    (RunPaused(9.0), [], [{"kind": "run_paused"}]),
    (RunResumed(9.0), [], [{"kind": "run_resumed"}]),
    (
        RunExtended(9.0, 50, None, 12.5, "loss<=0.1", 7),
        [],
        [
            {
                "kind": "extended",
                "detail": '{"epochs": 50, "gradients": null, "until_s": 12.5, "target": "loss<=0.1", "handled": 7}',
            }
        ],
    ),
    (WorkerBarred(9.0, 3, "odd"), [], [{"kind": "barred", "worker": 3, "detail": '{"why": "odd"}'}]),
    (WorkerReadmitted(9.0, 3), [], [{"kind": "readmitted", "worker": 3}]),
    (
        WorkerDeclared(9.0, 3, 50, "ba5e"),
        [],
        [{"kind": "declared", "worker": 3, "samples": 50, "detail": '{"base": "ba5e"}'}],
    ),
    (WorkerDeclared(9.0, 3), [], [{"kind": "declared", "worker": 3, "detail": '{"base": ""}'}]),
    (LeaseReturned(9.0, 3, 7), [], [{"kind": "returned", "worker": 3, "task": 7}]),
    (WorkerLeft(9.0, 3), [], [{"kind": "left", "worker": 3}]),
    (TaskRequested(9.0, 3), [], [{"kind": "requested", "worker": 3}]),
    (RequestEnded(9.0, 3), [], [{"kind": "request_ended", "worker": 3}]),
    (HeartbeatArrived(9.0, 7), [], [{"kind": "heartbeat", "task": 7}]),
    (UpdateMixed(9.0, 4), [], [{"kind": "mixed", "decision": 4}]),
    (VersionPublished(9.0, 15), [], [{"kind": "published", "t": 15}]),
    (Evaluated(9.0, 15, {"loss": 0.1}), [], [{"kind": "evaluated", "t": 15, "detail": '{"metrics": {"loss": 0.1}}'}]),
    (
        UpdateArrived(9.0, 3, 7, 50, 10, distance=0.25),
        [MixUpdate(DECIDED), AnswerPush(3, 7, Outcome.APPLIED, DECIDED)],
        [
            PUSHED | {"kind": "arrived", "samples": 50, "gradients": 10, "finite": 1, "distance": 0.25},
            OF_DECISION | {"outcome": "applied", "decision": 4, "keep": 0.7, "new": 0.3, "base": 0.0, "publish": 1},
        ],
    ),
    (
        UpdateArrived(9.0, 3, 7, 50, 10, finite=False),
        [AnswerPush(3, 7, Outcome.TOO_STALE, REFUSED)],
        [
            PUSHED | {"kind": "arrived", "samples": 50, "gradients": 10, "finite": 0},
            OF_DECISION | {"outcome": "too_stale", "decision": 5},
        ],
    ),
    (
        UpdateArrived(9.0, 3, 7, 50, 10, dots={"D.D": 4.0, "L.L": math.inf, "D.L": math.nan}),
        [AnswerPush(3, 7, Outcome.APPLIED, STEPPED)],
        [
            PUSHED
            | {"kind": "arrived", "samples": 50, "gradients": 10, "finite": 1}
            | {"detail": '{"dots": {"D.D": 4.0, "L.L": "inf", "D.L": "nan"}}'},
            OF_DECISION
            | {"outcome": "applied", "decision": 6, "keep": 1.0, "new": 0.25, "base": -0.25, "publish": 1}
            | {
                "detail": '{"steps": [["move", "_d", [["new", 1.0], ["base", -1.0]]], ["move", "own", [["_d", 1.0]]]], '
                '"closing": [["on_parameters", [["root", "g", 0.1, "m", "v", 1e-08]]], ["move", "g", []]], "cache": 3}'
            },
        ],
    ),
    (
        UpdateArrived(9.0, 3, 7, 50, 10, base_gone=True),
        [],
        [PUSHED | {"kind": "arrived", "samples": 50, "gradients": 10, "finite": 1, "detail": '{"base_gone": true}'}],
    ),
    (
        UpdateArrived(9.0, 3, 7, 50, 10, largest=1e20),
        [],
        [PUSHED | {"kind": "arrived", "samples": 50, "gradients": 10, "finite": 1, "detail": '{"largest": 1e+20}'}],
    ),
    (
        UpdateArrived(9.0, 3, 7, 50, 10, spent=Spent(0.5, 2.0, 0.25)),
        [],
        [
            PUSHED
            | {"kind": "arrived", "samples": 50, "gradients": 10, "finite": 1, "detail": '{"spent": [0.5, 2.0, 0.25]}'}
        ],
    ),
    (
        TimePassed(9.0),
        [
            SendTask(LEASE),
            SendTask(LEASE, 1.25),
            ReleaseTask(LEASE, revoked=True),
            ReleaseTask(LEASE, revoked=False),
            ReleaseTask(LEASE, revoked=False, silent=True),
            EndSilence(LEASE, resumed=True),
            AnswerPush(3, 7, Outcome.BUSY, retry_after_s=1.0),
            AnswerPush(3, 7, Outcome.UNKNOWN_TASK),
            AnswerPush(3, 7, Outcome.NOT_YOURS),
            AnswerPush(3, 7, Outcome.APPLIED, DECIDED, repeated=True),
            PublishVersion(15, (Larger("v", "m"),)),
            *(PublishVersion(15), EvaluateModel(15), WakeAt(99.0), TellFinished(3), TellQuarantined(3, "no")),
            Finish("15 epochs"),
        ],
        [
            {"kind": "time_passed"},
            OF_LEASE | {"kind": "leased"},
            OF_LEASE | {"kind": "leased", "asked_at": 1.25},
            OF_LEASE | {"kind": "released", "detail": '{"revoked": true}'},
            OF_LEASE | {"kind": "released", "detail": '{"revoked": false}'},
            OF_LEASE | {"kind": "released", "detail": '{"revoked": false, "silent": true}'},
            OF_LEASE | {"kind": "heard_again", "detail": '{"resumed": true}'},
            PUSHED | {"kind": "busy", "outcome": "busy"},
            PUSHED | {"kind": "unknown", "outcome": "unknown_task"},
            PUSHED | {"kind": "not_yours", "outcome": "not_yours"},
            PUSHED | {"kind": "repeated", "outcome": "applied"},
            {"kind": "group_closed", "t": 15, "detail": '{"closing": [["larger", "v", "m"]]}'},
            {"kind": "group_closed", "t": 15},
            {"kind": "finished", "detail": '{"reason": "15 epochs"}'},
        ],
    ),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a folder?#%" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    path.parent.mkdir()
    with Ledger.create(path) as made:
        yield made


def latest_arrivals(ledger: Ledger) -> dict[int, UpdateArrived]:
    """What was said about the update of each task; the last word where one was pushed again."""
    return {arrival.task: arrival for arrival in map(as_arrival, ledger.rows("arrived"))}


def published(ledger: Ledger, first: int, last: int) -> None:
    for t in range(first, last + 1):
        ledger.record(VersionPublished(float(t), t), [])


def test_every_message_has_its_row_and_nothing_else(tmp_path: Path) -> None:
    expected = [row for *_, wanted in STORIES for row in wanted]
    with Ledger.create(tmp_path / "l", verbose=True) as ledger:
        for event, commands, _ in STORIES:
            ledger.record(event, commands)
        found = [{name: value for name, value in row._asdict().items() if value is not None} for row in ledger.rows()]
    assert found == [{"sequence": n, "at": 9.0, **row} for n, row in enumerate(expected, 1)]
    assert {row["kind"] for row in expected} == set(KINDS) - {"lost", "truncated", "task_accepted", "forked"}


def test_what_was_lost_is_recorded(ledger: Ledger) -> None:
    ledger.add(lost_row(3.0, task=7, decision=12))
    (row,) = ledger.rows("lost")
    assert (row.at, row.task, row.decision) == (3.0, 7, 12)
    assert as_event(row) is None


def test_a_task_that_was_accepted_is_recorded(ledger: Ledger) -> None:
    ledger.add(task_accepted_row(3.0, 14, "line.py:task 0123"))
    (row,) = ledger.rows("task_accepted")
    assert (row.at, row.t, row.detail) == (3.0, 14, '{"task": "line.py:task 0123"}')
    assert as_event(row) is None


def test_what_follows_from_the_rest_is_recorded_only_on_demand(ledger: Ledger, tmp_path: Path) -> None:
    many: list[Event] = [TaskRequested(0.0, 1), TimePassed(0.0), UpdateMixed(0.0, 1)]
    for event in many:
        ledger.record(event, [SendTask(LEASE)])
    assert [row.kind for row in ledger.rows()] == ["leased"] * 3
    Ledger.create(tmp_path / "l", verbose=True).close()
    with Ledger.open(tmp_path / "l") as verbose:  # it stays what it was made
        for event in many:
            verbose.record(event, [])
        assert [row.kind for row in verbose.rows()] == ["requested", "time_passed", "mixed"]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(DECISIONS, max_size=8), st.lists(ARRIVALS, max_size=8), st.lists(EVALUATIONS, max_size=8))
def test_messages_read_back_equal(
    decisions: list[Decision], arrivals: list[UpdateArrived], evaluations: list[Evaluated]
) -> None:
    pushes = [UpdateArrived(d.at, d.lease.worker, d.lease.task, d.samples, d.gradients) for d in decisions]
    with tempfile.TemporaryDirectory() as folder:
        with Ledger.create(Path(folder) / "l") as ledger:
            for arrival in arrivals:
                ledger.record(arrival, [])
            for evaluation in evaluations:
                ledger.record(evaluation, [])
            for push, decision in zip(pushes, decisions, strict=True):
                ledger.record(push, [AnswerPush(push.worker, push.task, decision.outcome, decision)])
        with Ledger.open(Path(folder) / "l", read_only=True) as ledger:
            again = list(ledger.decisions())
            assert again == decisions
            assert all(mix is None or type(mix.publish) is bool for mix in (decision.mix for decision in again))
            assert all(isinstance(decision.outcome, Outcome) for decision in again)
            assert repr(ledger.evaluations()) == repr(evaluations)  # as text, for NaN is not equal to NaN
            last = {arrival.task: arrival for arrival in (*arrivals, *pushes)}
            assert repr(sorted(latest_arrivals(ledger).items())) == repr(sorted(last.items()))


@pytest.mark.parametrize("number", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 2.0**53, 1 - 2**-53, 3.0])
def test_coefficients_keep_their_bits(ledger: Ledger, number: float) -> None:
    decision = Decision(1, number, LEASE, Outcome.APPLIED, 1, 0, Mix(number, -number, number, False), 1, 1)
    ledger.record(UpdateArrived(number, 3, 7, 1, 1), [AnswerPush(3, 7, Outcome.APPLIED, decision)])
    (again,) = ledger.decisions()
    assert again.mix is not None
    assert struct.pack("<3d", *again.mix[:3]) == struct.pack("<3d", number, -number, number)
    assert again.at.hex() == number.hex()


@settings(derandomize=True, deadline=None, max_examples=40)
@given(STEPS)
def test_steps_keep_their_bits(answer: Steps) -> None:
    detail = detail_of(answer)
    json.loads(detail, parse_constant=pytest.fail)  # what is not finite would not be JSON
    assert repr(answer_in(*answer[:4], detail)) == repr(answer)
    assert repr(closing_in(detail_of_closing(answer.closing))) == repr(answer.closing)


@pytest.mark.parametrize("case", RULE_CASES)
def test_the_decisions_of_every_rule_read_back_equal(case: str, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"executor": "inline", "device_model": "lognormal:1", "epochs": 20, **RULE_CASES[case]}
    run = Simulation(TASK, Settings.of(chosen)).run()
    Simulation(TASK, Settings.of(chosen), folder=tmp_path / "run").run()
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert [decision for decision in ledger.decisions() if decision.mix] == run.decisions
        arrivals = [as_arrival(row) for row in ledger.rows("arrived")]
    asked = rule_of(Settings.of(chosen)).dots
    assert all((arrival.dots or {}).keys() == set(asked) for arrival in arrivals)


def test_the_last_word_on_an_update_counts(ledger: Ledger) -> None:
    first, second = UpdateArrived(1.0, 3, 7, 5, 6), UpdateArrived(2.0, 3, 7, 5, 6, distance=math.inf)
    for event in (first, UpdateArrived(1.5, 4, 8, 1, 1), second):
        ledger.record(event, [])
    assert latest_arrivals(ledger) == {7: second, 8: UpdateArrived(1.5, 4, 8, 1, 1)}


def test_a_whole_run_is_in_it(ledger: Ledger) -> None:
    """What the coordinator decided is what the ledger tells, for a run in which devices overtake each other."""
    coordinator = Coordinator(fedasync(0.6), Plan(in_flight_max=4, epochs=40, evaluate_every=10), seed=3)
    told = [(event, coordinator_answers) for event, coordinator_answers in _run(coordinator)]
    for event, commands in told:
        ledger.record(event, commands)
    answers = [c for _, commands in told for c in commands if isinstance(c, AnswerPush)]
    assert list(ledger.decisions()) == [answer.decision for answer in answers]
    assert ledger.evaluations() == coordinator.evaluations
    assert [row.t for row in ledger.rows("published")] == list(range(1, 41))
    assert ledger.count("leased") == sum(isinstance(c, SendTask) for _, commands in told for c in commands)
    assert [row.detail for row in ledger.rows("finished")] == ['{"reason": "40 epochs"}']
    assert [row.kind for row in ledger.rows(task=1)] == ["leased", "arrived", "decided"]


def _run(coordinator: Coordinator) -> Iterator[tuple[Event, list[Command]]]:
    heap: list[tuple[float, int, Event]] = [(0.0, 0, FleetJoined(0.0, 9))]
    number = 0
    while heap:
        at, _, event = heapq.heappop(heap)
        commands = coordinator.handle(event)
        yield event, commands
        for command in commands:
            for happening in _follows(command, at):
                number += 1
                heapq.heappush(heap, (happening.at, number, happening))


def _follows(command: Command, at: float) -> Iterator[Event]:
    match command:
        case SendTask(lease):
            yield UpdateArrived(at + 1 + lease.device % 3, lease.worker, lease.task, 10 + lease.device, 5)
        case MixUpdate(decision):
            yield VersionPublished(at, decision.t)
            yield UpdateMixed(at, decision.sequence)
        case AnswerPush():
            yield TaskRequested(at, command.worker)
        case EvaluateModel(t):
            yield Evaluated(at, t, {"loss": 1 / t})


# --- reading ---------------------------------------------------------------------------------------------------------


def test_rows_are_chosen_and_paged(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "PAGE_ROWS", 3)
    for n in range(10):
        ledger.record(VersionPublished(n, n), [])
        ledger.record(HeartbeatArrived(n, n), [])
    everything = list(ledger.rows())
    assert [row.sequence for row in everything] == list(range(1, 21))
    for kind, after in product((None, "published", "heartbeat", "left"), (0, 1, 7, 99)):
        chosen = [row for row in everything if row.sequence > after and kind in (None, row.kind)]
        for limit in (None, 0, 1, 3, 4, 50):
            assert list(ledger.rows(kind, after, limit)) == chosen[:limit]
        assert after or ledger.count(kind) == len(chosen)


def test_reading_while_recording_ends(ledger: Ledger) -> None:
    published(ledger, 1, 3)
    for row in ledger.rows():
        ledger.record(VersionPublished(row.at, 0), [])
    assert ledger.count() == 6


def test_reading_by_kind_and_by_task_uses_an_index(ledger: Ledger, path: Path) -> None:
    ledger.flush()
    with closing(sqlite3.connect(path)) as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(events)")]
        for name, value in (("kind", "evaluated"), ("task", 7)):
            query = f"EXPLAIN QUERY PLAN SELECT * FROM events WHERE {name} = ? AND sequence > 5 ORDER BY sequence"  # noqa: S608
            plan = str(connection.execute(query, (value,)).fetchall())
            assert f"events_by_{name}" in plan
            assert "TEMP B-TREE" not in plan
    assert tuple(columns) == Row._fields


def test_a_reader_sees_what_is_flushed_while_the_writer_goes_on(ledger: Ledger, path: Path) -> None:
    published(ledger, 1, 3)
    with Ledger.open(path, read_only=True) as reader:
        assert reader.count() == 0
        ledger.flush()
        some = reader.rows()
        assert next(some).t == 1
        published(ledger, 4, 5)
        ledger.flush()
        assert reader.count() == 5
        assert [row.t for row in some] == [2, 3]


def test_a_reader_cannot_write(ledger: Ledger, path: Path) -> None:
    ledger.flush()
    reader = Ledger.open(path, read_only=True)
    published(reader, 1, 1)
    with pytest.raises(OffbeatError, match="cannot write to the ledger"):
        reader.close()
    assert ledger.count() == 0


def test_rows_go_to_disk_by_themselves_many_at_a_time(
    ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "BUFFER_ROWS", 10)
    published(ledger, 1, 25)
    with Ledger.open(path, read_only=True) as reader:
        assert reader.count() == 20
    ledger.close()
    with Ledger.open(path, read_only=True) as reader:
        assert reader.count() == 25


# --- marks -----------------------------------------------------------------------------------------------------------


def without_numbers(rows: Iterator[Row]) -> list[Row]:
    return [row._replace(sequence=0) for row in rows if row.kind != "truncated"]


def test_a_run_that_returns_to_its_mark_ends_with_the_same_rows(ledger: Ledger, path: Path) -> None:
    assert ledger.mark() == 0
    published(ledger, 1, 4)
    mark = ledger.mark()
    assert mark == 4
    published(ledger, 5, 9)
    uninterrupted = without_numbers(ledger.rows())
    published(ledger, 10, 12)
    ledger.close()
    with Ledger.open(path) as resumed:
        head = resumed.head.hex()
        resumed.truncate_after(resumed.mark())
        assert resumed.count("truncated") == 0  # there was nothing to forget
        resumed.truncate_after(mark)
        (told,) = resumed.rows("truncated")
        assert (told.sequence, json.loads(told.detail or "")) == (13, {"rows": 8, "head": head})  # 12 were used
        published(resumed, 5, 9)
        assert without_numbers(resumed.rows()) == uninterrupted
        published(resumed, 77, 78)  # waits in memory: forgotten too
        resumed.truncate_after(0)
        assert [row.kind for row in resumed.rows()] == ["truncated"]


def test_a_mark_that_the_ledger_does_not_reach_is_refused(ledger: Ledger) -> None:
    published(ledger, 1, 4)
    with pytest.raises(InvalidValue, match=r"ends at row 4 .* taken at row 5: rows were lost"):
        ledger.truncate_after(5)
    assert ledger.count() == 4


# --- what can go wrong -----------------------------------------------------------------------------------------------

KILLED = """
import os, sys
from pathlib import Path
from offbeat.protocol.messages import VersionPublished
from offbeat.storage.ledger import Ledger
ledger = Ledger.create(Path(sys.argv[1]))
for t in range(1, 8):
    ledger.record(VersionPublished(0.0, t), [])
    if t == 5:
        ledger.flush()
os._exit(9)
"""


def test_a_killed_writer_leaves_what_it_flushed(path: Path) -> None:
    path.parent.mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, path], check=False).returncode == 9
    with Ledger.open(path, read_only=True) as reader:
        assert [row.t for row in reader.rows()] == [1, 2, 3, 4, 5]
    with Ledger.open(path) as resumed:
        published(resumed, 6, 7)
        assert [(row.sequence, row.t) for row in resumed.rows()] == [(n, n) for n in range(1, 8)]


def test_a_new_ledger_is_new_whatever_a_killed_writer_left_beside_it(path: Path) -> None:
    path.parent.mkdir()
    subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    path.unlink()
    assert any(path.parent.iterdir())
    with Ledger.create(path) as ledger:
        assert ledger.count() == 0
        published(ledger, 1, 1)
        assert ledger.count() == 1


def test_a_closed_ledger_is_one_file(ledger: Ledger, path: Path) -> None:
    published(ledger, 1, 3)
    ledger.close()
    ledger.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (3,)
    with Ledger.open(path, read_only=True) as reader:
        assert reader.count() == 3
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("durable", "synchronous"), [(False, 0), (True, 2)])
def test_durable_waits_for_the_disk(tmp_path: Path, durable: bool, synchronous: int) -> None:
    with Ledger.create(tmp_path / "l", durable=durable) as ledger:
        assert ledger._connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
        assert ledger._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_there_is_one_ledger_at_a_path(ledger: Ledger, path: Path) -> None:
    published(ledger, 1, 1)
    with pytest.raises(InvalidValue, match="is there already"):
        Ledger.create(path)
    assert ledger.count() == 1


def _text(path: Path) -> None:
    path.write_text("no database " * 100)


def _empty(path: Path) -> None:
    path.touch()


def _other(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE meta (key TEXT)")


def _newer(path: Path) -> None:
    Ledger.create(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
        connection.commit()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _: None, "there is no ledger"),
        (Path.mkdir, "there is no ledger"),
        (_text, "cannot be read as a ledger"),
        (_empty, "cannot be read as a ledger"),
        (_other, "cannot be read as a ledger"),
        (_newer, f"schema 99 and this version of Offbeat reads {SCHEMA}"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_ledger_is_refused(tmp_path: Path, make: Any, says: str, read_only: bool) -> None:
    path = tmp_path / "l"
    make(path)
    with pytest.raises(InvalidValue, match=says) as refused:
        Ledger.open(path, read_only=read_only)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_ledger_where_none_can_be_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "l", tmp_path / "nowhere" / "l"):
        with pytest.raises(OffbeatError, match="cannot make the ledger"):
            Ledger.create(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_kind_and_limit_are_checked_at_once(ledger: Ledger) -> None:
    with pytest.raises(InvalidValue, match="kind is 'decision'; use one of fleet_joined, "):
        ledger.rows("decision")
    with pytest.raises(InvalidValue, match="use one of"):
        ledger.count("decision")
    with pytest.raises(InvalidValue, match="limit is -1"):
        ledger.rows(limit=-1)


def test_numbers_of_numpys_are_numbers(ledger: Ledger) -> None:
    """A task, a rule or a schedule may answer what numpy counted; SQLite would take it for bytes."""
    whole: Any = np.int64(50)
    real: Any = np.float32(0.1)
    true: Any = np.bool_(True)
    lease, mix = Lease(7, 3, 5, 2, 11, 1.5, 9.0, whole, real), Mix(real, real, np.float64(0.0), true)
    decision = Decision(1, 1.0, lease, Outcome.APPLIED, 15, 3, mix, whole, whole)
    event = UpdateArrived(1.0, 3, 7, whole, whole, true, real)
    ledger.record(event, [SendTask(lease), AnswerPush(3, 7, Outcome.APPLIED, decision)])
    ledger.record(Evaluated(1.0, 1, {"loss": real, "hits": whole}), [])
    assert latest_arrivals(ledger) == {7: event}
    assert list(ledger.decisions()) == [decision]
    assert ledger.evaluations() == [Evaluated(1.0, 1, {"loss": float(real), "hits": 50.0})]
    plain = (int, float, str, type(None))
    assert all(type(value) in plain for row in ledger.rows() for value in row)


def test_a_flush_that_fails_writes_nothing_and_says_why(ledger: Ledger, path: Path) -> None:
    published(ledger, 1, 2)
    ledger.record(VersionPublished(0.0, 2**70), [])
    with pytest.raises(OffbeatError, match=r"cannot write to the ledger .*large"):
        ledger.flush()
    with Ledger.open(path, read_only=True) as reader:
        assert reader.count() == 0
    with pytest.raises(OffbeatError):
        ledger.close()
    ledger.close()


def test_every_event_reads_back_as_it_was(tmp_path: Path) -> None:
    """What a restarted server leads its coordinator through."""
    events = [event for event, _, _ in STORIES]
    with Ledger.create(tmp_path / "ledger.sqlite", verbose=True) as ledger:
        for event in events:
            ledger.record(event, [])
        assert repr([as_event(row) for row in ledger.rows()]) == repr(events)  # as text, for NaN is not equal to NaN
