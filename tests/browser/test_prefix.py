"""The page below a path prefix, through a real nginx with the shipped configuration, in a real browser."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from playwright.sync_api import expect

from offbeat.cli.standing import run_folders
from offbeat.server import certificates
from offbeat.web.app import make_app, mount_runs
from offbeat.web.runs import Runs
from tests.browser.seen import Seen, needs_browser
from tests.browser.test_live import log_in, reaches
from tests.server.proxying import needs_nginx, nginx
from tests.server.serving import TASK
from tests.server.test_nginx import PREFIX, Place, placed
from tests.web.looking import opened, simulated

pytestmark = [*needs_browser, *needs_nginx]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with placed(tmp_path, {"epochs": 1000, "evaluate_every": 1}, prefix=PREFIX, task=TASK) as place:
        yield place


def test_a_run_is_watched_and_stepped_in_below_a_prefix(place: Place, visit: Callable[..., Seen]) -> None:
    worker, url = place.worker(7), place.proxy.url + PREFIX
    seen = visit(url, ignore_https_errors=True)
    page = seen.page
    page.goto(f"{url}/workers?state=idle")
    expect(page).to_have_url(f"{url}/login?next=%2Fworkers%3Fstate%3Didle")
    page.get_by_label("Token").fill(place.tokens["boss"])
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{url}/workers?state=idle")
    [cookie] = page.context.cookies(f"{url}/")
    assert (cookie["path"], cookie["secure"], cookie["httpOnly"]) == (PREFIX, True, True)
    assert page.context.cookies(place.proxy.url) == [], "what is beside it on this host does not get the cookie"
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("status")).to_have_text("Live")
    assert worker.work().status == 200
    reaches(seen, 1)
    _walk(seen, url)
    _quarantine(seen, place)
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(f"{url}/login")
    log_in(seen, place.tokens["eye"])
    expect(page).to_have_url(f"{url}/")
    seen.check("401")
    assert all(one.startswith((f"{url}/", "blob:", "data:")) for one in seen.asked)


def _walk(seen: Seen, url: str) -> None:
    """From page to page, as deep as they go, and back by the name of the product."""
    page = seen.page
    page.get_by_role("link", name="Updates").click()
    page.locator("tbody tr a").first.click()
    expect(page).to_have_url(f"{url}/updates/1")
    expect(page.locator("main")).to_contain_text("Leased")
    page.get_by_role("link", name="Offbeat").click()
    expect(page).to_have_url(f"{url}/")
    expect(page.locator(".chart .xtitle").first).to_be_visible()
    for path in ("/updates/1", "/asynchrony", "/workers"):
        seen.go(path)


def _quarantine(seen: Seen, place: Place) -> None:
    seen.go("/workers")
    row = seen.page.locator("tbody tr").filter(has_text="w7")
    row.get_by_role("button", name="Quarantine").click()
    seen.page.get_by_role("dialog").get_by_role("button", name="Quarantine").click()
    expect(row).to_contain_text("an administrator said so")
    assert place.by("eye").call("GET", "/v1/status").json["quarantined"] == 1
    row.get_by_role("button", name="Readmit").click()
    expect(row.get_by_role("button", name="Quarantine")).to_be_visible()


def test_a_folder_of_runs_is_looked_at_below_a_prefix(tmp_path: Path, visit: Callable[..., Seen]) -> None:
    for name in ("one", "two"):
        simulated(tmp_path / "runs" / name, epochs=12)
    certificates.make(tmp_path / "access", ["localhost"])

    def make() -> web.Application:
        app = make_app()
        mount_runs(app, Runs(tmp_path / "runs", run_folders))
        return app

    with (
        opened(make) as folder,
        nginx(tmp_path / "nginx", folder.url, tmp_path / "access", prefix=PREFIX) as proxy,
    ):
        url = proxy.url + PREFIX
        seen = visit(url, ignore_https_errors=True)
        page = seen.go("/").page
        for name in ("one", "two"):
            page.get_by_label(f"Compare {name}").check()
        page.get_by_role("button", name="Compare").click()
        expect(page).to_have_url(f"{url}/compare?run=one&run=two")
        expect(page.locator(".chart .xtitle").first).to_be_visible()
        page.get_by_role("link", name="one", exact=True).first.click()
        expect(page).to_have_url(f"{url}/runs/one/")
        expect(page.get_by_role("status")).to_have_text("Stored run")
        page.get_by_role("link", name="Updates").click()
        expect(page).to_have_url(f"{url}/runs/one/updates")
        page.get_by_role("link", name="All runs").click()
        expect(page).to_have_url(f"{url}/")
        page.goto(f"{url}/runs/two")
        expect(page).to_have_url(f"{url}/runs/two/")
        seen.check()
