"""Who may do what, end to end: TLS, tokens, roles, and sessions that belong to their token."""

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from offbeat.errors import InvalidValue
from offbeat.server import certificates
from offbeat.server.access import TOKENS, Right, Role, TokenBook
from offbeat.server.app import ROUTES
from offbeat.server.settings import AccessSettings, ServerSettings
from offbeat.worker.settings import trusted
from tests.server.serving import PATIENCE_S, Answered, Running, Worker, serving
from tests.server.speaking import Line, file_of, head, ones, refused, until, untouched

ROLES = {
    "ann": Role.WORKER,
    "bob": Role.WORKER,
    "carl": Role.WORKER,
    "eye": Role.VIEWER,
    "boss": Role.ADMIN,
    "gone": Role.ADMIN,
}


@dataclass
class As(Running):
    """A server as whoever has a token sees it."""

    trust: ssl.SSLContext | None = None
    token: str = ""

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, timeout: float = 30
    ) -> Answered:
        where = urlsplit(self.url)
        connection = http.client.HTTPSConnection(where.hostname or "", where.port, timeout=timeout, context=self.trust)
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        known = {"Content-Type": "application/json"} if isinstance(body, dict | list) else {}
        known |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            connection.request(method, path, data, {**known, **(headers or {})})
            answer = connection.getresponse()
            return Answered(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()


@dataclass
class Guarded:
    """A server with tokens."""

    running: Running
    access: Path
    book: TokenBook
    tokens: dict[str, str]

    def by(self, name: str = "") -> As:
        """As one of those with a token; as nobody without a name."""
        trust = trusted(self.access / certificates.CA_CERT)
        running = self.running
        return As(running.server, running.folder, running.url, trust, self.tokens.get(name, name))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("server")
    access = folder / "access"
    certificates.make(access, ["localhost"])
    book = TokenBook.begin(access / TOKENS)
    tokens = book.add_all(ROLES)
    book.revoke("gone")
    room = {"tasks_per_device": 1000, "in_flight_max": 8000, "evaluate_every": 1_000_000}
    with serving(folder, room, access=AccessSettings(folder=access)) as running:
        yield Guarded(running, access, book, tokens)
        assert Worker(Guarded(running, access, book, tokens).by("ann"), "ann").work().status == 200


# --- tokens ----------------------------------------------------------------------------------------------------------


def paths() -> list[tuple[str, str, Right]]:
    """Every call that is not open to all, with something where a number goes."""
    named = {"{worker}": "0", "{task}": "1", "{t}": "0", "{run}": "none"}
    found = []
    for route in ROUTES:
        path = route.path
        for name, value in named.items():
            path = path.replace(name, value)
        if route.right is not None:
            found.append((route.method, path + ("?limit=1" if path.endswith("events") else ""), route.right))
    return found


@pytest.mark.parametrize(("method", "path", "right"), paths())
def test_a_role_may_do_what_its_rights_allow_and_nothing_else(
    guarded: Guarded, method: str, path: str, right: Right
) -> None:
    headers = {"Last-Event-ID": "0"}
    refused(guarded.by().call(method, path, headers=headers), 401, "no_token")
    refused(guarded.by("ob_wrong").call(method, path, headers=headers), 401, "bad_token")
    refused(guarded.by("gone").call(method, path, headers=headers), 401, "bad_token")
    for name in ("ann", "eye", "boss"):
        answer = guarded.by(name).call(method, path, headers=headers)
        if ROLES[name].may(right):
            assert answer.status not in (403, 500), answer
            assert answer.status != 401 or answer.json["error"] == "unknown_session", answer
        else:
            refused(answer, 403, "not_allowed")


def test_the_rights_are_these(guarded: Guarded) -> None:
    """Said once more, by hand: a table that is read from the code checks nothing."""
    eye, ann, boss = guarded.by("eye"), guarded.by("ann"), guarded.by("boss")
    for path in ("/v1/status", "/v1/workers", "/v1/metrics"):
        assert eye.call("GET", path).status == 200
        assert boss.call("GET", path).status == 200
        refused(ann.call("GET", path), 403, "not_allowed")
    for who in (eye, ann, boss):
        assert who.call("GET", "/v1/models/latest").status == 200
        assert who.call("GET", "/v1/allowed/models").status == 204
    refused(guarded.by().call("GET", "/v1/allowed/models"), 401, "no_token")
    refused(guarded.by("gone").call("GET", "/v1/allowed/models"), 401, "bad_token")
    refused(eye.call("POST", "/v1/workers", {"name": "x", "protocol": 1}), 403, "not_allowed")
    refused(eye.call("PUT", "/v1/tasks/1/update", b"x"), 403, "not_allowed")
    refused(ann.call("POST", "/v1/workers/0/readmit"), 403, "not_allowed")
    refused(eye.call("POST", "/v1/workers/0/readmit"), 403, "not_allowed")


def test_what_is_open_to_all_needs_no_token(guarded: Guarded) -> None:
    for path in ("/v1/health", "/v1/openapi.json"):
        assert guarded.by().call("GET", path).status == 200
        assert guarded.by("ob_wrong").call("GET", path).status == 200
    refused(guarded.by().call("GET", "/v1/nowhere"), 404, "not_found")
    refused(guarded.by().call("PATCH", "/v1/status"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic {}",
        "Bearer  {}",
        "Bearer {} ",
        "{}",
        "Bearer {}x",
        "Bearer \xff\xfe",
        "Bearer ob_",
    ],
)
def test_anything_but_a_bearer_token_is_none(guarded: Guarded, header: str) -> None:
    said = {"Authorization": header.format(guarded.tokens["eye"])}
    if header == "Bearer {} ":
        said = {"Authorization": header.format(guarded.tokens["eye"]) + "x"}
    answer = guarded.by().call("GET", "/v1/status", headers=said)
    refused(answer, 401, answer.json["error"])
    assert answer.json["error"] in ("no_token", "bad_token")


def test_the_word_bearer_may_be_written_in_any_case(guarded: Guarded) -> None:
    for word in ("bearer", "BEARER"):
        said = {"Authorization": f"{word} {guarded.tokens['eye']}"}
        assert guarded.by().call("GET", "/v1/status", headers=said).status == 200


def test_a_token_in_the_path_does_not_count(guarded: Guarded) -> None:
    refused(guarded.by().call("GET", f"/v1/status?token={guarded.tokens['boss']}"), 401, "no_token")


def test_a_push_without_a_token_is_refused_before_its_body(guarded: Guarded) -> None:
    data = file_of(ones())
    ann = Worker(guarded.by("ann"), "ann")
    task = ann.lease()["task"]
    facts = {**ann.head(data), "Content-Length": len(data), "Expect": "100-continue"}
    with untouched(guarded.by("boss")):
        with Line(guarded.running, head("PUT", f"/v1/tasks/{task}/update", facts), tls=guarded.by().trust) as line:
            refused(line.answer(), 401, "no_token")
        viewer = {**facts, "Authorization": f"Bearer {guarded.tokens['eye']}"}
        with Line(guarded.running, head("PUT", f"/v1/tasks/{task}/update", viewer), tls=guarded.by().trust) as line:
            refused(line.answer(), 403, "not_allowed")
        refused(replaced(ann, guarded.by("eye")).push(task, data), 403, "not_allowed")
    assert ann.push(task, data).status == 200


def test_a_revoked_token_opens_nothing_any_more_and_a_new_one_does(guarded: Guarded) -> None:
    token = guarded.book.add("temporary", Role.VIEWER)
    until(lambda: guarded.by(token).call("GET", "/v1/status").status, lambda status: status == 200)
    guarded.book.revoke("temporary")
    until(lambda: guarded.by(token).call("GET", "/v1/status").status, lambda status: status == 401)
    refused(guarded.by(token).call("GET", "/v1/status"), 401, "bad_token")
    again = guarded.book.add("temporary", Role.VIEWER)
    until(lambda: guarded.by(again).call("GET", "/v1/status").status, lambda status: status == 200)
    refused(guarded.by(token).call("GET", "/v1/status"), 401, "bad_token")


def test_a_book_that_cannot_be_read_lets_nobody_in(tmp_path: Path) -> None:
    certificates.make(tmp_path / "access", ["localhost"])
    book = TokenBook.begin(tmp_path / "access" / TOKENS)
    tokens = book.add_all({"eye": Role.VIEWER})
    with serving(tmp_path, access=AccessSettings(folder=tmp_path / "access")) as running:
        eye = Guarded(running, tmp_path / "access", book, tokens).by("eye")
        assert eye.call("GET", "/v1/status").status == 200
        good = book.path.read_bytes()
        book.path.write_bytes(b"{}")
        answer = until(lambda: eye.call("GET", "/v1/status"), lambda answer: answer.status != 200)
        told = refused(answer, 503, "not_now")
        assert str(tmp_path) not in told["message"]
        troubles = running.server.context.troubles
        assert "tokens cannot be read" in str(troubles.text)
        book.path.write_bytes(good)
        until(lambda: troubles.text is None)
        until(lambda: eye.call("GET", "/v1/status").status, lambda status: status == 200)
    book.path.write_bytes(b"{}")
    with (
        pytest.raises(InvalidValue, match="no list of tokens"),
        serving(tmp_path, access=AccessSettings(folder=book.path.parent)),
    ):
        pass


# --- sessions --------------------------------------------------------------------------------------------------------


def replaced(worker: Worker, running: Running) -> Worker:
    """The same session, used by somebody else."""
    other = object.__new__(Worker)
    other.__dict__.update(worker.__dict__, running=running)
    return other


def test_a_workers_name_is_that_of_its_token(guarded: Guarded) -> None:
    ann, bob = Worker(guarded.by("ann"), "anything"), Worker(guarded.by("bob"), "ann")
    names = {w["worker"]: w["name"] for w in guarded.by("boss").call("GET", "/v1/workers").json["workers"]}
    assert (names[ann.number], names[bob.number]) == ("ann", "bob")
    assert Worker(guarded.by("ann"), "bob").number == ann.number


def test_a_session_is_worth_nothing_with_another_token(guarded: Guarded) -> None:
    ann, bob = Worker(guarded.by("ann"), "ann"), guarded.by("bob")
    lease, data = ann.lease(), file_of(ones())
    task, session = lease["task"], ann.session
    with untouched(guarded.by("boss")):
        refused(bob.call("POST", f"/v1/workers/{ann.number}/ask", headers=session), 403, "not_yours")
        refused(bob.call("DELETE", f"/v1/workers/{ann.number}", headers=session), 403, "not_yours")
        refused(bob.call("POST", f"/v1/tasks/{task}/heartbeat", headers=session), 403, "not_yours")
        refused(bob.call("GET", f"/v1/tasks/{task}/update", headers=session), 403, "not_yours")
        refused(bob.call("DELETE", f"/v1/tasks/{task}", headers=session), 403, "not_yours")
        refused(replaced(ann, bob).push(task, data), 403, "not_yours")
        refused(replaced(ann, bob).push(task, b"garbage"), 403, "not_yours")
    assert ann.lease() == lease
    assert ann.push(task, data).status == 200


def test_a_session_is_worth_nothing_after_its_token_was_revoked(guarded: Guarded) -> None:
    carl = Worker(guarded.by("carl"), "carl")
    task, data = carl.lease()["task"], file_of(ones())
    guarded.book.revoke("carl")
    until(lambda: carl.running.call("GET", "/v1/models/latest").status, lambda status: status == 401)
    with untouched(guarded.by("boss")):
        refused(carl.push(task, data), 401, "bad_token")
        refused(replaced(carl, guarded.by("ann")).push(task, data), 403, "not_yours")


def test_an_administrator_may_do_all_of_it(guarded: Guarded) -> None:
    boss = guarded.by("boss")
    worker = Worker(boss, "bosss-laptop")
    lease = worker.lease()
    assert boss.call("POST", f"/v1/tasks/{lease['task']}/heartbeat", {"progress": 1}, worker.session).status == 200
    assert worker.push(lease["task"], worker.train(lease)).status == 200
    for path in ("/v1/status", "/v1/workers", "/v1/metrics", "/v1/events?limit=1"):
        assert boss.call("GET", path, headers={"Last-Event-ID": "0"}).status == 200
    assert boss.call("POST", f"/v1/workers/{worker.number}/readmit").status == 204
    assert boss.call("DELETE", f"/v1/workers/{worker.number}", headers=worker.session).status == 204


def test_an_administrator_may_take_the_name_of_a_worker(guarded: Guarded) -> None:
    ann = Worker(guarded.by("ann"), "ann")
    assert Worker(guarded.by("boss"), "ann").number == ann.number
    answer = ann.running.call("POST", f"/v1/workers/{ann.number}/ask", headers=ann.session)
    refused(answer, 401, "replaced")  # as by any second process of one name


# --- TLS -------------------------------------------------------------------------------------------------------------


def test_whoever_trusts_another_authority_does_not_talk_to_it(guarded: Guarded, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other", ["localhost"])
    stranger = replace(guarded.by("eye"), trust=trusted(tmp_path / "other" / certificates.CA_CERT))
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.call("GET", "/v1/health")
    with pytest.raises(ssl.SSLCertVerificationError):
        replace(guarded.by("eye"), trust=ssl.create_default_context()).call("GET", "/v1/health")


def test_old_tls_and_no_tls_are_refused(guarded: Guarded) -> None:
    assert guarded.running.url.startswith("https://")
    old = trusted(guarded.access / certificates.CA_CERT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert replace(guarded.by("eye"), trust=old).call("GET", "/v1/status").status == 200
    with Line(guarded.running, head("GET", "/v1/health")) as line:
        refused(line.answer(), 426, "wrong_scheme")
        assert line.ended().is_closed()


def test_who_shakes_hands_late_or_never_and_says_nothing_takes_no_place(tmp_path: Path) -> None:
    certificates.make(tmp_path / "access", ["localhost"])
    TokenBook.begin(tmp_path / "access" / TOKENS)
    trust = trusted(tmp_path / "access" / certificates.CA_CERT)
    limits = {"head_s": 0.7, "connections_max": 6, "connections_share": 1.0}
    with serving(tmp_path, None, limits, access=AccessSettings(folder=tmp_path / "access")) as running:
        never, late = [Line(running) for _ in range(5)], Line(running)
        until(lambda: len(running.server.listener.places) == 6)
        with Line(running) as one_too_many:
            assert one_too_many.is_closed()
        assert all(line.is_closed() for line in never), "whoever does not shake hands"
        with suppress(OSError), trust.wrap_socket(late.socket, server_hostname="localhost") as handshaken:
            handshaken.settimeout(PATIENCE_S)
            assert handshaken.recv(1) == b"", "whoever does so late, if it can at all"
        until(lambda: not len(running.server.listener.places))
        with Line(running, tls=trust) as silent:
            assert silent.is_closed(), "whoever shakes hands and says nothing"
        for line in (*never, late):
            line.cut()
        with Line(running, head("GET", "/v1/health"), tls=trust) as line:
            assert line.answer().status == 200


# --- the door --------------------------------------------------------------------------------------------------------


def test_a_server_is_not_open_to_a_network_by_accident() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):  # noqa: S104
        with pytest.raises(InvalidValue, match="--insecure"):
            AccessSettings().check(ServerSettings(host=host))
        AccessSettings(insecure=True).check(ServerSettings(host=host))
        AccessSettings(folder=Path("access")).check(ServerSettings(host=host))
    for host in ("127.0.0.1", "localhost", "::1"):
        AccessSettings().check(ServerSettings(host=host))
