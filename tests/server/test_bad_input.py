"""Whatever a stranger, a broken worker or a hostile one sends: refused in words, and not a bit of x_t moves."""

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.server.context import JSON_BYTES_MAX
from offbeat.server.refusals import KINDS
from tests.server.serving import Answered, Running, Worker, serving, without_head
from tests.server.speaking import Line, described, file_of, head, ones, put, refused, settled, sha256, until, untouched

NAMES = count()
ROOM = {"tasks_per_device": 1000, "in_flight_max": 8000, "epochs": 1_000_000, "evaluate_every": 1_000_000}
"""As many open leases as the tests of a module leave behind."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all of it: at the end it must be as well as at the beginning."""
    with serving(tmp_path_factory.mktemp("server"), {**ROOM, "bad_updates_max": 1_000_000}) as running:
        yield running
        assert Worker(running, "last").work().status == 200
        assert running.call("GET", "/v1/health").json["state"] == "running"


@pytest.fixture
def worker(running: Running) -> Worker:
    return Worker(running, f"w{next(NAMES)}")


# --- updates that are none -------------------------------------------------------------------------------------------

X = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
Y = {"dtype": "F32", "shape": [2, 2], "data_offsets": [24, 40]}
BODY = np.ones(10, np.float32).tobytes()
NO_MODEL = {
    "garbage": b"\xff" * 300,
    "text": b"just some words",
    "one byte": b"x",
    "only a length": (8).to_bytes(8, "little"),
    "a header that is longer than everything": (1 << 62).to_bytes(8, "little") + b"{}",
    "a header without end": (200).to_bytes(8, "little") + b"{" * 60,
    "no JSON": described(b"{x: 1}", BODY),
    "no object": described([], BODY),
    "no UTF-8": described(b'{"\xff": 1}', BODY),
    "a bomb": described(b"[" * 50_000, BODY),
    "a bomb in an entry": described(b'{"x":' + b"[" * 50_000, BODY),
    "more dimensions than there are": described({"x": {**X, "shape": [1] * 33}, "y": Y}, BODY),
    "a name that stands twice": described(b'{"x": 1, "x": 2}', BODY),
    "a number without end": described(b'{"x": {"dtype": "F32", "shape": [' + b"9" * 5000 + b"]}}", BODY),
    "no numbers": described({"x": {**X, "shape": ["6"]}, "y": Y}, BODY),
    "not whole": described({"x": {**X, "shape": [6.0]}, "y": Y}, BODY),
    "yes": described({"x": {**X, "shape": [True, 6]}, "y": Y}, BODY),
    "below zero": described({"x": {**X, "shape": [-6]}, "y": Y}, BODY),
    "an unknown dtype": described({"x": {**X, "dtype": "F31"}, "y": Y}, BODY),
    "offsets that overlap": described({"x": X, "y": {**Y, "data_offsets": [0, 16]}}, BODY),
    "offsets with a gap": described({"x": X, "y": {**Y, "data_offsets": [28, 44]}}, BODY + BODY[:4]),
    "offsets that go back": described({"x": {**X, "data_offsets": [24, 0]}, "y": Y}, BODY),
    "fewer bytes than described": described({"x": X, "y": Y}, BODY[:-4]),
    "more bytes than described": described({"x": X, "y": Y}, BODY + b"more"),
    "metadata that is no text": described({"__metadata__": {"a": 1}, "x": X, "y": Y}, BODY),
}
OF_ANOTHER_MODEL = {
    "wrong shape": ones(x=np.ones((2, 3), np.float32)),
    "larger": ones(x=np.ones(7, np.float32)),
    "missing": ones(y=None),
    "extra": ones(z=np.ones(1, np.float32)),
    "another name": {"X": ones()["x"], "y": ones()["y"]},
    "float64": ones(y=np.ones((2, 2), np.float64)),
    "float16": ones(x=np.ones(6, np.float16)),
    "int32": ones(x=np.ones(6, np.int32)),
    "empty": {},
}
NOT_FINITE = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf}


@pytest.mark.parametrize("name", NO_MODEL)
def test_what_is_no_model_is_refused_each_time_in_the_same_words(running: Running, worker: Worker, name: str) -> None:
    lease = worker.lease()
    with untouched(running):
        first = refused(worker.push(lease["task"], NO_MODEL[name]), 422, "not_a_model")
        again = refused(worker.push(lease["task"], NO_MODEL[name]), 422, "not_a_model")
    assert again == first
    assert worker.push(lease["task"], file_of(ones())).status == 200, "the lease is still open"


@pytest.mark.parametrize("name", OF_ANOTHER_MODEL)
def test_another_model_is_refused_by_the_name_of_what_does_not_fit(running: Running, worker: Worker, name: str) -> None:
    lease = worker.lease()
    with untouched(running):
        told = refused(worker.push(lease["task"], file_of(OF_ANOTHER_MODEL[name])), 422, "wrong_layout")
    assert "'" in told["message"]
    assert worker.push(lease["task"], file_of(ones())).status == 200


def test_any_order_of_the_right_arrays_is_taken(running: Running, worker: Worker) -> None:
    arrays = ones(x=np.arange(6, dtype=np.float32))
    lease = worker.lease()
    worker.push(lease["task"], file_of({name: arrays[name] for name in ("y", "x")}))
    settled(running)
    share = np.float32(0.6) * arrays["x"]
    before = worker.pull({"model": "/v1/models/latest"})["x"] - share
    assert np.ptp(before) < 1e-4, "x was not mixed with y's numbers"


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_refused_once_and_for_all(running: Running, worker: Worker, name: str) -> None:
    lease, y = worker.lease(), np.ones((2, 2), np.float32)
    y[1, 1] = NOT_FINITE[name]
    with untouched(running):
        for _ in range(2):
            refused(worker.push(lease["task"], file_of(ones(y=y))), 422, "not_finite")
    refused(worker.push(lease["task"], file_of(ones())), 409, "other_bytes")  # the task was answered


def test_a_layout_that_is_said_to_be_another_is_refused_before_the_body(running: Running, worker: Worker) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    with untouched(running), Line(running, put(worker, task, data, Offbeat_Layout="another")) as line:
        refused(line.answer(), 422, "wrong_layout")
        assert line.ended().is_closed()
    assert worker.push(task, data, Offbeat_Layout=worker.joined["layout"]).status == 200


# --- bytes that do not arrive as they were sent ----------------------------------------------------------------------


def test_a_wrong_digest_blames_nobody_and_leaves_nothing(running: Running, worker: Worker) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    with untouched(running):
        refused(worker.push(task, data[:-1] + b"\0", Offbeat_Digest=sha256(data)), 400, "digest")
    assert running.call("GET", f"/v1/tasks/{task}/update", headers=worker.session).json == {"offset": 0}
    assert kinds(running, worker) == []
    assert worker.push(task, data).status == 200


def test_a_body_that_is_cut_off_blames_nobody(running: Running, worker: Worker) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    with untouched(running):
        Line(running, put(worker, task, data) + data[:-8]).cut()
        with Line(running, put(worker, task, data, length=len(data) + 100) + data) as line:  # announced more
            assert line.ended().is_closed()
    assert kinds(running, worker) == []
    assert worker.push(task, data).status == 200


def test_a_length_that_is_too_small_cuts_the_update(running: Running, worker: Worker) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    with untouched(running), Line(running, put(worker, task, data, length=len(data) - 4) + data[:-4]) as line:
        refused(line.answer(), 400, "digest")
        assert is_refused_by_http(line.send(data[-4:]).answer()), "what was left over is no request"
        assert line.is_closed()
    assert worker.push(task, data).status == 200


def test_more_than_can_be_an_update_is_refused_before_it_is_sent(running: Running, worker: Worker) -> None:
    task, largest = worker.lease()["task"], worker.joined["update_bytes_max"]
    cases = [
        (largest + 1, {}),
        (10**14, {}),
        (10, {"Offbeat-Size": largest + 1}),
        (10, {"Offbeat-Offset": largest}),
        (10, {"Offbeat-Size": 9}),
    ]
    for length, said in cases:
        with untouched(running), Line(running, put(worker, task, b"", length, **said)) as line:
            refused(line.answer(), 413, "too_long")
            assert line.ended().is_closed()


def test_an_update_that_announces_more_than_comes_is_refused(running: Running, worker: Worker) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    with untouched(running):
        refused(worker.push(task, data, Offbeat_Size=len(data) + 8), 400, "bad_request")
    assert kinds(running, worker) == []


def test_a_body_without_a_length_is_refused(running: Running, worker: Worker) -> None:
    path, data = f"/v1/tasks/{worker.lease()['task']}/update", file_of(ones())
    chunked = {**worker.head(data), "Transfer-Encoding": "chunked"}
    with untouched(running), Line(running, head("PUT", path, chunked) + b"2\r\nab\r\n0\r\n\r\n") as line:
        refused(line.answer(), 411, "length_required")
    with untouched(running), Line(running, head("PUT", path, worker.head(data))) as line:
        answer = line.answer()  # which HTTP takes for a body of no bytes
        refused(answer, answer.status, {400: "bad_request", 411: "length_required"}[answer.status])


def test_nothing_at_all_is_no_update(running: Running, worker: Worker) -> None:
    task = worker.lease()["task"]
    with untouched(running):
        refused(worker.push(task, b""), 400, "bad_request")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "nonsense"])
def test_a_packed_body_is_refused(running: Running, worker: Worker, encoding: str) -> None:
    with untouched(running):
        answer = worker.push(worker.lease()["task"], file_of(ones()), Content_Encoding=encoding)
        refused(answer, 415, "media_type")
        joining = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        refused(running.call("POST", "/v1/workers", b"{}", joining), 415, "media_type")


def kinds(running: Running, worker: Worker) -> list[str]:
    """What the ledger holds against a worker."""
    rows = running.server.run.driver.ask(lambda _: list(running.server.run.ledger.rows("bad_update"))).result()
    return [row.kind for row in rows if row.worker == worker.number]


# --- headers ---------------------------------------------------------------------------------------------------------

BAD_HEADS: list[tuple[str, Any, int, str]] = [
    ("Offbeat-Samples", "0", 400, "bad_request"),
    ("Offbeat-Samples", "-1", 400, "bad_request"),
    ("Offbeat-Samples", "+1", 400, "bad_request"),
    ("Offbeat-Samples", "1.5", 400, "bad_request"),
    ("Offbeat-Samples", "1e3", 400, "bad_request"),
    ("Offbeat-Samples", "1_000", 400, "bad_request"),
    ("Offbeat-Samples", "0x10", 400, "bad_request"),
    ("Offbeat-Samples", "", 400, "bad_request"),
    ("Offbeat-Samples", "nan", 400, "bad_request"),
    ("Offbeat-Samples", "9" * 16, 400, "bad_request"),
    ("Offbeat-Samples", "9" * 8000, 400, "bad_request"),
    ("Offbeat-Samples", "\u0663".encode().decode("latin-1"), 400, "bad_request"),
    ("Offbeat-Samples", "\xb2", 400, "bad_request"),
    ("Offbeat-Samples", "\xff\xfe", 400, "bad_request"),
    ("Offbeat-Gradients", "-1", 400, "bad_request"),
    ("Offbeat-Gradients", "many", 400, "bad_request"),
    ("Offbeat-Offset", "-1", 400, "bad_request"),
    ("Offbeat-Offset", "1", 409, "wrong_offset"),
    ("Offbeat-Size", "0", 400, "bad_request"),
    ("Offbeat-Size", "ten", 400, "bad_request"),
    ("Offbeat-Digest", "", 400, "bad_request"),
    ("Offbeat-Digest", "0" * 63, 400, "bad_request"),
    ("Offbeat-Digest", "A" * 64, 400, "bad_request"),
    ("Offbeat-Encoding", "float16", 415, "media_type"),
    ("Content-Type", "text/plain", 415, "media_type"),
    ("Content-Type", "application/json", 415, "media_type"),
    ("Offbeat-Metrics", "[]", 400, "bad_request"),
    ("Offbeat-Metrics", "{", 400, "bad_request"),
    ("Offbeat-Metrics", '{"a": "b"}', 400, "bad_request"),
    ("Offbeat-Metrics", '{"a": {}}', 400, "bad_request"),
    ("Offbeat-Metrics", "[" * 3999, 400, "bad_request"),
    ("Offbeat-Metrics", '{"a": %s}' % ("9" * 3000), 400, "bad_request"),
    ("Offbeat-Metrics", '{"\\ud800": 1}', 400, "bad_request"),
    ("Offbeat-Metrics", '{"a\\nb": 1}', 400, "bad_request"),
    ("Offbeat-Metrics", '{"%s": 1}' % ("a" * 5000), 400, "bad_request"),
    ("Offbeat-Protocol", "2", 426, "wrong_version"),
    ("Offbeat-Protocol", "", 426, "wrong_version"),
    ("Offbeat-Protocol", "\xff" * 1000, 426, "wrong_version"),
    ("Offbeat-Session", "", 401, "unknown_session"),
    ("Offbeat-Session", "0", 401, "replaced"),
    ("Offbeat-Session", "0-\xff\xfe", 401, "replaced"),
    ("Offbeat-Session", "\xb2-x", 401, "unknown_session"),
    ("Offbeat-Session", "\u0660-x".encode().decode("latin-1"), 401, "unknown_session"),
    ("Offbeat-Session", "9" * 5000, 401, "unknown_session"),
    ("Offbeat-Session", "-1-x", 401, "unknown_session"),
]


@pytest.mark.parametrize(("name", "value", "status", "error"), BAD_HEADS)
def test_a_bad_header_is_refused(
    running: Running, worker: Worker, name: str, value: str, status: int, error: str
) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    with untouched(running), Line(running, put(worker, task, data, **{name: value}) + data) as line:
        refused(line.answer(), status, error)
    assert worker.push(task, data).status == 200


@pytest.mark.parametrize("name", ["Offbeat-Samples", "Offbeat-Gradients", "Offbeat-Digest", "Offbeat-Session"])
def test_a_missing_header_is_refused(running: Running, worker: Worker, name: str) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    headers = {**worker.head(data), "Content-Length": len(data)}
    del headers[name]
    with untouched(running), Line(running, head("PUT", f"/v1/tasks/{task}/update", headers) + data) as line:
        answer = line.answer()
    refused(answer, *((401, "unknown_session") if name == "Offbeat-Session" else (400, "bad_request")))


def test_headers_without_end_are_not_read(running: Running) -> None:
    with untouched(running), Line(running, head("GET", "/v1/health", {"X": "9" * 1_000_000})[:-2]) as line:
        assert is_refused_by_http(line.answer())
        assert line.is_closed()


def is_refused_by_http(answer: Answered) -> bool:
    """Refused before it was a request at all, in the documented words; nothing of the server's inside is told."""
    assert b"/server/" not in answer.body
    refused(answer, answer.status, answer.json["error"])
    return (answer.status, answer.json["error"]) in ((400, "bad_request"), (413, "too_long"), (426, "wrong_scheme"))


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["999999", "0", "999999999999999"])
def test_an_unknown_task_is_refused(running: Running, worker: Worker, task: str) -> None:
    data = file_of(ones())
    with untouched(running):
        refused(worker.push(int(task), data), 404, "unknown_task")
        refused(running.call("GET", f"/v1/tasks/{task}/update", headers=worker.session), 404, "unknown_task")
        refused(running.call("POST", f"/v1/tasks/{task}/heartbeat", headers=worker.session), 410, "released")
        assert running.call("DELETE", f"/v1/tasks/{task}", headers=worker.session).status == 204


@pytest.mark.parametrize(
    "task", ["-1", "x", "1.0", "9" * 16, "9" * 4000, "%00", "%D9%A3", "1%2F2", "..%2f1", "+1", "%201"]
)
def test_a_task_that_is_no_number_is_refused(running: Running, worker: Worker, task: str) -> None:
    with untouched(running):
        for method, path in (("PUT", "/update"), ("GET", "/update"), ("POST", "/heartbeat"), ("DELETE", "")):
            headers = worker.head(b"") if method == "PUT" else worker.session
            refused(running.call(method, f"/v1/tasks/{task}{path}", b"", headers), 400, "bad_request")


def test_another_workers_task_is_refused(running: Running, worker: Worker) -> None:
    task, data, thief = worker.lease()["task"], file_of(ones()), Worker(running, f"w{next(NAMES)}")
    with untouched(running):
        refused(thief.push(task, data), 403, "not_yours")
        refused(thief.push(task, b"garbage"), 403, "not_yours")
        refused(running.call("GET", f"/v1/tasks/{task}/update", headers=thief.session), 403, "not_yours")
        refused(running.call("POST", f"/v1/tasks/{task}/heartbeat", headers=thief.session), 403, "not_yours")
        running.call("DELETE", f"/v1/tasks/{task}", headers=thief.session)
        path = f"/v1/workers/{worker.number}"
        refused(running.call("POST", f"{path}/ask", headers=thief.session), 403, "not_yours")
        refused(running.call("DELETE", path, headers=thief.session), 403, "not_yours")
    assert worker.lease()["task"] == task, "nobody else can hand it back"
    assert worker.push(task, data).status == 200
    refused(thief.push(task, data), 403, "not_yours")


def test_a_push_that_comes_again_changes_nothing(running: Running, worker: Worker) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    first = worker.push(task, data).json
    with untouched(running):
        assert without_head(worker.push(task, data).json) == without_head(first) | {"repeated": True}
        refused(worker.push(task, b"something else"), 409, "other_bytes")


def test_a_session_that_has_left_is_unknown(running: Running, worker: Worker) -> None:
    task, data = worker.lease()["task"], file_of(ones())
    assert running.call("DELETE", f"/v1/workers/{worker.number}", headers=worker.session).status == 204
    with untouched(running):
        refused(worker.push(task, data), 401, "unknown_session")


def test_a_released_task_is_still_judged_and_a_revoked_one_refused(tmp_path: Path) -> None:
    chosen = {"staleness_policy": "pace", "staleness_max": 0, "pace_wait_s": 0.05}
    with serving(tmp_path, {**ROOM, **chosen}) as running:
        slow, late, quick = (Worker(running, name) for name in ("slow", "late", "quick"))
        revoked = slow.lease()
        handed_back = late.lease()  # which waits until the first one is revoked
        assert running.call("DELETE", f"/v1/tasks/{handed_back['task']}", headers=late.session).status == 204
        with untouched(running):
            refused(beat(slow, revoked), 410, "revoked")
            refused(slow.push(revoked["task"], slow.train(revoked)), 409, "too_stale")
        refused(beat(late, handed_back), 410, "released")
        assert late.push(handed_back["task"], late.train(handed_back)).status == 200
        assert quick.work().status == 200


def test_a_lease_that_ran_out_is_released_and_a_late_push_still_judged(tmp_path: Path) -> None:
    with serving(tmp_path, {**ROOM, "lease_s": 0.1}) as running:
        worker = Worker(running)
        lease = worker.lease()
        data = worker.train(lease)
        until(running.status, lambda status: status["in_flight"] == 0)
        refused(beat(worker, lease), 410, "released")
        assert worker.push(lease["task"], data).json["outcome"] == "applied"


def beat(worker: Worker, lease: Any) -> Answered:
    return worker.running.call("POST", f"/v1/tasks/{lease['task']}/heartbeat", {"progress": 0.5}, worker.session)


# --- the norm --------------------------------------------------------------------------------------------------------


def test_too_large_a_step_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, {**ROOM, "norm_max": 3.0}) as running:
        worker = Worker(running)
        lease = worker.lease()
        with untouched(running):
            refused(worker.push(lease["task"], file_of(ones())), 422, "too_large")  # sqrt(10) > 3
            lease = worker.lease()
            refused(worker.push(lease["task"], file_of(ones(x=np.full(6, 3e38, np.float32)))), 422, "too_large")
        assert worker.work(0.9).status == 200


def test_too_large_a_step_is_clipped_to_the_bit(tmp_path: Path) -> None:
    chosen = {**ROOM, "norm_max": 2.0, "norm_policy": "clip", "staleness_fn": "constant"}
    with serving(tmp_path, chosen) as running:
        first, second = Worker(running, "first"), Worker(running, "second")
        old = second.lease()  # from x_0, and mixed into x_1
        assert first.work(0.25).status == 200
        settled(running)
        x_0, x_1 = np.zeros(10, np.float32), np.frombuffer(running.x, np.float32)
        x_new = np.arange(10, dtype=np.float32)
        assert second.push(old["task"], file_of(ones(x=x_new[:6], y=x_new[6:].reshape(2, 2)))).status == 200
        settled(running)
        factor = 2.0 / np.sqrt(285.0)  # ||0, 1, ..., 9||
        keep, new, base = (np.float32(c) for c in (1 - 0.6, 0.6 * factor, 0.6 * (1.0 - factor)))
        expected = (keep * x_1 + new * x_new) + base * x_0
        assert running.x == expected.tobytes()
        lease = first.lease()
        with untouched(running):
            nan = file_of(ones(x=np.full(6, np.nan, np.float32)))
            refused(first.push(lease["task"], nan), 422, "not_finite")


# --- quarantine ------------------------------------------------------------------------------------------------------


def test_who_pushes_badly_again_and_again_is_quarantined_and_can_be_readmitted(tmp_path: Path) -> None:
    with serving(tmp_path, {**ROOM, "bad_updates_max": 3}) as running:
        bad, good = Worker(running, "bad"), Worker(running, "good")
        nan = file_of(ones(x=np.full(6, np.nan, np.float32)))
        with untouched(running):
            refused(bad.push(bad.lease()["task"], b"garbage"), 422, "not_a_model")
            refused(bad.push(bad.lease()["task"], file_of(ones(y=None))), 422, "wrong_layout")
        assert bad.work().status == 200, "what is applied makes up for it"
        with untouched(running):
            refused(bad.push(bad.lease()["task"], b"garbage"), 422, "not_a_model")
            refused(bad.push(bad.lease()["task"], nan), 422, "not_finite")
            lease = bad.lease()
            refused(bad.push(lease["task"], b"garbage"), 422, "not_a_model")  # the third in a row
            answer = running.call("POST", f"/v1/workers/{bad.number}/ask", headers=bad.session)
            refused(answer, 403, "quarantined")
            assert int(answer.headers["Retry-After"]) >= 1
            refused(bad.push(lease["task"], file_of(ones())), 403, "quarantined")
        workers = {w["name"]: w for w in running.call("GET", "/v1/workers").json["workers"]}
        assert workers["bad"]["state"] == "quarantined"
        assert "header" in workers["bad"]["why"]
        assert workers["good"]["why"] is None
        assert running.status()["quarantined"] == 1
        assert good.work().status == 200
        again = Worker(running, "bad")
        answer = running.call("POST", f"/v1/workers/{again.number}/ask", headers=again.session)
        refused(answer, 403, "quarantined")  # joining anew does not lift it
        assert running.call("POST", f"/v1/workers/{bad.number}/readmit").status == 204
        assert again.work().status == 200
        assert running.status()["quarantined"] == 0
        refused(running.call("POST", "/v1/workers/77/readmit"), 404, "not_found")


# --- JSON ------------------------------------------------------------------------------------------------------------

BAD_JSON = {
    "nothing": b"",
    "no JSON": b"{name: 1}",
    "cut off": b'{"name": "a", ',
    "no object": b"[]",
    "null": b"null",
    "a bomb of lists": b"[" * 60_000,
    "a bomb of objects": b'{"name":' * 7_000,
    "no UTF-8": b'{"name": "\xff", "protocol": 1}',
    "UTF-16 without end": b'\xff\xfe{\x00"',
    "an unknown field": b'{"name": "a", "protocol": 1, "admin": true}',
    "a missing name": b'{"protocol": 1}',
    "a missing protocol": b'{"name": "a"}',
    "a number as name": b'{"name": 1, "protocol": 1}',
    "a list as name": b'{"name": ["a"], "protocol": 1}',
    "an empty name": b'{"name": "", "protocol": 1}',
    "a name with a space": b'{"name": "a b", "protocol": 1}',
    "a name with a new line": b'{"name": "a\\nb", "protocol": 1}',
    "half a letter": b'{"name": "\\ud800", "protocol": 1}',
    "a long name": b'{"name": "%s", "protocol": 1}' % (b"a" * 101),
    "yes as protocol": b'{"name": "a", "protocol": true}',
    "text as protocol": b'{"name": "a", "protocol": "1"}',
    "not quite 1": b'{"name": "a", "protocol": 1.0}',
    "a device below 0": b'{"name": "a", "protocol": 1, "device": -1}',
    "a device that is not there": b'{"name": "a", "protocol": 1, "device": 8}',
    "a device far away": b'{"name": "a", "protocol": 1, "device": %s}' % (b"9" * 4000),
    "a number without end": b'{"name": "a", "protocol": 1, "device": %s}' % (b"9" * 5000),
    "an infinite device": b'{"name": "a", "protocol": 1, "device": 1e999}',
    "half a device": b'{"name": "a", "protocol": 1, "device": 0.5}',
    "a name that stands twice": b'{"name": "a", "name": "b", "protocol": 1}',
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_bad_json_is_refused(running: Running, name: str) -> None:
    with untouched(running):
        answer = running.call("POST", "/v1/workers", BAD_JSON[name], {"Content-Type": "application/json"})
        refused(answer, 400, "bad_request")


@pytest.mark.parametrize("progress", ["-0.1", "1.1", "1e999", "NaN", '"half"', "true", "[]", "9" * 4000])
def test_bad_progress_is_refused(running: Running, worker: Worker, progress: str) -> None:
    path = f"/v1/tasks/{worker.lease()['task']}/heartbeat"
    headers = {**worker.session, "Content-Type": "application/json"}
    answer = running.call("POST", path, b'{"progress": %s}' % progress.encode(), headers)
    refused(answer, 400, "bad_request")


@pytest.mark.parametrize("wait_s", ["-1", "nan", "inf", "1e999", "soon", "", "9" * 5000])
def test_a_bad_wait_is_refused(running: Running, worker: Worker, wait_s: str) -> None:
    path = f"/v1/workers/{worker.number}/ask?wait_s={wait_s}"
    answer = running.call("POST", path, headers=worker.session)
    if wait_s == "9" * 5000:
        return  # float() knows no number that is too long: it is infinity, or the longest wait that there is
    refused(answer, 400, "bad_request")


def test_json_that_is_too_long_or_of_another_type_is_refused(running: Running) -> None:
    body = json.dumps({"name": "a", "protocol": 1, "task": "x" * JSON_BYTES_MAX}).encode()
    with untouched(running):
        refused(running.call("POST", "/v1/workers", body, {"Content-Type": "application/json"}), 413, "too_long")
        refused(running.call("POST", "/v1/workers", b"name=a", {"Content-Type": "text/plain"}), 415, "media_type")
        refused(running.call("POST", "/v1/workers", b"<a/>"), 415, "media_type")


@pytest.mark.parametrize("protocol", [0, 2, -1, 2**63 - 1])
def test_another_protocol_is_refused(running: Running, protocol: int) -> None:
    told = refused(running.call("POST", "/v1/workers", {"name": "a", "protocol": protocol}), 426, "wrong_version")
    assert "Offbeat" in told["message"]
    refused(running.call("GET", "/v1/status", headers={"Offbeat-Protocol": str(protocol)[:4000]}), 426, "wrong_version")


# --- requests that are none ------------------------------------------------------------------------------------------

PATHS = [
    "/",
    "/v1",
    "/v2/health",
    "//v1/health",
    "/v1//health",
    "/v1/health/",
    "/v1/models/../health",
    "/v1/models/%2e%2e/health",
    "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
    "/v1/../../../../etc/passwd",
    "/v1/models/%00",
    "/v1/models/latest%00",
    "/v1/models/%ff%fe",
    "/v1/models/-1",
    "/v1/models/\u0663".encode().decode("latin-1"),
    "/v1/models/" + "9" * 8000,
    "/v1/health;jsessionid=1",
    "/v1/%68ealth/x",
]


@pytest.mark.parametrize("path", PATHS)
def test_strange_paths_lead_nowhere(running: Running, path: str) -> None:
    with untouched(running), Line(running, head("GET", path, close=True)) as line:
        answer = line.answer()
        assert is_refused_by_http(answer) or refused(answer, 404, "not_found")


def test_a_whole_address_is_a_path_too(running: Running) -> None:
    with Line(running, head("GET", "http://localhost/v1/health", close=True)) as line:
        assert line.answer().json["state"] == "running"


@pytest.mark.parametrize("method", ["PATCH", "TRACE", "OPTIONS", "POST", "DELETE", "FOO"])
def test_unknown_methods_are_refused(running: Running, method: str) -> None:
    with untouched(running), Line(running, head(method, "/v1/status", close=True)) as line:
        status, headers = line.head()
        assert (status, headers.get("Allow")) in ((405, "GET,HEAD"), (400, None))  # or no method at all


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",  # somebody speaks TLS
        b"\r\n\r\n\r\n\x00\x00",
        b"hello\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/\x00health HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: b\x00c\r\n\r\n",
        b"POST /v1/workers HTTP/1.1\r\nHost: localhost\r\nContent-Length: -4\r\n\r\n",
        b"POST /v1/workers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/workers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/workers HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_the_connection_closed(running: Running, data: bytes) -> None:
    with untouched(running), Line(running, data) as line:
        assert is_refused_by_http(line.answer())
        assert line.is_closed()


def test_an_expectation_that_nobody_knows_is_ignored_or_refused_in_words(running: Running) -> None:
    with Line(running, head("GET", "/v1/health", {"Expect": "miracles"}, close=True)) as line:
        answer = line.answer()
    assert answer.status == 200 or answer.json["do"]


# --- connections -----------------------------------------------------------------------------------------------------


def test_who_says_nothing_and_who_is_one_too_many_takes_no_place(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"head_s": 1.0, "connections_max": 4, "connections_share": 1.0}) as running:
        with Line(running, b"GET /v1/hea") as slow, Line(running) as silent:
            assert slow.is_closed()
            assert silent.is_closed()
        health = head("GET", "/v1/health")
        lines = [Line(running, health) for _ in range(4)]
        assert [line.answer().status for line in lines] == [200] * 4
        with Line(running) as extra:
            refused(extra.answer(), 503, "not_now")
            assert extra.is_closed()
        with Line(running) as extra:
            assert extra.reader.readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        assert [line.send(health).answer().status for line in lines] == [200] * 4, "who is in stays in"
        for line in lines:
            line.cut()
        until(lambda: running.call("GET", "/v1/health").status, lambda status: status == 200)
        assert Worker(running).work().status == 200


def test_no_more_workers_join_than_may(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, {"workers_max": 2}) as running:
        Worker(running, "one")
        Worker(running, "two")
        refused(running.call("POST", "/v1/workers", {"name": "three", "protocol": 1}), 503, "not_now")
        assert Worker(running, "two").work().status == 200, "who was there may come back"


# --- whatever the bytes ----------------------------------------------------------------------------------------------


def test_every_refusal_says_what_to_do() -> None:
    for kind in KINDS.values():
        assert 400 <= kind.status < 600
        assert kind.do.endswith(".")


VALID = file_of(ones())
HEADER_END = len(VALID) - 40
DOCUMENTED = {200, 400, 413, 422}
edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "insert", "delete", "copy"]),
        st.one_of(st.integers(0, 8), st.integers(0, HEADER_END), st.integers(0, len(VALID))),
        st.binary(min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes: list[tuple[str, int, bytes]]) -> bytes:
    out = bytearray(data)
    for how, at, other in changes:
        at = min(at, len(out))
        match how:
            case "flip":
                out[at : at + 1] = bytes(byte ^ other[0] for byte in out[at : at + 1])
            case "insert":
                out[at:at] = other
            case "delete":
                del out[at : at + len(other)]
            case "copy":
                out[at:at] = out[max(0, at - 3 * len(other)) : at]
    return bytes(out)


@given(changes=edits, number=st.sampled_from([None, 0, 7, 41, 2**31, 2**63, 2**64 - 1]))
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_are_an_update_or_a_refusal(
    running: Running, changes: list[tuple[str, int, bytes]], number: int | None
) -> None:
    data = edited(VALID, changes)
    if number is not None:
        data = number.to_bytes(8, "little") + data[8:]
    worker = Worker(running, "fuzz")
    task = worker.lease()["task"]
    before = settled(running)
    answer = worker.push(task, data)
    assert answer.status in DOCUMENTED, answer
    if answer.status != 200:
        refused(answer, answer.status, answer.json["error"])
        assert settled(running)["applied"] == before["applied"]
    assert np.isfinite(np.frombuffer(running.x, np.float32)).all()


@given(changes=edits)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_request_or_a_refusal(running: Running, changes: list[tuple[str, int, bytes]]) -> None:
    worker = Worker(running, "fuzz")
    said = put(worker, worker.lease()["task"], VALID)
    with Line(running, edited(said, [(how, 3 * at, other) for how, at, other in changes]) + VALID) as line:
        told = line.ended().reader.read()
    assert not re.match(rb"HTTP/1.[01] 5", told), told
    assert running.call("GET", "/v1/health").status == 200
