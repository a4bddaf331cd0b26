"""The Chromium of this machine, without a window: pages are tested in a real browser."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def open_chromium() -> Iterator[Browser]:
    """It needs no large /dev/shm. A test that finds none fails: nothing was looked at."""
    path = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(f"no Chromium: install one, or name it in the variable CHROMIUM. Looked for {', '.join(NAMES)}.")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path, args=["--headless", "--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()
