"""Workers that vanish, fall silent and come back, before a real server; and the end, of which late workers hear."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.protocol.messages import TimePassed
from offbeat.server.server import ServeOptions
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.web.app import furnish
from tests.server import serving as served
from tests.server.serving import TASK, Answered, Running, Worker, serving
from tests.server.speaking import refused, settled, until
from tests.web.looking import Visitor


@pytest.fixture(autouse=True)
def _with_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ServeOptions", partial(ServeOptions, extend=furnish))


ONE: dict[str, Any] = {"in_flight_max": 1}


def states(running: Running) -> dict[str, str]:
    return {worker["name"]: worker["state"] for worker in running.call("GET", "/v1/workers").json["workers"]}


def beat(worker: Worker, task: int) -> Any:
    return worker.running.call("POST", f"/v1/tasks/{task}/heartbeat", headers=worker.session)


def pass_time(running: Running, seconds: float) -> None:
    """The clock of the run goes on, all at once."""
    driver = running.server.run.driver
    driver.clock._offset += seconds
    driver.tell(TimePassed).result()


def fall_silent(running: Running, worker: Worker) -> int:
    """The worker has a task and is not heard of until its place is free; the task."""
    task: int = worker.lease()["task"]
    pass_time(running, 90.0)
    assert running.status()["silent"] == 1
    return task


# --- the place -------------------------------------------------------------------------------------------------------


def test_by_default_a_worker_is_silent_after_three_heartbeats_of_30_s(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        assert running.server.begun.method.plan.silent_s == 90.0
        assert running.server.begun.method.plan.lease_s == 3600.0
        assert Worker(running).joined["heartbeat_s"] == 30.0


def test_heartbeats_are_as_frequent_as_silence_is_short(tmp_path: Path) -> None:
    with serving(tmp_path, {"silent_s": 1.5}) as running:
        assert Worker(running).joined["heartbeat_s"] == 0.5


def test_with_the_defaults_32_dead_workers_cost_the_fleet_under_two_minutes(tmp_path: Path) -> None:
    with serving(tmp_path, task=TASK.replace("devices = 8", "devices = 64")) as running:
        for n in range(32):
            Worker(running, f"dead-{n}").lease()
        alive = [Worker(running, f"alive-{n}") for n in range(32)]
        assert alive[0].ask(0.0) == {"state": "idle"}
        pass_time(running, 115.0)
        assert running.status()["silent"] == 32
        assert len({worker.lease()["task"] for worker in alive}) == 32


def test_dead_workers_do_not_hold_the_fleet_up(tmp_path: Path) -> None:
    """All places are taken by workers that are never heard of again; a lease lasts an hour."""
    with serving(tmp_path, {"silent_s": 1.0}) as running:
        for n in range(8):
            Worker(running, f"dead-{n}", device=n).lease()
        assert running.status()["in_flight"] == 8
        alive = [Worker(running, f"alive-{n}", device=n) for n in range(8)]
        for worker in alive:
            lease = until(lambda worker=worker: worker.ask(20.0).get("lease"))  # type: ignore[misc]
            assert worker.push(lease["task"], worker.train(lease)).json["outcome"] == "applied"
        assert running.status()["silent"] == 8
        assert settled(running)["t"] == 8


def test_who_is_silent_is_shown_everywhere(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        worker = Worker(running, "ann")
        fall_silent(running, worker)
        assert states(running) == {"ann": "silent"}
        assert running.status()["in_flight"] == 0
        assert b"offbeat_silent 1.0" in running.call("GET", "/metrics").body
        visitor = Visitor(running.url)
        until(lambda: visitor.get("/workers.json?state=silent")["total"] == 1)
        assert visitor.get("/overview.json")["silent"] == 1
        assert visitor.get("/overview.json")["health"]["sentence"].startswith("all 1 workers are silent")
        assert ", 1 silent" in CliRunner().invoke(main, ["status", running.url]).output
    found = json.loads(CliRunner().invoke(main, ["status", str(tmp_path / "run"), "--json"]).output)
    assert found["silent"] == 1  # also without a server


# --- coming back -----------------------------------------------------------------------------------------------------


def test_a_worker_that_comes_back_in_time_gets_its_lease_back(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        worker, other = Worker(running, "ann"), Worker(running, "bob")
        lease = worker.lease()
        pass_time(running, 90.0)
        assert running.status()["silent"] == 1
        assert beat(worker, lease["task"]).status == 200
        assert states(running)["ann"] == "working"
        shown = until(lambda: Visitor(running.url).get("/asynchrony.json")["timeline"]["tasks"])
        assert [task["task"] for task in shown] == [lease["task"]]
        assert other.ask(0.0) == {"state": "idle"}
        assert worker.push(lease["task"], worker.train(lease)).json["outcome"] == "applied"
        assert running.status()["silent"] == 0
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        (row,) = ledger.rows("heard_again")
        assert json.loads(row.detail or "") == {"resumed": True}


def test_a_place_that_was_given_away_stays_so_and_the_late_push_is_judged_once(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        worker, other = Worker(running, "ann"), Worker(running, "bob")
        lease = worker.lease()
        data = worker.train(lease)
        pass_time(running, 90.0)
        other.lease()
        refused(beat(worker, lease["task"]), 410, "released")
        first = worker.push(lease["task"], data)
        assert (first.json["outcome"], first.json["repeated"]) == ("applied", False)
        assert worker.push(lease["task"], data).json["repeated"]
        assert settled(running)["applied"] == 1


def test_a_silent_worker_that_asks_is_given_its_task_again(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        worker = Worker(running, "ann")
        task = fall_silent(running, worker)
        assert worker.lease()["task"] == task


def test_a_silent_worker_that_joins_with_its_task_has_its_lease_again(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        task = fall_silent(running, Worker(running, "ann"))
        again = Worker(running, "ann", holding=task)
        assert (states(running), running.status()["silent"]) == ({"ann": "working"}, 0)
        assert beat(again, task).status == 200


def test_a_silent_worker_that_joins_without_its_task_does_not_have_it(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        task = fall_silent(running, Worker(running, "ann"))
        again = Worker(running, "ann")
        assert (states(running), running.status()["silent"]) == ({"ann": "away"}, 0)
        refused(beat(again, task), 410, "released")


def test_another_worker_cannot_speak_for_a_silent_one(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        task = fall_silent(running, Worker(running, "ann"))
        refused(beat(Worker(running, "eve"), task), 403, "not_yours")
        assert running.status()["silent"] == 1


def test_silence_survives_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, ONE) as running:
        worker = Worker(running, "ann")
        task = fall_silent(running, worker)
    with serving(tmp_path, ONE) as running:
        assert states(running) == {"ann": "silent"}
        worker.running = running
        assert beat(worker, task).status == 200


def test_a_run_of_before_there_was_silence_goes_on_without_it(tmp_path: Path) -> None:
    with serving(tmp_path):
        pass
    file = tmp_path / "run" / "run.json"
    facts = read_json(file)
    del facts["silent_s"]
    file.write_text(json.dumps(facts))
    with serving(tmp_path) as running:
        plan = running.server.begun.method.plan
        assert (plan.silent_s, plan.hold_s) == (float("inf"), 3600.0)


# --- versions --------------------------------------------------------------------------------------------------------


def test_the_version_of_a_silent_lease_is_kept_while_it_may_return(tmp_path: Path) -> None:
    settings = {"rule": "delta", "in_flight_max": 2}
    with serving(tmp_path, settings, {"checkpoint_every": 1, "versions_bytes_max": 1}) as running:
        worker, other = Worker(running, "ann", device=0), Worker(running, "bob", device=1)
        lease = worker.lease()
        data = worker.train(lease)
        pass_time(running, 90.0)
        for _ in range(12):
            assert other.work().status == 200
            settled(running)
        until(lambda: not (tmp_path / "run" / "versions" / "2.safetensors").exists())
        assert beat(worker, lease["task"]).status == 200
        assert worker.push(lease["task"], data).json["outcome"] == "applied"
        assert settled(running)["t"] == 13


def test_a_late_push_that_is_judged_while_versions_are_pruned_can_be_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pruning has read the ledger when the decision is made, and removes files after it."""
    settings = {"rule": "delta", "in_flight_max": 2}
    limits = {"checkpoint_every": 1, "versions_bytes_max": 1}
    with serving(tmp_path, settings, limits) as running:
        versions, pushed = running.server.run.versions, list[Answered]()
        worker, other = Worker(running, "ann", device=0), Worker(running, "bob", device=1)
        lease = worker.lease()
        data = worker.train(lease)
        assert running.call("DELETE", f"/v1/tasks/{lease['task']}", headers=worker.session).status == 204
        prune = versions.prune

        def slow(needed: set[int], newest: int) -> None:
            if newest > 0 and 0 not in needed and not pushed:
                pushed.append(worker.push(lease["task"], data))
            prune(needed, newest)

        monkeypatch.setattr(versions, "prune", slow)
        while not pushed:
            assert other.work().status == 200
            settled(running)
        assert pushed[0].json["outcome"] == "applied"
        t, x = settled(running)["t"], running.x
        assert (tmp_path / "run" / "versions" / "0.safetensors").exists()
    with serving(tmp_path, settings, limits) as running:
        assert (running.x, running.status()["t"]) == (x, t)


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_comes_after_the_end_is_told_and_the_server_ends_when_all_have_left(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 1}, {"goodbye_s": 600.0}, exit_when_finished=True) as running:
        asleep, last = Worker(running, "asleep"), Worker(running, "last")
        late = asleep.lease()
        assert last.work().json["outcome"] == "applied"
        until(lambda: (running.folder / "summary.json").exists())
        assert last.ask()["state"] == "finished"
        assert running.call("DELETE", f"/v1/workers/{last.number}", headers=last.session).status == 204
        command = ["work", str(tmp_path / "line.py"), "--server", running.url, "--dir", str(tmp_path / "outbox")]
        found = CliRunner().invoke(main, command)
        assert (found.exit_code, "the run is finished" in found.output) == (0, True), found.output
        refused(asleep.push(late["task"], asleep.train(late)), 409, "finished")
        assert asleep.ask()["state"] == "finished"
        assert not running.server.stopped.is_set()
        assert running.call("DELETE", f"/v1/workers/{asleep.number}", headers=asleep.session).status == 204
        until(running.server.stopped.is_set)


def test_a_worker_that_never_comes_back_is_waited_for_no_longer_than_that(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 1}, {"goodbye_s": 0.1}, exit_when_finished=True) as running:
        assert Worker(running).work().json["outcome"] == "applied"
        until(running.server.stopped.is_set)


# --- Ringmaster ------------------------------------------------------------------------------------------------------

RING: dict[str, Any] = {"rule": "ringmaster:2", "alpha": 0.5, "in_flight_max": 2}


def pass_by(running: Running, worker: Worker) -> None:
    """Two versions are published while others are at work."""
    for t in (1, 2):
        assert worker.work().json["outcome"] == "applied"
        until(lambda t=t: running.status()["t"] == t)  # type: ignore[misc]


def test_a_worker_that_two_versions_passed_by_is_told_to_stop_and_begins_anew(tmp_path: Path) -> None:
    with serving(tmp_path, RING) as running:
        slow, fast = Worker(running, "slow"), Worker(running, "fast")
        old = slow.lease()
        pass_by(running, fast)
        refused(beat(slow, old["task"]), 410, "revoked")
        refused(slow.push(old["task"], slow.train(old)), 409, "too_stale")
        anew = slow.lease()
        assert (anew["tau"], running.status()["t"]) == (2, 2), "what was refused is no version"
        assert slow.push(anew["task"], slow.train(anew)).json["outcome"] == "applied"


def test_a_silent_worker_that_versions_passed_by_is_told_to_stop(tmp_path: Path) -> None:
    with serving(tmp_path, RING) as running:
        slow, fast = Worker(running, "slow"), Worker(running, "fast")
        task = fall_silent(running, slow)
        pass_by(running, fast)
        assert running.status()["silent"] == 1
        refused(beat(slow, task), 410, "revoked")
        assert slow.lease()["tau"] == 2
