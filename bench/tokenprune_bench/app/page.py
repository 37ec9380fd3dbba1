# SPDX-License-Identifier: Apache-2.0
"""The page: what is asked on the left, what methods make of it on the right."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
from PIL import Image

import tokenprune
from tokenprune.base import ImageChooser
from tokenprune.errors import TokenPruneError
from tokenprune.profiling.machine_load import busy_note
from tokenprune.profiling.media import read_frames
from tokenprune.profiling.pace import Pace
from tokenprune_bench.app import snippets
from tokenprune_bench.app.loading import Loading
from tokenprune_bench.app.snippets import LONGEST
from tokenprune_bench.own_questions import demo

# Not needed before the model is there: these import transformers' models, which takes seconds.
if TYPE_CHECKING:
    from tokenprune.profiling.model import Model
    from tokenprune.setting import Setting
    from tokenprune_bench.app.comparison import Asked

FIRST, SECOND, KEEP = "divprune", "fastv", 0.25
FRAMES = 8  # of a video, evenly chosen
_EXAMPLES = 6
_FONTS = ["system-ui", "sans-serif"]  # of the machine that looks: a page loads nothing from elsewhere
_CSS = """
.tokenprune-table table {width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums}
.tokenprune-table th, .tokenprune-table td {text-align: left; padding: .35em .7em .35em 0}
.tokenprune-table .wide {overflow-x: auto}
"""
_ABOUT = (
    "Drop an image or a video, ask, and see what methods keep of its visual tokens. Clear patches stay, dark ones are "
    "dropped, those of one colour are merged."
)


def build(loading: Loading, folder: Path) -> gr.Blocks:
    """Return the page for a model, which may still be loading; `launch` opens it. folder: for files of the page."""
    with gr.Blocks(title="tokenprune", analytics_enabled=False) as page:
        title = gr.Markdown(_title(f"`{loading.name}` is loading …"))
        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                image = gr.Image(type="pil", label="Image", sources=["upload", "clipboard"], height=260)
                file = gr.File(label="or a video, or a GIF", type="filepath", height=110, visible=False)
                question = gr.Textbox(label="Question", max_length=LONGEST)
                first, second = (
                    gr.Dropdown(
                        choices=choices, value=value, label=label, info=info, allow_custom_value=True, filterable=True
                    )
                    for choices, value, label, info in (
                        (_drawable(False), FIRST, "Method", "options and stacks too: dart:pivot_text=0, tome+fastv"),
                        (["", *_drawable(False)], SECOND, "and another", "leave it empty for one alone"),
                    )
                )
                keep = gr.Slider(0.05, 1.0, value=KEEP, step=0.05, label="Share of the visual tokens that is kept")
                button = gr.Button("Compare", variant="primary")
            with gr.Column(scale=2, min_width=300):
                table = gr.HTML(elem_classes="tokenprune-table")
                drawings = [gr.Image(label=FIRST, buttons=["download", "fullscreen"], visible=False) for _ in range(2)]
                layers = gr.HTML()
                with gr.Tabs():
                    lines = [_copied(label, language) for label, language in (
                        ("Python", "python"), ("vLLM", "shell"), ("Benchmark", "shell"))]  # fmt: skip
        if examples := _has_examples():
            gr.Examples(_examples(loading.name), [image, question], label="Held-out images")
        with gr.Column(visible=False) as videos:
            if examples:
                gr.Examples(_video_examples(folder), [file, question], label="A drawn video")
            else:
                gr.Markdown("Examples come with tokenprune-demo, which is not installed.")
        inputs, outputs = [image, file, question, first, second, keep], [table, *drawings, layers, *lines]
        # One at a time: a model is patched for everybody.
        gr.on(
            [button.click, question.submit, keep.release, first.input, second.input], partial(_answer, loading), inputs,
            outputs, concurrency_limit=1, trigger_mode="always_last", api_name="compare",
        )  # fmt: skip
        page.load(
            partial(_loaded, loading), None, [title, file, first, second, videos],
            concurrency_limit=None, show_progress="hidden", api_visibility="private",
        )  # fmt: skip
    return page


def _title(model: str) -> str:
    return f"# tokenprune\n{_ABOUT} Model: {model}"


def _loaded(loading: Loading) -> list[Any]:
    """Wait for the model, and return what the page shows of it."""
    try:
        subject = loading.get()
    except TokenPruneError as error:
        return [_title(str(error)), *[gr.skip()] * 4]
    from tokenprune.profiling.model import DRAWINGS_ONLY
    from tokenprune.show import contact_sheet

    video = contact_sheet.takes_video(subject)
    choices = [gr.Dropdown(choices=names) for names in (_drawable(video), ["", *_drawable(video)])]
    known = f", which {DRAWINGS_ONLY}" if subject.limits() else ""
    return [_title(f"`{subject.name}`{known}."), gr.File(visible=video), *choices, gr.Column(visible=video)]


def launch(page: gr.Blocks, host: str, port: int, open_browser: bool, block: bool = True) -> Any:
    """Serve the page until it is stopped, shared with nobody. Raises TokenPruneError where the port is taken."""
    try:
        return page.queue(default_concurrency_limit=1, max_size=16).launch(
            server_name=host, server_port=port, inbrowser=open_browser, share=False, quiet=True, ssr_mode=False,
            footer_links=[], css=_CSS, theme=gr.themes.Default(font=_FONTS, font_mono=["ui-monospace", "monospace"]),
            max_file_size="64mb", prevent_thread_lock=not block, app_kwargs={"docs_url": None, "redoc_url": None},
        )  # fmt: skip
    except OSError as error:
        raise TokenPruneError(f"cannot listen at {host}:{port} ({error}): choose another --port") from error


def _drawable(video: bool) -> list[str]:
    """Return the names of the methods with something to draw."""
    infos = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
    return [
        info.name
        for info in infos
        if not issubclass(info.cls, ImageChooser) and info.site is not tokenprune.Site.ATTENTION
        and (video or "frames" not in info.needs)
    ]  # fmt: skip


def _has_examples() -> bool:
    return importlib.util.find_spec("tokenprune_demo") is not None


def _examples(model: str) -> list[list[Any]]:
    """Images of the model's held-out set, each with a question of another kind."""
    heldout, found = demo("heldout"), {}
    asked = heldout.load_heldout(folder=heldout.heldout_of(model), limit=_EXAMPLES)
    for one in asked:
        if one.number not in found and one.kind not in {other.kind for other in found.values()}:
            found[one.number] = one
    return [[str(one.path), one.question] for one in found.values()]


def _video_examples(folder: Path) -> list[list[Any]]:
    """Return a drawn video, as a GIF in the folder, with one of its questions."""
    one = next(one for one in demo("drawn_sets").drawn_set("small-videos", 1).questions if one.kind == "change")
    file = folder / "drawn.gif"
    one.frames[0].save(file, save_all=True, append_images=list(one.frames[1:]), duration=400, loop=0)
    return [[str(file), one.question]]


def _copied(label: str, language: str) -> gr.Code:
    with gr.Tab(label):
        return gr.Code(language=language, label="", show_label=False, interactive=False, wrap_lines=True)


def _answer(
    loading: Loading,
    image: Image.Image | None,
    file: str | None,
    question: str,
    first: str | None,
    second: str | None,
    keep: float,
    progress: gr.Progress = gr.Progress(),  # noqa: B008 - how gradio hands it over
) -> list[Any]:
    methods = [text.strip() for text in (first, second) if text and text.strip()]
    if not loading.over:
        progress((0, 1), desc="the model is loading")
    try:
        subject = loading.get()
        # Not before: while another thread imports transformers for the model, this would meet half of it.
        from tokenprune_bench.app.comparison import checked, compare

        settings = [checked(text, keep) for text in methods]
        images, note = _seen(subject, image, file, question, settings)
        pace = Pace()

        def step(done: int, total: int, label: str) -> None:
            left = pace.left(done, total)
            progress((done, total), desc=f"{label}, {left}" if left else label)

        asked = compare(subject, images, question, settings, keep, step)
    except TokenPruneError as error:
        raise gr.Error(html.escape(str(error)), duration=None, print_exception=False) from error
    drawings = [
        gr.Image(value=one.drawing, label=f"{one.setting.spec}, keep {one.keep_in_words}", visible=True)
        for one in asked
    ]
    drawings += [gr.Image(value=None, visible=False)] * (2 - len(asked))
    name = subject.name.partition(" ")[0]
    lines = [
        snippets.python(*(one.setting for one in asked)),
        "\n# or\n".join(snippets.vllm(one.setting) for one in asked),
        "\n".join(snippets.bench(one.setting, name) for one in asked),
    ]
    return [_table(question, asked, note), *drawings, _layers(asked), *lines]


def _seen(
    subject: Model, image: Image.Image | None, file: str | None, question: str, settings: Sequence[Setting]
) -> tuple[list[Image.Image], str | None]:
    """Return the image, or frames of the file that fit into the model's context; and how many did not, in words."""
    if not file or not settings:
        return ([] if image is None else [image.convert("RGB")]), None
    from tokenprune.show import contact_sheet

    return contact_sheet.fitting(subject, partial(read_frames, [Path(file)]), FRAMES, question, settings[0])


def _table(question: str, asked: Sequence[Asked], note: str | None) -> str:
    """Answers and costs, as HTML; whatever a user or a model wrote is escaped."""
    head = ("", "answer", "visual tokens", "mean of the layers", "KV cache", "first token")
    whole, ttft = asked[0], asked[0].ttft
    kv, before = whole.seen.stats.kv_bytes_full, whole.tokens
    rows: list[tuple] = [("unpatched", whole.before, before, before, _size(kv), _ms(ttft, "_unpatched"))]
    for one in asked:
        stats, tokens = one.seen.stats, f"{one.tokens} → {one.kept}"
        average, first = round(stats.visual_tokens_average), f"{_ms(one.ttft, '')}, ×{one.faster:.2f}"
        label = f"{one.setting.spec} {one.keep_in_words}"
        rows.append((label, one.seen.answer, tokens, average, _size(stats.kv_bytes), first))
    warnings = [*([note] if note else []), *_warnings(asked)]
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    title = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    said = "".join(f"<p>⚠ {html.escape(text)}</p>" for text in warnings)
    return f"<h3>{html.escape(question)}</h3><div class=wide><table><tr>{title}</tr>{cells}</table></div>{said}"


def _warnings(asked: Sequence[Asked]) -> list[str]:
    busy = busy_note(max((one.ttft["load"] or 0 for one in asked), default=0))
    said = [busy] if busy else []
    for one in asked:
        if one.faster < 1:
            said.append(f"{one.setting.spec} is not faster here: choosing costs what is saved, as with few tokens")
        said += [f"{one.setting.spec}: {text}" for text in one.seen.stats.notes]
    return said


def _layers(asked: Sequence[Asked]) -> str:
    """Visual tokens that each layer sees, as bars in HTML."""
    parts = []
    for one in asked:
        layers = one.seen.stats.visual_tokens_per_layer
        most = max(one.tokens, 1)
        bars = "".join(
            f'<span title="layer {number}: {count}" style="flex:1;margin-right:2px;background:var(--color-accent);'
            f'height:{max(2, round(48 * count / most))}px"></span>'
            for number, count in enumerate(layers)
        )
        parts.append(
            f"<p>{html.escape(one.setting.spec)}: visual tokens in layers 0 to {len(layers) - 1}: "
            f'{", ".join(map(str, layers))}</p><div style="display:flex;align-items:flex-end;height:50px">{bars}</div>'
        )
    return "".join(parts)


def _size(number: float) -> str:
    return f"{number / 1024:.0f} KiB" if number < 10 * 2**20 else f"{number / 2**20:.0f} MiB"


def _ms(ttft: dict[str, Any], side: str) -> str:
    return f"{ttft[f'ttft_ms{side}']['p50']:.0f} ms"
