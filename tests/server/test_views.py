"""What can be looked at: status, workers, events over a restart, metrics, health."""

import json
import re
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from prometheus_client.samples import Sample

from offbeat.storage.ledger import CHATTER, Ledger
from tests.server.serving import PATIENCE_S, TASK, Running, Worker, serving
from tests.server.speaking import Line, file_of, head, ones, refused, settled, until

NO_EVALUATION = TASK.replace('{"size": float(np.abs(model["x"]).sum())}', "{}")
DIVERGED = TASK.replace('float(np.abs(model["x"]).sum())', 'float("nan"), "large": float("inf"), "loss": 0.5')
SCHEMAS = json.loads((resources.files("offbeat.server") / "openapi.json").read_text())["components"]["schemas"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server at epoch 3; one worker has a lease, one waits for nothing, one has left."""
    with serving(tmp_path_factory.mktemp("server"), {"epochs": 50, "evaluate_every": 1}) as running:
        busy, away, gone = (Worker(running, name) for name in ("busy", "away", "gone"))
        for worker in (busy, away, away):
            assert worker.work().status == 200
        late = gone.lease()
        assert running.call("DELETE", f"/v1/workers/{gone.number}", headers=gone.session).status == 204
        assert late["task"]
        task = busy.lease()["task"]
        running.call("POST", f"/v1/tasks/{task}/heartbeat", {"progress": 0.25}, busy.session)
        refused(away.push(away.lease()["task"], file_of(ones(x=np.full(6, np.nan, np.float32)))), 422, "not_finite")
        until(running.status, lambda status: status["metrics_t"] == 3)
        yield running


# --- status, workers, health -----------------------------------------------------------------------------------------


def test_the_status_says_where_the_run_stands(running: Running) -> None:
    until(lambda: running.status()["metrics_t"] == 3)
    status = running.status()
    told = {name: status[name] for name in ("t", "epochs", "applied", "rejected", "in_flight", "queued", "workers")}
    assert told == {"t": 3, "epochs": 50, "applied": 3, "rejected": 1, "in_flight": 1, "queued": 0, "workers": 2}
    assert (status["finished"], status["reason"], status["trouble"]) == (False, None, None)
    assert (status["duplicates"], status["quarantined"], status["waiting"], status["devices"]) == (0, 0, 0, 8)
    assert status["gradients"] == 6
    assert 0 <= status["staleness_mean"] <= status["staleness_largest"] <= 2  # 0, unless mixing took a while
    assert status["metrics"]["size"] == pytest.approx(float(np.abs(np.frombuffer(running.x, np.float32)[:6]).sum()))
    assert 0 < status["disk_bytes"] < status["disk_bytes_max"]
    assert status["task"].startswith("line.py")
    assert status["run"] == json.loads((running.folder / "server.json").read_text())["run"]


def test_the_status_has_what_the_document_says(running: Running) -> None:
    status = running.status()
    assert set(SCHEMAS["Status"]["required"]) <= set(status)
    assert set(SCHEMAS["Status"]["properties"]) >= set(status), "whoever reads the document knows all of it"


def test_workers_are_listed_with_what_they_do(running: Running) -> None:
    workers = {worker["name"]: worker for worker in running.call("GET", "/v1/workers").json["workers"]}
    assert list(workers) == ["busy", "away", "gone"]
    assert [worker["worker"] for worker in workers.values()] == [0, 1, 2]
    assert [worker["device"] for worker in workers.values()] == [0, 1, 2]
    assert [worker["state"] for worker in workers.values()] == ["working", "away", "away"]
    assert (workers["busy"]["tau"], workers["busy"]["progress"]) == (3, 0.25)
    assert workers["away"]["task"] is None
    for worker in workers.values():
        assert set(SCHEMAS["Worker"]["properties"]) >= set(worker)
        assert set(SCHEMAS["Worker"]["required"]) <= set(worker)
        assert not any("-" in str(value) for value in worker.values()), "no secret is shown"


def test_a_worker_that_waits_is_idle(tmp_path: Path) -> None:
    with serving(tmp_path, {"in_flight_max": 1}) as running:
        busy, idle = Worker(running, "busy"), Worker(running, "idle")
        lease = busy.lease()
        thread = threading.Thread(target=idle.ask, args=(PATIENCE_S,))
        thread.start()
        until(running.status, lambda status: status["waiting"] == 1)
        workers = running.call("GET", "/v1/workers").json["workers"]
        assert [worker["state"] for worker in workers] == ["working", "idle"]
        assert busy.push(lease["task"], busy.train(lease)).status == 200
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_of_two_requests_of_one_worker_the_older_is_superseded(tmp_path: Path) -> None:
    with serving(tmp_path, {"in_flight_max": 1}) as running:
        busy, idle = Worker(running, "busy"), Worker(running, "idle")
        lease = busy.lease()
        ask = head("POST", f"/v1/workers/{idle.number}/ask", idle.session)
        with Line(running, ask) as older:
            until(running.status, lambda status: status["waiting"] == 1)
            with Line(running, ask) as newer:
                refused(older.answer(), 409, "superseded")
                assert busy.push(lease["task"], busy.train(lease)).status == 200
                assert newer.answer().json["lease"]["tau"] == 1


def test_the_server_says_that_it_is_alive(running: Running) -> None:
    health = running.call("GET", "/v1/health")
    assert health.json == {"state": "running", "version": health.headers["Offbeat-Version"], "protocol": 1}


def test_a_server_that_failed_says_so(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        running.server.run.driver.failure = RuntimeError("the heart stopped")
        told = refused(running.call("GET", "/v1/health"), 503, "not_now")
        assert "the heart stopped" in told["message"]
        running.server.run.driver.failure = None


def test_numbers_that_json_has_no_word_for_are_words(tmp_path: Path) -> None:
    with serving(tmp_path, {"evaluate_every": 1}, task=DIVERGED) as running:
        Worker(running).work()
        status = until(running.status, lambda status: status["metrics_t"] == 1)
        assert status["metrics"] == {"size": "nan", "large": "inf", "loss": 0.5}
        samples = parsed(running.call("GET", "/v1/metrics").body.decode())
        assert {sample.labels["name"] for sample in samples if sample.name == "offbeat_metric"} == {*status["metrics"]}


# --- metrics ---------------------------------------------------------------------------------------------------------


def parsed(text: str) -> list[Sample]:
    """As the official parser reads it."""
    return [sample for family in parse(text) for sample in family.samples]


def test_metrics_are_prometheus_text_and_agree_with_the_status(running: Running) -> None:
    answer, status = running.call("GET", "/v1/metrics"), running.status()
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = parsed(answer.body.decode())
    plain = {sample.name: sample.value for sample in samples if not sample.labels}
    updates = {sample.labels["outcome"]: sample.value for sample in samples if sample.name == "offbeat_updates_total"}
    assert (updates["applied"], updates["not_finite"]) == (status["applied"], status["rejected"])
    assert plain["offbeat_gradients_total"] == status["gradients"]
    for name in ("t", "in_flight", "queued", "workers", "waiting", "quarantined", "staleness_mean", "disk_bytes"):
        assert plain[f"offbeat_{name}"] == pytest.approx(status[name])
    assert [s.value for s in samples if s.labels == {"name": "size"}] == [status["metrics"]["size"]]


def test_what_workers_measured_is_in_the_metrics_and_cannot_spoil_them(tmp_path: Path) -> None:
    with serving(tmp_path, {"evaluate_every": 1}, task=NO_EVALUATION) as running:
        worker = Worker(running)
        said = '{"accuracy": 0.5, "nothing": NaN, "all": Infinity, "a\\"b": 1}'
        for _ in range(4):
            lease = worker.lease()
            assert worker.push(lease["task"], file_of(ones()), Offbeat_Metrics=said).status == 200
        status = until(running.status, lambda status: status["metrics"])
        assert status["metrics"]["accuracy"] == 0.5
        assert "nothing" not in status["metrics"]
        samples = parsed(running.call("GET", "/v1/metrics").body.decode())
        assert {sample.labels["name"] for sample in samples if sample.name == "offbeat_metric"} == {
            "accuracy",
            "accuracy_worst_tenth",
            'a"b',
            'a"b_worst_tenth',
            "reports",
        }


# --- events ----------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """A server-sent event."""

    id: int
    kind: str
    facts: dict[str, Any]


def follow(running: Running, after: int | None = None, limit: int | None = None) -> "Following":
    asked = {} if after is None else {"Last-Event-ID": after}
    return Following(running, head("GET", "/v1/events" + (f"?limit={limit}" if limit else ""), asked))


class Following(Line):
    """A connection on which events come."""

    def __init__(self, running: Running, data: bytes) -> None:
        super().__init__(running, data)
        status, headers = self.head()
        assert status == 200
        assert headers["Content-Type"] == "text/event-stream"
        assert headers["Cache-Control"] == "no-cache"
        assert headers["Transfer-Encoding"] == "chunked"
        self._text = b""

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        """The next event, as strictly as they are written here: three lines and an empty one."""
        while b"\n\n" not in self._text:
            size = int(self.reader.readline(), 16)
            self._text += self.reader.read(size)
            assert self.reader.readline() == b"\r\n"
            if not size:
                raise StopIteration
        text, _, self._text = self._text.partition(b"\n\n")
        lines = [line.partition(": ") for line in text.decode().split("\n")]
        assert [name for name, _, _ in lines] == ["id", "event", "data"], text
        identity, kind, data = (value for _, _, value in lines)
        return Event(int(identity), kind, json.loads(data))


def ledger_of(running: Running) -> list[int]:
    with Ledger.open(running.folder / "ledger.sqlite", read_only=True) as ledger:
        return [row.sequence for row in ledger.rows() if row.kind not in CHATTER]


def test_events_are_the_rows_of_the_ledger(running: Running) -> None:
    rows = ledger_of(running)
    with follow(running, 0, len(rows)) as events:
        told = list(events)
    assert [event.id for event in told] == rows
    assert not {event.kind for event in told} & set(CHATTER)
    assert all(event.facts["kind"] == event.kind for event in told)
    assert [event.facts["outcome"] for event in told if event.kind == "decided"] == ["applied"] * 3 + ["not_finite"]
    names = [json.loads(event.facts["detail"])["name"] for event in told if event.kind == "joined"]
    assert names == ["busy", "away", "gone"]
    assert all("sequence" not in event.facts and None not in event.facts.values() for event in told)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_stream_ends_after_as_many_as_were_asked_for(running: Running, limit: int) -> None:
    with follow(running, 0, limit) as events:
        assert [event.id for event in events] == ledger_of(running)[:limit]
        assert events.send(head("GET", "/v1/health")).answer().status == 200, "and the connection goes on"


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 16, "\xb2"])
def test_a_bad_beginning_is_refused(running: Running, after: str) -> None:
    with Line(running, head("GET", "/v1/events?limit=1", {"Last-Event-ID": after})) as line:
        refused(line.answer(), 400, "bad_request")


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "9" * 16, "%D9%A3"])
def test_a_bad_limit_is_refused(running: Running, limit: str) -> None:
    refused(running.call("GET", f"/v1/events?limit={limit}"), 400, "bad_request")


def test_whoever_asks_for_nothing_past_hears_only_what_comes(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running, "before")
        with follow(running) as events:
            Worker(running, "after")
            joined = next(event for event in events if event.kind == "joined")
        assert json.loads(joined.facts["detail"])["name"] == "after"
        assert worker.work().status == 200


def test_events_go_on_after_a_restart_without_a_gap_or_a_repetition(tmp_path: Path) -> None:
    seen: list[Event] = []

    def hear(events: Following, until_t: int) -> None:
        """Until this version was published; what came meanwhile is kept."""
        for event in events:
            seen.append(event)
            if event.kind == "published" and event.facts["t"] >= until_t:
                return

    with serving(tmp_path) as running:
        worker = Worker(running)
        with follow(running, 0) as events:
            for _ in range(3):
                assert worker.work().status == 200
            hear(events, 2)  # and some are left unread
    with serving(tmp_path) as running:
        worker.running = running
        with follow(running, seen[-1].id) as events:
            for _ in range(2):
                assert worker.work().status == 200
            hear(events, 4)
        with follow(running, seen[-1].id) as events:
            hear(events, 5)
        rows = ledger_of(running)
    assert [event.id for event in seen] == rows[: len(seen)]
    assert [event.facts["t"] for event in seen if event.kind == "published"] == [1, 2, 3, 4, 5]


def test_a_follower_far_ahead_waits_for_what_is_to_come(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        settled(running)
        ahead = running.server.run.driver.ask(lambda _: running.server.run.ledger.newest()).result() + 10
        with follow(running, ahead, 1) as events:
            for _ in range(4):
                assert worker.work().status == 200
            assert next(events).id > ahead


def test_many_can_follow_and_hear_the_end_when_the_server_stops(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        followers = [follow(running, 0) for _ in range(5)]
        Worker(running).work()
        assert {next(events).id for events in followers} == {1}
        running.server.loop.call_soon_threadsafe(running.server.stopped.set)
        for events in followers:
            assert {event.kind for event in events} >= {"joined", "decided"}, "all that was left, and a proper end"
            events.cut()


def test_every_answer_says_who_speaks(running: Running) -> None:
    for path in ("/v1/status", "/v1/health", "/v1/metrics", "/v1/openapi.json", "/v1/models/latest", "/nowhere"):
        headers = running.call("GET", path).headers
        assert headers["Offbeat-Protocol"] == "1"
        assert re.fullmatch(r"\d+\.\d+.*", headers["Offbeat-Version"])
