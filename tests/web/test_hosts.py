"""`offbeat ui` and its names: a browser is answered under the names of this machine, and under those that are given."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli.standing import run_folders
from offbeat.errors import InvalidValue
from offbeat.web.app import OF_FOLDER, OF_RUN, OF_SITE
from offbeat.web.ui_server import Ui
from tests.server.serving import PATIENCE_S, Answered
from tests.server.speaking import Line, head, refused
from tests.web.looking import Visitor, simulated

PATHS = sorted(
    {
        (route.method, (prefix + route.path).replace("{run}", "one").replace("{name:.+}", "app.js"))
        for prefix, routes in (("", OF_SITE), ("", OF_FOLDER), ("/runs/one", OF_RUN))
        for route in routes
        if "{task" not in route.path and "{worker" not in route.path
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    simulated(folder / "one", epochs=12)
    return folder


@contextmanager
def shown(folder: Path, **options: Any) -> Iterator[Visitor]:
    """`offbeat ui`, in a thread."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[Ui]()

    async def live() -> None:
        ui = Ui(folder, run_folders, host="127.0.0.1", port=0, **options)
        await ui.open()
        found.append(ui)
        ready.set()
        await ui.stopped.wait()
        await ui.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),), name="ui")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield Visitor(found[0].url)
    finally:
        loop.call_soon_threadsafe(found[0].stopped.set)
        thread.join(PATIENCE_S)
        loop.close()


@pytest.fixture(scope="module")
def ui(folder: Path) -> Iterator[Visitor]:
    with shown(folder) as visitor:
        yield visitor


def said(visitor: Visitor, method: str, path: str, host: str, **headers: str) -> Answered:
    return visitor.call(method, path, headers={"Host": host, **{n.replace("_", "-"): v for n, v in headers.items()}})


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_no_route_answers_to_another_name_or_site(ui: Visitor, method: str, path: str) -> None:
    body = refused(said(ui, method, path, "evil.example"), 421, "wrong_host")
    assert "--public-name" in body["do"]
    refused(said(ui, method, path, "localhost", Origin="http://evil.example"), 403, "wrong_origin")


@pytest.mark.parametrize("host", ["localhost:7744", "127.0.0.1", "[::1]:9", "LOCALHOST"])
def test_its_own_names_are_answered(ui: Visitor, host: str) -> None:
    assert said(ui, "GET", "/runs.json", host, Origin=f"http://{host}".lower()).status == 200
    assert said(ui, "GET", "/session.json", host).json["role"] == "viewer"


def test_a_name_that_was_given_is_answered(folder: Path) -> None:
    with shown(folder, public_name="notebooks.example.org") as visitor:
        assert said(visitor, "GET", "/runs.json", "notebooks.example.org").status == 200
        refused(said(visitor, "GET", "/runs.json", "evil.example"), 421, "wrong_host")
    with pytest.raises(InvalidValue, match="without a port"):
        Ui(folder, run_folders, host="127.0.0.1", port=0, public_name="notebooks.example.org:80")


@pytest.mark.parametrize("path", [path for method, path in PATHS if method == "GET" and not path.endswith("events")])
def test_head_has_the_headers_of_get_and_no_body(ui: Visitor, path: str) -> None:
    whole, asked = ui.call("GET", path), ui.call("HEAD", path)
    assert (asked.status, asked.body) == (whole.status, b"")
    changing = {"Date"} | ({"Content-Length"} if not whole.body else set())
    assert {n: v for n, v in asked.headers.items() if n not in changing} == {
        n: v for n, v in whole.headers.items() if n not in changing
    }


def test_head_of_the_events_ends(ui: Visitor) -> None:
    answer = ui.call("HEAD", "/runs/one/events")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")


@pytest.mark.parametrize(
    ("data", "word"), [(b"hello\r\n\r\n", "bad_request"), (b"\x16\x03\x01\x02\x00\x01\x00", "wrong_scheme")]
)
def test_errors_of_the_parser_are_the_documented_json(ui: Visitor, data: bytes, word: str) -> None:
    with Line(ui, data) as line:  # type: ignore[arg-type] # all that it needs is where it is
        refused(line.answer(), 400 if word == "bad_request" else 426, word)
        assert line.is_closed()


def test_a_request_by_hand_is_answered(ui: Visitor) -> None:
    with Line(ui, head("GET", "/runs.json", close=True)) as line:  # type: ignore[arg-type]
        assert line.answer().status == 200
