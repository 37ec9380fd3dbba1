# SPDX-License-Identifier: Apache-2.0
"""The app in a real browser, wide and narrow: drop, ask, slide, switch; it loads nothing from elsewhere."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("gradio", reason="gradio makes the page: make test-app sets it up")

from tokenprune.app.page import build, launch
from tokenprune.bench.model import load
from tokenprune.errors import TokenPruneError

PATIENCE = 120_000  # milliseconds


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = build(load("demo_qwen", device="cpu"))
    launch(page, "127.0.0.1", port, open_browser=False, block=False)
    with pytest.raises(TokenPruneError, match="another --port"):
        launch(build(load("demo_vlm", device="cpu")), "127.0.0.1", port, open_browser=False, block=False)
    yield f"http://127.0.0.1:{port}"
    page.close()


@pytest.fixture(params=[(1280, "light"), (400, "dark")], ids=["wide", "narrow"])
def opened(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked, said = [], []
    page.on("request", lambda one: asked.append(one.url))
    page.on("console", lambda one: said.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda one: said.append(str(one)))
    page.goto(address, timeout=PATIENCE)
    page.get_by_role("button", name="Compare").wait_for(timeout=PATIENCE)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == [] and said == []


def table(page: Any) -> str:
    return page.locator(".tokenprune-table table").inner_text(timeout=PATIENCE)


def test_drop_ask_slide_and_switch(opened: Any, tmp_path: Path) -> None:
    Image.new("RGB", (256, 192), "navy").save(tmp_path / "dropped.png")
    opened.locator("input[type=file]").first.set_input_files(tmp_path / "dropped.png")
    opened.get_by_label("Question").fill("is there a <b>star</b>?")
    opened.get_by_role("button", name="Compare").click()
    first = table(opened)
    assert "divprune 0.25" in first and "fastv 0.25" in first and "192 → 48" in first
    assert "<b>star</b>" in opened.locator(".tokenprune-table h3").inner_text()
    slider = opened.locator("input[type=range]")
    slider.focus()
    for _ in range(5):
        opened.keyboard.press("ArrowRight")
    slider.dispatch_event("pointerup")
    opened.get_by_role("button", name="Compare").click()
    opened.get_by_text("divprune 0.5").first.wait_for(timeout=PATIENCE)
    method = opened.get_by_label("Method")
    method.fill("dart:pivot_text=0")
    method.press("Enter")
    opened.get_by_role("button", name="Compare").click()
    opened.get_by_text("dart:pivot_text=0 0.5").first.wait_for(timeout=PATIENCE)
    method.fill("no_such_method")
    method.press("Enter")
    opened.get_by_role("button", name="Compare").click()
    opened.get_by_text("no_such_method").last.wait_for(timeout=PATIENCE)
