"""The shipped nginx configuration before a real server: what is kept, for whom, and that all else passes through."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from threading import Barrier, Timer
from time import monotonic
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from offbeat.server import certificates
from offbeat.server.access import TOKENS, Role, TokenBook
from offbeat.server.server import ServeOptions
from offbeat.server.settings import AccessSettings
from offbeat.web.app import furnish
from offbeat.web.login import TRIES_MAX
from offbeat.worker.api_answers import RequestRefused
from offbeat.worker.api_client import ApiClient, Hello, common_headers
from offbeat.worker.http_client import HttpClient
from offbeat.worker.outbox import Finished
from offbeat.worker.settings import Address, trusted
from tests.server import serving as served
from tests.server.proxying import SHIPPED, Front, Nginx, free_port, needs_nginx, nginx
from tests.server.serving import PATIENCE_S, TASK, Answered, Running, Worker, packed, serving
from tests.server.speaking import Line, head, refused, sha256, until

PREFIX = "/fl/offbeat"
FLEET, REAL = 50, 2
NUMBERS = 1_000_000
LARGE = (
    TASK.replace("np.zeros(6, np.float32)", f"np.zeros({NUMBERS}, np.float32)")
    .replace("standard_normal(6)", "standard_normal(1)")
    .replace("devices = 8", "devices = 60")
)
POLL_S, SOON_S = 20.0, 10.0
"""What comes through at once is there long before a poll ends."""
LEFT_OVER = {"tasks_per_device": 1000, "in_flight_max": 8000, "evaluate_every": 1_000_000}
ROLES = {"eye": Role.VIEWER, "boss": Role.ADMIN, "gone": Role.WORKER}


@dataclass
class Place:
    """A server with tokens, and nginx before it."""

    running: Running
    proxy: Nginx
    access: Path
    book: TokenBook
    tokens: dict[str, str]

    def by(self, name: str = "") -> Front:
        """Through nginx, as whoever has this token."""
        return self.proxy.front(self.running, self.access, self.tokens.get(name, name))

    def worker(self, number: int) -> Worker:
        return Worker(self.by(f"w{number}"), f"w{number}")

    def counted(self, name: str) -> int:
        """What the server itself says that it has sent or received."""
        found = re.search(rf"^offbeat_{name}_total (\S+)$", self.by("boss").call("GET", "/metrics").body.decode(), re.M)
        return int(float(found[1])) if found else 0

    def line(self, data: bytes) -> Line:
        """A connection to nginx whose every byte the test sends."""
        trust = trusted(self.access / certificates.CA_CERT)
        return Line(self.by("boss"), data, tls=trust)


@contextmanager
def placed(
    folder: Path, settings: dict[str, Any], *, prefix: str, task: str = LARGE, public_name: str = ""
) -> Iterator[Place]:
    """A server with TLS and tokens on loopback, and the shipped configuration before it."""
    access = folder / "access"
    certificates.make(access, ["localhost"])
    book = TokenBook.begin(access / TOKENS)
    tokens = book.add_all(ROLES | {f"w{number}": Role.WORKER for number in range(FLEET + REAL)})
    limits = {"behind_proxy": True, "poll_s": POLL_S, "public_name": public_name}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(served, "ServeOptions", partial(ServeOptions, extend=furnish))
        with (
            serving(folder, settings, limits, task=task, access=AccessSettings(access)) as running,
            nginx(folder / "nginx", running.url, access, prefix=prefix) as proxy,
        ):
            yield Place(running, proxy, access, book, tokens)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with placed(tmp_path_factory.mktemp("place"), LEFT_OVER, prefix=PREFIX) as place:
        yield place


def test_a_long_poll_may_take_as_long_as_the_server_allows() -> None:
    found = re.search(r"proxy_read_timeout (\d+)s;", SHIPPED.read_text())
    assert found is not None
    assert int(found[1]) > 3600, "poll_s may be an hour"


class TestModels:
    """What is kept, and for whom."""

    pytestmark = needs_nginx

    def test_a_fleet_pulls_one_epoch_and_the_server_sends_it_once(self, place: Place) -> None:
        with ThreadPoolExecutor(FLEET) as pool:
            fleet = list(pool.map(place.worker, range(FLEET)))
            leases = list(pool.map(Worker.lease, fleet))
            addresses, before, together = (
                {lease["model"] for lease in leases},
                place.counted("sent_bytes"),
                Barrier(FLEET),
            )
            assert len(addresses) == 1

            def pulled(worker: Worker) -> Answered:
                together.wait(PATIENCE_S)
                return worker.running.call("GET", leases[0]["model"], timeout=90)

            answers = list(pool.map(pulled, fleet))
        x = packed(place.running.server.run.mixer.x)
        assert {answer.status for answer in answers} == {200}
        assert all(answer.body == x for answer in answers)
        assert place.counted("sent_bytes") - before == len(x)
        assert {answer.headers["Offbeat-Cache"] for answer in answers} == {"MISS", "HIT"}
        for worker, lease in list(zip(fleet, leases, strict=True))[:5]:
            assert worker.push(lease["task"], x).status == 200
        for worker in fleet[5:]:
            worker.running.call("DELETE", f"/v1/workers/{worker.number}", headers=worker.session)

    def test_no_model_leaves_the_cache_for_those_who_may_not(self, place: Place) -> None:
        path = place.worker(0).lease()["model"]
        assert place.by("gone").call("GET", path).status == 200
        assert place.by("eye").call("GET", path).headers["Offbeat-Cache"] == "HIT"
        place.book.revoke("gone")
        until(lambda: place.by("gone").call("GET", path).status, lambda status: status == 401)
        before = place.counted("sent_bytes")
        for ask in ({}, {"Range": "bytes=0-9"}, {"If-None-Match": "*"}):
            refused(place.by().call("GET", path, headers=ask), 401, "no_token")
            refused(place.by("ob_wrong").call("GET", path, headers=ask), 401, "bad_token")
            refused(place.by("gone").call("GET", path, headers=ask), 401, "bad_token")
            refused(place.by("eye").call("GET", path, headers=ask | {"Offbeat-Protocol": "9"}), 426, "wrong_version")
        assert place.by().call("HEAD", path).status == 401
        assert place.by().call("GET", "/offbeat-may-read-models").status == 404
        assert place.counted("sent_bytes") == before

    def test_a_part_comes_from_the_cache(self, place: Place) -> None:
        worker = place.worker(1)
        path = worker.lease()["model"]
        whole, before = worker.running.call("GET", path), place.counted("sent_bytes")
        tag, size = whole.headers["ETag"], len(whole.body)
        for asked, begin, end in (("bytes=1000-", 1000, size), ("bytes=-10", size - 10, size), ("bytes=0-0", 0, 1)):
            part = worker.running.call("GET", path, headers={"Range": asked, "If-Range": tag})
            assert (part.status, part.body) == (206, whole.body[begin:end])
            assert part.headers["Content-Range"] == f"bytes {begin}-{end - 1}/{size}"
            assert part.headers["ETag"] == tag
        other = worker.running.call("GET", path, headers={"Range": "bytes=9-", "If-Range": '"other"'})
        assert (other.status, other.body) == (200, whole.body)
        assert worker.running.call("GET", path, headers={"Range": f"bytes={size}-"}).status == 416
        assert worker.running.call("GET", path, headers={"If-None-Match": tag}).status == 304
        assert worker.running.call("GET", f"{path}?x=1").body == whole.body, "no query makes the server send it again"
        assert place.counted("sent_bytes") == before

    def test_what_names_no_run_is_not_kept(self, place: Place) -> None:
        for name in ("latest", place.running.server.run.coordinator.t):
            before = place.counted("sent_bytes")
            one, two = (place.by("eye").call("GET", f"/v1/models/{name}") for _ in range(2))
            assert one.body == two.body
            assert place.counted("sent_bytes") - before == 2 * len(one.body)

    def test_refusals_are_not_kept(self, place: Place) -> None:
        run = place.running.server.context.run_id
        t = place.running.server.run.coordinator.t + 1
        refused(place.by("eye").call("GET", f"/v1/runs/{run}/models/{t}"), 404, "not_found")
        assert place.worker(2).work().status == 200
        until(lambda: place.by("eye").call("GET", f"/v1/runs/{run}/models/{t}").status, lambda status: status == 200)


class TestTwoRuns:
    """One after the other at the same address."""

    pytestmark = needs_nginx

    def test_they_are_never_mistaken_for_each_other(self, tmp_path: Path) -> None:
        """Here the server is open, without TLS, and there is no prefix."""
        access, server = tmp_path / "access", f"http://127.0.0.1:{free_port()}"
        certificates.make(access, ["localhost"])
        with nginx(tmp_path / "nginx", server, access) as proxy:
            front = partial(proxy.front, access=access)
            one = self._pulled(tmp_path / "one", TASK, server, front)
            two = self._pulled(tmp_path / "two", TASK.replace("np.zeros(6", "np.ones(6"), server, front)
        assert one.body != two.body
        assert one.headers["ETag"] != two.headers["ETag"]

    def _pulled(self, folder: Path, task: str, server: str, front: Callable[[Running], Front]) -> Answered:
        """The first model of a run, by way of its lease."""
        folder.mkdir()
        limits = {"behind_proxy": True, "port": urlsplit(server).port}
        with serving(folder, limits=limits, task=task, access=AccessSettings(insecure=True)) as running:
            worker = Worker(front(running))
            answer = worker.running.call("GET", worker.lease()["model"])
            assert answer.body == packed(running.server.run.mixer.x)
            return answer


class TestPassingThrough:
    """Everything else is the server's."""

    pytestmark = needs_nginx

    def test_an_upload_arrives_as_it_is_sent_and_goes_on_after_a_cut(self, place: Place) -> None:
        worker, before = place.worker(3), place.counted("received_bytes")
        lease = worker.lease()
        data = worker.train(lease)
        half = len(data) // 2
        known = {"Authorization": f"Bearer {place.tokens['w3']}", "Content-Length": len(data), **worker.head(data)}
        with place.line(head("PUT", f"{PREFIX}/v1/tasks/{lease['task']}/update", known)) as line:
            line.send(data[:half])
            until(lambda: place.counted("received_bytes") - before, lambda count: count >= half - (1 << 18))
        path = f"/v1/tasks/{lease['task']}/update"
        offset = until(lambda: worker.running.call("GET", path, headers=worker.session).json["offset"])
        assert half - (1 << 18) <= offset <= half

        def go_on(offset: int) -> dict[str, Any]:
            rest = worker.head(data, Offbeat_Offset=offset, Offbeat_Size=len(data))
            return dict(worker.running.call("PUT", path, data[offset:], rest).json)

        answer = go_on(offset)
        if answer.get("error") == "wrong_offset":  # more of what came before the cut has been written meanwhile
            answer = go_on(answer["offset"])
        assert answer["outcome"] == "applied"

    @pytest.mark.parametrize("task", [999_999, 10**14])
    def test_a_refusal_that_comes_before_the_body_reaches_a_worker(
        self, place: Place, tmp_path: Path, task: int
    ) -> None:
        """nginx wants the body although the server does not: the worker hears it all the same."""
        data = packed(place.running.server.run.mixer.x)
        (tmp_path / "update").write_bytes(data)
        layout = place.running.server.run.layout.fingerprint
        finished = Finished(tmp_path / "update", "run", task, sha256(data), len(data), 1, 1, {}, layout)
        trust = trusted(place.access / certificates.CA_CERT)
        http = HttpClient(Address.of(f"{place.proxy.url}{PREFIX}"), common_headers(place.tokens["w4"]), trust)
        calls = ApiClient(http, Hello("w4", "line"))
        calls.join()
        for _ in range(5):
            with pytest.raises(RequestRefused) as told:
                calls.push(finished)
            assert told.value.error == "unknown_task"
        calls.leave()
        calls.http.close()

    def test_a_task_comes_to_whoever_waits_for_it(self, tmp_path: Path) -> None:
        with placed(tmp_path, {"in_flight_max": 1, "devices": 2}, prefix="", task=TASK) as place:
            busy, waiting = place.worker(0), place.worker(1)
            task = busy.lease()["task"]
            began = monotonic()
            give_back = partial(busy.running.call, "DELETE", f"/v1/tasks/{task}", None, busy.session)
            soon = Timer(1.0, give_back)
            soon.start()
            assert waiting.ask(POLL_S)["state"] == "working"
            soon.join()
            assert 1.0 <= monotonic() - began < SOON_S
            assert busy.ask(1.5)["state"] == "idle"

    def test_who_hangs_up_does_not_wait_any_more(self, tmp_path: Path) -> None:
        with placed(tmp_path, {"in_flight_max": 1, "devices": 2}, prefix="", task=TASK) as place:
            busy, waiting = place.worker(0), place.worker(1)
            busy.lease()
            known = {"Authorization": f"Bearer {place.tokens['w1']}", "Content-Length": 0, **waiting.session}
            asking = head("POST", f"/v1/workers/{waiting.number}/ask", known)
            session = place.running.server.context.sessions.of(waiting.number)
            assert session is not None
            with place.line(asking):
                until(lambda: session.asking)
            until(lambda: not session.asking)

    @pytest.mark.parametrize("path", ["/events", "/v1/events"])
    def test_events_arrive_at_once(self, place: Place, path: str) -> None:
        where, worker = urlsplit(place.proxy.url), place.worker(5)
        trust = trusted(place.access / certificates.CA_CERT)
        connection = HTTPSConnection(where.hostname or "", where.port, timeout=SOON_S, context=trust)
        connection.request("GET", PREFIX + path, headers={"Authorization": f"Bearer {place.tokens['eye']}"})
        with closing(connection), closing(connection.getresponse()) as stream:
            assert stream.headers["Content-Type"].startswith("text/event-stream")
            for _ in range(2):
                assert worker.work().status == 200
                while not stream.readline().startswith(b"data: "):
                    pass

    def test_only_the_address_that_guesses_tokens_waits(self, place: Place) -> None:
        assert [log_in(place, "127.0.0.2", "ob_wrong") for _ in range(TRIES_MAX)] == [401] * TRIES_MAX
        assert log_in(place, "127.0.0.2", place.tokens["eye"]) == 429
        assert log_in(place, "127.0.0.2", place.tokens["eye"], "203.0.113.9") == 429, "it cannot say to be another"
        assert log_in(place, "127.0.0.1", place.tokens["eye"]) == 303

    def test_it_is_all_below_the_prefix(self, place: Place) -> None:
        outside = Front(place.running.server, place.running.folder, place.proxy.url, place.by().trust)
        assert outside.call("GET", "/v1/health").status == 404
        answer = outside.call("GET", PREFIX)
        assert (answer.status, answer.headers["Location"]) == (301, f"{PREFIX}/")
        assert place.by().call("GET", "/v1/health").json["state"] == "running"
        options = ("--ca", str(place.access / "ca.pem"), "--token", place.tokens["eye"], "--json")
        command = [sys.executable, "-m", "offbeat", "status", place.proxy.url + PREFIX, *options]
        status = subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE_S * 3)
        assert b'"t"' in status.stdout

    def test_real_workers_work_through_it(self, place: Place, tmp_path: Path) -> None:
        before = place.by("eye").call("GET", "/v1/status").json["applied"]
        task = str(place.running.folder.parent / "line.py")
        started = []
        for number in range(FLEET, FLEET + REAL):
            (tmp_path / f"{number}.token").write_text(place.tokens[f"w{number}"])
            trust = ("--ca", str(place.access / "ca.pem"), "--token-file", str(tmp_path / f"{number}.token"))
            own = ("--server", place.proxy.url + PREFIX, "--dir", str(tmp_path / f"w{number}"))
            command = [sys.executable, "-m", "offbeat", "work", task, *own, *trust]
            with (tmp_path / "log").open("ab") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        try:
            status = partial(place.by("eye").call, "GET", "/v1/status")
            until(lambda: status().json["applied"], lambda applied: applied >= before + 6)
        finally:
            for process in started:
                process.terminate()
            ended = [process.wait(PATIENCE_S) for process in started]
        assert all(code in (0, 130, 143, -15) for code in ended), (tmp_path / "log").read_text()


def log_in(place: Place, address: str, token: str, said: str | None = None) -> int:
    """What becomes of a token that comes from this address."""
    where = urlsplit(place.proxy.url)
    trust = trusted(place.access / certificates.CA_CERT)
    connection = HTTPSConnection(
        "127.0.0.1", where.port, timeout=PATIENCE_S, context=trust, source_address=(address, 0)
    )
    headers = {"Content-Type": "application/x-www-form-urlencoded"} | ({"X-Forwarded-For": said} if said else {})
    connection.request("POST", f"{PREFIX}/login", urlencode({"token": token}), headers)
    try:
        return connection.getresponse().status
    finally:
        connection.close()
