"""Pages in a browser: the machine's Chromium, if present."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import ConsoleMessage, Request
from playwright.sync_api import Page as BrowserPage

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")


class Opened:
    """Page in a browser, with its errors and network requests."""

    def __init__(self, browser: Any, path: Path, width: int) -> None:
        phone = width < 600
        viewport = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=viewport, has_touch=phone, is_mobile=phone)
        self.page: BrowserPage = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []

        def note(request: Request) -> None:
            self.requests.append(request.url)

        def complain(message: ConsoleMessage) -> None:
            if message.type == "error":
                self.complaints.append(message.text)

        self.page.on("console", complain)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", note)
        self.page.goto(path.as_uri())
        self.path, self.width = path, width

    def settled(self) -> int:
        return int(self.page.evaluate("Number(document.body.dataset.settled || 0)"))

    def settle(self, before: int) -> None:
        """Wait until the reach has been recomputed."""
        self.page.wait_for_function(f"Number(document.body.dataset.settled || 0) > {before}")

    def each(self, selector: str, expression: str) -> list[float]:
        """Evaluate an expression of ``e`` for each element."""
        return self.page.evaluate(f"[...document.querySelectorAll('{selector}')].map((e) => {expression})")

    def curve(self, plot: str, trace: int) -> list[float]:
        return self.page.evaluate(f"[...document.getElementById('{plot}').data[{trace}].y]")

    def check(self) -> None:
        """Assert that the page has no error, makes no request, fits the window, and has legible text."""
        assert self.page.evaluate("document.documentElement.scrollWidth") <= self.width
        assert (
            min(self.each("label, output, p, select, td, th, a, dd", "parseFloat(getComputedStyle(e).fontSize)")) >= 12
        )
        assert self.requests == [self.path.as_uri()]
        assert not self.complaints
