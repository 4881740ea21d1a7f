"""One browser for the tests of a file, and a fresh profile for every visit.

OFFBEAT_SCREENSHOTS names a folder in which screenshots are kept.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.seen import CHROMIUM, PATIENCE_MS, WIDE, Seen


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Seen]]:
    """Opens a browser of its own for a server."""
    with ExitStack() as stack:

        def visit(url: str, viewport: dict[str, int] = WIDE, theme: str = "light", **more: Any) -> Seen:
            context = browser.new_context(viewport=viewport, color_scheme=theme, reduced_motion="reduce", **more)  # type: ignore[arg-type]
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE_MS)
            return Seen(context.new_page(), url)

        yield visit


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("OFFBEAT_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
