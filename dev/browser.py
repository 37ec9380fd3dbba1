# SPDX-License-Identifier: Apache-2.0
"""Start a Chromium through Playwright: for screenshots, and for the tests that need a real browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chromium-headless-shell")


class NoBrowser(Exception):
    """No Chromium is installed here."""


def chromium(default: str) -> str:
    """Return the path of a Chromium.

    The environment variable CHROMIUM is read first, then PATH. `default` is the path of Playwright's Chromium.

    Raises:
        NoBrowser: If none is installed.
    """
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None and Path(default).exists():
        path = default
    if path is None:
        raise NoBrowser(f"none of {', '.join(NAMES)} is installed here, and none by `playwright install chromium`")
    return path


@contextmanager
def started() -> Iterator[Any]:
    """Yield a headless Chromium; raise NoBrowser if there is none, ImportError without Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = chromium(playwright.chromium.executable_path)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
