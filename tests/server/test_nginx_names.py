"""The shipped nginx configuration and the names of the server: who is answered through it, below a prefix and not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.server.proxying import Front, needs_nginx
from tests.server.serving import TASK, Answered, Worker
from tests.server.speaking import Line, head, refused, until
from tests.server.test_nginx import FLEET, LEFT_OVER, Place, placed

pytestmark = needs_nginx
NAME = "fl.example.org"
EVIL = "evil.example"


@pytest.fixture(scope="module", params=["", "/fl/offbeat"], ids=["at the root", "below a prefix"])
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """With --public-name."""
    folder = tmp_path_factory.mktemp("named")
    with placed(folder, LEFT_OVER, prefix=request.param, task=TASK, public_name=NAME) as place:
        yield place


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Without: the proxy answers for the name."""
    with placed(tmp_path_factory.mktemp("unnamed"), LEFT_OVER, prefix="/fl", task=TASK) as place:
        yield place


def said(place: Place, method: str, path: str, host: str, **headers: str) -> Answered:
    fields = {"Host": host, "Content-Length": 0, "Authorization": f"Bearer {place.tokens['boss']}"}
    fields |= {name.replace("_", "-"): text for name, text in headers.items()}
    with place.line(head(method, place.proxy.prefix + path, fields, close=True)) as line:
        return line.answer()


def model_of(place: Place) -> str:
    return f"/v1/runs/{place.running.server.context.run_id}/models/0"


@pytest.mark.parametrize("path", ["/v1/status", "/session.json", "/", "model", "/v1/models/latest"])
def test_only_a_public_name_is_answered(named: Place, path: str) -> None:
    path = model_of(named) if path == "model" else path
    port = urlsplit(named.proxy.url).port
    for host in (NAME, f"{NAME}:{port}", f"localhost:{port}"):
        assert said(named, "GET", path, host).status == 200
    for more in ({}, {"X_Forwarded_Host": NAME}):
        refused(said(named, "GET", path, EVIL, **more), 421, "wrong_host")


def test_a_page_of_another_site_changes_nothing(named: Place, unnamed: Place) -> None:
    for place in (named, unnamed):
        number = Worker(place.by("w1"), "w1").number
        for path in (f"/v1/workers/{number}/quarantine", f"/workers/{number}/quarantine"):
            for headers in ({"Origin": f"https://{EVIL}"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}):
                refused(said(place, "POST", path, NAME, **headers), 403, "wrong_origin")
        for headers in ({"Origin": f"https://{NAME}"}, {"Sec_Fetch_Site": "same-origin", "Origin": f"https://{NAME}"}):
            assert said(place, "POST", f"/v1/workers/{number}/readmit", NAME, **headers).status == 204
        assert place.by("eye").call("GET", "/v1/status").json["quarantined"] == 0


def test_the_page_can_be_logged_into_by_its_public_name(named: Place, unnamed: Place) -> None:
    for place in (named, unnamed):
        form = f"token={place.tokens['eye']}".encode()
        about = {"Host": NAME, "Content-Type": "application/x-www-form-urlencoded", "Content-Length": len(form)}
        for origin, status in ((f"https://{NAME}", 303), (f"https://{EVIL}", 403)):
            asked = head("POST", f"{place.proxy.prefix}/login", about | {"Origin": origin}, close=True)
            with place.line(asked + form) as line:
                assert line.answer().status == status


def test_without_a_public_name_the_proxy_answers_for_it(unnamed: Place) -> None:
    for host in (NAME, "localhost", "192.0.2.7:8443"):
        assert said(unnamed, "GET", "/v1/status", host).status == 200


def test_head_works_through_it(named: Place) -> None:
    for path in ("/v1/health", "/v1/status", model_of(named), "/"):
        answer = named.by("eye").call("HEAD", path)
        assert (answer.status, answer.body) == (200, b""), path


def test_http_to_its_tls_port_is_told_in_words(named: Place) -> None:
    with Line(Front(named.running.server, named.running.folder, named.proxy.url), head("GET", "/v1/health")) as line:
        assert b"plain HTTP request was sent to HTTPS port" in line.answer().body


def test_many_workers_behind_one_address_wait_and_work(tmp_path: Path) -> None:
    """To the server they all are 127.0.0.1; to nginx as well. Default settings, but for the length of a poll."""
    with placed(tmp_path, {"in_flight_max": 1, "devices": 2}, prefix="", task=TASK) as place:
        busy = place.worker(0)
        busy.lease()
        with ThreadPoolExecutor(10) as pool:
            waiting = list(pool.map(place.worker, range(1, FLEET)))
        lines = []
        try:
            for number, worker in enumerate(waiting, 1):
                known = {"Authorization": f"Bearer {place.tokens[f'w{number}']}", "Content-Length": 0}
                lines.append(place.line(head("POST", f"/v1/workers/{worker.number}/ask", known | worker.session)))
            context = place.running.server.context
            until(lambda: sum(session.asking for session in context.sessions.all()) == len(waiting))
            assert place.by("eye").call("GET", "/v1/status").json["waiting"] == len(waiting)
            assert busy.work().status == 200, "who works is not in their way"
        finally:
            for line in lines:
                line.cut()
