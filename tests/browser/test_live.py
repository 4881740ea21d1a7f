"""The page of a real fleet: `offbeat serve` with TLS and tokens, `offbeat work` for five devices, and a browser.

With OFFBEAT_SCREENSHOTS=docs/pictures it makes the README's screenshot, page.png.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from tests.browser.seen import AWAY, Seen, needs_browser, same, value_at

pytestmark = needs_browser
PATIENCE_S = 90.0
EPOCHS = 5_000
SPEEDS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
LOOK_S = 0.05
ENOUGH = 150
"""Epochs after which there is something to look at."""

Process = subprocess.Popen[bytes]


class Fleet:
    """Processes as a user would start them, in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.started = folder, folder / "digits", list[Process]()
        workers = [part for number in range(len(SPEEDS_S)) for part in ("--worker", f"phone-{number}")]
        made = self._offbeat("init", "access", *workers, "--write-tokens", "--json")
        out, _ = made.communicate(timeout=PATIENCE_S)
        self.tokens: dict[str, str] = json.loads(out)["tokens"]
        self.port = "0"
        self.serve()

    def _offbeat(self, *arguments: str) -> Process:
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "offbeat", *arguments]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=self.folder, env=environment)

    def serve(self) -> None:
        """Start the server; it goes on with the run that is there."""
        options = ("--epochs", str(EPOCHS), "--evaluate-every", "10", "--port", self.port)
        self.server = self._offbeat("serve", "digits", "--dir", "digits", "--access", "access", *options)
        self.started.append(self.server)
        where = self.run / "server.json"
        until = time.monotonic() + PATIENCE_S
        while not (where.is_file() and json.loads(where.read_text())["pid"] == self.server.pid):
            assert self.server.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until
            time.sleep(LOOK_S)
        self.url = str(json.loads(where.read_text())["url"])
        self.port = self.url.rpartition(":")[2]

    def work(self, number: int) -> Process:
        """Start a worker."""
        trust = ("--ca", "access/ca.pem", "--token-file", f"access/tokens/phone-{number}.token")
        own = ("--dir", f"w{number}", "--name", f"phone-{number}", "--at-least-s", str(SPEEDS_S[number]))
        worker = self._offbeat("work", "digits", "--server", self.url, "--threads", "1", *trust, *own)
        self.started.append(worker)
        return worker


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    made = Fleet(folder)
    try:
        yield made
    finally:
        for process in reversed(made.started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(made.started):
            try:
                process.communicate(timeout=PATIENCE_S)
            finally:
                process.kill()


def log_in(seen: Seen, token: str) -> None:
    seen.page.goto(f"{seen.url}/")
    seen.page.get_by_label("Token").fill(token)
    seen.page.get_by_role("button", name="Log in").click()
    expect(seen.page.get_by_role("status")).to_have_text("Live", timeout=PATIENCE_S * 1000)


def epoch(seen: Seen) -> int:
    return int(str(seen.shown("t").get_attribute("data-value")))


def reaches(seen: Seen, t: int) -> None:
    """Nobody reloads: the page itself must come to this epoch."""
    script = "t => Number(document.querySelector('[data-name=t]')?.dataset.value) >= t"
    seen.page.wait_for_function(script, arg=t, timeout=PATIENCE_S * 1000)


def twin_of(seen: Seen) -> Any:
    """The twin as this visitor's cookie lets them see it."""
    answer = seen.page.request.get(seen.url + seen.twin())
    assert answer.ok
    return answer.json()


def agrees(seen: Seen) -> None:
    """Every number on the page is that of its twin, once both are of the same moment."""
    until = time.monotonic() + PATIENCE_S
    while True:
        before, numbers, after = twin_of(seen), dict(seen.numbers()), twin_of(seen)
        steady = {name: value for name, value in numbers.items() if value_at(before, name) == value_at(after, name)}
        wrong = {name: value for name, value in steady.items() if not same(value, value_at(before, name))}
        if not wrong and {"t", "applied"} <= steady.keys():
            return
        assert time.monotonic() < until, (wrong, before)


def order(seen: Seen, worker: int, what: str, csrf: str | None) -> int:
    """What the page's own request would bring, whoever is logged in."""
    script = """async ([path, csrf]) => {
        const headers = csrf === null ? {} : {"X-CSRF-Token": csrf};
        return (await fetch(path, {method: "POST", headers})).status;
    }"""
    return int(seen.page.evaluate(script, [f"/workers/{worker}/{what}", csrf]))


def test_a_real_fleet_is_watched(tmp_path: Path, visit: Callable[..., Seen], shots: Path) -> None:
    with fleet(tmp_path) as made:
        viewer, admin = (visit(made.url, ignore_https_errors=True) for _ in range(2))
        log_in(viewer, made.tokens["viewer"])
        expect(viewer.page.locator(".health")).to_contain_text("no workers: start some with offbeat work")
        for number in range(len(SPEEDS_S)):
            made.work(number)
        reaches(viewer, 2)
        expect(viewer.page.locator(".health")).to_contain_text("healthy")
        _look_closer(viewer)
        log_in(admin, made.tokens["admin"])
        _quarantine(viewer, admin, "phone-3")
        _pull_the_plug(made, viewer)
        viewer.page.goto(f"{viewer.url}/")
        reaches(viewer, ENOUGH)
        _picture(viewer, shots)
        viewer.page.goto(f"{viewer.url}/")
        viewer.settle()
        agrees(viewer)
        admin.check("403", *AWAY)
        viewer.check("401", "403", *AWAY)


def _look_closer(viewer: Seen) -> None:
    page = viewer.page
    for axis, title in (("Gradients", "gradients"), ("Time", "time (s)"), ("Epochs", "epoch t")):
        page.get_by_role("radio", name=axis).check(force=True)
        expect(page.locator(".chart .xtitle")).to_have_text(title)
    page.get_by_role("link", name="Workers").click()
    expect(page.locator("tbody tr")).to_have_count(5, timeout=PATIENCE_S * 1000)
    page.get_by_role("searchbox").fill("phone-3")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("button", name="Quarantine")).to_have_count(0)
    page.get_by_role("link", name="Overview").click()


def _quarantine(viewer: Seen, admin: Seen, name: str) -> None:
    """The admin can, and the viewer sees it; the viewer cannot, with or without the admin's CSRF token."""
    admin.go("/workers")
    row = admin.page.locator("tbody tr").filter(has_text=name)
    row.get_by_role("button", name="Quarantine").click()
    admin.page.get_by_role("dialog").get_by_role("button", name="Quarantine").click()
    expect(row).to_contain_text("an administrator said so")
    expect(viewer.page.locator(".health")).to_contain_text("1 worker quarantined")
    worker = int(str(row.get_attribute("data-worker")))
    session = admin.page.request.get(f"{admin.url}/session.json").json()
    assert [order(viewer, worker, "readmit", csrf) for csrf in (None, session["csrf"])] == [403, 403]
    assert order(admin, worker, "readmit", None) == 403
    expect(row).to_contain_text("an administrator said so")
    row.get_by_role("button", name="Readmit").click()
    expect(row.get_by_role("button", name="Quarantine")).to_be_visible()
    expect(viewer.page.locator(".health")).to_contain_text("healthy")


def _pull_the_plug(made: Fleet, viewer: Seen) -> None:
    """The server is killed and started again: the page, which nobody touches, goes on by itself."""
    status, before = viewer.page.get_by_role("status"), epoch(viewer)
    made.server.kill()
    made.server.wait(PATIENCE_S)
    expect(status).to_have_text("Connection lost, trying again")
    assert epoch(viewer) >= before, "what was known stays on the page"
    made.serve()
    expect(status).to_have_text("Live", timeout=PATIENCE_S * 1000)
    reaches(viewer, before + 5)


def _picture(viewer: Seen, shots: Path) -> None:
    viewer.page.set_viewport_size({"width": 1180, "height": 970})
    viewer.go("/asynchrony")
    viewer.page.screenshot(path=shots / "page.png")
    assert (shots / "page.png").stat().st_size > 20_000
