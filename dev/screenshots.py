# SPDX-License-Identifier: Apache-2.0
"""Take screenshots of pages of the built site at two widths, light and dark, and report faults.

make docs && python dev/screenshots.py build/site OUT     # needs Playwright and Chromium; CHROMIUM=path of another

Exits with 1 if a page writes an error to the console, requests another machine, has an image that does not load, is
wider than the window, or has a cut-off table. Check the screenshots by eye, too.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGES = (
    "index.html",
    "start/quickstart.html",
    "start/choose.html",
    "guides/gpu.html",
    "serving/start.html",
    "guides/retrieval.html",
    "methods/index.html",
    "methods/dart.html",
    "results/documents.html",
    "measure/leaderboard.html",
    "results/all-methods.html",
    "extend/add-a-method.html",
)
SIZES = ((1280, 900), (390, 800))
SCHEMES = ("light", "dark")
# Elements that are wider than the window and are not in a scrolling box.
LOOK = """() => {
  const wide = document.documentElement.clientWidth, found = [];
  const scrolls = (one) => { for (let box = one; (box = box.parentElement);)
    if (['auto', 'scroll'].includes(getComputedStyle(box).overflowX)) return true; };
  if (document.documentElement.scrollWidth > wide) found.push('the page is wider than the window');
  for (const table of document.querySelectorAll('table')) {
    const own = ['auto', 'scroll'].includes(getComputedStyle(table).overflowX);
    const box = table.getBoundingClientRect();
    if (box.right > wide + 1 && !scrolls(table) || !own && !scrolls(table) && table.scrollWidth > table.clientWidth + 1)
      found.push('a table is cut off: ' + table.textContent.trim().slice(0, 40));
  }
  for (const image of document.images)
    if (!image.complete || !image.naturalWidth) found.push('an image does not load: ' + image.getAttribute('src'));
  return found;
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Suppress the log of requests."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on localhost and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def check(browser: Any, folder: Path, pages: Sequence[str] = PAGES, out: Path | None = None) -> list[str]:
    """Open each page in each size and scheme and return the faults. `out` is a folder for screenshots."""
    faults = []
    with served(folder) as address:
        for page in pages:
            for width, height in SIZES:
                for scheme in SCHEMES:
                    size = {"width": width, "height": height}
                    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
                    where = f"{page} at {width}, {scheme}"
                    faults += [
                        f"{where}: {fault}" for fault in _opened(context, address, page, out and _name(out, where))
                    ]
                    context.close()
    return faults


def _name(out: Path, where: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return out / (where.replace("/", "-").replace(".html at ", "-").replace(", ", "-") + ".png")


def _opened(context: Any, address: str, page: str, image: Path | None) -> list[str]:
    faults: list[str] = []

    def asked(route: Any) -> None:
        if route.request.url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            faults.append(f"asks for {route.request.url}")
            route.abort()

    context.route("**/*", asked)
    tab = context.new_page()
    tab.on("console", lambda told: faults.append(f"console: {told.text}") if told.type == "error" else None)
    tab.on("pageerror", lambda error: faults.append(f"error: {error}"))
    tab.goto(address + page, wait_until="networkidle")
    tab.evaluate("() => document.querySelectorAll('img[loading]').forEach((one) => { one.loading = 'eager'; })")
    tab.wait_for_load_state("networkidle")
    tab.wait_for_function("() => [...document.images].every((one) => one.complete)")
    faults += tab.evaluate(LOOK)
    if image is not None:
        tab.screenshot(path=image, full_page=True)
    return faults


def main() -> None:
    from browser import started

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the built site")
    parser.add_argument("out", type=Path, help="where images go")
    parser.add_argument("--pages", nargs="+", default=PAGES, metavar="PAGE.html")
    args = parser.parse_args()
    with started() as browser:
        faults = check(browser, args.site, args.pages, args.out)
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
