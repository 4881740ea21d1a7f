"""The page of a large run, in a real browser: first paint, size of the answers, and the server's load of an open page.

    python benchmarks/page.py [--devices 5000] [--updates 100000]

Needs the extras `dev` and a Chromium (`apt-get install chromium`, or OFFBEAT_CHROMIUM says where it is). The run is
made by the simulator; for the cost of an open page its last updates are written again, 100 a second, while a browser
shows it.
"""

import argparse
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
from playwright.sync_api import Browser, sync_playwright

from offbeat.storage.ledger import Ledger
from offbeat.storage.lock import Lock
from offbeat.storage.rows import Row
from offbeat.storage.run_folder import LEDGER, LOCK, SETTINGS

CHROMIUM = os.environ.get("OFFBEAT_CHROMIUM", "/usr/bin/chromium")
VIEWS = ("/", "/asynchrony", "/workers", "/updates")
LOOKS, WATCHED_S, SPARE_S = 5, 20.0, 20.0
UPDATES_PER_S = 100
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
NUMBERS = "main [data-name], main tbody tr"
TASK = """
import numpy as np
from offbeat import Trained

class Line:
    devices = {devices}

    def initial(self, seed):
        return {{"x": np.zeros(4, np.float32)}}

    def train(self, model, work):
        model["x"][:] += 1
        return Trained(samples=1, gradients=1)

    def evaluate(self, model):
        return {{"size": float(model["x"].sum())}}

task = Line()
"""


def offbeat(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "offbeat", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)  # noqa: S603 (ours)


def simulated(folder: Path, devices: int, updates: int) -> "subprocess.Popen[str]":
    (folder / "line.py").write_text(TASK.format(devices=devices))
    options = ("--in-flight-max", "500", "--evaluate-every", "50", "--executor", "inline")
    where = ("--dir", str(folder / "runs" / f"of-{updates}"))
    return offbeat("simulate", str(folder / "line.py"), "--epochs", str(updates), *options, *where)


def first_looks(browser: Browser, url: str, run: str) -> None:
    """Open every view in a fresh profile, without a cache."""
    for view in VIEWS:
        looks = [first_look(browser, f"{url}/runs/{run}{view}") for _ in range(LOOKS)]
        paint, full, size = (median(values) for values in zip(*looks, strict=True))
        print(f"{view:12} first paint {paint:.2f} s, with its numbers {full:.2f} s, largest JSON {size / 1000:.0f} kB")


def first_look(browser: Browser, address: str) -> tuple[float, float, int]:
    """Seconds to the first paint, seconds to the numbers, bytes of the largest answer in JSON."""
    page, sizes = browser.new_context().new_page(), []
    page.on("response", lambda answer: sizes.append(len(answer.body())) if ".json" in answer.url else None)
    page.on("console", lambda said: print(f"  console: {said.text}"))
    began = time.perf_counter()
    page.goto(address)
    page.locator(NUMBERS).first.wait_for()
    full, paint = time.perf_counter() - began, page.evaluate(PAINT) / 1000
    page.wait_for_load_state("networkidle")
    page.context.close()
    return paint, full, max(sizes)


def cost_of_an_open_page(browser: Browser, url: str, run: Path, server: psutil.Process) -> None:
    """Measure the server's processor time while a browser shows a run that goes on."""
    for view in VIEWS:
        live = run.with_name(f"live-{VIEWS.index(view)}")
        with growing(run, live):
            page = browser.new_context().new_page()
            page.goto(f"{url}/runs/{live.name}{view}")
            page.locator(NUMBERS).first.wait_for()
            time.sleep(2)
            before, began = sum(server.cpu_times()[:2]), time.perf_counter()
            time.sleep(WATCHED_S)
            share = (sum(server.cpu_times()[:2]) - before) / (time.perf_counter() - began)
            print(f"{view:12} costs the server {100 * share:.1f} % of a core, at {UPDATES_PER_S} updates a second")
            page.context.close()


@contextmanager
def growing(run: Path, live: Path) -> Iterator[None]:
    """A copy of the run without its last updates, which are written to it again meanwhile."""
    live.mkdir()
    for name in (SETTINGS, LEDGER):
        shutil.copy(run / name, live / name)
    lock, stop = Lock.take(live / LOCK), threading.Event()
    with Ledger.open(live / LEDGER) as ledger:
        decided = [row.sequence for row in ledger.rows() if row.kind == "decided"]
        keep = decided[-int(UPDATES_PER_S * (WATCHED_S + SPARE_S))]
        rows = [row for row in ledger.rows() if row.sequence > keep]
    with sqlite3.connect(live / LEDGER) as connection:  # whose rows come back under their own numbers
        connection.execute("DELETE FROM events WHERE sequence > ?", (keep,))
        connection.execute("DELETE FROM commits WHERE last > ?", (keep,))
    writer = threading.Thread(target=write, args=(live / LEDGER, rows, stop))
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()
        lock.release()


def write(path: Path, rows: list[Row], stop: threading.Event) -> None:
    """Write rows ten times a second, as many as belong to a tenth of a second's updates."""
    share = max(1, int(len(rows) / (WATCHED_S + SPARE_S) / 10))
    with sqlite3.connect(path, timeout=10) as ledger:
        for begin in range(0, len(rows), share):
            places = ", ".join("?" * len(rows[0]))
            ledger.executemany(f"INSERT INTO events VALUES ({places})", rows[begin : begin + share])  # noqa: S608
            ledger.commit()
            if stop.wait(0.1):
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=5_000)
    parser.add_argument("--updates", type=int, default=100_000)
    asked = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        simulated(folder, asked.devices, asked.updates).communicate()
        ui = offbeat("ui", str(folder / "runs"), "--port", "0")
        try:
            said = ui.stderr.readline() if ui.stderr else ""
            url = next(word for word in said.split() if word.startswith("http"))
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                first_looks(browser, url, f"of-{asked.updates}")
                cost_of_an_open_page(browser, url, folder / "runs" / f"of-{asked.updates}", psutil.Process(ui.pid))
                browser.close()
        finally:
            ui.terminate()
            ui.communicate()


if __name__ == "__main__":
    main()
