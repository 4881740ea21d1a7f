"""The page below a prefix that it knows nothing of: whatever it sends leads the way from where the browser is."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest

from offbeat.server.access import Role, TokenBook
from tests.web.looking import Visitor, opened, page_of, runs_of, simulated

HERE = "https://fl.example/some/where"
OF_RUN = ("/", "/login", "/asynchrony", "/updates", "/updates/3")
OF_FOLDER = ("/", "/compare", "/runs/run/", "/runs/run/workers", "/runs/run/updates/3")
HTML = {"Accept": "text/html"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefix")
    simulated(folder / "run", epochs=12)
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Visitor]:
    with opened(page_of(folder / "run")) as visitor:
        yield visitor


@pytest.fixture(scope="module")
def many(folder: Path) -> Iterator[Visitor]:
    with opened(runs_of(folder)) as visitor:
        yield visitor


@pytest.fixture
def shut(folder: Path, tmp_path: Path) -> Iterator[Visitor]:
    book = TokenBook.begin(tmp_path / "tokens.json")
    with opened(page_of(folder / "run", tokens=book)) as visitor:
        visitor.token = book.add("eye", Role.VIEWER)
        yield visitor


def links_of(body: bytes) -> list[str]:
    return [link for link in re.findall(r'(?:href|src|action)="([^"]*)"', body.decode()) if not link.startswith("#")]


def stays(visitor: Visitor, path: str, links: list[str]) -> None:
    """Whoever follows these from a path below the prefix stays there, and finds something."""
    assert links
    for link in links:
        url = urljoin(HERE + path, link)
        assert url.startswith(f"{HERE}/"), (path, link)
        if "overview.json" not in link:  # which a folder does not have: the page's script says what it has
            assert visitor.call("GET", url.removeprefix(HERE)).status == 200, (path, link)


@pytest.mark.parametrize("path", OF_RUN)
def test_every_link_of_a_run_leads_on(one: Visitor, path: str) -> None:
    stays(one, path, links_of(one.call("GET", path, headers=HTML).body))


@pytest.mark.parametrize("path", OF_FOLDER)
def test_every_link_of_a_folder_leads_on(many: Visitor, path: str) -> None:
    stays(many, path, links_of(many.call("GET", path, headers=HTML).body))
    stays(many, "/runs/run", [many.call("GET", "/runs/run").headers["Location"]])


@pytest.mark.parametrize("path", ["/nowhere", "/not/here/either", "/workers/3/"])
def test_a_page_that_says_no_leads_back(one: Visitor, path: str) -> None:
    answer = one.call("GET", path, headers=HTML)
    assert answer.status == 404
    stays(one, path, links_of(answer.body))


@pytest.mark.parametrize("path", OF_RUN)
def test_a_page_of_one_depth_is_not_taken_for_one_of_another(one: Visitor, path: str) -> None:
    tag = one.call("GET", "/updates/3").headers["ETag"]
    again = one.call("GET", path, headers={"If-None-Match": tag})
    assert again.status == (304 if path == "/updates/3" else 200)


def test_who_logs_in_and_out_stays(shut: Visitor) -> None:
    for path in ("/", "/workers", "/updates/3"):
        where = Visitor(shut.url).call("GET", path, headers=HTML).headers["Location"]
        assert urljoin(HERE + path, where) == f"{HERE}/login?next={path.replace('/', '%2F')}"
    visitor = Visitor(shut.url)
    answer = visitor.log_in(shut.token)
    assert urljoin(f"{HERE}/login", answer.headers["Location"]) == f"{HERE}/"
    csrf = {"X-CSRF-Token": visitor.get("/session.json")["csrf"]}
    left = visitor.call("POST", "/logout", headers=csrf)
    assert urljoin(f"{HERE}/logout", left.headers["Location"]) == f"{HERE}/login"
    for one in (answer, left):
        assert "path" not in one.headers["Set-Cookie"].lower(), "then it is for what is beside the form, and no more"
