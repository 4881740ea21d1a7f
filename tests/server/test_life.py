"""A served run from its first worker to its end, over restarts."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import InvalidValue
from offbeat.server.verify import verify
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision
from tests.server.serving import PATIENCE_S, TASK, Worker, packed, serving, without_head


def test_a_worker_joins_trains_and_pushes(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        lease = worker.lease()
        assert (lease["tau"], lease["device"], lease["number"]) == (0, 0, 0)
        answer = worker.push(lease["task"], worker.train(lease))
        assert answer.status == 200
        assert answer.json["t"] == 1
        assert answer.json["alpha_t"] == 0.6
        assert worker.lease()["tau"] == 1
        assert np.allclose(worker.pull({"model": "/v1/models/latest"}).vector, 0.6)
        status = running.status()
        assert (status["t"], status["applied"], status["in_flight"], status["workers"]) == (1, 1, 1, 1)
    assert verify(running.folder)["agrees"]


def test_an_open_lease_is_given_again_and_a_push_is_answered_once(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        lease = worker.lease()
        assert worker.lease() == lease
        data = worker.train(lease)
        first, again = worker.push(lease["task"], data), worker.push(lease["task"], data)
        assert without_head(first.json) | {"repeated": True} == without_head(again.json)
        assert running.status()["applied"] == 1
        assert running.status()["duplicates"] == 1


def test_a_restart_goes_on_where_it_stood(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        one, two = Worker(running, "one"), Worker(running, "two")
        lease = two.lease()
        data = two.train(lease)
        for step in range(5):
            assert one.work(step).status == 200
        one.ask(0)  # the last one is mixed
        x = running.x
    with serving(tmp_path) as running:
        assert running.x == x
        assert running.status()["in_flight"] == 2
        two.running = one.running = running
        assert two.lease() == lease
        assert two.push(lease["task"], data).json["staleness"] == 5
        assert one.work().status == 200
    facts = verify(running.folder)
    assert facts["agrees"]
    assert facts["applied"] == 7


def test_settings_that_differ_are_listed(tmp_path: Path) -> None:
    with serving(tmp_path):
        pass
    with pytest.raises(InvalidValue, match=r"alpha is 0.6 there and 0.3 here"), serving(tmp_path, {"alpha": 0.3}):
        pass
    with serving(tmp_path, {"device_model": "constant"}):
        pass  # a simulated world is no part of a served run


def test_a_second_server_is_refused_and_told_who_has_the_folder(tmp_path: Path) -> None:
    with serving(tmp_path), pytest.raises(InvalidValue, match="is being written by process"), serving(tmp_path):
        pass


def test_server_json_is_there_while_it_runs(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        where = json.loads((running.folder / "server.json").read_text())
        assert where["url"] == running.url
        assert where["pid"] > 1
    assert not (running.folder / "server.json").exists()


def test_the_end_is_told_and_written_down(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 3}) as running:
        worker, waiting = Worker(running), Worker(running, "other")
        heard: list[Any] = []
        kept = [waiting.lease()]
        thread = threading.Thread(target=lambda: heard.append(Worker(running, "third", device=0).ask(20)))
        for _ in range(2):
            worker.work()
        lease = worker.lease()
        thread.start()
        while running.status()["waiting"] < 1:
            pass
        assert worker.push(lease["task"], worker.train(lease)).json["t"] == 3
        thread.join(PATIENCE_S)
        assert heard[0]["state"] == "finished"
        assert worker.ask()["state"] == "finished"
        late = waiting.push(kept[0]["task"], packed(waiting.pull({"model": "/v1/models/latest"})))
        assert (late.status, late.json["error"]) == (409, "finished")
        while not (running.folder / "summary.json").exists():
            pass
    summary = json.loads((running.folder / "summary.json").read_text())
    assert (summary["t"], summary["applied"], summary["ended"]) == (3, 3, "3 epochs")
    assert summary["size"] > 0
    with serving(tmp_path, {"epochs": 3}) as running:
        assert running.status()["finished"]
        assert Worker(running, "late").joined["state"] == "finished"
    assert verify(running.folder)["x_sha256"] == summary["x_sha256"]


def test_a_worker_that_joins_again_keeps_the_lease_that_it_holds(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        lease = Worker(running).lease()
        again = Worker(running, holding=lease["task"])
        assert again.number == 0
        assert again.lease() == lease
        assert Worker(running).lease()["task"] != lease["task"], "it said that it holds nothing"


def test_an_older_process_of_the_same_name_is_shut_out(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        older = Worker(running)
        Worker(running)
        answer = running.call("POST", "/v1/workers/0/ask", headers=older.session)
        assert (answer.status, answer.json["error"]) == (401, "replaced")


def test_a_lease_is_never_kept_by_a_closed_connection(tmp_path: Path) -> None:
    with serving(tmp_path, {"in_flight_max": 1}) as running:
        busy, gone = Worker(running, "busy"), Worker(running, "gone")
        lease = busy.lease()
        with pytest.raises(TimeoutError):
            running.call("POST", f"/v1/workers/{gone.number}/ask", headers=gone.session, timeout=0.3)
        while running.status()["waiting"]:
            pass
        assert busy.push(lease["task"], busy.train(lease)).status == 200
        assert running.status()["in_flight"] == 0
        assert Worker(running, "third").lease()["tau"] == 1


def test_damage_is_refused_by_name_and_may_be_dropped(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        for _ in range(4):
            worker.work()
    for checkpoint in sorted((running.folder / "checkpoints").glob("*.json"))[1:]:
        checkpoint.write_text("{}")  # the newest is damaged: the one before it must do
    damaged = running.folder / "updates" / "2.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with (
        pytest.raises(Exception, match=r"task 2 \(worker 0\).*epoch 2.*2.safetensors.*--drop-damaged"),
        serving(tmp_path),
    ):
        pass
    with serving(tmp_path, drop_damaged=True) as running:
        assert running.status()["t"] == 4
        x = running.x
    with serving(tmp_path) as running:
        assert running.x == x
        with Ledger.open(running.folder / "ledger.sqlite", read_only=True) as ledger:
            assert [row.task for row in ledger.rows("lost")] == [2]
            assert [as_decision(row).lease.task for row in ledger.rows("decided")] == [1, 2, 3, 4]


def test_where_the_server_has_no_data_the_workers_measure(tmp_path: Path) -> None:
    task = TASK.replace('return {"size": float(np.abs(model["x"]).sum())}', "return {}")
    with serving(tmp_path, {"epochs": 9, "evaluate_every": 2}, task=task) as running:
        worker = Worker(running)
        for number in range(9):
            lease = worker.lease()
            report = json.dumps({"accuracy": number / 10})
            assert worker.push(lease["task"], worker.train(lease), Offbeat_Metrics=report).status == 200
        while not (running.folder / "summary.json").exists():
            pass
        with Ledger.open(running.folder / "ledger.sqlite", read_only=True) as ledger:
            found = [(e.t, e.metrics["accuracy"], e.metrics["reports"]) for e in ledger.evaluations()]
    assert [t for t, _, _ in found] == [1, 3, 5, 7, 8], "two epochs each, under the newer one's number"
    assert [mean for _, mean, _ in found] == pytest.approx([0.05, 0.25, 0.45, 0.65, 0.8])
    assert sum(reports for _, _, reports in found) == 9


def test_a_page_of_another_site_cannot_step_in(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        Worker(running)
        for call in ("quarantine", "readmit"):
            path, elsewhere = f"/v1/workers/0/{call}", {"Origin": "https://elsewhere.example"}
            assert running.call("POST", path, headers=elsewhere).status == 403
            assert running.call("POST", path).status == 204
