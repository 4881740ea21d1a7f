"""Who may look and who may touch: roles, cookies, CSRF, headers, tries."""

import json
from collections.abc import Iterator
from http.cookies import SimpleCookie
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from aiohttp.web import Response

from offbeat.server.access import Role, TokenBook
from offbeat.server.refusals import Refusal
from offbeat.web.app import OF_RUN, OF_SITE
from offbeat.web.login import COOKIE, SESSION_S, TRIES_MAX, TRIES_S, PageAccess
from offbeat.web.pages import POLICY
from tests.web.looking import Visitor, opened, page_of, simulated

PAGES = ("/", "/asynchrony", "/workers", "/updates", "/updates/3", "/compare")
TWINS = (
    *("/overview.json", "/asynchrony.json", "/workers.json", "/updates.json", "/updates/3.json", "/runs.json"),
    "/compare.json?run=run",
)
OPEN = ("/login", "/session.json", "/static/main.js", "/static/plotly.min.js")
ACTS = ("/workers/2/quarantine", "/workers/2/readmit", "/pause", "/resume")
ROLES = {"eye": Role.VIEWER, "boss": Role.ADMIN, "hand": Role.WORKER, "gone": Role.ADMIN}


class Place(NamedTuple):
    """A page with access control, and what was done through it."""

    url: str
    tokens: dict[str, str]
    book: TokenBook
    acts: list[tuple[str, int]]

    def by(self, name: str = "") -> Visitor:
        """As somebody with a token."""
        return Visitor(self.url, self.tokens.get(name, name))

    def logged_in(self, name: str) -> Visitor:
        """As somebody who has exchanged a token for a cookie."""
        visitor = Visitor(self.url)
        assert visitor.log_in(self.tokens[name]).status == 303
        return visitor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("access") / "run"
    simulated(folder)
    return folder


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a page, whatever the real ones are like at the moment."""
    static = tmp_path_factory.mktemp("static")
    (static / "index.html").write_text("<!doctype html><title>Offbeat</title>")
    (static / "main.js").write_text("// " + "x" * 5000)
    (static.parent / "secret.txt").write_text("nobody may read this")
    return static


@pytest.fixture(scope="module")
def place(folder: Path, static: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    book = TokenBook.begin(tmp_path_factory.mktemp("tokens") / "tokens.json")
    tokens, acts = book.add_all(ROLES), list[tuple[str, int]]()
    book.revoke("gone")

    async def act(what: str, worker: int) -> None:
        if worker == 404:
            raise Refusal("not_found", "there is no worker 404")
        acts.append((what, worker))

    with opened(page_of(folder, tokens=book, act=act, static=static)) as visitor:
        yield Place(visitor.url, tokens, book, acts)


@pytest.fixture(scope="module")
def free(folder: Path, static: Path) -> Iterator[Visitor]:
    """Without access control."""

    async def act(_what: str, _worker: int | None) -> None:
        pass

    with opened(page_of(folder, act=act, static=static)) as visitor:
        yield visitor


# --- the matrix ------------------------------------------------------------------------------------------------------


def test_the_matrix_is_complete() -> None:
    paths = {route.path for route in (*OF_SITE, *OF_RUN)}
    known = {path.partition("?")[0].replace("/3", r"/{task:\d+}") for path in (*PAGES, *TWINS, *OPEN)}
    known |= {"/static/{name:.+}", "/logout", "/events", r"/workers/{worker:\d+}/{what:quarantine|readmit}"}
    known |= {"/{what:pause|resume}"}
    assert paths == known - {"/static/main.js", "/static/plotly.min.js"}


@pytest.mark.parametrize("path", [*PAGES, *TWINS, "/events"])
def test_who_may_look(place: Place, path: str) -> None:
    expected = {"hand": 403, "gone": 401, "ob_nonsense": 401} | ({} if path == "/events" else {"eye": 200, "boss": 200})
    for name, status in expected.items():
        answer = place.by(name).call("GET", path, headers={"Accept": "application/json"})
        assert answer.status == status, (name, answer)
    assert place.by().call("GET", path, headers={"Accept": "application/json"}).status == 401


@pytest.mark.parametrize("path", OPEN)
def test_what_is_open_to_everybody(place: Place, path: str) -> None:
    for name in ("", "hand", "eye", "ob_nonsense"):
        answer = place.by(name).call("GET", path)
        assert answer.status == 200
        assert b"run" not in answer.body or "static" in path


@pytest.mark.parametrize("path", PAGES)
def test_people_are_led_to_the_form_and_back(place: Place, path: str) -> None:
    answer = Visitor(place.url).call("GET", f"{path}?x=1", headers={"Accept": "text/html"})
    assert answer.status == 303
    where, root = path.replace("/", "%2F"), "../" if path == "/updates/3" else "./"
    assert answer.headers["Location"] == f"{root}login?next={where}%3Fx%3D1"
    refused = place.by("hand").call("GET", path, headers={"Accept": "text/html"})
    assert (refused.status, refused.headers["Content-Type"]) == (403, "text/html; charset=utf-8")
    assert b"role worker may not" in refused.body


@pytest.mark.parametrize("path", ACTS)
def test_who_may_touch(place: Place, path: str) -> None:
    for name, status in {"": 401, "hand": 403, "eye": 403, "gone": 401, "boss": 204}.items():
        place.acts.clear()
        assert place.by(name).call("POST", path).status == status
        worker = 2 if path.startswith("/workers") else None
        assert place.acts == ([(path.rsplit("/", 1)[1], worker)] if status == 204 else [])


def test_what_cannot_be_done_says_why(place: Place) -> None:
    answer = place.by("boss").call("POST", "/workers/404/readmit")
    assert (answer.status, answer.json["error"]) == (404, "not_found")
    assert place.by("boss").call("POST", "/workers/2/praise").status == 404
    assert place.by("boss").call("GET", "/workers/2/readmit").status == 405


# --- cookies and CSRF ------------------------------------------------------------------------------------------------


def test_a_token_is_exchanged_for_a_cookie(place: Place) -> None:
    visitor = Visitor(place.url)
    answer = visitor.log_in(place.tokens["eye"])
    assert (answer.status, answer.headers["Location"]) == (303, "./")
    cookie = SimpleCookie(answer.headers["Set-Cookie"])[COOKIE]
    assert (cookie["httponly"], cookie["samesite"], cookie["path"], cookie["secure"]) == (True, "Strict", "", "")
    assert int(cookie["max-age"]) == SESSION_S
    assert place.tokens["eye"] not in answer.headers["Set-Cookie"]
    assert visitor.get("/overview.json")["t"] == 60
    session = visitor.get("/session.json")
    assert (session["role"], session["open"], session["ui"]) == ("viewer", False, False)
    assert len(session["csrf"]) > 30


def test_json_is_taken_as_well_as_a_form(place: Place) -> None:
    body = json.dumps({"token": place.tokens["eye"]})
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    assert Visitor(place.url).call("POST", "/login", body, headers).status == 303
    for wrong in ('{"token": 3}', "[]", "{", "{}"):
        assert Visitor(place.url).call("POST", "/login", wrong, headers).status == 400


def test_nobody_is_known_without_a_cookie(place: Place) -> None:
    expected = {"role": None, "open": False, "csrf": None, "ui": False}
    assert Visitor(place.url).get("/session.json") == expected
    assert Visitor(place.url, cookie="guessed").get("/session.json") == expected
    assert place.by("hand").get("/session.json") == expected | {"role": "worker"}


def test_an_admin_with_a_cookie_needs_the_csrf_token(place: Place) -> None:
    boss, eye = place.logged_in("boss"), place.logged_in("eye")
    csrf, other = boss.get("/session.json")["csrf"], eye.get("/session.json")["csrf"]
    assert csrf != other
    place.acts.clear()
    for wrong in (None, "", "guessed", other, csrf[:-1], csrf + "x", "\xe9"):
        headers = {} if wrong is None else {"X-CSRF-Token": wrong}
        answer = boss.call("POST", ACTS[0], headers=headers)
        assert (answer.status, answer.json["error"]) == (403, "not_allowed")
    assert place.acts == []
    assert boss.call("POST", ACTS[0], headers={"X-CSRF-Token": csrf}).status == 204
    assert place.acts == [("quarantine", 2)]
    assert eye.call("POST", ACTS[0], headers={"X-CSRF-Token": other}).status == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "https://behind-a-proxy.example"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 204),
    ],
)
def test_other_sites_cannot_touch(place: Place, headers: dict[str, str], status: int) -> None:
    boss = place.logged_in("boss")
    csrf = {"X-CSRF-Token": boss.get("/session.json")["csrf"]}
    assert boss.call("POST", ACTS[0], headers=headers | csrf).status == status
    stranger = Visitor(place.url).call("POST", "/login", {"token": place.tokens["eye"]}, headers)
    assert stranger.status == (303 if status == 204 else 403)


def test_without_access_control_other_sites_cannot_touch_either(free: Visitor) -> None:
    session = free.get("/session.json")
    assert (session["role"], session["open"]) == ("admin", True)
    assert free.call("POST", ACTS[0]).status == 403
    assert free.call("POST", ACTS[0], headers={"X-CSRF-Token": session["csrf"]}).status == 204
    assert free.get("/overview.json")["t"] == 60
    answer = free.call("POST", "/login", {"token": "whatever"})
    assert (answer.status, "Set-Cookie" in answer.headers) == (303, False)


def test_logging_out_ends_the_session(place: Place) -> None:
    eye = place.logged_in("eye")
    assert eye.call("POST", "/logout").status == 403
    answer = eye.call("POST", "/logout", headers={"X-CSRF-Token": eye.get("/session.json")["csrf"]})
    assert (answer.status, answer.headers["Location"]) == (303, "./login")
    assert "Max-Age=0" in answer.headers["Set-Cookie"]
    assert eye.call("GET", "/overview.json").status == 401


def test_a_worker_cannot_log_in(place: Place) -> None:
    answer = Visitor(place.url).log_in(place.tokens["hand"])
    assert answer.status == 403
    assert "Set-Cookie" not in answer.headers


def test_a_refused_form_is_answered_in_html(place: Place) -> None:
    answer = Visitor(place.url).call("POST", "/login", {"token": "<b>"})
    assert (answer.status, answer.headers["Content-Type"]) == (401, "text/html; charset=utf-8")


# --- the door by itself ----------------------------------------------------------------------------------------------


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(tmp_path: Path, clock: Clock) -> TokenBook:
    TokenBook.begin(tmp_path / "tokens.json")
    return TokenBook(tmp_path / "tokens.json", clock)


def entered(door: PageAccess, token: str) -> str:
    """The cookie."""
    response = Response()
    door.log_in(make_mocked_request("POST", "/login"), token, response)
    return response.cookies[COOKIE].value


def role(door: PageAccess, cookie: str) -> Role | None:
    return door.visitor(make_mocked_request("GET", "/", headers={"Cookie": f"{COOKIE}={cookie}"})).role


def test_sessions_end(book: TokenBook, clock: Clock) -> None:
    door = PageAccess(book, now=clock)
    cookie = entered(door, book.add("eye", Role.VIEWER))
    clock.now = SESSION_S - 1
    assert role(door, cookie) is Role.VIEWER
    clock.now = SESSION_S
    assert role(door, cookie) is None


def test_a_revoked_token_ends_its_sessions(book: TokenBook, clock: Clock) -> None:
    door = PageAccess(book, now=clock)
    cookie = entered(door, book.add("boss", Role.ADMIN))
    assert role(door, cookie) is Role.ADMIN
    book.revoke("boss")
    clock.now = 2.0
    assert role(door, cookie) is None


def test_there_are_not_more_sessions_than_there_may_be(
    book: TokenBook, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.web.login.SESSIONS_MAX", 5)
    door, token = PageAccess(book, now=clock), book.add("eye", Role.VIEWER)
    first = entered(door, token)
    later = [entered(door, token) for _ in range(5)]
    assert role(door, first) is None
    assert role(door, later[0]) is Role.VIEWER


def test_a_server_that_is_started_again_knows_its_visitors(book: TokenBook, clock: Clock) -> None:
    token = book.add("eye", Role.VIEWER)
    first = PageAccess(book, now=clock)
    stays, goes = entered(first, token), entered(first, token)
    first.log_out(make_mocked_request("POST", "/logout", headers={"Cookie": f"{COOKIE}={goes}"}), Response())
    file = book.path.with_name("sessions.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(secret in file.read_text() for secret in (stays, goes, token))
    second = PageAccess(book, now=clock)
    assert (role(second, stays), role(second, goes)) == (Role.VIEWER, None)
    request = make_mocked_request("GET", "/", headers={"Cookie": f"{COOKIE}={stays}"})
    assert first.visitor(request).csrf == second.visitor(request).csrf is not None
    book.revoke("eye")
    clock.now = 2.0
    assert role(second, stays) is None


@pytest.mark.parametrize("sessions", ["", "[[1]]", '{"a": 3}', '[["a", "b", "c"]]'])
def test_a_damaged_file_of_sessions_keeps_nobody_out(book: TokenBook, clock: Clock, sessions: str) -> None:
    book.path.with_name("sessions.json").write_text(f'{{"sessions": {sessions}}}')
    door = PageAccess(book, now=clock)
    assert role(door, "x") is None
    assert role(door, entered(door, book.add("eye", Role.VIEWER))) is Role.VIEWER


def test_where_sessions_cannot_be_written_they_last_as_long_as_the_server(book: TokenBook, clock: Clock) -> None:
    token = book.add("eye", Role.VIEWER)
    book.path.with_name("sessions.json").mkdir()
    door = PageAccess(book, now=clock)
    cookie = entered(door, token)
    assert role(door, cookie) is Role.VIEWER
    assert role(PageAccess(book, now=clock), cookie) is None


def test_who_tries_too_often_must_wait(book: TokenBook, clock: Clock) -> None:
    door, token = PageAccess(book, now=clock), book.add("eye", Role.VIEWER)
    for _ in range(TRIES_MAX):
        with pytest.raises(Refusal, match="not known"):
            entered(door, "guessed")
    with pytest.raises(Refusal) as refused:
        entered(door, token)
    assert (refused.value.status, refused.value.retry_after_s) == (429, TRIES_S)
    clock.now = TRIES_S
    assert entered(door, token)


def test_under_tls_the_cookie_is_secure(book: TokenBook, clock: Clock) -> None:
    response = Response()
    token = book.add("eye", Role.VIEWER)
    PageAccess(book, tls=True, now=clock).log_in(make_mocked_request("POST", "/login"), token, response)
    assert response.cookies[COOKIE]["secure"] is True


@pytest.mark.parametrize(("said", "secure"), [("https", True), ("HTTPS", True), ("http", False), ("", False)])
def test_behind_a_proxy_that_speaks_tls_the_cookie_is_secure(book: TokenBook, said: str, secure: bool) -> None:
    token = book.add("eye", Role.VIEWER)
    request = make_mocked_request("POST", "/login", headers={"X-Forwarded-Proto": said})
    door, entered, left = PageAccess(book), Response(), Response()
    door.log_in(request, token, entered)
    door.log_out(request, left)
    for response in (entered, left):
        assert bool(response.cookies[COOKIE]["secure"]) is secure


@pytest.mark.parametrize("behind_proxy", [False, True])
def test_behind_a_proxy_only_the_address_that_tries_too_often_waits(book: TokenBook, behind_proxy: bool) -> None:
    door, token = PageAccess(book, behind_proxy=behind_proxy), book.add("eye", Role.VIEWER)

    def entered_from(address: str, token: str) -> Response:
        headers, transport = {"X-Forwarded-For": f"198.51.100.7, {address}"}, Mock()
        transport.get_extra_info.side_effect = {"peername": ("127.0.0.1", 4)}.get
        response = Response()
        door.log_in(make_mocked_request("POST", "/login", headers=headers, transport=transport), token, response)
        return response

    for _ in range(TRIES_MAX):
        with pytest.raises(Refusal, match="not known"):
            entered_from("203.0.113.5", "guessed")
    with pytest.raises(Refusal, match="too many"):
        entered_from("203.0.113.5", token)
    if behind_proxy:
        assert COOKIE in entered_from("203.0.113.6", token).cookies
    else:
        with pytest.raises(Refusal, match="too many"):
            entered_from("203.0.113.6", token)


def test_tokens_that_cannot_be_read_let_nobody_in(book: TokenBook, clock: Clock) -> None:
    door = PageAccess(book, now=clock)
    cookie = entered(door, book.add("eye", Role.VIEWER))
    book.path.write_text("{")
    clock.now = 5.0
    with pytest.raises(Refusal) as refused:
        role(door, cookie)
    assert refused.value.status == 503


# --- headers and files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, *TWINS, *OPEN, "/nowhere", "/static/none.js", "/updates/999999.json"])
@pytest.mark.parametrize("name", ["", "eye", "hand"])
def test_every_answer_has_the_policy(place: Place, path: str, name: str) -> None:
    headers = place.by(name).call("GET", path).headers
    assert headers["Content-Security-Policy"] == POLICY
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["Cache-Control"] in ("no-store", "no-cache")


def test_the_policy_allows_no_script_but_our_own() -> None:
    assert "default-src 'self'" in POLICY
    assert "script-src" not in POLICY
    assert "unsafe-eval" not in POLICY
    assert POLICY.count("unsafe-inline") == 1
    assert "frame-ancestors 'none'" in POLICY


@pytest.mark.parametrize(
    "path", ["/static/../secret.txt", "/static/..%2fsecret.txt", "/static//etc/passwd", "/static/%2e%2e/secret.txt"]
)
def test_only_the_files_of_the_page_are_given(free: Visitor, path: str) -> None:
    assert free.call("GET", path).status == 404


def test_files_are_packed_and_not_sent_twice(free: Visitor) -> None:
    whole = free.call("GET", "/static/main.js")
    assert whole.headers["Content-Type"].startswith("text/javascript")
    packed = free.call("GET", "/static/main.js", headers={"Accept-Encoding": "gzip, br"})
    assert packed.headers["Content-Encoding"] == "gzip"
    assert len(packed.body) < len(whole.body) / 10
    again = free.call("GET", "/static/main.js", headers={"If-None-Match": whole.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")


def test_plotly_comes_from_its_package(free: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(free.call("GET", "/static/plotly.min.js").body) > 1 << 20
    monkeypatch.setattr("offbeat.web.pages.plotly_path", lambda: None)
    missing = free.call("GET", "/static/plotly.min.js")
    assert missing.status == 404
    assert "offbeat[web]" in missing.json["do"]


def test_wrong_questions_are_refused_in_words(free: Visitor) -> None:
    answer = free.call("GET", "/workers.json?sort=age")
    assert (answer.status, answer.json["error"]) == (400, "bad_request")
    assert "sort is 'age'" in answer.json["message"]
    assert free.call("GET", "/compare.json?run=nothing").status == 404
    assert free.call("GET", "/updates/999999.json").status == 404
    assert free.call("GET", "/updates/" + "9" * 20 + ".json").status == 400
    page = free.call("GET", "/nowhere", headers={"Accept": "text/html"})
    assert (page.status, page.headers["Content-Type"]) == (404, "text/html; charset=utf-8")


def test_what_breaks_is_one_refusal(free: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.web.asynchrony.asynchrony", lambda _reading: 1 / 0)
    answer = free.call("GET", "/asynchrony.json")
    assert (answer.status, answer.json["error"]) == (500, "internal")
