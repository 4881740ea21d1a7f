"""The page of a real server, beside its API: live, with real tokens over TLS, and an administrator who steps in."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.server import certificates
from offbeat.server.access import TOKENS, Role, TokenBook
from offbeat.server.server import ServeOptions
from offbeat.server.settings import AccessSettings
from offbeat.web.app import furnish
from offbeat.web.pages import POLICY
from offbeat.web.run_reader import RunReader
from offbeat.worker.settings import trusted
from tests.server import serving as served
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import file_of, ones, refused, until
from tests.server.test_access_control import As
from tests.web.looking import Listener, Told, Visitor, rows_of


@pytest.fixture(autouse=True)
def _with_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ServeOptions", partial(ServeOptions, extend=furnish))


@pytest.fixture
def running(tmp_path: Path, _with_page: None) -> Iterator[Running]:
    with serving(tmp_path, {"epochs": 50, "evaluate_every": 1}) as running:
        yield running


def test_the_page_is_beside_the_api(running: Running) -> None:
    visitor = Visitor(running.url)
    assert visitor.get("/session.json")["role"] == "admin"
    assert visitor.get("/overview.json")["health"] == {
        "level": "warning",
        "sentence": "no workers: start some with offbeat work",
    }
    assert running.call("GET", "/v1/health").json["state"] == "running"
    assert "Content-Security-Policy" not in running.call("GET", "/v1/health").headers
    lost = visitor.call("GET", "/nowhere")
    assert (lost.status, lost.headers["Content-Security-Policy"]) == (404, POLICY)


def test_an_epoch_arrives_live(running: Running) -> None:
    visitor, worker = Visitor(running.url), Worker(running, "ann")
    listener = Listener(visitor)
    while listener.next()["data"]["t"] != 0:
        pass
    assert worker.work().status == 200
    while (word := listener.next())["data"]["t"] < 1:
        pass
    found = visitor.get("/overview.json")
    assert found["t"] == 1
    assert found["sequence"] >= word["data"]["sequence"]
    listener.close()


def test_the_numbers_are_those_of_the_api(running: Running) -> None:
    visitor = Visitor(running.url)
    busy, away, gone = (Worker(running, name) for name in ("busy", "away", "gone"))
    for worker in (busy, away, away, busy):
        assert worker.work().status == 200
    gone.lease()
    running.call("DELETE", f"/v1/workers/{gone.number}", headers=gone.session)
    refused(away.push(away.lease()["task"], file_of(ones(x=np.full(6, np.nan, np.float32)))), 422, "not_finite")
    task = busy.lease()["task"]
    running.call("POST", f"/v1/tasks/{task}/heartbeat", {"progress": 0.5}, busy.session)
    status = until(running.status, lambda status: status["metrics_t"] == 4)
    found = until(lambda: visitor.get("/overview.json"), lambda found: found["metrics_t"] == 4)
    for name in ("t", "epochs", "applied", "gradients", "in_flight", "queued", "workers", "duplicates", "metrics"):
        assert found[name] == status[name], name
    assert (found["rejected"], found["run"]["served"], found["run"]["state"]) == ({"not_finite": 1}, True, "running")
    assert found["health"]["sentence"] == "healthy"
    assert found["at_s"] >= rows_of(running.folder)[-1].at - 1.0
    assert found["eta_s"] > 0
    states = {w["name"]: w["state"] for w in visitor.get("/workers.json")["workers"]}
    api = {w["name"]: w["state"] for w in running.call("GET", "/v1/workers").json["workers"]}
    assert states == api == {"busy": "working", "away": "away", "gone": "away"}
    told = Told(rows_of(running.folder))
    kinds = [line["kind"] for line in visitor.get(f"/updates/{told.applied[0].task}.json")["story"]]
    assert [kind for kind in kinds if kind not in ("mixed", "published")] == ["leased", "arrived", "decided"]
    assert sorted(kinds[3:]) == ["mixed", "published"]


def test_an_administrator_quarantines_and_readmits(running: Running) -> None:
    visitor, worker = Visitor(running.url), Worker(running, "ann")
    csrf = {"X-CSRF-Token": visitor.get("/session.json")["csrf"]}
    assert worker.work().status == 200

    def state() -> Any:
        return visitor.get("/workers.json")["workers"][0]

    assert visitor.call("POST", f"/workers/{worker.number}/quarantine", headers=csrf).status == 204
    assert state()["state"] == "quarantined"  # at once
    assert state()["why"]
    assert visitor.get("/overview.json")["health"]["sentence"] == "all 1 workers are quarantined"
    assert running.status()["quarantined"] == 1
    assert visitor.call("POST", f"/workers/{worker.number}/readmit", headers=csrf).status == 204
    assert state()["state"] == "away"
    assert worker.work().status == 200
    assert visitor.call("POST", "/workers/77/readmit", headers=csrf).status == 404


def test_a_finished_run_goes_on_being_shown(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 2}) as running:
        visitor, worker = Visitor(running.url), Worker(running, "ann")
        listener = Listener(visitor)
        for _ in range(2):
            assert worker.work().status == 200
        found = until(
            lambda: visitor.get("/overview.json"), lambda found: found["health"]["sentence"] == "finished: 2 epochs"
        )
        assert (found["t"], found["run"]["state"], found["eta_s"]) == (2, "finished", None)
    assert b"moved" in listener.answer.read()  # it has ended, with what was not read yet
    listener.close()
    assert not (running.folder / "ledger.sqlite-wal").exists()  # whoever looked is gone


def test_trouble_is_shown(running: Running) -> None:
    running.server.context.troubles.note("evaluation", "version 3 could not be evaluated")
    found = Visitor(running.url).get("/overview.json")
    assert found["health"] == {"level": "bad", "sentence": "trouble: version 3 could not be evaluated"}


def test_tokens_over_tls(tmp_path: Path) -> None:
    access = tmp_path / "access"
    certificates.make(access, ["localhost"])
    book = TokenBook.begin(access / TOKENS)
    tokens = book.add_all({"eye": Role.VIEWER, "boss": Role.ADMIN})
    trust = trusted(access / certificates.CA_CERT)
    with serving(tmp_path, {"epochs": 5}, {"host": "localhost"}, access=AccessSettings(access)) as running:
        nobody = As(running.server, running.folder, running.url, trust)
        for path in ("/overview.json", "/workers.json", "/events", "/runs.json"):
            assert nobody.call("GET", path).status == 401
        assert nobody.call("GET", "/").status == 303
        answer = nobody.call("POST", "/login", {"token": tokens["eye"]})
        assert answer.status == 303
        assert "Secure" in answer.headers["Set-Cookie"]
        cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
        assert nobody.call("GET", "/overview.json", headers=cookie).json["t"] == 0
        csrf = {"X-CSRF-Token": nobody.call("GET", "/session.json", headers=cookie).json["csrf"]}
        assert nobody.call("POST", "/workers/0/quarantine", headers=cookie | csrf).status == 403
        boss = As(running.server, running.folder, running.url, trust, tokens["boss"])
        assert boss.call("POST", "/workers/0/quarantine").status == 404
        assert boss.call("GET", "/overview.json").status == 200


@pytest.mark.parametrize("where", [{"host": "0.0.0.0"}, {"behind_proxy": True}])  # noqa: S104
def test_beyond_this_machine_without_tokens_nothing_is_shown(tmp_path: Path, where: dict[str, Any]) -> None:
    with serving(tmp_path, {"epochs": 5}, where, access=AccessSettings(insecure=True)) as running:
        here = Running(running.server, running.folder, running.url.replace("0.0.0.0", "127.0.0.1"))  # noqa: S104
        assert here.call("GET", "/v1/status").status == 200, "workers and --insecure are another matter"
        for path in ("/", "/workers", "/overview.json", "/workers.json", "/updates/1.json", "/events", "/session.json"):
            answer = here.call("GET", path)
            assert (answer.status, b"not shown here" in answer.body) == (403, True), path
        assert here.call("POST", "/workers/0/quarantine").status == 403
        assert here.call("GET", "/metrics").status == 403


def test_a_server_counts_for_its_page_when_somebody_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = list[str]()
    refresh = RunReader.refresh

    def noted(reading: RunReader, least_s: float = 1.0) -> int:
        looked.append(reading.name)
        return refresh(reading, least_s)

    monkeypatch.setattr(RunReader, "refresh", noted)
    with serving(tmp_path) as running:
        for path in ("/v1/health", "/v1/status", "/login"):
            assert running.call("GET", path).status == 200
        assert looked == []
        assert Visitor(running.url).call("GET", "/").status == 200
        until(lambda: looked, bool)
