"""A page in a real browser: what it shows, what it asks for, and what goes wrong on it.

Needs Playwright's Python package and a Chromium (Debian: `apt-get install chromium`; elsewhere OFFBEAT_CHROMIUM says
where it is).
"""

import json
import os
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Locator, Page, expect

from offbeat.web.pages import plotly_path

CHROMIUM = Path(os.environ.get("OFFBEAT_CHROMIUM", "/usr/bin/chromium"))
PATIENCE_MS = 20_000
WIDE, PHONE = {"width": 1360, "height": 900}, {"width": 375, "height": 800}
VIEWS = ("/", "/asynchrony", "/workers", "/updates", "/updates/12")
AWAY = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")
"""What a browser says while a server is not there."""
expect.set_options(timeout=PATIENCE_MS)
needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs a browser at {CHROMIUM}: apt-get install chromium"),
    pytest.mark.skipif(plotly_path() is None, reason="needs plotly: pip install plotly"),
]

REPORT = "document.addEventListener('securitypolicyviolation', e => console.error('policy: ' + e.violatedDirective));"


@dataclass
class Seen:
    """A page, and what went wrong on it."""

    page: Page
    url: str
    troubles: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.add_init_script(REPORT)
        self.page.on("console", lambda said: self.troubles.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.troubles.append(f"{error}\n{error.stack}"))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def go(self, path: str = "/") -> "Seen":
        """To a page, until it shows its numbers and its charts."""
        self.page.goto(self.url + path)
        self.settle()
        return self

    def settle(self) -> None:
        """Until the page has its numbers and has drawn them."""
        expect(self.page.locator("h1")).to_be_visible()
        expect(self.page.locator(".view")).not_to_contain_text("being loaded")
        expect(self.page.locator("main")).not_to_contain_text("Loading.")

    def get(self, path: str) -> Any:
        """JSON from the server, past the page."""
        with urllib.request.urlopen(self.url + path) as answer:  # noqa: S310 (our own server)
            return json.loads(answer.read())

    def shown(self, name: str) -> Locator:
        """The element that shows a number."""
        return self.page.locator(f'[data-name="{name}"]').first

    def numbers(self, within: str = "main") -> list[tuple[str, str]]:
        """Every number that is shown: its name and its raw value."""
        found = self.page.locator(f"{within} [data-name]")
        told = found.evaluate_all("all => all.map(e => [e.dataset.name, e.dataset.value])")
        return [(name, value) for name, value in told]

    def twin(self) -> str:
        """Where the page says that its numbers come from."""
        return str(self.page.get_by_role("link", name="JSON").get_attribute("href"))

    def check(self, *allowed: str) -> None:
        """Nothing went wrong but what the test did itself, and nothing was asked of another host."""
        assert [text for text in self.troubles if not any(one in text for one in allowed)] == []
        own = urlsplit(self.url).netloc
        assert [url for url in self.asked if urlsplit(url).netloc not in (own, "")] == []


def value_at(twin: Any, name: str) -> Any:
    """metrics.accuracy: twin["metrics"]["accuracy"]."""
    for part in name.split("."):
        twin = twin.get(part)
    return twin


def same(text: str, value: Any) -> bool:
    """Is this what is shown of a value?"""
    return text == "" if value is None else float(text) == float(value)
