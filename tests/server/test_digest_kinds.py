"""Updates with BLAKE3 digests beside those with SHA-256, and workers and servers that know one kind only."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("blake3")

from offbeat.digests import BLAKE3, SHA256, Hasher, kind_of
from offbeat.server import calls, pushes
from offbeat.server.verify import verify
from offbeat.storage.disk import Disk
from offbeat.task import Task, Trained
from offbeat.worker.api_answers import Joined
from offbeat.worker.api_client import ApiClient, Hello
from offbeat.worker.http_client import HttpClient
from offbeat.worker.journal import Journal
from offbeat.worker.loop import Worker as RealWorker
from offbeat.worker.outbox import Outbox
from offbeat.worker.settings import WorkerSettings
from tests.server.serving import TASK, Answered, Running, Worker, packed, serving
from tests.server.speaking import Line, head, put, refused, settled, untouched

ROOM = {"tasks_per_device": 1000, "in_flight_max": 8000, "epochs": 1_000_000, "evaluate_every": 1_000_000}
LARGE = TASK.replace("np.zeros(6, np.float32)", "np.zeros(1_000_000, np.float32)")
ALL = {"keep_updates": "all"}


def blake3(data: bytes) -> str:
    hasher = Hasher(BLAKE3)
    hasher.update(data)
    return hasher.text()


def push(worker: Worker, task: int, data: bytes) -> Answered:
    return worker.push(task, data, Offbeat_Digest=blake3(data))


def recorded(folder: Path, task: int) -> list[str]:
    connection = sqlite3.connect(f"file:{folder / 'ledger.sqlite'}?mode=ro", uri=True)
    rows = connection.execute(
        "SELECT json_extract(detail, '$.digest') FROM events WHERE kind = 'arrived' AND task = ?", (task,)
    ).fetchall()
    connection.close()
    return [digest for (digest,) in rows]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path, ROOM, ALL) as running:
        yield running
    assert verify(running.folder)["agrees"]


# --- on the server ---------------------------------------------------------------------------------------------------


def test_either_kind_is_taken_and_recorded_as_it_came(running: Running) -> None:
    worker = Worker(running)
    assert worker.joined["digests"] == [BLAKE3, SHA256]
    first, second = worker.lease(), None
    data = worker.train(first)
    assert push(worker, first["task"], data).json["outcome"] == "applied"
    second = worker.lease()
    assert worker.push(second["task"], data).json["outcome"] == "applied"
    assert recorded(running.folder, first["task"]) == [blake3(data)]
    assert [kind_of(digest) for digest in recorded(running.folder, second["task"])] == [SHA256]


def test_a_wrong_one_is_noticed_and_starts_over(running: Running) -> None:
    worker = Worker(running)
    lease = worker.lease()
    data = worker.train(lease)
    with untouched(running):
        refused(worker.push(lease["task"], data, Offbeat_Digest=blake3(data[:-1])), 400, "digest")
        refused(worker.push(lease["task"], data, Offbeat_Digest="md5:" + "0" * 64), 400, "bad_request")
    assert push(worker, lease["task"], data).json["outcome"] == "applied"


def test_the_same_bytes_are_known_by_either_kind_and_others_are_refused(running: Running) -> None:
    worker = Worker(running)
    lease = worker.lease()
    task, data, other = lease["task"], worker.train(lease), worker.train(lease, step=2.0)
    assert push(worker, task, data).json["repeated"] is False
    with untouched(running):
        assert push(worker, task, data).json["repeated"] is True
        assert worker.push(task, data).json["repeated"] is True
        refused(push(worker, task, other), 409, "other_bytes")
        refused(worker.push(task, other), 409, "other_bytes")


def test_a_cut_upload_goes_on_with_its_kind(running: Running) -> None:
    worker = Worker(running)
    lease = worker.lease()
    data = worker.train(lease)
    facts: dict[str, Any] = {"Offbeat-Digest": blake3(data), "Offbeat-Size": len(data)}
    with Line(running, put(worker, lease["task"], data, Expect="100-continue", **facts)) as line:
        assert line.head()[0] == 100
        line.send(data[:100])
        running.call("GET", "/v1/health")
    there = 0
    while not there:
        answer = running.call("GET", f"/v1/tasks/{lease['task']}/update", headers=worker.session)
        there = int(answer.json["offset"])
    assert worker.push(lease["task"], data[there:], **facts, Offbeat_Offset=there).json["outcome"] == "applied"


def test_a_restart_and_verify_find_an_update_that_was_changed(tmp_path: Path) -> None:
    with serving(tmp_path, ROOM, ALL) as running:
        worker = Worker(running)
        for _ in range(3):
            lease = worker.lease()
            assert push(worker, lease["task"], worker.train(lease)).status == 200
        settled(running)
    assert verify(running.folder)["replayed"] == 3
    file = running.folder / "updates" / f"{lease['task']}.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = verify(running.folder)
    assert not found["agrees"]
    assert any("does not hold what was acknowledged" in sentence for sentence in found["wrong"])


def test_a_server_without_the_package_says_so_and_refuses_the_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (calls, pushes):
        monkeypatch.setattr(module, "known_digests", lambda: (SHA256,))
    with serving(tmp_path, ROOM) as running:
        worker = Worker(running)
        assert worker.joined["digests"] == [SHA256]
        lease = worker.lease()
        data = worker.train(lease)
        said = refused(push(worker, lease["task"], data), 400, "bad_request")
        assert "blake3" not in said["message"]
        assert worker.push(lease["task"], data).status == 200


# --- the body, past the parser ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_the_next_request_follows_on_the_same_connection(running: Running, at_once: bool) -> None:
    worker = Worker(running)
    with Line(running) as line:
        for step in (1.0, 2.0, 3.0):
            lease = worker.lease()
            data, more = worker.train(lease, step), head("GET", "/v1/health")
            body = put(worker, lease["task"], data) + data
            for part in [body + more] if at_once else [body[:-3], body[-3:] + more[:5], more[5:]]:
                line.send(part)
            assert line.answer().json.get("outcome") == "applied", step
            assert line.answer().status == 200


@pytest.mark.parametrize("kept", [True, False], ids=["in one piece", "in pieces"])
@pytest.mark.parametrize("where", [0, 262_128, 999_999, -1])
def test_a_nan_is_found_wherever_it_stands(
    tmp_path: Path, where: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr("offbeat.server.body_receiver.WHOLE_BYTES_MAX", 0)
    with serving(tmp_path, ROOM, task=LARGE) as running:
        worker = Worker(running)
        lease = worker.lease()
        model = worker.pull(lease).copy()
        model.vector[where] = np.nan
        with untouched(running):
            refused(push(worker, lease["task"], packed(model)), 422, "not_finite")
        lease = worker.lease()
        model.vector[:] = np.arange(len(model.vector), dtype=np.float32)
        assert push(worker, lease["task"], packed(model)).json["outcome"] == "applied"
        settled(running)
        assert running.x == (np.float32(0.6) * model.vector).tobytes()
    assert verify(running.folder)["agrees"]


# --- a real worker ---------------------------------------------------------------------------------------------------


class Small:
    devices = 8

    def initial(self, _seed: int) -> dict[str, Any]:
        return {"x": np.zeros(6, np.float32), "y": np.zeros((2, 2), np.float32)}

    def train(self, model: Any, _work: Any) -> Trained:
        model["x"][:] += 1
        return Trained(samples=5, gradients=2)


def borne_out(running: Running, folder: Path) -> bool:
    """Has the ledger of the server, which has stopped, everything that the worker was told?"""
    found = verify(running.folder, folder / "journal")
    return bool(found["agrees"]) and found["journal"] == 3


def worked(running: Running, folder: Path) -> set[str]:
    """The kinds of digests in the journal of a real worker, which works until the run ends."""
    settings = WorkerSettings(running.url, name="real")
    client = ApiClient(HttpClient(settings.address), Hello("real", "small"))
    journal = Journal(folder / "journal")
    with Outbox(folder / "outbox", Disk(), name="real") as outbox:

        def make(_joined: Joined) -> Task:
            return Small()  # type: ignore[return-value]

        RealWorker(client, outbox, make, settings, journal=journal).run()
    journal.close()
    lines = (folder / "journal").read_text().splitlines()
    return {"blake3" if '"blake3:' in line else "sha256" for line in lines}


def test_a_worker_uses_the_faster_kind_where_the_server_takes_it(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 3}, ALL) as running:
        assert worked(running, tmp_path) == {"blake3"}
    assert borne_out(running, tmp_path)


def test_a_worker_of_now_works_with_a_server_that_says_nothing_of_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = calls._about

    def before(*arguments: Any) -> dict[str, Any]:
        return {name: value for name, value in about(*arguments).items() if name != "digests"}

    monkeypatch.setattr(calls, "_about", before)
    monkeypatch.setattr(pushes, "known_digests", lambda: (SHA256,))
    with serving(tmp_path, {"epochs": 3}, ALL) as running:
        assert worked(running, tmp_path) == {"sha256"}
    assert borne_out(running, tmp_path)


def test_an_update_that_lies_on_the_disk_gets_a_digest_that_the_server_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (calls, pushes):
        monkeypatch.setattr(module, "known_digests", lambda: (SHA256,))
    with serving(tmp_path, {"epochs": 3}, ALL) as running:
        worker = Worker(running, "real")
        lease = worker.lease()
        model = worker.pull(lease).copy()
        with Outbox(tmp_path / "outbox", Disk(), name="real") as outbox:
            kept = outbox.keep(worker.joined["run"], lease["task"], model, Trained(5, 2), kind=BLAKE3)
            assert kind_of(kept.digest) == BLAKE3
        assert worked(running, tmp_path) == {"sha256"}
        assert settled(running)["applied"] == 3
    assert borne_out(running, tmp_path)
