"""The verbs of the API: updates that are cut and go on, tasks, sessions."""

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.core.model_base import ModelBase
from offbeat.errors import OffbeatError
from offbeat.worker.api_answers import RequestRefused, Unreachable
from offbeat.worker.api_client import ApiClient, Hello, OtherRun, OwnModel, common_headers
from offbeat.worker.outbox import Finished
from offbeat.worker.settings import Timeouts
from tests.unit.test_worker_http import CONTINUE, LONG_S, SLOW, Connection, Peer, said, speaking

# --- updates ---------------------------------------------------------------------------------------------------------

DATA = np.random.default_rng(0).bytes(5_000_000)
ACK: dict[str, Any] = {"task": 3, "outcome": "applied", "t": 9, "tau": 7, "staleness": 1, "alpha_t": 0.42}
ACKNOWLEDGED = json.dumps({**ACK, "repeated": False}).encode()
JOINED = {
    "worker": 5,
    "session": "5-secret",
    "device": 2,
    "run": "r1",
    "seed": 1,
    "protocol": 1,
    "version": "0.1.0",
    "task": "digits",
    "settings": {},
    "layout": "abc",
    "update_bytes_max": 10**9,
    "poll_s": 25,
    "heartbeat_s": 60,
    "state": "idle",
}


def finished_in(folder: Path) -> Finished:
    path = folder / "r1-3.safetensors"
    path.write_bytes(DATA)
    return Finished(path, "r1", 3, "d" * 64, len(DATA), 100, 10, {"loss": 0.5}, "abc", 0.25, 1.5)


@pytest.fixture
def finished(tmp_path: Path) -> Finished:
    return finished_in(tmp_path)


def joining(then: Connection, **changes: Any) -> Connection:
    """Lets the worker join, and goes on with that on the same connection."""

    def connection(peer: Peer) -> None:
        peer.request()
        peer.answer("201 Created", json.dumps(JOINED | changes).encode())
        then(peer)

    return connection


@contextmanager
def working(*connections: Connection, timeouts: Timeouts = SLOW, **changes: Any) -> Iterator[ApiClient]:
    """A worker that has joined."""
    with speaking(joining(connections[0], **changes), *connections[1:], timeouts=timeouts) as http:
        calls = ApiClient(http, Hello("w", "digits"))
        calls.join()
        yield calls


def takes(data: list[bytes], status: str = "200 OK", body: bytes = ACKNOWLEDGED) -> Connection:
    """Takes an update after 100 Continue."""

    def connection(peer: Peer) -> None:
        headers = peer.head()
        peer.offset = headers["Offbeat-Offset"]
        peer.say(CONTINUE)
        data.append(peer.body(int(headers["Content-Length"])))
        peer.answer(status, body)

    return connection


def test_an_update_is_sent_after_the_server_said_that_it_wants_it(finished: Finished) -> None:
    seen: dict[str, Any] = {}

    def connection(peer: Peer) -> None:
        seen.update(peer.head())
        assert select.select([peer.sock], [], [], 0.1)[0] == []  # nothing comes before
        peer.say(CONTINUE)
        seen["body"] = peer.body(len(DATA))
        peer.answer("200 OK", ACKNOWLEDGED)

    with working(connection) as calls:
        answer = calls.push(finished)
    assert (answer.t, answer.staleness, answer.alpha_t, answer.repeated) == (9, 1, 0.42, False)
    assert seen.pop("body") == DATA
    assert seen == {
        "Host": calls.http.address.netloc,
        "Accept-Encoding": "identity",
        "Expect": "100-continue",
        "Content-Type": "application/octet-stream",
        "Content-Length": str(len(DATA)),
        "Offbeat-Session": "5-secret",
        "Offbeat-Run": "r1",
        "Offbeat-Digest": "d" * 64,
        "Offbeat-Samples": "100",
        "Offbeat-Gradients": "10",
        "Offbeat-Download-S": "0.250000",
        "Offbeat-Train-S": "1.500000",
        "Offbeat-Layout": "abc",
        "Offbeat-Size": str(len(DATA)),
        "Offbeat-Offset": "0",
        "Offbeat-Encoding": "float32",
        "Offbeat-Metrics": '{"loss": 0.5}',
    }


def test_interim_and_final_answer_in_one_piece(finished: Finished) -> None:
    """No byte is lost between the two readers."""

    def connection(peer: Peer) -> None:
        size = int(peer.head()["Content-Length"])
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(ACKNOWLEDGED)}\r\n\r\n".encode()
        peer.say(CONTINUE + head + ACKNOWLEDGED[:20])
        peer.say(ACKNOWLEDGED[20:])
        with suppress(OSError):
            peer.body(size)

    with working(connection) as calls:
        assert calls.push(finished).t == 9


def test_a_refusal_before_the_body_saves_the_body(finished: Finished) -> None:
    rest = []

    def connection(peer: Peer) -> None:
        peer.head()
        peer.answer("409 Conflict", b'{"error": "too_stale", "message": "m", "do": "d"}')
        rest.append(peer.file.read())

    with working(connection, said("204 No Content", b"")) as calls:
        with pytest.raises(RequestRefused) as refused:
            calls.push(finished)
        calls.hand_back(3)  # on another connection: on the first one it would be taken for the body
    assert refused.value.error == "too_stale"
    assert rest == [b""]


def test_a_server_that_never_says_continue_gets_the_update_all_the_same(finished: Finished) -> None:
    seen = []

    def connection(peer: Peer) -> None:
        seen.append(peer.body(int(peer.head()["Content-Length"])))
        peer.answer("200 OK", ACKNOWLEDGED)

    with working(connection, timeouts=replace(SLOW, continue_s=0.2)) as calls:
        assert calls.push(finished).outcome == "applied"
    assert seen == [DATA]


def test_a_late_continue_does_not_stop_the_update(finished: Finished) -> None:
    """It comes when the worker has begun to send already; only a final answer ends the sending."""
    seen = []

    def connection(peer: Peer) -> None:
        size = int(peer.head()["Content-Length"])
        begun = peer.body(1000)
        peer.say(CONTINUE)
        seen.append(begun + peer.body(size - 1000))
        peer.answer("200 OK", ACKNOWLEDGED)

    with working(connection, timeouts=replace(SLOW, continue_s=0.1)) as calls:
        assert calls.push(finished).outcome == "applied"
    assert seen == [DATA]


@pytest.mark.parametrize("hard", [False, True])
def test_an_answer_in_the_middle_of_the_body_is_heard(finished: Finished, hard: bool) -> None:
    """The server has enough of it, says so, and reads no more."""

    def connection(peer: Peer) -> None:
        peer.head()
        peer.say(CONTINUE)
        peer.body(100_000)
        peer.answer("413 Too Large", b'{"error": "too_long", "message": "m", "do": "d"}', "Connection: close\r\n")
        if hard:
            assert peer.gone() or True
        else:
            peer.sock.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                peer.file.read()

    with working(connection) as calls, pytest.raises(RequestRefused) as refused:
        calls.push(finished)
    assert refused.value.error == "too_long"


def test_an_answer_is_heard_while_the_server_reads_nothing(finished: Finished) -> None:
    """Its buffers are full and the worker waits to send, when the answer comes."""
    answered = threading.Event()

    def connection(peer: Peer) -> None:
        peer.head()
        peer.say(CONTINUE)
        assert not threading.Event().wait(0.2)
        peer.answer("503 Unavailable", b'{"error": "stopping", "message": "m", "do": "d", "retry_after_s": 2}')
        assert answered.wait(LONG_S)

    began = time.monotonic()
    with working(connection, timeouts=Timeouts()) as calls:
        with pytest.raises(RequestRefused) as refused:
            calls.push(finished)
        answered.set()
    assert refused.value.retry_after_s == 2
    assert time.monotonic() - began < 5


def test_a_server_that_stops_reading_is_not_waited_for(finished: Finished) -> None:
    done = threading.Event()

    def connection(peer: Peer) -> None:
        peer.head()
        peer.say(CONTINUE)
        assert done.wait(LONG_S)

    began = time.monotonic()
    with working(connection, timeouts=replace(SLOW, answer_s=2, piece_s=0.6)) as calls:
        with pytest.raises(Unreachable):
            calls.push(finished)
        done.set()
    assert time.monotonic() - began < 9


def test_a_cut_upload_goes_on_where_the_server_stands(finished: Finished) -> None:
    got: list[bytes] = []
    heads: list[dict[str, str]] = []

    def cut(peer: Peer) -> None:
        peer.head()
        peer.say(CONTINUE)
        got.append(peer.body(1_234_567))
        peer.reset()

    def resumed(peer: Peer) -> None:
        peer.request()
        assert peer.line == "GET /v1/tasks/3/update HTTP/1.1"
        peer.answer("200 OK", b'{"offset": 1234567}')
        heads.append(peer.head())
        peer.say(CONTINUE)
        got.append(peer.body(int(heads[0]["Content-Length"])))
        peer.answer("200 OK", ACKNOWLEDGED)

    with working(cut, resumed) as calls:
        assert calls.push(finished).t == 9
    assert b"".join(got) == DATA
    assert (heads[0]["Offbeat-Offset"], heads[0]["Offbeat-Size"]) == ("1234567", str(len(DATA)))


def test_a_cut_that_brought_nothing_is_told(finished: Finished) -> None:
    def cut(peer: Peer) -> None:
        peer.head()
        peer.say(CONTINUE)
        peer.body(1000)
        peer.reset()

    where = said("200 OK", b'{"offset": 1000}')
    with working(cut, where) as calls, pytest.raises(Unreachable):
        calls.push(finished)


def test_a_wrong_offset_is_mended_and_wrong_bytes_start_over(finished: Finished) -> None:
    offsets: list[str] = []
    bodies: list[bytes] = []

    def first(peer: Peer) -> None:
        peer.request()
        peer.answer("200 OK", b'{"offset": 100}')
        offsets.append(peer.head()["Offbeat-Offset"])
        peer.answer("409 Conflict", b'{"error": "wrong_offset", "message": "m", "do": "d", "offset": 4999990}')

    def second(peer: Peer) -> None:
        takes(bodies, "400 Bad Request", b'{"error": "digest", "message": "m", "do": "d"}')(peer)
        offsets.append(peer.offset)
        takes(bodies)(peer)
        offsets.append(peer.offset)

    with working(first, second) as calls:
        assert calls.push(finished, resume=True).t == 9
    assert offsets == ["100", "4999990", "0"]
    assert bodies == [DATA[-10:], DATA]


def test_a_server_that_never_agrees_on_the_offset_is_given_up(finished: Finished) -> None:
    def connection(peer: Peer) -> None:
        peer.head()
        peer.answer("409 Conflict", b'{"error": "wrong_offset", "message": "m", "do": "d", "offset": 5}')
        assert peer.gone()

    with working(*[connection] * 5) as calls, pytest.raises(RequestRefused) as refused:
        calls.push(finished)
    assert refused.value.error == "wrong_offset"


def test_all_is_there_but_the_answer_was_lost(finished: Finished) -> None:
    heads = []

    def connection(peer: Peer) -> None:
        peer.request()
        peer.answer("200 OK", json.dumps({"offset": len(DATA)}).encode())
        heads.append(peer.head())
        peer.answer("200 OK", json.dumps({**ACK, "repeated": True}).encode())

    with working(connection) as calls:
        assert calls.push(finished, resume=True).repeated
    assert heads[0]["Content-Length"] == "0"
    assert "Expect" not in heads[0]


def test_an_upload_that_the_server_does_not_know_starts_at_its_beginning(finished: Finished) -> None:
    bodies: list[bytes] = []

    def connection(peer: Peer) -> None:
        peer.request()
        peer.answer("404 Not Found", b'{"error": "unknown_task", "message": "m", "do": "d"}')
        takes(bodies)(peer)

    with working(connection) as calls:
        calls.push(finished, resume=True)
    assert bodies == [DATA]


def test_an_update_that_lost_its_end_is_not_sent_for_ever(finished: Finished) -> None:
    finished.path.write_bytes(DATA[:100])

    def connection(peer: Peer) -> None:
        peer.head()
        peer.say(CONTINUE)
        with suppress(OSError):
            peer.file.read()

    with working(connection) as calls, pytest.raises(OffbeatError, match="is shorter than it was") as error:
        calls.push(finished)
    assert not isinstance(error.value, Unreachable)


def test_an_update_that_is_gone_is_no_trouble_of_the_connection(finished: Finished) -> None:
    finished.path.unlink()
    with working(lambda _peer: None) as calls, pytest.raises(OffbeatError, match=r"cannot read .*; make it") as error:
        calls.push(finished)
    assert not isinstance(error.value, Unreachable)


def test_too_many_metrics_are_left_out(finished: Finished) -> None:
    heads = []

    def connection(peer: Peer) -> None:
        heads.append(peer.head())
        peer.answer("200 OK", ACKNOWLEDGED)

    many = replace(finished, metrics={f"metric {i}": 0.1 for i in range(1000)})
    with working(connection) as calls:
        calls.push(many)
    assert heads[0]["Offbeat-Metrics"] == "{}"


# --- joining and asking ----------------------------------------------------------------------------------------------

LEASE = {"task": 3, "device": 2, "number": 4, "tau": 7, "seed": 1, "lease_s": None, "model": "/v1/models/7", "gamma": 1}


def test_a_worker_asks_and_gets_a_task() -> None:
    lines = []

    def connection(peer: Peer) -> None:
        for body in ({"state": "working", "lease": LEASE, "new": [1]}, {"state": "idle"}, {"state": "finished"}):
            headers = peer.request()
            lines.append((peer.line, headers["Offbeat-Session"]))
            peer.answer("200 OK", json.dumps(body).encode())

    with working(connection) as calls:
        answers = [calls.ask() for _ in range(3)]
    assert answers[0].lease is not None
    assert (answers[0].lease.tau, answers[0].lease.lease_s, answers[0].lease.gamma) == (7, None, 1)
    assert [answer.state for answer in answers] == ["working", "idle", "finished"]
    assert lines[0] == ("POST /v1/workers/5/ask HTTP/1.1", "5-secret")


@pytest.mark.parametrize(
    "odd",
    [
        {"state": "working"},
        {"state": "idle", "lease": LEASE},
        {"state": "elsewhere"},
        {"state": "working", "lease": LEASE | {"task": -1}},
        {"state": "working", "lease": LEASE | {"task": True}},
        {"state": "working", "lease": LEASE | {"task": 10**400}},
        {"state": "working", "lease": LEASE | {"gamma": "0.1"}},
        {"state": "working", "lease": {"task": 3}},
        {},
    ],
)
def test_an_answer_that_makes_no_sense_is_none(odd: dict[str, Any]) -> None:
    with working(said("200 OK", json.dumps(odd).encode())) as calls, pytest.raises(Unreachable, match="the server's"):
        calls.ask()


def test_joining_again_is_done_once_for_all_threads() -> None:
    joins = []

    def connection(peer: Peer) -> None:
        size = int(peer.head()["Content-Length"])
        joins.append(json.loads(peer.body(size)))
        peer.answer("201 Created", json.dumps(JOINED | {"session": "5-new"}).encode())
        for _ in range(2):
            assert peer.request()["Offbeat-Session"] == "5-new"
            peer.answer("200 OK", b'{"lease_s": null}')

    with working(lambda _peer: None, connection) as calls:
        beside = ApiClient(calls.http, calls.hello, calls._membership)
        assert beside.rejoin("5-secret", holding=3).session == "5-new"
        assert calls.rejoin("5-secret", holding=3).session == "5-new"
        beside.heartbeat(3)
        calls.heartbeat(3)
    assert len(joins) == 1
    assert (joins[0]["name"], joins[0]["holding"], joins[0]["device"]) == ("w", 3, None)


def test_another_connection_speaks_for_the_same_worker() -> None:
    lines = []

    def connection(peer: Peer) -> None:
        assert peer.request()["Offbeat-Session"] == "5-secret"
        lines.append(peer.line)
        peer.answer("204 No Content", b"")

    with working(connection, connection) as calls:
        calls.leave()
        calls.http.close()
        beside = calls.beside()
        beside.hand_back(3)
        beside.http.abort()
        with pytest.raises(Unreachable):
            beside.hand_back(3)
        beside.http.close()
    assert lines == ["DELETE /v1/workers/5 HTTP/1.1", "DELETE /v1/tasks/3 HTTP/1.1"]


def test_what_goes_with_every_request() -> None:
    headers = common_headers("abc")
    assert (headers["Authorization"], headers["Offbeat-Protocol"]) == ("Bearer abc", "1")
    assert headers["Offbeat-Version"] == offbeat.__version__
    assert "Authorization" not in common_headers(None)


OWN = OwnModel(12, ModelBase("b" * 64, {"base": "0" * 16}))


def test_what_was_declared_is_declared_again_after_joining_again() -> None:
    told = []

    def connection(peer: Peer) -> None:
        joined = ("201 Created", json.dumps(JOINED).encode())
        for status, body in (("204 No Content", b""), joined, ("204 No Content", b"")):
            size = int(peer.head()["Content-Length"])
            told.append((peer.line.removesuffix(" HTTP/1.1"), json.loads(peer.body(size))))
            peer.answer(status, body)

    with working(connection) as calls:
        calls.declare(OWN)
        calls.rejoin("5-secret")
    declaration = {"samples": 12, "base": "b" * 64, "frozen": {"base": "0" * 16}}
    assert [line for line, _ in told] == [
        "POST /v1/workers/5/declare",
        "POST /v1/workers",
        "POST /v1/workers/5/declare",
    ]
    assert [body for line, body in told if line.endswith("declare")] == [declaration] * 2
    assert "base" not in told[1][1], "another run may have another model"


def test_a_server_of_the_version_before_has_no_such_call() -> None:
    def connection(peer: Peer) -> None:
        peer.body(int(peer.head()["Content-Length"]))
        peer.answer("404 Not Found", b'{"error": "not_found", "message": "Not Found"}')

    with working(connection) as calls:
        calls.declare(OWN)


def test_joining_again_finds_another_run() -> None:
    other = said("201 Created", json.dumps(JOINED | {"run": "r2", "session": "5-new"}).encode())
    with working(lambda _peer: None, other) as calls:
        with pytest.raises(OtherRun):
            calls.rejoin("5-secret", holding=3)
        assert calls.session == "5-secret"  # so that the worker itself finds out
