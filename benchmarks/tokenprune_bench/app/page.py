# SPDX-License-Identifier: Apache-2.0
"""Layout of the page: inputs on the left, results on the right; on a phone the inputs come first."""

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

_FONTS = ["system-ui", "sans-serif"]  # local fonts, so that the page does not load fonts from the network
_HERE = Path(__file__).parent
_MORE_METHODS = "A method can have options (<code>dart:pivot_text=0</code>) and be combined (<code>tome+fastv</code>)."


def build(loading: Loading, folder: Path, max_visual_tokens: int | None = None) -> gr.Blocks:
    """Return the page for a model that may still be loading. `launch` opens it.

    Args:
        loading: The model.
        folder: Folder for files of the page.
        max_visual_tokens: Maximum number of visual tokens per image before the methods. None: no limit.
    """
    examples = Examples.load(loading.name, folder)
    do = Handlers(loading, examples, max_visual_tokens)
    with gr.Blocks(title="tokenprune", analytics_enabled=False) as page:
        session, about = gr.State(AppSession()), gr.Markdown(title(f"`{loading.name}` is loading …"))
        with gr.Row():
            # The inputs come first: on a phone the columns are below each other, and results above the slider would
            # move it while it is dragged.
            with gr.Column(scale=1, min_width=280):
                file = gr.File(
                    label="Image or video (drop it anywhere)", type="filepath", height=100,
                    file_types=["image", "video"], elem_id="tokenprune-file",
                )  # fmt: skip
                question = gr.Textbox(label="Question", max_length=LONGEST)
                with gr.Row():
                    first, second = (
                        gr.Dropdown(
                            choices=choices, value=value, label=label, allow_custom_value=True, filterable=True,
                            min_width=120,
                        )
                        for choices, value, label in (
                            (drawable(False), FIRST, "Method"),
                            (["", *drawable(False)], SECOND, "Second method"),
                        )
                    )  # fmt: skip
                gr.HTML(_MORE_METHODS, elem_classes="tokenprune-hint")
                keep = gr.Slider(SMALLEST_KEEP, 1.0, value=KEEP, step=STEP, label="Kept share of the visual tokens")
                button = gr.Button("Compare", variant="primary")
            with gr.Column(scale=3, min_width=300):
                head, panels, details = gr.HTML(elem_id="tokenprune-head"), gr.HTML(), gr.HTML()
        gallery = gr.Dataset(
            components=[gr.MultimodalTextbox(visible=False)], samples=samples(examples, False), type="index",
            label="Examples with known answers", visible=bool(examples.listed), elem_id="tokenprune-examples",
        )  # fmt: skip
        if not examples.listed:
            gr.Markdown("Install tokenprune-demo for examples.")
        with gr.Tabs():
            lines = [
                _build_code_tab("Python", "python"),
                _build_code_tab("vLLM", "shell"),
                _build_code_tab("Benchmark", "shell"),
            ]

        inputs, outputs = [session, file, question, first, second, keep], [head, panels, details, *lines]
        # Several requests may run: a later request of a visitor stops the previous request, and the model has a lock.
        hidden = {"show_progress": "hidden", "concurrency_limit": None, "trigger_mode": "multiple"}
        private = hidden | {"api_visibility": "private"}

        def on(trigger: Callable[..., Any], does: Callable[..., Any] = do.compare, **more: Any) -> None:
            trigger(does, inputs, outputs, **(more or private)).success(do.draw_ahead, [session, keep], None, **private)

        on(button.click, api_name="compare", **hidden)
        for trigger in (question.submit, file.upload, first.input, second.input):
            on(trigger)
        on(keep.release, do.release_slider)
        keep.input(do.move_slider, inputs, [head, panels], queue=False, **private)
        on(gallery.click(do.choose_example, gallery, [file, question], **private).success)
        # Two steps, because a step reads its inputs when it starts.
        loaded, page_inputs = page.load(do.wait, None, about, **private), [file, question, first, second, keep]
        on(loaded.success(do.load_page, page_inputs, [*page_inputs, gallery], **private).success)
    return page


def launch(page: gr.Blocks, host: str, port: int, open_browser: bool, block: bool = True) -> Any:
    """Serve the page until it is stopped. The page is not shared publicly.

    Raises:
        TokenPruneError: If the port is in use.
    """
    try:
        return page.queue(default_concurrency_limit=1, max_size=16).launch(
            server_name=host, server_port=port, inbrowser=open_browser, share=False, quiet=True, ssr_mode=False,
            footer_links=[], css=(_HERE / "page.css").read_text(), js=(_HERE / "page.js").read_text(),
            theme=gr.themes.Default(font=_FONTS, font_mono=["ui-monospace", "monospace"]),
            max_file_size="64mb", prevent_thread_lock=not block, app_kwargs={"docs_url": None, "redoc_url": None},
        )  # fmt: skip
    except OSError as error:
        raise TokenPruneError(f"Cannot listen at {host}:{port} ({error}). Pass another --port.") from error


def _build_code_tab(label: str, language: str) -> gr.Code:
    with gr.Tab(label):
        return gr.Code(
            language=language, show_label=False, interactive=False, wrap_lines=True, lines=1, show_line_numbers=False,
            elem_classes="tokenprune-code",
        )  # fmt: skip
