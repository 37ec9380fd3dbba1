# SPDX-License-Identifier: Apache-2.0
"""The app in a browser, wide and narrow. The page sends no requests to other hosts."""

from __future__ import annotations

import base64
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("gradio", reason="gradio makes the page: dev/check app sets it up")

import gradio as gr

from tokenprune.errors import TokenPruneError
from tokenprune_bench.app.examples import Examples
from tokenprune_bench.app.handlers import Handlers
from tokenprune_bench.app.loading import Loading, use_temp_folder
from tokenprune_bench.app.page import build, launch
from tokenprune_bench.app.session import AppSession
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.profiling.photo import Photo
from tokenprune_demo.heldout import load_heldout

PATIENCE = 120_000  # milliseconds


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_qwen", device="cpu")


@contextmanager
def serve(loading: Loading) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with use_temp_folder() as folder:
        page = build(loading, folder)
        launch(page, "127.0.0.1", port, open_browser=False, block=False)
        with pytest.raises(TokenPruneError, match="another --port"):
            launch(build(Loading("demo_vlm"), folder), "127.0.0.1", port, open_browser=False, block=False)
        yield f"http://127.0.0.1:{port}"
        loading.fail()
        page.close()


@pytest.fixture(scope="module")
def address(subject: Model) -> Iterator[str]:
    loading = Loading("demo_qwen")
    loading.set_model(subject)
    with serve(loading) as url:
        yield url


WIDE, NARROW = pytest.param((1280, "light"), id="wide"), pytest.param((390, "dark"), id="narrow")


@pytest.fixture(params=[WIDE, NARROW])
def opened(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    urls, errors = [], []
    page.on("request", lambda sent_request: urls.append(sent_request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda message: errors.append(str(message)))
    page.goto(address, timeout=PATIENCE)
    wait_for_result(page, "divprune 0.25")
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()
    assert [url for url in urls if not url.startswith((address, "data:", "blob:"))] == [] and errors == []


def wait_for_result(page: Any, name: str, question: str = "") -> str:
    """Wait for the answers and times of a setting. Return the headline."""
    page.locator(".tokenprune-row figure", has_text=name).get_by_text("first token").first.wait_for(timeout=PATIENCE)
    page.get_by_role("heading", name=question, level=2).wait_for(timeout=PATIENCE)
    page.locator(".tokenprune-status").wait_for(state="detached", timeout=PATIENCE)
    return page.locator("#tokenprune-head").inner_text()


def test_the_page_opens_before_the_model_is_loaded(browser: Any, subject: Model) -> None:
    loading = Loading("demo_qwen")
    with serve(loading) as address:
        page = browser.new_page()
        page.goto(address, timeout=PATIENCE)
        page.get_by_text("demo_qwen is loading").wait_for(timeout=PATIENCE)
        # video support is unknown before the model is loaded
        assert page.get_by_text("what color was the").count() == 0
        page.get_by_label("Question").fill("what?")
        page.get_by_role("button", name="Compare").click()  # waits for the model
        page.get_by_text("the model is loading").wait_for(timeout=PATIENCE)
        loading.set_model(subject)
        page.get_by_text("demo_qwen (shipped)").wait_for(timeout=PATIENCE)
        page.get_by_text("The image is missing").first.wait_for(timeout=PATIENCE)
        page.get_by_text("what color was the").first.wait_for(timeout=PATIENCE)
        assert page.get_by_label("Question").input_value() == "what?"  # input typed during loading
        page.close()


def test_loading_keeps_the_inputs_of_the_visitor(subject: Model, tmp_path: Path) -> None:
    loading, skipped = Loading("demo_qwen"), gr.skip()
    loading.set_model(subject)
    handlers = Handlers(loading, Examples.load("demo_qwen", tmp_path))
    plain, linked = (SimpleNamespace(query_params=params) for params in ({}, {"keep": "0.5", "first": "dart"}))

    def load_page(*inputs: Any, request: Any = plain) -> list[Any]:
        file, question, first, second, keep, _ = handlers.load_page(*inputs, request)
        return [file, question, getattr(first, "value", None), getattr(second, "value", None), keep]

    file, question, *_, keep = load_page(None, "", "divprune", "fastv", 0.25)
    assert Path(file).is_file() and question and keep == skipped
    for inputs in (("my photo.png", ""), (None, "mine?"), ("my photo.png", "mine?")):
        assert load_page(*inputs, "divprune", "fastv", 0.25)[:2] == [skipped, skipped]
    assert load_page(None, "", "divprune", "fastv", 0.25, request=linked)[4] == 0.5
    assert load_page(None, "", "divprune", "fastv", 0.75, request=linked)[4] == skipped


def test_the_page_does_not_import_transformers() -> None:
    """Importing transformers is slow, and two threads that import it can see a partially loaded module."""
    code = """if True:
        import sys
        import gradio as gr
        from tokenprune import TokenPruneError
        from tokenprune_bench.app import page
        from tokenprune_bench.app.examples import Examples
        from tokenprune_bench.app.loading import Loading
        from tokenprune_bench.app.session import AppSession

        class Watched(Loading):
            def get(self):
                print("transformers" in sys.modules)
                raise TokenPruneError("no model")

        do = page.Handlers(Watched("some"), Examples())
        do.wait()
        try:
            list(do.compare(AppSession(), None, "what?", "divprune", None, 0.5))
        except gr.Error:
            print("said")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "said"]


def test_the_page_opens_with_an_answered_example(opened: Any) -> None:
    head = wait_for_result(opened, "fastv 0.25")
    assert "divprune 0.25: 4x fewer visual tokens, " in head and "answer" in head and "time" in head
    boxes = [img.bounding_box() for img in opened.locator(".tokenprune-row img").all()]
    # all at the same scale
    assert len(boxes) == 3 and len({(round(box["width"]), round(box["height"])) for box in boxes}) == 1
    wide = opened.viewport_size["width"] > 1000
    assert len({box["y"] for box in boxes}) == (1 if wide else 2)
    button, table = opened.get_by_role("button", name="Compare").bounding_box(), opened.locator(".tokenprune-table")
    assert wide or button["y"] + button["height"] <= opened.locator("#tokenprune-head").bounding_box()["y"]
    assert table.locator("tr").first.inner_text().split() == ["unpatched", "divprune", "0.25", "fastv", "0.25"]
    assert table.evaluate("box => box.scrollWidth <= box.clientWidth")  # not cut off
    assert opened.locator(".tokenprune-code").first.bounding_box()["height"] < 130  # no empty lines
    assert opened.get_by_text("✓ right").count() + opened.get_by_text("✗ wrong").count() == 3
    summary = opened.locator(".tokenprune-row summary").nth(1)
    summary.focus()
    opened.keyboard.press("Enter")  # enlarges the image
    large = opened.locator(".tokenprune-row img").nth(1).bounding_box()
    assert large["width"] == opened.viewport_size["width"]
    opened.keyboard.press("Enter")
    assert opened.locator(".tokenprune-row img").nth(1).bounding_box()["width"] == boxes[1]["width"]


def test_drop_ask_slide_and_switch(opened: Any, tmp_path: Path) -> None:
    Image.new("RGB", (256, 192), "navy").save(tmp_path / "dropped.png")
    drop(opened, tmp_path / "dropped.png", "image/png")
    wait_for_result(opened, "192 → 48")
    question = opened.get_by_label("Question")
    question.fill("is there a <b>star</b>?")
    question.press("Enter")
    head = wait_for_result(opened, "192 → 48", "is there a <b>star</b>?")
    assert "these settings, without your file" in head and opened.get_by_text("✓ right").count() == 0
    slider = opened.locator("input[type=range]")
    slider.focus()
    for _ in range(5):
        opened.keyboard.press("ArrowRight")
    wait_for_result(opened, "divprune 0.5")
    method = opened.get_by_label("Method", exact=True)
    method.fill("dart:pivot_text=0")
    method.press("Enter")
    opened.get_by_role("button", name="Compare").click()
    wait_for_result(opened, "dart:pivot_text=0 0.5")
    method.fill("no_such_method")
    method.press("Enter")
    opened.get_by_role("button", name="Compare").click()
    opened.get_by_text("no_such_method").last.wait_for(timeout=PATIENCE)


@pytest.mark.parametrize("opened", [NARROW], indirect=True)
def test_the_slider_redraws_without_an_answer_until_it_is_released(opened: Any) -> None:
    slider = opened.locator("input[type=range]")
    box = slider.bounding_box()
    middle, redrawn = box["y"] + box["height"] / 2, opened.get_by_text("release the slider for answers and times")
    opened.mouse.move(box["x"] + box["width"] * 0.22, middle)
    opened.mouse.down()
    for _ in range(120):  # until the neighboring keep is drawn in advance
        for share in (0.22, 0.27):
            opened.mouse.move(box["x"] + box["width"] * share, middle)
            opened.wait_for_timeout(500)
        if redrawn.count():
            break
    figure = opened.locator(".tokenprune-row figure").nth(1)
    assert "divprune 0.3" in figure.inner_text() and "80 → 24" in figure.inner_text()
    opened.wait_for_timeout(3000)
    assert "…" in figure.inner_text() and redrawn.count() == 1  # no answer yet
    assert slider.bounding_box() == box  # the slider does not move during the drag
    opened.mouse.up()
    wait_for_result(opened, "divprune 0.3")


def test_a_superseded_request_does_not_change_the_page(subject: Model) -> None:
    loading, session = Loading("demo_qwen"), AppSession()
    file = str(load_heldout(folder=subject.heldout, limit=1)[0].path)
    asking = Handlers(loading, Examples()).compare(session, file, "what?", "divprune", "", 0.3)
    assert "the model is loading" in next(asking)[0]
    session.begin()
    loading.set_model(subject)
    assert list(asking) == [[gr.skip()] * 6] and session.comparisons == {}
    assert not loading.lock.locked()


def test_a_page_with_a_budget_decodes_photographs_small(subject: Model, tmp_path: Path) -> None:
    loading, session = Loading("demo_qwen"), AppSession()
    loading.set_model(subject)
    Image.new("RGB", (2000, 1500), "red").save(tmp_path / "a.jpg")
    handlers = Handlers(loading, Examples(), max_visual_tokens=64)
    head, *_ = next(handlers.compare(session, str(tmp_path / "a.jpg"), "what?", "divprune", "", 0.25))
    (image,) = session.prompt.images
    assert isinstance(image, Photo) and image.size == (2000, 1500) and image.preview.width < 2000
    assert "max_visual_tokens=64" in head and session.comparisons[0.25].asked[0].kept == 16


def test_the_slider_does_not_wait_for_the_model() -> None:
    loading = Loading("never there")
    handlers, session = Handlers(loading, Examples()), AppSession()
    with loading.lock:
        head, _ = handlers.move_slider(session, None, "what?", "divprune", "", 0.3)
    assert "release the slider to compare at keep 0.3" in head


def test_an_address_sets_the_page_and_is_not_trusted(browser: Any, address: str) -> None:
    page = browser.new_page()
    page.goto(f"{address}/?example=2&question=is+there+a+ring%3F&first=dart&second=&keep=0.5", timeout=PATIENCE)
    assert "dart 0.5: 1.6x fewer" in wait_for_result(page, "dart 0.5", "is there a ring?")
    assert page.locator(".tokenprune-row figure").count() == 2
    link = page.get_by_role("link", name="Link to these settings")
    link.click()
    wait_for_result(page, "dart 0.5", "is there a ring?")
    assert "example=2" in page.url
    for query, message in (
        ("keep=7", "keep=7 in the address"),
        ("first=dymu:thresholds=/etc/passwd", "does not open files"),
        ("first=<img src=x onerror=alert(1)>", "is not a setting. Write it"),
        ("example=99", "Use 1 to"),
    ):
        page.goto(f"{address}/?{query}", timeout=PATIENCE)
        page.get_by_text("The address is ignored").wait_for(timeout=PATIENCE)
        assert message in page.get_by_text("The address is ignored").inner_text()
        wait_for_result(page, "divprune 0.25")
    page.close()


@pytest.mark.parametrize("opened", [WIDE], indirect=True)
def test_a_video_is_dropped_on_the_page(opened: Any, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (112, 112), (20 * index, 80, 120)) for index in range(8)]
    frames[0].save(tmp_path / "video.gif", save_all=True, append_images=frames[1:], duration=200)
    drop(opened, tmp_path / "video.gif", "image/gif")
    opened.locator(".tokenprune-row.strips").wait_for(timeout=PATIENCE)
    wait_for_result(opened, "divprune 0.25")
    tops = [img.bounding_box()["y"] for img in opened.locator(".strips img").all()]
    assert len(set(tops)) == 3  # strips, one below the other


def test_a_model_without_video_support_reports_it(browser: Any, tmp_path: Path) -> None:
    loading = Loading("demo_vlm")
    loading.set_model(load_model("demo_vlm", device="cpu"))
    frames = [Image.new("RGB", (112, 112), (20 * index, 80, 120)) for index in range(8)]
    frames[0].save(tmp_path / "video.gif", save_all=True, append_images=frames[1:], duration=200)
    with serve(loading) as address:
        page = browser.new_page()
        page.goto(address, timeout=PATIENCE)
        wait_for_result(page, "divprune 0.25")
        drop(page, tmp_path / "video.gif", "image/gif")
        page.get_by_text("does not support videos").wait_for(timeout=PATIENCE)
        page.close()


def drop(page: Any, file: Path, kind: str) -> None:
    """Drop a file on the headline, as from a desktop."""
    page.evaluate(
        """([name, type, data]) => {
          const held = new DataTransfer();
          held.items.add(new File([Uint8Array.from(atob(data), (one) => one.charCodeAt(0))], name, {type}));
          const where = document.querySelector("#tokenprune-head");
          for (const event of ["dragenter", "dragover", "drop"])
            where.dispatchEvent(new DragEvent(event, {dataTransfer: held, bubbles: true, cancelable: true}));
        }""",
        [file.name, kind, base64.b64encode(file.read_bytes()).decode()],
    )
