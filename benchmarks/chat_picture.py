"""The picture of docs/chat.md: `python -m benchmarks.chat_picture RUN`, with a run of `cpt demo`; needs Chromium and
playwright."""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from cpt.serving.answering import Sampling
from cpt.serving.browser import page_at
from cpt.serving.chat import free_port
from cpt.serving.sides import load_sides

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "chat.png"
PROMPT = "def read_lines(path):\n"
MILLISECONDS = 120_000


def main() -> None:
    """Start the page, ask, and take the picture."""
    run = Path(sys.argv[1])
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    sides = load_sides(str(run))
    with (
        page_at(sides, run, port=free_port(), sampling=Sampling(temperature=0.3, max_new_tokens=60)) as url,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--headless", "--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.set_default_timeout(MILLISECONDS)
        take(page, url)
        browser.close()
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def take(page: Page, url: str) -> None:
    """With both answers on it."""
    page.goto(url)
    page.locator("#prompt textarea").fill(PROMPT)
    page.locator("#send").click()
    page.wait_for_selector("#side-1 .bot-row [aria-label='Copy message']")  # is there once the answer is whole
    page.screenshot(path=PICTURE, full_page=True)


if __name__ == "__main__":
    main()
