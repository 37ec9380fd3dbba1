# SPDX-License-Identifier: Apache-2.0
"""The page: what methods keep, answer and cost first, and beside it what is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from tokenprune.errors import TokenPruneError
from tokenprune_bench.app.examples import Examples
from tokenprune_bench.app.handlers import FIRST, KEEP, SECOND, STEP, Handlers, drawable, samples, title
from tokenprune_bench.app.link import SMALLEST_KEEP
from tokenprune_bench.app.loading import Loading
from tokenprune_bench.app.session import AppSession
from tokenprune_bench.app.snippets import LONGEST

_FONTS = ["system-ui", "sans-serif"]  # of the machine that looks: a page loads nothing from elsewhere
_HERE = Path(__file__).parent


def build(loading: Loading, folder: Path) -> gr.Blocks:
    """Return the page for a model, which may still be loading; `launch` opens it. folder: for files of the page."""
    examples = Examples.of(loading.name, folder)
    do = Handlers(loading, examples)
    with gr.Blocks(title="tokenprune", analytics_enabled=False) as page:
        session, about = gr.State(AppSession()), gr.Markdown(title(f"`{loading.name}` is loading …"))
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                # The slider comes first: what changes above it would move it under the finger.
                keep = gr.Slider(
                    SMALLEST_KEEP, 1.0, value=KEEP, step=STEP, label="Share of the visual tokens that is kept"
                )
                head, panels = gr.HTML(elem_id="tokenprune-head"), gr.HTML()
            with gr.Column(scale=1, min_width=280):
                file = gr.File(
                    label="Image or video: drop it anywhere", type="filepath", height=130,
                    file_types=["image", "video"], elem_id="tokenprune-file",
                )  # fmt: skip
                question = gr.Textbox(label="Question", max_length=LONGEST)
                first, second = (
                    gr.Dropdown(
                        choices=choices, value=value, label=label, info=info, allow_custom_value=True, filterable=True
                    )
                    for choices, value, label, info in (
                        (drawable(False), FIRST, "Method", "options and stacks too: dart:pivot_text=0, tome+fastv"),
                        (["", *drawable(False)], SECOND, "and another", "leave it empty for one alone"),
                    )
                )
                button = gr.Button("Compare", variant="primary")
        gallery = gr.Dataset(
            components=[gr.MultimodalTextbox(visible=False)], samples=samples(examples, False), type="index",
            label="Examples, whose answers are known", visible=bool(examples.listed),
        )  # fmt: skip
        if not examples.listed:
            gr.Markdown("Examples come with tokenprune-demo, which is not installed.")
        details = gr.HTML()
        with gr.Tabs():
            lines = [_copied("Python", "python"), _copied("vLLM", "shell"), _copied("Benchmark", "shell")]

        inputs, outputs = [session, file, question, first, second, keep], [head, panels, details, *lines]
        # Several at a time: a later request of a visitor ends the one before, and the model has a lock of its own.
        hidden = {"show_progress": "hidden", "concurrency_limit": None, "trigger_mode": "multiple"}
        private = hidden | {"api_visibility": "private"}

        def on(trigger: Callable[..., Any], does: Callable[..., Any] = do.compare, **more: Any) -> None:
            trigger(does, inputs, outputs, **(more or private)).success(do.draw_ahead, [session, keep], None, **private)

        on(button.click, api_name="compare", **hidden)
        for trigger in (question.submit, file.upload, first.input, second.input):
            on(trigger)
        on(keep.release, do.released)
        keep.input(do.slid, inputs, [head, panels], queue=False, **private)
        on(gallery.click(do.chosen, gallery, [file, question], **private).success)
        # In two steps: what a step is given is what the page holds when the step begins.
        there, held = page.load(do.wait, None, about, **private), [file, question, first, second, keep]
        on(there.success(do.loaded, held, [*held, gallery], **private).success)
    return page


def launch(page: gr.Blocks, host: str, port: int, open_browser: bool, block: bool = True) -> Any:
    """Serve the page until it is stopped, shared with nobody. Raises TokenPruneError where the port is taken."""
    try:
        return page.queue(default_concurrency_limit=1, max_size=16).launch(
            server_name=host, server_port=port, inbrowser=open_browser, share=False, quiet=True, ssr_mode=False,
            footer_links=[], css=(_HERE / "page.css").read_text(), js=(_HERE / "page.js").read_text(),
            theme=gr.themes.Default(font=_FONTS, font_mono=["ui-monospace", "monospace"]),
            max_file_size="64mb", prevent_thread_lock=not block, app_kwargs={"docs_url": None, "redoc_url": None},
        )  # fmt: skip
    except OSError as error:
        raise TokenPruneError(f"cannot listen at {host}:{port} ({error}): choose another --port") from error


def _copied(label: str, language: str) -> gr.Code:
    with gr.Tab(label):
        return gr.Code(language=language, label="", show_label=False, interactive=False, wrap_lines=True)
