# SPDX-License-Identifier: Apache-2.0
"""The app in a real browser, wide and narrow: drop, ask, slide, switch; it loads nothing from elsewhere."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("gradio", reason="gradio makes the page: make test-app sets it up")

from tokenprune.errors import TokenPruneError
from tokenprune.profiling.model import Model, load
from tokenprune_bench.app.comparison import compare
from tokenprune_bench.app.loading import Loading, own_folder
from tokenprune_bench.app.page import _table, build, launch

PATIENCE = 120_000  # milliseconds


@pytest.fixture(scope="module")
def subject() -> Model:
    return load("demo_qwen", device="cpu")


def test_times_of_a_busy_machine_are_marked(subject: Model) -> None:
    asked = compare(subject, [Image.new("RGB", (112, 112), "red")], "what is shown?", ["divprune"], 0.25)
    for load_then, marked in ((100.0, True), (0.5, False), (None, False)):
        asked[0].ttft["load"] = load_then
        assert ("The machine was busy with other work (load 100.0" in _table("what?", asked, None)) is marked


@contextmanager
def served(loading: Loading) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with own_folder() as folder:
        page = build(loading, folder)
        launch(page, "127.0.0.1", port, open_browser=False, block=False)
        with pytest.raises(TokenPruneError, match="another --port"):
            launch(build(Loading("demo_vlm"), folder), "127.0.0.1", port, open_browser=False, block=False)
        yield f"http://127.0.0.1:{port}"
        page.close()


@pytest.fixture(scope="module")
def address(subject: Model) -> Iterator[str]:
    loading = Loading("demo_qwen")
    loading.give(subject)
    with served(loading) as found:
        yield found


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


def test_the_page_is_there_before_the_model(browser: Any, subject: Model) -> None:
    loading = Loading("demo_qwen")
    with served(loading) as address:
        page = browser.new_page()
        page.goto(address, timeout=PATIENCE)
        page.get_by_text("demo_qwen is loading").wait_for(timeout=PATIENCE)
        assert page.get_by_text("or a video, or a GIF").count() == 0  # nobody knows yet
        page.get_by_label("Question").fill("what?")
        page.get_by_role("button", name="Compare").click()  # waits, as the page does
        loading.give(subject)
        page.get_by_text("demo_qwen (shipped)").wait_for(timeout=PATIENCE)
        page.get_by_text("or a video, or a GIF").first.wait_for(timeout=PATIENCE)
        page.get_by_text("there is no image").wait_for(timeout=PATIENCE)
        page.get_by_text("A drawn video").wait_for(timeout=PATIENCE)
        page.close()


def test_the_page_imports_no_transformers_before_the_model_is_there() -> None:
    """It takes longer than the rest until the page answers, and two threads that import it meet half of it."""
    code = """if True:
        import sys
        import gradio as gr
        from tokenprune import TokenPruneError
        from tokenprune_bench.app import page
        from tokenprune_bench.app.loading import Loading

        class Watched(Loading):
            def get(self):
                print("transformers" in sys.modules)
                raise TokenPruneError("no model")

        page._loaded(Watched("some"))
        try:
            page._answer(Watched("some"), None, None, "what?", "divprune", None, 0.5, lambda *_, **more: None)
        except gr.Error:
            print("said")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "said"]


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
