"""The page in a real browser: its numbers are those of the twins, keyboard and phone will do, and it stays at home."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from offbeat.server.access import Role, TokenBook
from offbeat.web.app import make_app, mount, mount_runs
from offbeat.web.run_reader import RunReader
from offbeat.web.runs import Runs
from tests.browser.fake import ADMIN, VIEWER, Fake, Story
from tests.browser.seen import AWAY, PHONE, VIEWS, WIDE, Seen, needs_browser, same, value_at
from tests.server.probing import server_process
from tests.web.looking import SOME, opened, simulated

pytestmark = needs_browser

HIDE = """
    let hidden = false;
    Object.defineProperty(Document.prototype, 'hidden', {get: () => hidden});
    addEventListener('message', e => {
        hidden = e.data === 'hide';
        document.dispatchEvent(new Event('visibilitychange'));
    });
"""
CONTRAST = """() => {
    const light = ([r, g, b]) => {
        const of = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        return 0.2126 * of(r) + 0.7152 * of(g) + 0.0722 * of(b);
    };
    const rgb = text => text.match(/[\\d.]+/g).map(Number);
    const ground = element => {
        for (let e = element; e; e = e.parentElement) {
            const colour = rgb(getComputedStyle(e).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const poor = [];
    for (const e of document.querySelectorAll('body *')) {
        const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if (!own || e.closest('svg, [hidden], .unseen, .skip, noscript') || !e.getClientRects().length) continue;
        const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) poor.push(`${e.tagName} ${e.textContent.trim().slice(0, 30)} ${ratio.toFixed(2)}`);
    }
    return poor;
}"""


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake(Story()) as fake:
        yield fake


@pytest.fixture(scope="module")
def folder() -> Iterator[Fake]:
    runs = (Story(), Story(30, 900, name="digits-8", state="finished"), Story(5, 60, name="slow", state="interrupted"))
    with Fake(*runs, ui=True) as fake:
        yield fake


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_the_overview_shows_the_numbers_of_its_twin(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go()
    twin = seen.get(seen.twin())
    numbers = dict(seen.numbers())
    assert {name: value for name, value in numbers.items() if not same(value, value_at(twin, name))} == {}
    plain = {name for name, value in twin.items() if isinstance(value, int | float)} - {"sequence"}
    assert plain | {f"metrics.{name}" for name in twin["metrics"]} | {"rejected.too_stale"} <= set(numbers)
    expect(seen.shown("t")).to_have_text(str(twin["t"]))
    expect(seen.page.get_by_role("heading", level=1)).to_have_text("digits")
    expect(seen.page.locator(".health")).to_have_text(f"OK: {twin['health']['sentence']}")
    seen.check()


def test_what_is_missing_is_shown_as_missing(visit: Callable[..., Seen]) -> None:
    with Fake(Story(0, 0)) as fake:
        seen = visit(fake.url).go()
        expect(seen.page.locator(".chart")).to_have_text("Nothing has been evaluated yet.")
        expect(seen.shown("metric")).to_have_text("\u2013")
        for path, words in (("/workers", "No worker has joined yet."), ("/updates", "No update has arrived yet.")):
            seen.go(path)
            expect(seen.page.locator("tbody")).to_have_text(words)
        seen.go("/asynchrony")
        expect(seen.page.locator("#timeline ~ .chart")).to_have_text("No task has been given yet.")
        seen.check()


def test_rows_show_the_numbers_of_their_twin(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url)
    for path, rows in (("/workers", "workers"), ("/updates", "updates")):
        seen.go(path)
        expect(seen.page.locator("tbody tr").nth(3)).to_be_visible()
        for number, row in enumerate(seen.get(seen.twin())[rows]):
            row |= {"refused": sum(row["refused"].values())} if "refused" in row else {}
            numbers = seen.numbers(f"tbody tr:nth-child({number + 1})") if number < 5 else []
            assert [(name, value) for name, value in numbers if not same(value, row[name])] == []
    seen.check()


def test_every_page_links_its_twin_and_breaks_no_rule(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url)
    for path in VIEWS:
        seen.go(path)
        expect(seen.page.locator("#updated")).not_to_be_empty()
        assert seen.get(seen.twin())
        current = seen.page.get_by_role("navigation", name="Views").locator("[aria-current=page]")
        expect(current).to_have_count(1)
    seen.check()


def test_names_from_outside_stay_text(fake: Fake, visit: Callable[..., Seen]) -> None:
    evil = "<img src=x onerror=alert(1)><b>x</b> %{x}"
    for worker in fake.run.people:
        worker["name"] = evil
    for update in fake.run.updates:
        update["name"] = evil
    seen = visit(fake.url)
    for path in ("/workers", "/updates", "/asynchrony"):
        seen.go(path)
        assert seen.page.locator("main img, main tbody b").count() == 0
    expect(seen.page.locator("#timeline ~ .chart .ytick text").first).to_contain_text("<img src=x onerror=")
    seen.check()


# --- looking closer --------------------------------------------------------------------------------------------------


def test_axes_and_metrics_are_switched_and_kept_in_the_address(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go()
    chart = seen.page.locator(".chart")
    for axis, title in (("Gradients", "gradients"), ("Time", "time (s)"), ("Epochs", "epoch t")):
        seen.page.get_by_role("radio", name=axis).check(force=True)
        expect(chart.locator(".xtitle")).to_have_text(title)
        expect(chart).to_have_attribute("aria-label", re.compile(f"accuracy against {axis.lower()}"))
    seen.page.get_by_role("radio", name="loss").check(force=True)
    expect(chart.locator(".ytitle")).to_have_text("loss")
    expect(seen.shown("metrics.loss")).to_have_attribute("data-value", str(fake.run.point(1)["metrics"]["loss"]))
    seen.page.get_by_role("radio", name="Time").check(force=True)
    assert seen.page.url.endswith("?metric=loss&x=time")
    seen.page.reload()
    seen.settle()
    expect(chart.locator(".xtitle")).to_have_text("time (s)")
    seen.check()


def test_workers_are_sorted_filtered_and_paged(visit: Callable[..., Seen]) -> None:
    with Fake(Story(120, 600)) as fake:
        seen = visit(fake.url).go("/workers")
        rows, header = seen.page.locator("tbody tr"), seen.page.get_by_role("columnheader", name="Tasks")
        expect(rows).to_have_count(50)
        for order in ("descending", "ascending"):
            header.get_by_role("button").click()
            expect(header).to_have_attribute("aria-sort", order)
            twin = seen.get(seen.twin())
            expect(rows.first).to_have_attribute("data-worker", str(twin["workers"][0]["worker"]))
            expect(header.get_by_role("button")).to_be_focused()
        seen.page.get_by_role("link", name="Next").click()
        expect(seen.page.get_by_role("navigation", name="Pages")).to_contain_text("Page 2 of 3")
        expect(seen.page.get_by_role("link", name="Next")).to_be_focused()
        seen.page.get_by_label("Find").fill("lab-gpu")
        expect(rows).to_have_count(20)
        expect(seen.page.get_by_label("Find")).to_be_focused()
        seen.page.get_by_label("State").select_option("away")
        expect(rows).to_have_count(len([w for w in fake.run.people if "lab-gpu" in w["name"] and w["state"] == "away"]))
        assert "sort=tasks" in seen.twin()
        assert "text=lab-gpu" in seen.twin()
        assert "page" not in seen.twin()
        seen.page.get_by_label("Find").fill("nobody is called so")
        expect(seen.page.locator("tbody")).to_have_text("No worker fits the filter.")
        seen.check()


def test_updates_are_found_and_each_has_its_story(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go("/updates")
    rows, task = seen.page.locator("tbody tr"), seen.page.locator("tbody tr th a").first
    expect(task).to_have_attribute("data-value", "400")
    seen.page.get_by_role("link", name="Older").click()
    expect(task).to_have_attribute("data-value", "300")
    seen.page.go_back()
    expect(task).to_have_attribute("data-value", "400")
    seen.page.get_by_label("Outcome").select_option("not_finite")
    expect(rows).to_have_count(fake.run.overview({})["rejected"]["not_finite"])
    seen.page.get_by_label("Outcome").select_option("")
    seen.page.get_by_label("Worker").fill("lab-gpu-2")
    expect(rows).to_have_count(fake.run.people[2]["tasks"])
    task.click()
    expect(seen.page.get_by_role("heading", level=1)).to_be_focused()
    expect(seen.page.locator(".story li")).to_have_count(len(seen.get(seen.twin())["story"]))
    expect(seen.page.locator(".story li").first).to_contain_text("Leased to a worker")
    seen.check()


def test_a_bar_of_the_timeline_leads_to_its_story(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go("/asynchrony")
    bar = seen.page.locator(".barlayer .trace").nth(1).locator(".point path").first
    bar.scroll_into_view_if_needed()
    place = bar.bounding_box()
    assert place is not None
    middle = (place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    seen.page.mouse.move(*middle)
    hover = seen.page.locator("#timeline ~ .chart .hoverlayer")
    expect(hover).to_contain_text("leased at")
    expect(hover).to_contain_text("staleness")
    seen.page.mouse.click(*middle)
    expect(seen.page.locator(".story")).to_be_visible()
    assert re.search(r"/updates/\d+$", seen.page.url)
    seen.check()


# --- live ------------------------------------------------------------------------------------------------------------


def test_an_epoch_arrives_while_one_looks(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go()
    expect(seen.page.get_by_role("status")).to_have_text("Live")
    for _ in range(3):
        fake.move()
        expect(seen.shown("t")).to_have_attribute("data-value", str(fake.run.t))
        expect(seen.shown("gradients")).to_have_attribute("data-value", str(10 * fake.run.t))
    seen.check()


def test_many_moves_are_few_requests(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go()
    expect(seen.page.get_by_role("status")).to_have_text("Live")
    before = fake.asked.count("/overview.json")
    for _ in range(40):
        fake.move()
        seen.page.wait_for_timeout(50)
    expect(seen.shown("t")).to_have_attribute("data-value", str(fake.run.t))
    assert 1 <= fake.asked.count("/overview.json") - before <= 5


def test_a_hidden_page_asks_for_nothing(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url)
    seen.page.add_init_script(HIDE)
    seen.go()
    expect(seen.page.get_by_role("status")).to_have_text("Live")
    seen.page.evaluate("postMessage('hide')")
    before, asked = fake.run.t, fake.asked.count("/overview.json")
    while fake.run.t == before:
        fake.move()
    seen.page.wait_for_timeout(2500)
    assert fake.asked.count("/overview.json") == asked
    seen.page.evaluate("postMessage('show')")
    expect(seen.shown("t")).to_have_attribute("data-value", str(fake.run.t))
    seen.check()


def test_the_connection_is_lost_and_regained(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go()
    status = seen.page.get_by_role("status")
    expect(status).to_have_text("Live")
    fake.stop()
    expect(status).to_have_text("Connection lost, trying again")
    expect(seen.shown("t")).to_have_attribute("data-value", str(fake.run.t))
    for _ in range(20):
        fake.run.step()
    fake.start()
    expect(status).to_have_text("Live")
    expect(seen.shown("t")).to_have_attribute("data-value", str(fake.run.t))
    expect(seen.page.locator(".trouble")).to_be_empty()
    seen.check(*AWAY)


def test_errors_are_said_in_words(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url)
    body = json.dumps({"error": "not_now", "message": "cannot read the ledger", "do": "Come back later."})
    seen.page.route("**/workers.json", lambda route: route.fulfill(status=503, body=body))
    seen.page.goto(f"{fake.url}/workers")
    alert = seen.page.locator(".trouble")
    expect(alert).to_contain_text("cannot read the ledger. Come back later.")
    seen.page.unroute("**/workers.json")
    seen.page.get_by_role("button", name="Try again").click()
    expect(alert).to_be_empty()
    expect(seen.page.locator("tbody tr")).to_have_count(12)
    seen.page.goto(f"{fake.url}/no/such/page")
    expect(seen.page.get_by_role("heading", level=1)).to_have_text("Nothing here")
    seen.page.goto(f"{fake.url}/updates/999999")
    expect(alert).to_contain_text("there is no /updates/999999.json.")
    seen.check("503", "404")


def test_without_charts_the_numbers_are_there(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url)
    seen.page.route("**/plotly.min.js", lambda route: route.abort())
    seen.page.goto(fake.url)
    expect(seen.page.locator(".chart")).to_contain_text("could not be loaded")
    expect(seen.shown("t")).to_have_attribute("data-value", str(fake.run.t))
    seen.check("ERR_FAILED")


# --- who looks -------------------------------------------------------------------------------------------------------


def test_a_viewer_logs_in_looks_and_cannot_touch(visit: Callable[..., Seen]) -> None:
    with Fake(Story(), tokens=True) as fake:
        seen = visit(fake.url)
        seen.page.goto(f"{fake.url}/workers?state=idle")
        expect(seen.page).to_have_url(f"{fake.url}/login?next=%2Fworkers%3Fstate%3Didle")
        token = seen.page.get_by_label("Token")
        expect(token).to_be_focused()
        token.fill("ob_wrong")
        seen.page.get_by_role("button", name="Log in").click()
        expect(seen.page.locator("#trouble")).to_contain_text("this token is not known")
        token.fill(VIEWER)
        token.press("Enter")
        expect(seen.page).to_have_url(f"{fake.url}/workers?state=idle")
        expect(seen.page.locator("tbody tr")).to_have_count(2)
        expect(seen.page.get_by_role("button", name="Quarantine")).to_have_count(0)
        seen.page.get_by_role("button", name="Log out").click()
        expect(seen.page).to_have_url(f"{fake.url}/login")
        seen.check("401")


AWAY_AND_HOME = {"/.//example.org/": "//example.org/", "//example.org/": "/", "https://example.org/": "/"}
"""Where somebody would like the form to lead, and where it leads."""


def test_who_is_logged_out_is_led_to_the_form_and_nowhere_else(visit: Callable[..., Seen]) -> None:
    with Fake(Story(), tokens=True) as fake:
        seen = visit(fake.url)
        for away, home in AWAY_AND_HOME.items():
            fake.session |= {"role": None, "csrf": None}
            seen.page.goto(f"{fake.url}/login?next={away}")
            seen.page.get_by_label("Token").fill(VIEWER)
            seen.page.get_by_label("Token").press("Enter")
            expect(seen.page).to_have_url(f"{fake.url}{home}")
        expect(seen.page.get_by_role("status")).to_have_text("Live")
        fake.session |= {"role": None, "csrf": None}
        fake.move()
        expect(seen.page).to_have_url(f"{fake.url}/login?next=%2F")
        seen.check("401")


def test_an_admin_quarantines_and_readmits(visit: Callable[..., Seen]) -> None:
    with Fake(Story(), tokens=True) as fake:
        fake.session |= {"role": "admin", "csrf": "csrf-2"}
        assert ADMIN
        seen = visit(fake.url).go("/workers")
        row = seen.page.locator('tr[data-worker="4"]')
        row.get_by_role("button", name="Quarantine laptop-4").click()
        dialog = seen.page.get_by_role("dialog", name="Quarantine laptop-4?")
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_be_hidden()
        assert fake.orders == []
        row.get_by_role("button", name="Quarantine laptop-4").click()
        dialog.get_by_role("button", name="Quarantine").click()
        expect(row).to_contain_text("by hand")
        row.get_by_role("button", name="Readmit laptop-4").click()
        expect(row.get_by_role("button", name="Quarantine laptop-4")).to_be_visible()
        assert fake.orders == [("4", "quarantine"), ("4", "readmit")]
        seen.check()
        fake.session["csrf"] = "another"
        row.get_by_role("button", name="Quarantine laptop-4").click()
        dialog.get_by_role("button", name="Quarantine").click()
        expect(seen.page.locator("main [role=alert]").last).to_contain_text("only an admin may do this")
        seen.check("403")


# --- a folder of runs ------------------------------------------------------------------------------------------------


def test_runs_are_listed_opened_and_compared(folder: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(folder.url).go()
    compare = seen.page.get_by_role("button", name="Compare")
    expect(compare).to_be_disabled()
    for name in ("digits-8", "slow"):
        seen.page.get_by_role("checkbox", name=f"Compare {name}").check()
    compare.click()
    seen.settle()
    chart = seen.page.locator(".chart")
    expect(chart.locator(".scatterlayer .trace")).to_have_count(2)
    twin = seen.get(seen.twin())
    for row in twin["results"]:
        for run, value in row["values"].items():
            assert same(str(seen.shown(f"{row['name']} {run}").get_attribute("data-value")), value)
    seen.page.get_by_role("checkbox", name="digits-7").check()
    expect(chart.locator(".scatterlayer .trace")).to_have_count(3)
    seen.page.get_by_role("radio", name="Time").check(force=True)
    expect(chart.locator(".xtitle")).to_have_text("time (s)")
    seen.page.get_by_role("list", name="Runs in the chart").get_by_role("link", name="slow").click()
    expect(seen.page.get_by_role("status")).to_have_text("Interrupted")
    assert seen.twin() == "/runs/slow/overview.json"
    seen.page.get_by_role("link", name="Asynchrony").click()
    expect(seen.page).to_have_url(f"{folder.url}/runs/slow/asynchrony")
    seen.page.get_by_role("link", name="All runs").click()
    expect(seen.page.locator("tbody tr")).to_have_count(3)
    seen.check()


def test_a_finished_run_is_not_listened_to(folder: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(folder.url).go("/runs/digits-8/")
    expect(seen.page.get_by_role("status")).to_have_text("Stored run")
    assert not any(url.endswith("/events") for url in seen.asked)
    seen.check()


def test_real_runs_show_the_numbers_of_their_twins(tmp_path: Path, visit: Callable[..., Seen]) -> None:
    for name, settings in (("one", {}), ("two", {**SOME, "seed": 4})):
        simulated(tmp_path / name, **settings)

    def make() -> Any:
        app = make_app()
        mount_runs(app, Runs(tmp_path, lambda folder: sorted(folder.iterdir())))
        return app

    with opened(make) as server:
        seen = visit(server.url).go("/runs/two/")
        twin = seen.get(seen.twin())
        numbers = dict(seen.numbers())
        assert {name: value for name, value in numbers.items() if not same(value, value_at(twin, name))} == {}
        assert numbers["t"] == "60"
        for path in ("/", *(f"/runs/two{view}" for view in VIEWS[1:]), "/compare?run=one&run=two"):
            seen.go(path)
            expect(seen.page.locator("#updated")).not_to_be_empty()
            expect(seen.page.locator(".trouble")).to_be_empty()
        seen.check()


def test_the_real_door_lets_an_admin_touch_and_a_viewer_look(tmp_path: Path, visit: Callable[..., Seen]) -> None:
    simulated(tmp_path / "run")
    book = TokenBook.begin(tmp_path / "tokens.json")
    tokens, acts = book.add_all({"ann": Role.ADMIN, "vic": Role.VIEWER}), list[tuple[str, int | None]]()

    async def act(what: str, worker: int | None) -> None:
        acts.append((what, worker))

    def make() -> Any:
        app = make_app()
        mount(app, RunReader(tmp_path / "run"), tokens=book, act=act)
        return app

    with opened(make) as server:
        for name, buttons in (("vic", 0), ("ann", 9)):
            seen = visit(server.url)
            seen.page.goto(f"{server.url}/workers")
            expect(seen.page).to_have_url(f"{server.url}/login?next=%2Fworkers")
            seen.page.get_by_label("Token").fill(tokens[name])
            seen.page.get_by_role("button", name="Log in").click()
            expect(seen.page.locator("tbody tr")).to_have_count(9)
            expect(seen.page.get_by_role("button", name="Quarantine")).to_have_count(buttons)
        seen.page.get_by_role("button", name="Quarantine").nth(2).click()
        seen.page.get_by_role("dialog").get_by_role("button", name="Quarantine").click()
        expect(seen.page.get_by_role("dialog")).to_be_hidden()
        seen.go("/")
        seen.page.get_by_role("button", name="Log out").click()
        expect(seen.page).to_have_url(f"{server.url}/login")
        assert acts == [("quarantine", 2)]
        seen.check()


def test_a_real_run_is_paused_and_resumed(tmp_path: Path, visit: Callable[..., Seen]) -> None:
    with server_process(tmp_path) as running:
        seen = visit(running.url).go("/")
        badge = seen.page.locator('.badge[data-state="paused"]')
        seen.page.get_by_role("button", name="Pause").click()
        expect(badge).to_be_visible()
        assert running.status()["paused"] is True
        seen.page.get_by_role("button", name="Resume").click()
        expect(badge).to_be_hidden()
        assert running.status()["paused"] is False
        seen.check()


# --- how it looks and feels ------------------------------------------------------------------------------------------


def test_the_keyboard_is_enough(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url).go()
    seen.page.keyboard.press("Tab")
    skip = seen.page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    seen.page.keyboard.press("Enter")
    expect(seen.page.locator("main")).to_be_focused()
    seen.page.keyboard.press("Tab")
    expect(seen.page.get_by_role("button", name="Pause")).to_be_focused()
    seen.page.keyboard.press("Tab")
    expect(seen.page.get_by_role("radio", name="accuracy")).to_be_focused()
    seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("ArrowRight")
    expect(seen.page.locator(".xtitle")).to_have_text("gradients")
    expect(seen.page.get_by_role("radio", name="Gradients")).to_be_focused()
    seen.page.get_by_role("link", name="Workers").focus()
    seen.page.keyboard.press("Enter")
    expect(seen.page.get_by_role("heading", level=1)).to_be_focused()
    seen.check()


def test_the_theme_follows_the_system_until_one_chooses(fake: Fake, visit: Callable[..., Seen]) -> None:
    seen = visit(fake.url, theme="dark").go()
    root = seen.page.locator("html")
    expect(root).to_have_attribute("data-theme", "dark")
    title = seen.page.locator(".xtitle")
    before = title.evaluate("e => getComputedStyle(e).fill")
    seen.page.get_by_role("button", name="Light theme").click()
    expect(root).to_have_attribute("data-theme", "light")
    assert title.evaluate("e => getComputedStyle(e).fill") != before
    seen.page.reload()
    expect(root).to_have_attribute("data-theme", "light")
    seen.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out(fake: Fake, visit: Callable[..., Seen], theme: str) -> None:
    fake.run.people[3] |= {"state": "quarantined", "why": "3 updates were not finite"}
    fake.run.health = {"level": "warning", "sentence": "1 worker quarantined"}
    seen = visit(fake.url, theme=theme)
    for path in (*VIEWS, "/login"):
        seen.go(path)
        assert (path, seen.page.evaluate(CONTRAST)) == (path, [])


def test_no_page_is_wider_than_the_screen(fake: Fake, folder: Fake, visit: Callable[..., Seen]) -> None:
    both = (visit(server.url) for server in (fake, folder))
    for seen, paths in zip(both, (VIEWS, ("/", "/compare?run=digits-7&run=digits-8&run=slow")), strict=True):
        for path in paths:
            seen.go(path)
            for width in (1920, 768, 375, 320):
                seen.page.set_viewport_size({"width": width, "height": 800})
                expect(seen.page.locator("html")).to_have_js_property("scrollWidth", width)
        seen.check()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", ["wide", "phone"])
def test_screenshots(fake: Fake, folder: Fake, visit: Callable[..., Seen], shots: Path, theme: str, size: str) -> None:
    fake.run.people[3] |= {"state": "quarantined", "why": "3 updates were not finite"}
    viewport, touch = (WIDE, False) if size == "wide" else (PHONE, True)
    mine, runs = (visit(server.url, viewport, theme, has_touch=touch) for server in (fake, folder))
    pages = [(mine, path) for path in (*VIEWS, "/login")] + [(runs, "/"), (runs, "/compare?run=digits-7&run=slow")]
    for seen, path in pages:
        seen.go(path)
        name = path.partition("?")[0].strip("/").replace("/", "-") or ("overview" if seen is mine else "runs")
        where = shots / f"{name}-{theme}-{size}.png"
        seen.page.screenshot(path=where, full_page=True)
        assert where.stat().st_size > 5000
        seen.check()


# --- many ------------------------------------------------------------------------------------------------------------


def test_five_thousand_workers_and_a_hundred_thousand_updates(visit: Callable[..., Seen]) -> None:
    with Fake(Story(5000, 100_000)) as fake:
        seen = visit(fake.url)
        for path in VIEWS:
            seen.go(path)
            assert seen.page.locator("main *").count() < 10_000
        seen.go("/workers?page=100")
        expect(seen.page.locator("tbody tr")).to_have_count(50)
        expect(seen.page.get_by_role("navigation", name="Pages")).to_contain_text("Page 100 of 100")
        seen.check()
