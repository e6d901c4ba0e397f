"""Takes the pictures of the web page that docs/page.md shows, from a running server on the demo model.

`python -m pagewire.tools.page_pictures --url http://127.0.0.1:8000` needs tests/e2e/requirements-browser.txt and a
Chromium.
"""

import argparse
import json
import shutil
import sys
import threading
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")
_WARM_UP_S = 45  # so that the charts are filled
_QUESTIONS = ("What is 17 + 25?", "Spell lantern", "Tell me a story")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder (default: %(default)s)")
    arguments = parser.parse_args(argv)
    from playwright import sync_api

    others = _Others(arguments.url)
    try:
        with sync_api.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(_FLAGS))
            wide = sync_api.ViewportSize(width=1400, height=900)
            pages = []
            for scheme in ("light", "dark"):
                page = browser.new_context(viewport=wide, color_scheme=scheme).new_page()
                page.goto(arguments.url)
                page.locator("#field-temperature").fill("1.3")
                page.locator("#field-seed").fill("7")
                page.get_by_label("Colour tokens by probability").check()
                pages.append((scheme, page))
            pages[0][1].wait_for_timeout(_WARM_UP_S * 1000)
            for scheme, page in pages:
                for question in _QUESTIONS:
                    _ask(page, question)
                page.locator(".token.doubtful").first.hover()
                page.wait_for_timeout(1000)
                page.screenshot(path=arguments.out / f"page_{scheme}.png")
            small = sync_api.ViewportSize(width=390, height=700)
            page = browser.new_context(viewport=small, color_scheme="light", device_scale_factor=2).new_page()
            page.goto(arguments.url)
            for question in _QUESTIONS[:2]:
                _ask(page, question)
            page.screenshot(path=arguments.out / "page_small.png")
            browser.close()
    finally:
        others.stop()
    return 0


def _ask(page: "Page", question: str) -> None:
    prompt = page.locator("#prompt")
    prompt.fill(question)
    prompt.press("Enter")
    page.locator("#send:not(.stop)").wait_for()


class _Others:
    """A few other clients that put load on the engine."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        for i in range(5):
            threading.Thread(target=self._ask_on, args=(i,), daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def _ask_on(self, index: int) -> None:
        turn = 0
        while not self._is_over.wait(0.4 * index):
            turn += 1
            body = {
                "messages": [{"role": "user", "content": f"Client {index}, question {turn}: count from 1 to 40"}],
                "max_tokens": 60 + 97 * ((index + turn) % 5),
                "ignore_eos": True,
            }
            request = urllib.request.Request(
                f"{self._url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()


if __name__ == "__main__":
    sys.exit(main())
